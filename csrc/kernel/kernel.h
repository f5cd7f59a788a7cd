/* kernel.h - dtypes, reduce ops, and the loops over elements. HOT.
 *
 * One X-macro row adds a dtype or an op: the tables, the kernels, the names that Python shows and the test
 * matrix expand from it. SIMD is chosen once, at run time, through a table of function pointers.
 *
 * Arithmetic (the same on every processor and for every way tensors are fused):
 *   - All n sources are combined in rank order, src[0] first; the destination may be one of the sources.
 *   - float16, bfloat16 and the two float8 accumulate in float32, float64 in float64; one factor (prescale, average
 *     and postscale, folded in double, rounded once to the accumulator's type) is applied in the accumulator;
 *     one rounding (to nearest even) at the store. What is too large becomes infinite; float8_e4m3fn has no infinity,
 *     there it becomes 448, as in PyTorch.
 *   - Integer sums and products wrap. Scaled ones (any average, any factor other than 1) are combined in 64 bits,
 *     so that only the result can fail to fit: each source times `first` in double with truncation (a prescale acts
 *     on every rank's own tensor, as in Horovod), the combination divided by `divide` with truncation towards zero,
 *     then multiplied by `factor` likewise. What does not fit wraps modulo 2^bits; NaN and infinities give 0.
 *   - bool: sum, max = or; product, min = and; average and scales are refused (hvd_reduce_check). Any byte but 0
 *     is true, and true is stored as 1.
 *   - min and max of floats: a NaN in any source gives NaN. A NaN that was computed is stored as the one positive
 *     quiet NaN of its dtype, since which of two NaNs survives an addition is up to compilers and processors.
 *   - One source and no scale is a copy, bit by bit.
 *   - Everything is built with -ffp-contract=off.
 */
#ifndef HVD_KERNEL_H
#define HVD_KERNEL_H

#include "../base/base.h"

/* X(number, NAME, bytes): numbers are wire format, never reused. */
#define HVD_DTYPES(X)       \
    X(0, uint8, 1)          \
    X(1, int8, 1)           \
    X(2, uint16, 2)         \
    X(3, int16, 2)          \
    X(4, int32, 4)          \
    X(5, int64, 8)          \
    X(6, float16, 2)        \
    X(7, float32, 4)        \
    X(8, float64, 8)        \
    X(9, bool, 1)           \
    X(10, bfloat16, 2)      \
    X(11, float8_e4m3fn, 1) \
    X(12, float8_e5m2, 1)
#define HVD_DTYPES_MAX 13

/* Numbers as Horovod's ReduceOp. adasum is no reduction of elements: planes refuse it (hvd_reduce_check), the engine
 * composes it of other works (adasum.h). */
#define HVD_OPS(X) \
    X(0, average)  \
    X(1, sum)      \
    X(2, adasum)   \
    X(3, min)      \
    X(4, max)      \
    X(5, product)

enum {
#define X(number, name, bytes) HVD_DTYPE_##name = number,
    HVD_DTYPES(X)
#undef X
#define X(number, name) HVD_OP_##name = number,
        HVD_OPS(X)
#undef X
};

/* A float narrower than float32, in which it is summed: where sums meet in several steps, each would round. */
static inline bool hvd_is_narrow(int dtype)
{
    return dtype == HVD_DTYPE_float16 || dtype == HVD_DTYPE_bfloat16 || dtype == HVD_DTYPE_float8_e4m3fn ||
           dtype == HVD_DTYPE_float8_e5m2;
}

static inline bool hvd_is_float(int dtype)
{
    return dtype == HVD_DTYPE_float32 || dtype == HVD_DTYPE_float64 || hvd_is_narrow(dtype);
}

/* What remains to be done to a combined value, after prescale, postscale and average are folded into one. */
struct hvd_scale {
    int op;        /* sum, min, max or product; min and max are swapped under a negative prescale */
    int divide;    /* integer average: divide the 64-bit sum by this; 1 otherwise */
    double factor; /* 1.0: none */
    double first;  /* integers: what each source is multiplied by before it is combined; 1.0 for floats */
};

/* NULL if the core can reduce this; else a sentence that names the dtype and op and the remedy. Static. */
const char *hvd_reduce_check(int op, int dtype, double prescale, double postscale);

/* Fold. `n`: sources combined (a product of prescaled values has prescale^n); `divide_by`: what an average
 * divides by (the size of the set, or its active ranks). */
struct hvd_scale hvd_scale_fold(int op, int dtype, int n, int divide_by, double prescale, double postscale);

/* dst[i] = scale(op(src[0][i], ..., src[n-1][i])), 1 <= n <= HVD_RANKS_MAX. No alignment is needed beyond
 * that of the dtype. dst is one of the sources or overlaps none. */
void hvd_reduce(int dtype, const struct hvd_scale *scale, void *dst, const void *const *src, int n, size_t count);

/* The same result in every one of dst[0 .. dsts-1], dsts >= 1; each is one of the sources or overlaps none. For memory
 * that other cores have in their caches. */
void hvd_reduce_to(int dtype, const struct hvd_scale *scale, void *const *dst, int dsts, const void *const *src, int n,
                   size_t count);

/* *element := the value that changes nothing when it is combined with others (a sum: also of an average). */
void hvd_op_identity(int op, int dtype, void *element);

/* How many elements are NaN, and how many infinite. None of integers. */
void hvd_count_not_finite(int dtype, const void *from, size_t count, uint64_t *nans, uint64_t *infinities);

/* memcpy for large blocks that are read by another core soon; the ranges do not overlap. */
void hvd_copy(void *dst, const void *src, size_t bytes);
/* The same, of what another core has written and this one will write next: src is fetched with the right to write. */
void hvd_copy_back(void *dst, const void *src, size_t bytes);

/* Name of the instruction set in use: "avx512", "avx2", "neon", "portable". */
const char *hvd_kernel_name(void);
/* For tests: use the named variant if this processor has it; HVD_EINVAL if it has not. NULL: choose again. */
int hvd_kernel_use(const char *name);

#endif
