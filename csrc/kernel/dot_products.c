/* dot_products.c - the dots of n arrays, each with each, and the way of narrower floats through float32.
 *
 * How are n * (n + 1) / 2 dots taken without reading each array n times from memory, and without a loop per pair of
 * dtypes? In blocks: a block of every array is widened to float64 on the stack, where all its dots find it in the
 * first caches. One loop then serves all dtypes: the product of two float32 is exact in float64, and so is that of two
 * narrower ones.
 *
 * The bits do not depend on the processor: a dot always has HVD_DOT_LANES partial sums, which every variant keeps in
 * vectors of its own width and adds up in one order; the last block is filled up with zeros. What this file does not
 * do: decide what the dots mean (adasum.c).
 */
#include "adasum.h"
#include "loops.h"

#include <string.h>

#define BLOCK 256 /* elements: 16 KB for 8 arrays, 128 KB for 64 */
_Static_assert(BLOCK % HVD_DOT_LANES == 0, "whole rounds of lanes");

void hvd_gram_add(int dtype, const void *const *src, int n, size_t count, double *gram)
{
    HVD_ASSERT(!hvd_adasum_check(dtype) && n >= 1 && n <= HVD_LOCAL_MAX);
    const struct hvd_loops *loops = hvd_loops_chosen();
    size_t element = (size_t)hvd_dtype_bytes(dtype);
    double block[HVD_LOCAL_MAX][BLOCK];
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t length = count - at < BLOCK ? count - at : BLOCK, padded = HVD_ALIGN_UP(length, HVD_DOT_LANES);
        for (int i = 0; i < n; i++) {
            loops->doubles[dtype](block[i], (const char *)src[i] + at * element, length);
            memset(block[i] + length, 0, (padded - length) * sizeof block[i][0]);
            for (int j = 0; j <= i; j++)
                gram[HVD_GRAM_AT(i, j)] += loops->dot(block[i], block[j], padded);
        }
    }
}

void hvd_floats_of_narrow(int dtype, float *to, const void *from, size_t count, double factor)
{
    HVD_ASSERT(hvd_is_narrow(dtype));
    hvd_loops_chosen()->floats[dtype](to, from, count, (float)factor);
}

void hvd_narrow_of_floats(int dtype, void *to, const float *from, size_t count)
{
    HVD_ASSERT(hvd_is_narrow(dtype));
    hvd_loops_chosen()->narrow[dtype](to, from, count);
}
