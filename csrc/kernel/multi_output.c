/* multi_output.c - a result for several places, and copies, of memory that other cores have in their caches.
 *
 * What does it cost to change a line that lies in another core's cache? A load fetches a shared copy of it, and the
 * store that follows asks again, for the right to write: two trips between the cores, and no prefetcher foresees the
 * second. Asked for with that right before it is loaded, a line comes once. So everything that is written here, or will
 * be written by this core next (hvd_copy_back), is asked for HVD_AHEAD_BYTES before it is read. Measured, two cores, 1
 * MB that each changes half of in both memories: 75 us instead of 115.
 *
 * Two sources and two places, which is two ranks, have a loop of their own in every variant (both_ in one_dtype.h and
 * float16.h), which stores a line twice. All else is made block by block in the first place and copied on from there
 * while it is in the first cache. All sources of a line or block are read before any place of it is written: so places
 * may be sources.
 */
#include "loops.h"

#include <string.h>

#define BLOCK_BYTES 1024

/* Ask for lines, to write. */
HVD_TAKING static void take(const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += HVD_CACHE_LINE)
        __builtin_prefetch(from + at, 1);
}

static size_t block_at(size_t at, size_t bytes)
{
    return bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
}

static void reduce_in_blocks(int dtype, const struct hvd_scale *scale, void *const *dst, int dsts,
                             const void *const *src, int n, size_t bytes)
{
    size_t element_bytes = (size_t)hvd_dtype_bytes(dtype);
    const void *source[HVD_LOCAL_MAX];
    for (int k = 0; k < dsts; k++)
        take(dst[k], block_at(0, bytes));
    for (size_t at = 0, block; at < bytes; at += block) {
        block = block_at(at, bytes);
        for (int k = 0; k < dsts; k++)
            take((char *)dst[k] + at + block, block_at(at + block, bytes));
        for (int k = 0; k < n; k++)
            source[k] = (const char *)src[k] + at;
        hvd_reduce(dtype, scale, (char *)dst[0] + at, source, n, block / element_bytes);
        for (int k = 1; k < dsts; k++)
            memcpy((char *)dst[k] + at, (char *)dst[0] + at, block);
    }
}

void hvd_reduce_to(int dtype, const struct hvd_scale *scale, void *const *dst, int dsts, const void *const *src, int n,
                   size_t count)
{
    HVD_ASSERT(dtype >= 0 && dtype < HVD_DTYPES_MAX && n >= 1 && n <= HVD_LOCAL_MAX && dsts >= 1);
    const struct hvd_loops *loops = hvd_loops_chosen();
    bool wide = hvd_is_scaled(scale) && loops->wide[dtype];
    if (n == 2 && dsts == 2 && !wide)
        loops->both[dtype][scale->op](scale, dst[0], dst[1], src[0], src[1], count);
    else
        reduce_in_blocks(dtype, scale, dst, dsts, src, n, count * (size_t)hvd_dtype_bytes(dtype));
}

void hvd_copy(void *dst, const void *src, size_t bytes)
{
    /* Measured on two processors, 64 KB to 64 MB: `rep movsb` is as fast, streaming stores are slower below the last
     * cache's size and no faster above it. */
    memcpy(dst, src, bytes);
}

HVD_TAKING void hvd_copy_back(void *dst, const void *src, size_t bytes)
{
    const char *from = src;
    char *to = dst;
    size_t at = 0;
    take(from, bytes < HVD_AHEAD_BYTES ? bytes : HVD_AHEAD_BYTES);
    for (; bytes - at > HVD_AHEAD_BYTES; at += HVD_CACHE_LINE) {
        __builtin_prefetch(from + at + HVD_AHEAD_BYTES, 1);
        memcpy(to + at, from + at, HVD_CACHE_LINE);
    }
    memcpy(to + at, from + at, bytes - at);
}
