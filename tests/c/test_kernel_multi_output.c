/* test_kernel_multi_output.c - a result for several places is in all of them what hvd_reduce makes, to the bit.
 *
 * hvd_reduce is compared with the slow reference elsewhere (test_kernel.c); here it is the reference, for every dtype,
 * op, variant, number of sources and choice of places: apart, or sources. Counts lie around a line, a block and the
 * distance of the prefetches. Bytes beside every array must stay as they were.
 */
#include "check.h"
#include "kernel/kernel.h"

#include <string.h>

#define COUNT_MAX 3001
#define SLACK     64
#define ROOM      (SLACK + COUNT_MAX * 8 + SLACK)
#define ARRAYS    6 /* three that can be sources, three that cannot */

static const size_t counts[] = {0, 1, 15, 16, 17, 64, 129, 257, 512, 1025, COUNT_MAX};
static _Alignas(64) char pristine[ARRAYS][ROOM], arrays[ARRAYS][ROOM], wanted[ROOM];

static void fill(void)
{
    uint64_t state = 88172645463325252;
    for (int k = 0; k < ARRAYS; k++)
        for (size_t i = 0; i < ROOM; i++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            pristine[k][i] = (char)(state >> 24);
        }
}

/* `places`: one bit for each array. */
static void run(int dtype, const struct hvd_scale *scale, int n, unsigned places, size_t count, size_t shift)
{
    size_t bytes = count * (size_t)hvd_dtype_bytes(dtype);
    const void *src[3];
    void *dst[ARRAYS];
    int dsts = 0;
    memcpy(arrays, pristine, sizeof arrays);
    for (int k = 0; k < ARRAYS; k++) {
        char *start = arrays[k] + SLACK + (size_t)k * shift;
        if (k < n)
            src[k] = start;
        if (places >> k & 1)
            dst[dsts++] = start;
    }
    hvd_reduce(dtype, scale, wanted, src, n, count);
    hvd_reduce_to(dtype, scale, dst, dsts, src, n, count);
    for (int k = 0; k < ARRAYS; k++) {
        size_t from = SLACK + (size_t)k * shift, until = places >> k & 1 ? from + bytes : from;
        CHECK(until == from || memcmp(arrays[k] + from, wanted, bytes) == 0,
              "%s %s %s: place %d of %x, %d sources, %zu elements, shift %zu", hvd_kernel_name(), hvd_dtype_name(dtype),
              hvd_op_name(scale->op), k, places, n, count, shift);
        CHECK(memcmp(arrays[k], pristine[k], from) == 0 &&
                  memcmp(arrays[k] + until, pristine[k] + until, ROOM - until) == 0,
              "%s %s wrote outside its places, into array %d", hvd_kernel_name(), hvd_dtype_name(dtype), k);
    }
}

static void all_places_of(int dtype, const struct hvd_scale *scale)
{
    static const unsigned places[] = {01, 03, 05, 010, 011, 012, 030, 031, 07, 013, 071};
    for (int n = 1; n <= 3; n++)
        for (size_t p = 0; p < HVD_COUNT_OF(places); p++)
            for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                run(dtype, scale, n, places[p], counts[c], c % 2 ? (size_t)hvd_dtype_bytes(dtype) : 0);
}

static void every_place_gets_the_same_bits(void)
{
    static const int ops[] = {HVD_OP_sum, HVD_OP_min, HVD_OP_max, HVD_OP_product};
    static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++)
        for (int dtype = 0; dtype < HVD_DTYPES_MAX && hvd_kernel_use(variants[v]) == HVD_OK; dtype++)
            for (size_t o = 0; o < HVD_COUNT_OF(ops); o++) {
                struct hvd_scale scale = {ops[o], 1, 1.0, 1.0};
                all_places_of(dtype, &scale);
                scale.factor = 0.3; /* integers: a wide loop */
                if (dtype != HVD_DTYPE_bool && ops[o] == HVD_OP_sum)
                    all_places_of(dtype, &scale);
            }
    hvd_kernel_use(NULL);
}

static void what_is_copied_back_is_all_of_it(void)
{
    for (size_t bytes = 0; bytes < ROOM - 2 * SLACK; bytes = bytes * 3 / 2 + 1) {
        memcpy(arrays[0], pristine[0], ROOM);
        hvd_copy_back(arrays[0] + SLACK, pristine[1] + SLACK - 3, bytes);
        CHECK(memcmp(arrays[0] + SLACK, pristine[1] + SLACK - 3, bytes) == 0, "%zu bytes", bytes);
        CHECK(memcmp(arrays[0], pristine[0], SLACK) == 0 &&
                  memcmp(arrays[0] + SLACK + bytes, pristine[0] + SLACK + bytes, ROOM - SLACK - bytes) == 0,
              "a copy of %zu bytes wrote beside them", bytes);
    }
}

int main(void)
{
    fill();
    every_place_gets_the_same_bits();
    what_is_copied_back_is_all_of_it();
    return 0;
}
