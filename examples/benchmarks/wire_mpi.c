/* wire_mpi.c - what wire.py measures of Open MPI: MPI_Allreduce of floats, called directly.
 *
 * wire_mpi SECONDS BYTES...: of each size so many calls as take about the seconds, timed in groups; the last rank
 * prints the line that measure.py's report() prints. Nothing of hvdlite is in this process, so that nothing of it can
 * disturb.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GROUPS_MAX 1000
#define GROUP      4

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double call(float *values, int count)
{
    double began = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return MPI_Wtime() - began;
}

static void measure(long bytes, double seconds, int last)
{
    static double taken[GROUPS_MAX];
    float *values = calloc((size_t)bytes, 1);
    int count = (int)(bytes / (long)sizeof *values);
    if (!values)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int i = 0; i < 3; i++)
        call(values, count);
    double one = call(values, count);
    MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    double wanted = seconds / GROUP / (one > 1e-5 ? one : 1e-5);
    int groups = wanted < 3 ? 3 : wanted > GROUPS_MAX ? GROUPS_MAX : (int)wanted;
    for (int i = 0; i < groups; i++) {
        taken[i] = 0;
        for (int k = 0; k < GROUP; k++)
            taken[i] += call(values, count) * 1e6 / GROUP;
    }
    free(values);
    qsort(taken, (size_t)groups, sizeof *taken, by_size);
    char size[32];
    snprintf(size, sizeof size, bytes >= 1 << 20 ? "%ld MB" : "%ld KB", bytes >= 1 << 20 ? bytes >> 20 : bytes >> 10);
    if (last)
        printf("RESULT {\"work\": \"%s\", \"column\": \"openmpi\", \"unit\": \"us\", \"median\": %.5g, \"low\": %.5g, "
               "\"high\": %.5g}\n",
               size, taken[groups / 2], taken[groups / 10], taken[groups * 9 / 10]);
}

int main(int count, char **word)
{
    int rank, size;
    MPI_Init(&count, &word);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int i = 2; i < count; i++)
        measure(atol(word[i]), atof(word[1]), rank == size - 1);
    MPI_Finalize();
    return 0;
}
