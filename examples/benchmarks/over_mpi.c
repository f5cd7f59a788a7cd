/* over_mpi.c - the same MPI as hvdlite's, called from C: what over_mpi.py compares plane mpi with.
 *
 * over_mpi.py compiles it with the MPI's own mpicc and calls it in the ranks' processes, by turns with hvdlite. MPI
 * runs already. `worst` makes one figure of all ranks': a collective is over when the last rank has its result.
 */
#include <mpi.h>

void together(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

double worst(double seconds)
{
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return seconds;
}

double blocking(const float *in, float *out, int count)
{
    double began = MPI_Wtime();
    MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return MPI_Wtime() - began;
}

double non_blocking(const float *in, float *out, int count)
{
    int done = 0;
    MPI_Request request;
    double began = MPI_Wtime();
    MPI_Iallreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    while (!done)
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    return MPI_Wtime() - began;
}
