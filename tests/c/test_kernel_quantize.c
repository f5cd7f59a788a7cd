/* test_kernel_quantize.c - the quantized sum is what hvdlite.h says, to the bit, in every variant and on every rank.
 *
 * The reference is slow_quantize.c. Every array ends where a page begins that nobody may touch: no call reads or writes
 * beyond the elements, or beyond the bytes that it was promised.
 */
#include "check.h"
#include "slow_quantize.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#define RANKS_MAX 5
#define NONE      {0, 0, 0}

struct list {
    int count, ranks; /* ranks: only so many; 0: all */
    uint64_t counts[TENSORS_MAX];
};
static const struct list lists[] = {
    {1, 0, {0}},          {1, 0, {1}},
    {1, 0, {255}},        {1, 0, {256}},
    {1, 0, {257}},        {1, 0, {511}},
    {1, 0, {512}},        {1, 0, {513}},
    {3, 0, {0, 300, 0}},  {2, 0, {1, 1}},
    {0, 0, {0}},          {6, 0, {0, 1000, 0, 0, 5, 4096}},
    {3, 0, {1, 0, 2560}}, {5, 0, {256, 0, 256, 77, 513}},
    {1, 3, {100003}},     {2, 5, {20001, 0}},
};
static const float odd[] = {NAN,    INFINITY, -INFINITY, 1e-40f,  1e-36f,   1.5e-36f, 1.4999e-36f, 3e38f,
                            -3e38f, 0.0f,     -0.0f,     FLT_MAX, -FLT_MAX, 1e-38f,   2.5e19f,     127.5f};

static uint32_t chance(void)
{
    static uint64_t state = 88172645463325252;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 24);
}

/* Memory before a forbidden page; all of it is given back after each run. */
static struct {
    char *at;
    size_t bytes;
} taken[1024];
static int takes;

static void *ending(size_t bytes)
{
    size_t room = (bytes + 4095) / 4096 * 4096;
    char *at = mmap(NULL, room + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(takes < 1024 && at != MAP_FAILED && mprotect(at + room, 4096, PROT_NONE) == 0, "memory");
    taken[takes].at = at;
    taken[takes++].bytes = room + 4096;
    return at + room - bytes;
}

static void same(const char *what, const struct slow_seat *seat, const float *got, const float *should, uint64_t count)
{
    for (uint64_t i = 0; should && i < count; i++)
        CHECK(memcmp(&got[i], &should[i], 4) == 0 || (isnan(got[i]) && isnan(should[i])),
              "%s int%d, rank %d of %d, %d elements, %s %d: %.9g, not %.9g", hvd_kernel_name(), seat->job.bits,
              seat->job.rank, seat->job.ranks, (int)count, what, (int)i, (double)got[i], (double)should[i]);
}

static void same_stats(const struct slow_seat *seat, const struct hvd_quantized_stats *got,
                       const struct hvd_quantized_stats *should, double off)
{
    same("greatest", seat, &got->greatest, &should->greatest, 1);
    double a = got->square, b = should->square;
    CHECK(got->not_finite == should->not_finite && (a == b || isnan(a + b) || fabs(a - b) <= off * b),
          "squares %.17g, not %.17g", a, b);
}

static void exchange(struct slow_seat *seats, size_t blocks)
{
    int ranks = seats->job.ranks;
    size_t bytes = BYTES(seats->job.bits), all = blocks * bytes + (size_t)ranks * GAP;
    unsigned char *sums_should = ending(all), *gathered = ending(all), *sums = gathered;
    slow_exchange(seats, sums_should, blocks);
    for (int r = 0; r < ranks; r++) {
        size_t own = (blocks * (size_t)(r + 1) / (size_t)ranks - seats[r].first) * bytes;
        unsigned char *out = ending(seats[r].out_bytes), *mine = ending(own);
        for (int twice = 0; twice < 2; twice++)
            hvd_quantized_encode(&seats[r].job, out);
        CHECK(memcmp(out, seats[r].out, seats[r].out_bytes) == 0, "%s int%d: rank %d of %d sends other bytes",
              hvd_kernel_name(), seats->job.bits, r, ranks);
        hvd_quantized_sum(&seats[r].job, out, seats[r].came, mine);
        hvd_quantized_sum(&seats[r].job, NULL, NULL, NULL); /* nothing */
        memcpy(sums, mine, own);
        sums += own + GAP;
    }
    CHECK(memcmp(gathered, sums_should, all) == 0, "%s int%d: other sums", hvd_kernel_name(), seats->job.bits);
    for (int r = 0; r < ranks; r++) {
        for (int twice = 0; twice < 2; twice++)
            hvd_quantized_decode(&seats[r].job, gathered, GAP);
        for (int i = 0; i < seats->job.count; i++) {
            struct hvd_quantized_tensor *got = &seats[r].tensors[i], *should = &seats[r].should[i];
            same("result", &seats[r], got->to, should->to, got->count);
            same("residual", &seats[r], got->residual, should->residual, got->count);
            for (uint64_t k = 0; got->residual && k < got->count; k++)
                CHECK(isfinite(got->residual[k]), "a residual of %g", (double)got->residual[k]);
            same_stats(&seats[r], &got->given, &should->given, 1e-12); /* its own blocks came last */
            same_stats(&seats[r], &got->result, &should->result, 0);
        }
    }
}

/* Blocks of several magnitudes. Odd: some have values that are none, or that are at the end of what there is. */
static void fill(float *to, uint64_t count, bool has_odd)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = ((float)(chance() >> 8) - 8388608.0f) * (i / 256 % 3 == 0 ? 1e-43f : i / 256 % 3 == 1 ? 1e-9f : 1.0f);
    for (uint64_t at = chance() % 300; at < count && has_odd; at += chance() % 700)
        to[at++] = odd[chance() % HVD_COUNT_OF(odd)];
}

/* Three exchanges, each with what the one before it has left over. in_place: results take the values' places. */
static void run(const struct list *list, int bits, int ranks, bool residual, bool in_place)
{
    static struct slow_seat seats[RANKS_MAX];
    size_t blocks = 0;
    for (int i = 0; i < list->count; i++)
        blocks += (list->counts[i] + 255) / 256;
    for (int step = 0; step < 3; step++) {
        for (int r = 0; r < ranks; r++) {
            struct slow_seat *seat = &seats[r];
            float by = step == 1 ? 0.7f : 1;
            seat->job = (struct hvd_quantized){seat->tensors, list->count, bits, ranks, r, 0, by, step ? by / 3 : 1, 0};
            seat->first = blocks * (size_t)r / (size_t)ranks;
            seat->out = ending(blocks * BYTES(bits));
            seat->came = ending(blocks * BYTES(bits) * (size_t)ranks);
            seat->out_bytes = 0;
            for (int i = 0; i < list->count; i++) {
                size_t count = list->counts[i], bytes = count * sizeof(float);
                struct hvd_quantized_tensor *it = &seat->tensors[i], *should = &seat->should[i], before = *should;
                float *from = ending(bytes), *kept = residual ? ending(bytes) : NULL;
                fill(from, count, r % 2 == 0 && step < 2);
                *should = (struct hvd_quantized_tensor){from,  ending(bytes), residual ? ending(bytes) : NULL,
                                                        count, NONE,          NONE};
                if (residual && step > 0) {
                    memcpy(kept, before.residual, bytes);
                    memcpy(should->residual, before.residual, bytes);
                }
                *it = (struct hvd_quantized_tensor){from, in_place ? from : ending(bytes), kept, count, NONE, NONE};
            }
            CHECK(hvd_quantized_first(&seat->job, ranks) == (int64_t)blocks, "blocks");
            CHECK(hvd_quantized_first(&seat->job, r) == (int64_t)seat->first, "first block");
        }
        exchange(seats, blocks);
    }
    while (takes > 0) {
        takes--;
        munmap(taken[takes].at, taken[takes].bytes);
    }
}

int main(void)
{
    static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};
    struct hvd_quantized job = {NULL, 0, 5, 2, 0, 0, 1, 1, 0};
    CHECK(hvd_quantized_first(&job, 0) == HVD_EINVAL, "5 bits");
    job.bits = 4;
    CHECK(hvd_quantized_first(&job, 3) == HVD_EINVAL && hvd_quantized_first(&job, 2) == 0, "rank 3 of 2");
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++)
        for (size_t i = 0; i < HVD_COUNT_OF(lists) && hvd_kernel_use(variants[v]) == HVD_OK; i++)
            for (int k = 0; k < 4 * RANKS_MAX; k++)
                if (lists[i].ranks == 0 || lists[i].ranks == k / 4 + 1)
                    run(&lists[i], k % 2 ? 8 : 4, k / 4 + 1, k / 2 % 2, (k / 2 + k / 4) % 2);
    return 0;
}
