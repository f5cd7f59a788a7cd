/* float16.h - the loops of bfloat16 and float16 in explicit vectors, for one variant.
 *
 * How do 16-bit floats, which are summed in float32, run as fast per byte as float32 itself? Compilers turn the
 * plain loops of one_dtype.h into shuffles between 16-bit and 32-bit lanes. A vector of bfloat16 needs none: seen
 * as 32-bit words, a shift makes the even elements float32 and a mask makes the odd ones, and back alike. float16
 * uses the processor's own conversions where the variant has them (WIDEN and NARROW); without them it stays with
 * one_dtype.h.
 *
 * The accumulator is a pair of registers: one vector of every source is read and combined, in rank order, then
 * the result is written. So dst may be one of the sources. The last, incomplete vector goes through a copy padded
 * with zeros, and therefore through the same instructions.
 *
 * The variant defines VECTOR (bytes). Vectors are the extension that gcc and clang share; comparisons give masks.
 */

typedef float lanes __attribute__((vector_size(VECTOR)));
typedef uint32_t words __attribute__((vector_size(VECTOR)));

#define HALVES (VECTOR / 2) /* elements in a vector */

/* The elements of a vector of halves: even and odd ones for bfloat16, first and second half for float16. */
struct pair {
    lanes a, b;
};

TARGET HVD_INLINE lanes lanes_where(words mask, lanes yes, lanes no)
{
    return (lanes)((mask & (words)yes) | (~mask & (words)no));
}

TARGET HVD_INLINE lanes lanes_combined(int op, lanes a, lanes b)
{
    switch (op) {
    case HVD_OP_sum:
        return a + b;
    case HVD_OP_product:
        return a * b;
    case HVD_OP_min:
        return lanes_where((words)((a < b) | (a != a)), a, b);
    default:
        return lanes_where((words)((a > b) | (a != a)), a, b);
    }
}

TARGET HVD_INLINE words lanes_to_bfloat16(lanes value) /* in the upper half of each word */
{
    words bits = (words)value;
    words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    words nan = (words)(value != value);
    return (rounded & ~nan) | (nan & HVD_BFLOAT16_NAN << 16);
}

TARGET HVD_INLINE struct pair pair_load(int dtype, const uint16_t *from)
{
    struct pair pair;
#ifdef WIDEN
    if (dtype == HVD_DTYPE_float16) {
        pair.a = WIDEN(from);
        pair.b = WIDEN(from + HALVES / 2);
        return pair;
    }
#endif
    (void)dtype;
    words both;
    memcpy(&both, from, sizeof both);
    pair.a = (lanes)(both << 16);
    pair.b = (lanes)(both & 0xffff0000u);
    return pair;
}

TARGET HVD_INLINE void pair_store(int dtype, uint16_t *to, struct pair pair, float factor)
{
    pair.a *= factor;
    pair.b *= factor;
#ifdef NARROW
    if (dtype == HVD_DTYPE_float16) {
        const lanes nan = (lanes)((words){0} + 0x7fc00000u);
        NARROW(to, lanes_where((words)(pair.a != pair.a), nan, pair.a));
        NARROW(to + HALVES / 2, lanes_where((words)(pair.b != pair.b), nan, pair.b));
        return;
    }
#endif
    (void)dtype;
    words both = lanes_to_bfloat16(pair.a) >> 16 | (lanes_to_bfloat16(pair.b) & 0xffff0000u);
    memcpy(to, &both, sizeof both);
}

TARGET HVD_INLINE void halves_reduce(int dtype, int op, float factor, uint16_t *dst, const void *const *src, int n,
                                     size_t count)
{
    size_t i = 0;
    for (; i + HALVES <= count; i += HALVES) {
        struct pair sum = pair_load(dtype, (const uint16_t *)src[0] + i);
        for (int k = 1; k < n; k++) {
            struct pair next = pair_load(dtype, (const uint16_t *)src[k] + i);
            sum.a = lanes_combined(op, sum.a, next.a);
            sum.b = lanes_combined(op, sum.b, next.b);
        }
        pair_store(dtype, dst + i, sum, factor);
    }
    if (i == count)
        return;
    uint16_t part[HALVES] = {0};
    size_t bytes = (count - i) * sizeof *dst;
    struct pair sum = {0};
    for (int k = 0; k < n; k++) {
        memcpy(part, (const uint16_t *)src[k] + i, bytes);
        struct pair next = pair_load(dtype, part);
        sum.a = k ? lanes_combined(op, sum.a, next.a) : next.a;
        sum.b = k ? lanes_combined(op, sum.b, next.b) : next.b;
    }
    pair_store(dtype, part, sum, factor);
    memcpy(dst + i, part, bytes);
}

TARGET HVD_INLINE void halves_both(int dtype, int op, float factor, uint16_t *c, uint16_t *d, const uint16_t *a,
                                   const uint16_t *b, size_t count)
{
    size_t i = 0;
    for (; i + HALVES <= count; i += HALVES) {
        size_t ahead = count - i > HVD_AHEAD_BYTES / 2 ? i + HVD_AHEAD_BYTES / 2 : count - 1;
        __builtin_prefetch(c + ahead, 1);
        __builtin_prefetch(d + ahead, 1);
        struct pair sum = pair_load(dtype, a + i), next = pair_load(dtype, b + i);
        sum.a = lanes_combined(op, sum.a, next.a);
        sum.b = lanes_combined(op, sum.b, next.b);
        pair_store(dtype, c + i, sum, factor);
        pair_store(dtype, d + i, sum, factor); /* the same registers once more: no load waits for the store */
    }
    if (i < count) {
        const void *src[] = {a + i, b + i};
        halves_reduce(dtype, op, factor, c + i, src, 2, count - i);
        memcpy(d + i, c + i, (count - i) * sizeof *c);
    }
}

#define LOOP(op, dtype)                                                                                                \
    TARGET static void op##_##dtype(const struct hvd_scale *scale, void *dst, const void *const *src, int n,           \
                                    size_t count)                                                                      \
    {                                                                                                                  \
        float factor = (float)scale->factor;                                                                           \
        if (n == 2)                                                                                                    \
            halves_reduce(HVD_DTYPE_##dtype, HVD_OP_##op, factor, dst, src, 2, count);                                 \
        else                                                                                                           \
            halves_reduce(HVD_DTYPE_##dtype, HVD_OP_##op, factor, dst, src, n, count);                                 \
    }                                                                                                                  \
    TARGET static void both_##op##_##dtype(const struct hvd_scale *scale, void *first, void *second, const void *left, \
                                           const void *right, size_t count)                                            \
    {                                                                                                                  \
        halves_both(HVD_DTYPE_##dtype, HVD_OP_##op, (float)scale->factor, first, second, left, right, count);          \
    }
LOOP(sum, bfloat16)
LOOP(min, bfloat16)
LOOP(max, bfloat16)
LOOP(product, bfloat16)
#ifdef WIDEN
LOOP(sum, float16)
LOOP(min, float16)
LOOP(max, float16)
LOOP(product, float16)
#endif
#undef LOOP
