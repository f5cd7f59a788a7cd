/* bench_engine.c - what the engine adds to the plane: latency of one collective, and a step's worth of gradients.
 *
 *   bench_engine [ranks]
 *
 * Prints medians on rank 0: a synchronous allreduce of 4 B and 4 KB (submit, wait, forget), 100 MB in 161 named
 * tensors submitted at once (from the first submit to the last wait), and the counters of a step. Numbers are
 * for comparing two builds on a quiet machine; nothing is asserted.
 */
#include "crew.h"

#include <unistd.h>

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare);
    return values[count / 2];
}

static void latency(struct hvd_engine *engine, int rank, int64_t count, const char *name)
{
    enum { ROUNDS = 3000 };
    static double took[ROUNDS];
    float *memory = calloc((size_t)count, sizeof *memory);
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX];
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t begun = hvd_now_ns();
        struct hvd_request request = crew_sum(name, memory, count);
        request.quiet = 1;
        int64_t handle = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        took[i] = (double)(hvd_now_ns() - begun) / 1e3;
    }
    double p50 = median(took, ROUNDS);
    if (rank == 0)
        printf("%-10s %8lld B  p50 %8.1f us  p10 %8.1f  p90 %8.1f\n", name ? "named" : "unnamed", (long long)count * 4,
               p50, took[ROUNDS / 10], took[ROUNDS * 9 / 10]);
    free(memory);
}

static void gradients(struct hvd_engine *engine, int rank)
{
    enum { TENSORS = 161, STEPS = 15 };
    const int64_t count = 25557032 / TENSORS;
    float *memory = calloc((size_t)count * TENSORS, sizeof *memory);
    int64_t handle[TENSORS];
    double took[STEPS];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX];
    int64_t before[HVD_COUNTERS_MAX];
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < HVD_COUNTERS_MAX; i++)
            before[i] = atomic_load(&engine->counter[i]);
        for (int64_t i = 0; i < count * TENSORS; i++)
            memory[i] = (float)(rank + step);
        struct hvd_request barrier = {.kind = HVD_BARRIER};
        CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &barrier, &error), text), HVD_OK, text);
        uint64_t begun = hvd_now_ns();
        for (int i = 0; i < TENSORS; i++) {
            char name[32];
            snprintf(name, sizeof name, "layer.%d.weight", i);
            handle[i] = crew_submit(engine, HVD_ALLREDUCE, name, HVD_OP_average, HVD_DTYPE_float32, memory + i * count,
                                    memory + i * count, count, &error);
        }
        for (int i = 0; i < TENSORS; i++)
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        took[step] = (double)(hvd_now_ns() - begun) / 1e6;
    }
    double p50 = median(took, STEPS);
    if (rank == 0) {
        printf("161 gradients, 102 MB: p50 %.1f ms, best %.1f ms; last step:", p50, took[0]);
        static const char *const names[] = {
#define X(name) #name,
            HVD_COUNTERS(X)
#undef X
        };
        for (int i = 0; i < HVD_COUNTERS_MAX; i++)
            printf(" %s %lld", names[i], (long long)(atomic_load(&engine->counter[i]) - before[i]));
        printf("\n");
    }
    free(memory);
}

/* Many small tensors, as optimizers without buckets send them; loud: the engine is woken for each. */
static void small_ones(struct hvd_engine *engine, int rank, int quiet)
{
    enum { TENSORS = 100, COUNT = 16384, STEPS = 300 };
    float *memory = calloc((size_t)COUNT * TENSORS, sizeof *memory);
    int64_t handle[TENSORS];
    double took[STEPS], submitting[STEPS];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX], name[32];
    for (int step = 0; step < STEPS; step++) {
        uint64_t begun = hvd_now_ns();
        for (int i = 0; i < TENSORS; i++) {
            snprintf(name, sizeof name, "small.%d", i);
            struct hvd_request request = crew_sum(name, memory + i * COUNT, COUNT);
            request.quiet = quiet;
            handle[i] = hvd_engine_submit(engine, &request, &error);
        }
        submitting[step] = (double)(hvd_now_ns() - begun) / 1e3;
        for (int i = 0; i < TENSORS; i++)
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        took[step] = (double)(hvd_now_ns() - begun) / 1e3;
    }
    double p50 = median(took, STEPS), submitted = median(submitting, STEPS);
    if (rank == 0)
        printf("100 x 64 KB, quiet %d: p50 %.0f us, p10 %.0f, p90 %.0f; until all are submitted %.0f us\n", quiet, p50,
               took[STEPS / 10], took[STEPS * 9 / 10], submitted);
    free(memory);
}

static void all(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    (void)size;
    latency(engine, rank, 1, "a");
    latency(engine, rank, 1024, "b");
    latency(engine, rank, 1024, NULL);
    small_ones(engine, rank, 0);
    small_ones(engine, rank, 1);
    gradients(engine, rank);
}

int main(int count, char **arguments)
{
    int status[HVD_LOCAL_MAX], size = count > 1 ? atoi(arguments[1]) : 2;
    crew_deadline(120);
    CHECK(size >= 1 && size <= HVD_LOCAL_MAX);
    crew_processes(size, all, NULL, status);
    return status[0] != 0;
}
