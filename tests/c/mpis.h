/* mpis.h - the MPI that is none (tests/stub/mpi), for tests: which of its two libraries, and what it can be told. */
#ifndef HVD_TEST_MPIS_H
#define HVD_TEST_MPIS_H

#include <stdbool.h>
#include <stdint.h>

/* The file: with handles that are ints, as MPICH has them, or as wide as pointers, as the standard has them. */
const char *mpis_file(bool standard);

extern void (*mpis_hold)(int yes);          /* nothing is done meanwhile */
extern void (*mpis_lazy)(int yes);          /* a broadcast leaves its root when that comes again */
extern void (*mpis_fail)(const char *name); /* the next call of this name gives an error */
extern void (*mpis_state)(int started, int over, int level);
extern int (*mpis_freed)(void);         /* communicators so far */
extern int (*mpis_probes)(void);        /* calls of MPI_Iprobe */
extern intptr_t (*mpis_comm)(int size); /* of ranks that are threads: rank 0's, those of the others follow */
void mpis_load(bool standard);          /* the core takes this one from now on */

#endif
