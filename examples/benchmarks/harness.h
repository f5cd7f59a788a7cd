/* harness.h - how long does one collective take in C? The same clock for every library that is compared.
 *
 * A program fills struct harness with four functions of its library and calls harness_run on all ranks; rank 0 then
 * prints one line `name bytes microseconds` per size. For each size there are batches of operations back to back;
 * a batch takes as long as on its slowest rank, and the median over batches is printed.
 *
 * From 4 KB on every rank writes its whole buffer anew before each operation, as a training step does, and the time
 * of a loop that only writes is subtracted. Without that, parts of a buffer would stay in the cache of the rank that
 * reduced them last, and ways that profit from it would look two to three times as fast as they are. The first
 * operation of each size is checked element by element.
 *
 * Only float32 and sum; allreduce in place, alltoall and reducescatter in equal parts to another buffer. All is static,
 * so that two programs can be built from it separately with the same flags.
 */
#ifndef HVD_BENCH_HARNESS_H
#define HVD_BENCH_HARNESS_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define HARNESS_BATCHES   32
#define HARNESS_BYTES_MAX ((size_t)128 << 20)

enum harness_kind { HARNESS_ALLREDUCE, HARNESS_ALLTOALL, HARNESS_REDUCESCATTER };

struct harness {
    const char *name;
    enum harness_kind kind;
    int rank, ranks;
    float *out; /* HARNESS_BYTES_MAX bytes; allreduce: not used */
    void *self; /* first argument of the functions; all are collective and may block */
    void (*meet)(void *self);
    void (*sum)(void *self, float *buffer, size_t count);      /* the collective: in place, or to `out` */
    void (*slowest)(void *self, double *microseconds, int of); /* maxima over the ranks, in place */
};

static inline enum harness_kind harness_kind_of(const char *name)
{
    if (strcmp(name, "alltoall") == 0)
        return HARNESS_ALLTOALL;
    if (strcmp(name, "reducescatter") == 0)
        return HARNESS_REDUCESCATTER;
    if (strcmp(name, "allreduce") == 0)
        return HARNESS_ALLREDUCE;
    fprintf(stderr, "the collective is allreduce, alltoall or reducescatter, not %s\n", name);
    exit(2);
}

static inline double harness_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* Not inlined, so that the loop that only writes is not optimised away or merged with another. */
__attribute__((noinline)) static void harness_write(float *buffer, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        buffer[i] = value;
    __asm__ volatile("" : : "r"(buffer) : "memory");
}

static inline void harness_check(const struct harness *harness, float *buffer, size_t count)
{
    float total = 0.5f * (float)harness->ranks * (float)(harness->ranks + 1);
    size_t part = count / (size_t)harness->ranks;
    const float *found = harness->kind == HARNESS_ALLREDUCE ? buffer : harness->out;
    size_t results = harness->kind == HARNESS_REDUCESCATTER ? part : count;
    harness_write(buffer, count, (float)(harness->rank + 1));
    harness->sum(harness->self, buffer, count);
    for (size_t i = 0; i < results; i++) {
        float wanted = harness->kind == HARNESS_ALLTOALL ? (float)(i / part + 1) : total;
        if (found[i] != wanted) {
            fprintf(stderr, "%s: rank %d got %g instead of %g at element %zu of %zu\n", harness->name, harness->rank,
                    (double)found[i], (double)wanted, i, count);
            exit(1);
        }
    }
}

/* The median over batches, in microseconds per round of writing and summing, each if wanted. */
static inline double harness_median(const struct harness *harness, float *buffer, size_t count, int batches, int rounds,
                                    int writes, int sums)
{
    double taken[HARNESS_BATCHES];
    for (int batch = -1; batch < batches; batch++) { /* the first warms up */
        harness->meet(harness->self);
        double start = harness_now_us();
        for (int round = 0; round < rounds; round++) {
            if (writes)
                harness_write(buffer, count, (float)round);
            if (sums)
                harness->sum(harness->self, buffer, count);
        }
        taken[batch < 0 ? 0 : batch] = (harness_now_us() - start) / rounds;
    }
    harness->slowest(harness->self, taken, batches);
    for (int i = 1; i < batches; i++) /* few: sorted by insertion */
        for (int k = i; k > 0 && taken[k] < taken[k - 1]; k--) {
            double swapped = taken[k];
            taken[k] = taken[k - 1];
            taken[k - 1] = swapped;
        }
    return batches % 2 ? taken[batches / 2] : 0.5 * (taken[batches / 2 - 1] + taken[batches / 2]);
}

/* buffer: HARNESS_BYTES_MAX bytes. */
static inline void harness_run(const struct harness *harness, float *buffer)
{
    static const struct {
        size_t bytes;
        int batches, rounds;
    } sizes[] = {{4, 31, 2000},
                 {(size_t)4 << 10, 31, 1000},
                 {(size_t)64 << 10, 31, 200},
                 {(size_t)1 << 20, 21, 20},
                 {(size_t)16 << 20, 11, 3},
                 {HARNESS_BYTES_MAX, 7, 1}};
    harness_write(buffer, HARNESS_BYTES_MAX / sizeof *buffer, 0); /* every page is there */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t count = sizes[i].bytes / sizeof *buffer, ranks = (size_t)harness->ranks;
        if (harness->kind != HARNESS_ALLREDUCE) /* equal parts */
            count = count < ranks ? ranks : count / ranks * ranks;
        int writes = sizes[i].bytes >= 4096, batches = sizes[i].batches, rounds = sizes[i].rounds;
        harness_check(harness, buffer, count);
        harness_write(buffer, count, 0); /* sums of what is never written anew stay finite */
        double both = harness_median(harness, buffer, count, batches, rounds, writes, 1);
        double alone = writes ? harness_median(harness, buffer, count, batches, rounds, 1, 0) : 0;
        if (harness->rank == 0)
            printf("%s %zu %.3f\n", harness->name, sizes[i].bytes, both - alone);
    }
    fflush(stdout);
}

#endif
