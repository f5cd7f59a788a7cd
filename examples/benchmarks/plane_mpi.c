/* plane_mpi.c - the peer of tests/c/bench_plane.c: MPI's collectives, timed by the same harness.
 *
 * Question: what does an MPI need for what a data plane does? plane.py builds this file against the Open MPI and the
 * MPICH of the wheels of these names and starts it with each one's own mpirun, default settings. Calls are blocking,
 * memory is private to the process; nothing else of MPI is measured.
 */
#include "harness.h"

#include <mpi.h>

#ifdef OPEN_MPI
#define NAME "openmpi"
#else
#define NAME "mpich"
#endif

static void meet(void *self)
{
    (void)self;
    MPI_Barrier(MPI_COMM_WORLD);
}

static MPI_Datatype dtype_of(const struct harness *harness) /* 16-bit floats: extensions that not every MPI has */
{
#ifdef MPIX_C_FLOAT16
    if (harness->dtype == HARNESS_FLOAT16)
        return MPIX_C_FLOAT16;
#endif
#ifdef MPIX_BFLOAT16
    if (harness->dtype == HARNESS_BFLOAT16)
        return MPIX_BFLOAT16;
#endif
    return harness->dtype == HARNESS_FLOAT32 ? MPI_FLOAT : MPI_DATATYPE_NULL;
}

static void sum(void *self, void *buffer, size_t count)
{
    const struct harness *harness = self;
    int part = (int)count / harness->ranks;
    switch (harness->kind) {
    case HARNESS_ALLTOALL:
        MPI_Alltoall(buffer, part, MPI_FLOAT, harness->out, part, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case HARNESS_REDUCESCATTER:
        MPI_Reduce_scatter_block(buffer, harness->out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    default:
        MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, dtype_of(harness), MPI_SUM, MPI_COMM_WORLD);
    }
}

static void slowest(void *self, double *microseconds, int of)
{
    (void)self;
    MPI_Allreduce(MPI_IN_PLACE, microseconds, of, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    struct harness harness = {.name = NAME, .self = &harness, .meet = meet, .sum = sum, .slowest = slowest};
    MPI_Init(&argc, &argv);
    harness_read(&harness, argc - 1, argv + 1);
    if (dtype_of(&harness) == MPI_DATATYPE_NULL) { /* says nothing, and that is no failure */
        MPI_Finalize();
        return 0;
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &harness.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &harness.ranks);
    void *buffer = aligned_alloc(4096, HARNESS_BYTES_MAX);
    harness.out = aligned_alloc(4096, HARNESS_BYTES_MAX);
    if (!buffer || !harness.out) {
        fprintf(stderr, "no memory for %zu bytes\n", HARNESS_BYTES_MAX);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    harness_run(&harness, buffer);
    free(buffer);
    free(harness.out);
    MPI_Finalize();
    return 0;
}
