/* harness.h - how long does one collective take in C? The same clock for every library that is compared.
 *
 * A program fills struct harness with four functions of its library and calls harness_run on all ranks; rank 0 then
 * prints one line `name dtype bytes microseconds` per size. For each size there are batches of operations back to back;
 * a batch takes as long as on its slowest rank, and the median over batches is printed.
 *
 * From 4 KB on every rank writes its whole buffer anew before each operation, as a training step does, and the time
 * of a loop that only writes is subtracted. Without that, parts of a buffer would stay in the cache of the rank that
 * reduced them last, and ways that profit from it would look two to three times as fast as they are. The first
 * operation of each size is checked element by element.
 *
 * The words of the command line (harness_read) say what is measured: the collective, the dtype, and how much patience
 * there is: `full`; `quick`, with fewer batches; `tiny`, which only shows that the program works. Only sums; allreduce
 * in place, alltoall and reducescatter (float32 only) in equal parts to another buffer. All is static, so that two
 * programs can be built from it separately with the same flags.
 */
#ifndef HVD_BENCH_HARNESS_H
#define HVD_BENCH_HARNESS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define HARNESS_BATCHES     32
#define HARNESS_BYTES_MAX   ((size_t)128 << 20)
#define HARNESS_PATIENCE_US 400e3

enum harness_kind { HARNESS_ALLREDUCE, HARNESS_ALLTOALL, HARNESS_REDUCESCATTER };
enum harness_dtype { HARNESS_FLOAT32, HARNESS_BFLOAT16, HARNESS_FLOAT16 };
enum harness_patience { HARNESS_FULL, HARNESS_QUICK, HARNESS_TINY };

static const char *const harness_kinds[] = {"allreduce", "alltoall", "reducescatter", NULL};
static const char *const harness_dtypes[] = {"float32", "bfloat16", "float16", NULL};
static const char *const harness_patiences[] = {"full", "quick", "tiny", NULL};

struct harness {
    const char *name;
    enum harness_kind kind;
    enum harness_dtype dtype;
    enum harness_patience patience;
    size_t only[4]; /* these sizes and no others; 0: no more */
    int rank, ranks;
    void *out;  /* HARNESS_BYTES_MAX bytes; allreduce: not used */
    void *self; /* first argument of the functions; all are collective and may block */
    void (*meet)(void *self);
    void (*sum)(void *self, void *buffer, size_t count);       /* the collective: in place, or to `out` */
    void (*slowest)(void *self, double *microseconds, int of); /* maxima over the ranks, in place */
};

static inline int harness_place_of(const char *word, const char *const *words)
{
    for (int i = 0; words[i]; i++)
        if (strcmp(word, words[i]) == 0)
            return i;
    return -1;
}

/* Words in any order, each from one of the three lists (the first of each list is what it is without a word), and up to
 * four sizes in bytes, for those alone. */
static inline void harness_read(struct harness *harness, int words, char **word)
{
    size_t only = 0;
    for (int i = 0; i < words; i++) {
        size_t size = (size_t)strtoull(word[i], NULL, 10);
        int kind = harness_place_of(word[i], harness_kinds), dtype = harness_place_of(word[i], harness_dtypes);
        int patience = harness_place_of(word[i], harness_patiences);
        if (kind >= 0)
            harness->kind = (enum harness_kind)kind;
        else if (dtype >= 0)
            harness->dtype = (enum harness_dtype)dtype;
        else if (patience >= 0)
            harness->patience = (enum harness_patience)patience;
        else if (size > 0 && only < sizeof harness->only / sizeof *harness->only)
            harness->only[only++] = size;
        else {
            fprintf(stderr,
                    "%s: expected a collective (allreduce, alltoall, reducescatter), a dtype (float32, bfloat16, "
                    "float16), a patience (full, quick, tiny) or bytes\n",
                    word[i]);
            exit(2);
        }
    }
    if (harness->kind != HARNESS_ALLREDUCE && harness->dtype != HARNESS_FLOAT32) {
        fprintf(stderr, "%s is measured in float32 only\n", harness_kinds[harness->kind]);
        exit(2);
    }
}

static inline size_t harness_element(const struct harness *harness)
{
    return harness->dtype == HARNESS_FLOAT32 ? 4 : 2;
}

static inline double harness_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* A small whole number as 32 bits: one float32, or twice the same 16-bit float. */
static inline uint32_t harness_word(const struct harness *harness, unsigned value)
{
    float single = (float)value;
    uint32_t bits, half = 0;
    memcpy(&bits, &single, sizeof bits);
    if (harness->dtype == HARNESS_FLOAT32)
        return bits;
    if (harness->dtype == HARNESS_BFLOAT16)
        half = bits >> 16;
    else if (value) /* exponent with the bias of float16, ten bits of fraction */
        half = ((bits >> 23) - 127 + 15) << 10 | (bits >> 13 & 0x3ff);
    return half << 16 | half;
}

/* Not inlined, so that the loop that only writes is not optimised away or merged with another. */
__attribute__((noinline)) static void harness_write(void *buffer, size_t bytes, uint32_t word)
{
    uint32_t *words = buffer;
    for (size_t i = 0; i < (bytes + 3) / 4; i++)
        words[i] = word;
    __asm__ volatile("" : : "r"(buffer) : "memory");
}

static inline void harness_check(const struct harness *harness, void *buffer, size_t count)
{
    size_t element = harness_element(harness), ranks = (size_t)harness->ranks, part = count / ranks;
    uint32_t total = harness_word(harness, (unsigned)(ranks * (ranks + 1) / 2));
    const char *found = harness->kind == HARNESS_ALLREDUCE ? buffer : harness->out;
    size_t results = harness->kind == HARNESS_REDUCESCATTER ? part : count;
    harness_write(buffer, count * element, harness_word(harness, (unsigned)harness->rank + 1));
    harness->sum(harness->self, buffer, count);
    for (size_t i = 0; i < results; i++) {
        uint32_t wanted = harness->kind == HARNESS_ALLTOALL ? harness_word(harness, (unsigned)(i / part + 1)) : total;
        if (memcmp(found + i * element, &wanted, element) != 0) {
            fprintf(stderr, "%s: rank %d got something else than %x at element %zu of %zu\n", harness->name,
                    harness->rank, (unsigned)wanted, i, count);
            exit(1);
        }
    }
}

/* The median over batches, in microseconds per round of writing and summing, each if wanted. */
static inline double harness_median(const struct harness *harness, void *buffer, size_t count, int batches, int rounds,
                                    int writes, int sums)
{
    double taken[HARNESS_BATCHES];
    for (int batch = -1; batch < batches; batch++) { /* the first warms up */
        harness->meet(harness->self);
        double start = harness_now_us();
        for (int round = 0; round < rounds; round++) {
            if (writes)
                harness_write(buffer, count * harness_element(harness), harness_word(harness, (unsigned)round % 64));
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

/* Fewer batches and rounds where an operation is slow, the same on every rank, as the slowest says; 0: far too slow, as
 * with an MPI that never yields when ranks outnumber processors. This size and larger ones are left out then. */
static inline int harness_limit(const struct harness *harness, void *buffer, size_t count, int *batches, int *rounds)
{
    static const double budget_us[] = {600e3, 150e3, 10e3};
    static const int at_most[] = {HARNESS_BATCHES, 7, 3};
    double budget = budget_us[harness->patience], start = harness_now_us();
    for (int i = 0; i < 3; i++)
        harness->sum(harness->self, buffer, count);
    double one = (harness_now_us() - start) / 3;
    harness->slowest(harness->self, &one, 1);
    if (one > HARNESS_PATIENCE_US)
        return 0;
    if (*batches > at_most[harness->patience])
        *batches = at_most[harness->patience];
    if (*batches > budget / one)
        *batches = budget / one < 3 ? 3 : (int)(budget / one);
    if (*rounds > budget / *batches / one)
        *rounds = budget / *batches / one < 1 ? 1 : (int)(budget / *batches / one);
    return 1;
}

static inline int harness_wants(const struct harness *harness, size_t bytes)
{
    const size_t *only = harness->only;
    return !only[0] || only[0] == bytes || only[1] == bytes || only[2] == bytes || only[3] == bytes;
}

/* buffer: HARNESS_BYTES_MAX bytes. */
static inline void harness_run(const struct harness *harness, void *buffer)
{
    static const struct {
        size_t bytes;
        int batches, rounds;
    } sizes[] = {{4, 31, 1000},
                 {(size_t)4 << 10, 31, 500},
                 {(size_t)64 << 10, 31, 100},
                 {(size_t)256 << 10, 21, 50},
                 {(size_t)1 << 20, 21, 20},
                 {(size_t)4 << 20, 15, 5},
                 {(size_t)16 << 20, 11, 3},
                 {(size_t)32 << 20, 7, 2},
                 {HARNESS_BYTES_MAX, 7, 1}};
    size_t largest = harness->patience == HARNESS_TINY ? (size_t)64 << 10 : HARNESS_BYTES_MAX;
    harness_write(buffer, largest, 0); /* every page is there */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && sizes[i].bytes <= largest; i++) {
        if (!harness_wants(harness, sizes[i].bytes))
            continue;
        size_t count = sizes[i].bytes / harness_element(harness), ranks = (size_t)harness->ranks;
        if (harness->kind != HARNESS_ALLREDUCE) /* equal parts */
            count = count < ranks ? ranks : count / ranks * ranks;
        int writes = sizes[i].bytes >= 4096, batches = sizes[i].batches, rounds = sizes[i].rounds;
        harness_check(harness, buffer, count);
        harness_write(buffer, count * harness_element(harness), 0); /* sums of what is not written anew stay finite */
        if (!harness_limit(harness, buffer, count, &batches, &rounds))
            break;
        double both = harness_median(harness, buffer, count, batches, rounds, writes, 1);
        double alone = writes ? harness_median(harness, buffer, count, batches, rounds, 1, 0) : 0;
        if (harness->rank == 0)
            printf("%s %s %zu %.3f\n", harness->name, harness_dtypes[harness->dtype], sizes[i].bytes, both - alone);
    }
    fflush(stdout);
}

#endif
