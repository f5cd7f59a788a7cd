/* one_dtype.h - the loops of one dtype: a template, included once per dtype and variant.
 *
 * How are n arrays combined at the speed of memory? Two of them: one pass, dst[i] = a[i] op b[i]. More: block
 * by block, with an accumulator that stays in the L1 cache; source after source is added to it, in rank order,
 * so that each array is read once, in runs long enough for the prefetcher, and all rounding happens in the
 * accumulator's type. A block of every source is read before that block of dst is written, and a pass over two
 * reads i before it writes i: therefore dst may be one of the sources.
 *
 * Two arrays into two places: line by line, and each line of the places was asked for before (multi_output.c). A line
 * is made in an array that nothing can alias, which a compiler keeps in registers. Where conversions take most of the
 * time (CONVERTED), it is a pass over two and a copy, block by block: the code of a conversion is large.
 *
 * Plain loops over plain C: the compiler makes the vectors (-O3), for whichever target the variant names. `op`
 * is a constant wherever combine() is inlined.
 *
 * The including file defines, and this file undefines:
 *   NAMED(verb)    a name that is this dtype's own
 *   ELEMENT        the type in memory;  ACCUMULATOR  the type of sums
 *   WRAPPING       the type in which + and * are done (unsigned for integers)
 *   LOAD(element), STORE(accumulator), ISNAN(accumulator)
 *   SCALED(accumulator, factor)   the accumulator times the factor (integers: as it is, see wide.h)
 *   CONVERTED      if LOAD and STORE take many instructions
 */

#define BLOCK (4096 / sizeof(ACCUMULATOR))
#define LINE  (HVD_CACHE_LINE / sizeof(ELEMENT))
#define AHEAD (HVD_AHEAD_BYTES / sizeof(ELEMENT))

HVD_INLINE ACCUMULATOR NAMED(combine)(int op, ACCUMULATOR a, ACCUMULATOR b)
{
    switch (op) {
    case HVD_OP_sum:
        return (ACCUMULATOR)((WRAPPING)a + (WRAPPING)b);
    case HVD_OP_product:
        return (ACCUMULATOR)((WRAPPING)a * (WRAPPING)b);
    case HVD_OP_min:
        b = a < b ? a : b; /* b if it is NaN */
        return ISNAN(a) ? a : b;
    default:
        b = a > b ? a : b;
        return ISNAN(a) ? a : b;
    }
}

TARGET static void NAMED(one)(ELEMENT *dst, const ELEMENT *src, size_t count, ACCUMULATOR factor)
{
    (void)factor;
    HVD_INDEPENDENT
    for (size_t i = 0; i < count; i++)
        dst[i] = STORE(SCALED(LOAD(src[i]), factor));
}

TARGET static void NAMED(load)(ACCUMULATOR *sum, const ELEMENT *src, size_t count)
{
    HVD_INDEPENDENT
    for (size_t i = 0; i < count; i++)
        sum[i] = LOAD(src[i]);
}

TARGET static void NAMED(store)(ELEMENT *dst, const ACCUMULATOR *sum, size_t count, ACCUMULATOR factor)
{
    (void)factor;
    HVD_INDEPENDENT
    for (size_t i = 0; i < count; i++)
        dst[i] = STORE(SCALED(sum[i], factor));
}

/* Three sources or more; `more` adds one of them to the accumulator. */
TARGET static void NAMED(blocks)(void (*more)(ACCUMULATOR *sum, const ELEMENT *src, size_t count), ACCUMULATOR factor,
                                 ELEMENT *dst, const void *const *src, int n, size_t count)
{
    ACCUMULATOR sum[BLOCK];
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t block = count - at < BLOCK ? count - at : BLOCK;
        NAMED(load)(sum, (const ELEMENT *)src[0] + at, block);
        for (int k = 1; k < n; k++)
            more(sum, (const ELEMENT *)src[k] + at, block);
        NAMED(store)(dst + at, sum, block, factor);
    }
}

#ifdef CONVERTED
#define TWO TARGET __attribute__((noinline)) static void
#define BOTH(op)                                                                                                    \
    TARGET static void NAMED(both_##op)(const struct hvd_scale *scale, void *first, void *second, const void *left, \
                                        const void *right, size_t count)                                            \
    {                                                                                                               \
        for (size_t at = 0; at < count; at += BLOCK) {                                                              \
            size_t block = count - at < BLOCK ? count - at : BLOCK;                                                 \
            NAMED(two_##op)                                                                                         \
            ((ELEMENT *)first + at, (const ELEMENT *)left + at, (const ELEMENT *)right + at, block,                 \
             (ACCUMULATOR)scale->factor);                                                                           \
            memcpy((ELEMENT *)second + at, (const ELEMENT *)first + at, block * sizeof(ELEMENT));                   \
        }                                                                                                           \
    }
#else
#define TWO TARGET static void
#define BOTH(op)                                                                                                    \
    TARGET static void NAMED(both_##op)(const struct hvd_scale *scale, void *first, void *second, const void *left, \
                                        const void *right, size_t count)                                            \
    {                                                                                                               \
        ACCUMULATOR factor = (ACCUMULATOR)scale->factor;                                                            \
        ELEMENT *c = first, *d = second, made[LINE];                                                                \
        const ELEMENT *a = left, *b = right;                                                                        \
        size_t at = 0;                                                                                              \
        (void)factor;                                                                                               \
        for (; count - at >= LINE; at += LINE) {                                                                    \
            size_t ahead = count - at > AHEAD ? at + AHEAD : count - 1;                                             \
            __builtin_prefetch(c + ahead, 1);                                                                       \
            __builtin_prefetch(d + ahead, 1);                                                                       \
            HVD_ONE_VECTOR                                                                                          \
            for (size_t i = 0; i < LINE; i++)                                                                       \
                made[i] = STORE(SCALED(NAMED(combine)(HVD_OP_##op, LOAD(a[at + i]), LOAD(b[at + i])), factor));     \
            for (size_t k = 0; k < LINE; k += VECTOR / sizeof(ELEMENT)) {                                           \
                words vector; /* copied as such: an array would go through the stack in smaller pieces */           \
                memcpy(&vector, made + k, sizeof vector);                                                           \
                memcpy(c + at + k, &vector, sizeof vector);                                                         \
                memcpy(d + at + k, &vector, sizeof vector);                                                         \
            }                                                                                                       \
        }                                                                                                           \
        for (; at < count; at++)                                                                                    \
            c[at] = d[at] = STORE(SCALED(NAMED(combine)(HVD_OP_##op, LOAD(a[at]), LOAD(b[at])), factor));           \
    }
#endif

/* `more` stays a function: inlined, the loops over sources and elements are swapped and no vectors come out. */
#define LOOP(op)                                                                                                       \
    TARGET __attribute__((noinline)) static void NAMED(more_##op)(ACCUMULATOR * sum, const ELEMENT *src, size_t count) \
    {                                                                                                                  \
        HVD_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < count; i++)                                                                             \
            sum[i] = NAMED(combine)(HVD_OP_##op, sum[i], LOAD(src[i]));                                                \
    }                                                                                                                  \
    TWO NAMED(two_##op)(ELEMENT * dst, const ELEMENT *a, const ELEMENT *b, size_t count, ACCUMULATOR factor)           \
    {                                                                                                                  \
        (void)factor;                                                                                                  \
        HVD_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < count; i++)                                                                             \
            dst[i] = STORE(SCALED(NAMED(combine)(HVD_OP_##op, LOAD(a[i]), LOAD(b[i])), factor));                       \
    }                                                                                                                  \
    BOTH(op)                                                                                                           \
    TARGET static void NAMED(op)(const struct hvd_scale *scale, void *dst, const void *const *src, int n,              \
                                 size_t count)                                                                         \
    {                                                                                                                  \
        ACCUMULATOR factor = (ACCUMULATOR)scale->factor;                                                               \
        if (n == 1)                                                                                                    \
            NAMED(one)(dst, src[0], count, factor);                                                                    \
        else if (n == 2)                                                                                               \
            NAMED(two_##op)(dst, src[0], src[1], count, factor);                                                       \
        else                                                                                                           \
            NAMED(blocks)(NAMED(more_##op), factor, dst, src, n, count);                                               \
    }
LOOP(sum)
LOOP(min)
LOOP(max)
LOOP(product)

#undef LOOP
#undef TWO
#undef BOTH
#undef CONVERTED
#undef BLOCK
#undef LINE
#undef AHEAD
#undef NAMED
#undef ELEMENT
#undef ACCUMULATOR
#undef WRAPPING
#undef LOAD
#undef STORE
#undef SCALED
#undef ISNAN
