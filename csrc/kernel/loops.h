/* loops.h - what one SIMD variant offers: a table of reduce loops by dtype and op.
 *
 * Private to kernel/. Each variant is one small source that includes every_dtype.h under its own target;
 * cpu_dispatch.c chooses among the tables.
 */
#ifndef HVD_KERNEL_LOOPS_H
#define HVD_KERNEL_LOOPS_H

#include "kernel.h"
#include "quantize.h"

#if defined(__x86_64__)
#define HVD_KERNEL_X86 1
#else
#define HVD_KERNEL_X86 0
#endif

#define HVD_OPS_MAX     6
#define HVD_DOT_LANES   16   /* partial sums of a dot, in every variant */
#define HVD_AHEAD_BYTES 2048 /* lines are asked for so far ahead: some 32 of them are under way between two cores */

#if HVD_KERNEL_X86
#define HVD_TAKING \
    __attribute__((target("prfchw"))) /* a prefetch to write is PREFETCHW: nothing, where it is unknown */
#else
#define HVD_TAKING
#endif

/* The arguments of hvd_reduce, whose contract holds, for one dtype and one op of sum, min, max, product. */
typedef void hvd_loop(const struct hvd_scale *scale, void *dst, const void *const *src, int n, size_t count);

/* The same of two sources into two places, each of which may be one of the sources (hvd_reduce_to). */
typedef void hvd_loop_both(const struct hvd_scale *scale, void *first, void *second, const void *left,
                           const void *right, size_t count);

struct hvd_loops {
    const char *name;
    hvd_loop *reduce[HVD_DTYPES_MAX][HVD_OPS_MAX];    /* floats apply the factor; integers ignore the scale */
    hvd_loop_both *both[HVD_DTYPES_MAX][HVD_OPS_MAX]; /* the same, with two sources */
    hvd_loop *wide[HVD_DTYPES_MAX];                   /* integers with a scale, any op; NULL for other dtypes */
    /* For adasum.h; NULL for dtypes that are no floats, floats and narrow also for those of 32 and 64 bits. */
    void (*doubles[HVD_DTYPES_MAX])(double *to, const void *from, size_t count);
    double (*dot)(const double *a, const double *b, size_t count); /* count: a multiple of HVD_DOT_LANES */
    void (*floats[HVD_DTYPES_MAX])(float *to, const void *from, size_t count, float factor);
    void (*narrow[HVD_DTYPES_MAX])(void *to, const float *from, size_t count);
    /* For quantize.c: from a place to block `end`. */
    void (*quantized_encode)(struct hvd_quantized *, struct hvd_quantized_place, uint64_t end, unsigned char *to);
    void (*quantized_settle)(struct hvd_quantized *, struct hvd_quantized_place, uint64_t end, const unsigned char *);
    void (*quantized_sum)(struct hvd_quantized *, struct hvd_quantized_place, uint64_t end, const unsigned char *came,
                          size_t stride, unsigned char *to);
    void (*quantized_decode)(struct hvd_quantized *, struct hvd_quantized_place, uint64_t end, const unsigned char *);
};

/* Is there more to do than to combine? Integers then need a wide loop. */
static inline bool hvd_is_scaled(const struct hvd_scale *scale)
{
    return scale->divide != 1 || scale->factor != 1.0 || scale->first != 1.0;
}

/* cpu_dispatch.c: the table for this processor. */
const struct hvd_loops *hvd_loops_chosen(void);

extern const struct hvd_loops hvd_loops_portable; /* SSE2 on x86-64, NEON on aarch64 */
#if HVD_KERNEL_X86
extern const struct hvd_loops hvd_loops_avx2;   /* AVX2 and F16C */
extern const struct hvd_loops hvd_loops_avx512; /* AVX-512 F, BW, DQ, VL */
#endif

#endif
