/* dtype.c - the names and sizes of dtypes and ops, and what a reduction with scales comes down to.
 *
 * What can be reduced, and what is left to do once all sources are combined? Both answers are pure
 * functions of numbers that all ranks agree on, so every rank folds to the same bits.
 *
 * Folding: a scale before the combination is as good as one after it, as long as it can be pulled out:
 *   sum(p*x) = p * sum(x);  product(p*x) = p^n * product(x);  min(p*x) = p * min(x), or p * max(x) if p < 0.
 * An average is a sum with the factor 1/size. Integers cannot pull anything out, since each step truncates: their
 * prescale stays with the sources, the average is a division in 64 bits, the postscale comes last. The one factor
 * that remains is computed in double, by multiplications in a fixed order (no pow: it differs by libm),
 * and rounded once to the accumulator's type by the loop.
 *
 * Here stand the tables that hvdlite.h declares; they expand from the X-macros of kernel.h. What this file
 * does not do: look at an element.
 */
#include "kernel.h"

static const struct {
    const char *name;
    int bytes;
} dtypes[HVD_DTYPES_MAX] = {
#define X(number, name, bytes) [number] = {#name, bytes},
    HVD_DTYPES(X)
#undef X
};

static const char *const ops[] = {
#define X(number, name) [number] = #name,
    HVD_OPS(X)
#undef X
};

const char *hvd_dtype_name(int dtype)
{
    return dtype >= 0 && dtype < HVD_DTYPES_MAX ? dtypes[dtype].name : NULL;
}

int hvd_dtype_bytes(int dtype)
{
    return dtype >= 0 && dtype < HVD_DTYPES_MAX ? dtypes[dtype].bytes : 0;
}

const char *hvd_op_name(int op)
{
    return op >= 0 && (size_t)op < HVD_COUNT_OF(ops) ? ops[op] : NULL;
}

int hvd_op_number(int i)
{
    static const int numbers[] = {
#define X(number, name) number,
        HVD_OPS(X)
#undef X
    };
    return i >= 0 && (size_t)i < HVD_COUNT_OF(numbers) ? numbers[i] : HVD_EINVAL;
}

const char *hvd_reduce_check(int op, int dtype, double prescale, double postscale)
{
    if (!hvd_dtype_name(dtype))
        return "this dtype is unknown to the core: cast the tensor to float32, int32 or another supported dtype";
    if (!hvd_op_name(op))
        return "this reduce op is unknown to the core: use average, sum, min, max or product";
    if (op == HVD_OP_adasum)
        return "adasum combines whole tensors, not elements: use it with allreduce, or use sum or average here";
    if (dtype == HVD_DTYPE_bool && op == HVD_OP_average)
        return "average is not defined for bool: use sum or max (or), min or product (and), "
               "or cast the tensor to float32";
    if (dtype == HVD_DTYPE_bool && (prescale != 1.0 || postscale != 1.0))
        return "bool cannot be scaled under any op: leave prescale and postscale at 1, or cast the tensor to float32";
    return NULL;
}

struct hvd_scale hvd_scale_fold(int op, int dtype, int n, int divide_by, double prescale, double postscale)
{
    struct hvd_scale scale = {.op = op, .divide = 1, .factor = 1.0, .first = 1.0};
    if (dtype == HVD_DTYPE_bool) {
        scale.op = op == HVD_OP_sum || op == HVD_OP_max ? HVD_OP_max : HVD_OP_min;
        return scale;
    }
    if (!hvd_is_float(dtype)) {
        scale.op = op == HVD_OP_average ? HVD_OP_sum : op;
        scale.divide = op == HVD_OP_average ? divide_by : 1;
        scale.first = prescale;
        scale.factor = postscale;
        return scale;
    }
    scale.factor = prescale;
    switch (op) {
    case HVD_OP_average:
        scale.op = HVD_OP_sum;
        break;
    case HVD_OP_min:
    case HVD_OP_max:
        if (prescale < 0.0)
            scale.op = op == HVD_OP_min ? HVD_OP_max : HVD_OP_min;
        break;
    case HVD_OP_product:
        for (int source = 1; source < n; source++)
            scale.factor *= prescale;
        break;
    }
    scale.factor *= postscale;
    if (op == HVD_OP_average)
        scale.factor /= divide_by;
    return scale;
}
