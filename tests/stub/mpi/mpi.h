/* mpi.h - what the two halves of the MPI that is none have in common. See mpi.c. */
#ifndef STUB_MPI_H
#define STUB_MPI_H

#include <stdint.h>
#include <stdlib.h>

#ifdef ABI_standard
#define HANDLE      intptr_t
#define MPICH(a, b) (b)
#else
#define HANDLE      int
#define MPICH(a, b) (a)
#endif
#define EXPORT __attribute__((visibility("default")))
#define CALLED(name)          \
    if (stub_mpi_fails(name)) \
        return 5;

enum {
    WORLD = MPICH(0x44000000, 0x101),
    SELF = MPICH(0x44000001, 0x102),
    NULL_REQUEST = MPICH(0x2c000000, 0x180),
    NULL_COMM = MPICH(0x04000000, 0x100)
};

int stub_mpi_fails(const char *name); /* whether this call is to fail */
intptr_t stub_mpi_comm(int size);     /* of threads: the handle of rank 0, those of the others follow */

enum { MAX, MIN, SUM };
void stub_mpi_combine(int type, int op, void *into, const void *from, int count); /* of rows of types[] in mpi.c */

#endif
