/* wide.h - scaled integers of one variant: accumulated in 64 bits, then divided or multiplied.
 *
 * What is the average of integers, or their sum times a factor? The sources of a block are widened to 64 bits,
 * multiplied by `first`, combined there (wrapping), divided by `divide` with truncation towards zero, multiplied by
 * `factor` in double with truncation, and cut to the dtype. That is rare work, so its steps are separate passes over a
 * block in the L1 cache, shared by all dtypes; only widening and narrowing is per dtype (WIDE). Unscaled integers never
 * come here: they stay in their own type, at the speed of memory.
 */

#define WIDE_BLOCK 512

TARGET static void wide_combine(int op, int64_t *sum, const int64_t *next, size_t count)
{
    switch (op) {
    case HVD_OP_sum:
        for (size_t i = 0; i < count; i++)
            sum[i] = (int64_t)((uint64_t)sum[i] + (uint64_t)next[i]);
        return;
    case HVD_OP_product:
        for (size_t i = 0; i < count; i++)
            sum[i] = (int64_t)((uint64_t)sum[i] * (uint64_t)next[i]);
        return;
    case HVD_OP_min:
        for (size_t i = 0; i < count; i++)
            sum[i] = sum[i] < next[i] ? sum[i] : next[i];
        return;
    default:
        for (size_t i = 0; i < count; i++)
            sum[i] = sum[i] > next[i] ? sum[i] : next[i];
        return;
    }
}

TARGET static void wide_scale(int64_t *sum, size_t count, double factor)
{
    if (factor != 1.0)
        for (size_t i = 0; i < count; i++)
            sum[i] = (int64_t)hvd_wrapped((double)sum[i] * factor);
}

/* Only sums divide. `exact`: those of at most HVD_RANKS_MAX elements stay below 2^53, where a division of doubles
 * truncates right. */
TARGET static void wide_finish(const struct hvd_scale *scale, int64_t *sum, size_t count, bool exact)
{
    double divide = scale->divide;
    if (scale->divide != 1 && exact)
        for (size_t i = 0; i < count; i++)
            sum[i] = (int64_t)((double)sum[i] / divide);
    else if (scale->divide != 1)
        for (size_t i = 0; i < count; i++)
            sum[i] = hvd_quotient(sum[i], scale->divide);
    wide_scale(sum, count, scale->factor);
}

#define WIDE(NAME, ELEMENT)                                                                                 \
    TARGET static void widen_##NAME(int64_t *to, const ELEMENT *from, size_t count)                         \
    {                                                                                                       \
        for (size_t i = 0; i < count; i++)                                                                  \
            to[i] = from[i];                                                                                \
    }                                                                                                       \
    TARGET static void narrow_##NAME(ELEMENT *to, const int64_t *from, size_t count)                        \
    {                                                                                                       \
        for (size_t i = 0; i < count; i++)                                                                  \
            to[i] = (ELEMENT)(uint64_t)from[i];                                                             \
    }                                                                                                       \
    TARGET static void wide_##NAME(const struct hvd_scale *scale, void *dst, const void *const *src, int n, \
                                   size_t count)                                                            \
    {                                                                                                       \
        int64_t sum[WIDE_BLOCK], next[WIDE_BLOCK];                                                          \
        for (size_t at = 0; at < count; at += WIDE_BLOCK) {                                                 \
            size_t block = count - at < WIDE_BLOCK ? count - at : WIDE_BLOCK;                               \
            widen_##NAME(sum, (const ELEMENT *)src[0] + at, block);                                         \
            wide_scale(sum, block, scale->first);                                                           \
            for (int k = 1; k < n; k++) {                                                                   \
                widen_##NAME(next, (const ELEMENT *)src[k] + at, block);                                    \
                wide_scale(next, block, scale->first);                                                      \
                wide_combine(scale->op, sum, next, block);                                                  \
            }                                                                                               \
            wide_finish(scale, sum, block, sizeof(ELEMENT) <= 4);                                           \
            narrow_##NAME((ELEMENT *)dst + at, sum, block);                                                 \
        }                                                                                                   \
    }
WIDE(uint8, uint8_t)
WIDE(int8, int8_t)
WIDE(uint16, uint16_t)
WIDE(int16, int16_t)
WIDE(int32, int32_t)
WIDE(int64, int64_t)
