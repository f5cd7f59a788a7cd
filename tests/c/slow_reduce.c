/* slow_reduce.c - an independent second answer to every question the kernel answers.
 *
 * It shares no code with csrc/kernel: halves are decoded and encoded from the definition of their formats
 * with ldexp and nearbyint, integers are taken through 128 bits, one element at a time.
 */
#include "slow_reduce.h"

#include <math.h>
#include <string.h>

struct format {
    int mantissa_bits, exponent_bits;
    uint16_t nan;
    bool finite; /* no infinity, and only all bits set is NaN */
};

static struct format format_of(int dtype)
{
    return dtype == HVD_DTYPE_float16         ? (struct format){10, 5, 0x7e00, false}
           : dtype == HVD_DTYPE_bfloat16      ? (struct format){7, 8, 0x7fc0, false}
           : dtype == HVD_DTYPE_float8_e4m3fn ? (struct format){3, 4, 0x7f, true}
                                              : (struct format){2, 5, 0x7f, false};
}

static uint16_t sign_of(struct format format)
{
    return (uint16_t)(1 << (format.mantissa_bits + format.exponent_bits));
}

double slow_value_of_half(int dtype, uint16_t bits)
{
    struct format format = format_of(dtype);
    int bias = (1 << (format.exponent_bits - 1)) - 1;
    int exponent = bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1);
    int mantissa = bits & ((1 << format.mantissa_bits) - 1);
    double sign = bits & sign_of(format) ? -1.0 : 1.0;
    if (format.finite && (bits & (sign_of(format) - 1)) == format.nan)
        return (double)NAN;
    if (!format.finite && exponent == (1 << format.exponent_bits) - 1)
        return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - format.mantissa_bits);
    return sign * ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
}

uint16_t slow_half_of_value(int dtype, double value)
{
    struct format format = format_of(dtype);
    if (isnan(value))
        return format.nan;
    int bias = (1 << (format.exponent_bits - 1)) - 1;
    uint16_t sign = signbit(value) ? sign_of(format) : 0;
    uint16_t infinity = (uint16_t)(((1 << format.exponent_bits) - 1) << format.mantissa_bits);
    value = fabs(value);
    if (value == 0.0)
        return sign;
    if (isinf(value))
        return format.finite ? (uint16_t)(sign | (format.nan - 1)) : sign | infinity;
    int exponent;
    frexp(value, &exponent);
    exponent -= 1; /* value = 1.xxx * 2^exponent */
    if (exponent < 1 - bias)
        exponent = 1 - bias; /* subnormal: the last place stays where it is */
    double places = nearbyint(ldexp(value, format.mantissa_bits - exponent));
    /* places is at most 2^(mantissa_bits+1); a carry into the exponent adds up by itself. */
    double bits = places + ldexp(exponent + bias - 1, format.mantissa_bits);
    if (format.finite)
        return (uint16_t)(sign | (bits >= format.nan ? format.nan - 1 : (uint16_t)bits));
    return bits >= infinity ? sign | infinity : (uint16_t)(sign | (uint16_t)bits);
}

static float combined_float(int op, float a, float b)
{
    if (op == HVD_OP_sum)
        return a + b;
    if (op == HVD_OP_product)
        return a * b;
    if (isnan(a) || isnan(b))
        return NAN;
    if (op == HVD_OP_min)
        return a < b ? a : b;
    return a > b ? a : b;
}

static double combined_double(int op, double a, double b)
{
    if (op == HVD_OP_sum)
        return a + b;
    if (op == HVD_OP_product)
        return a * b;
    if (isnan(a) || isnan(b))
        return NAN;
    if (op == HVD_OP_min)
        return a < b ? a : b;
    return a > b ? a : b;
}

uint16_t slow_half_at(int dtype, const void *array, size_t i)
{
    return hvd_dtype_bytes(dtype) == 1 ? ((const uint8_t *)array)[i] : ((const uint16_t *)array)[i];
}

void slow_set_half(int dtype, void *array, size_t i, uint16_t bits)
{
    if (hvd_dtype_bytes(dtype) == 1)
        ((uint8_t *)array)[i] = (uint8_t)bits;
    else
        ((uint16_t *)array)[i] = bits;
}

static float float_at(int dtype, const void *array, size_t i)
{
    if (dtype == HVD_DTYPE_float32)
        return ((const float *)array)[i];
    return (float)slow_value_of_half(dtype, slow_half_at(dtype, array, i));
}

static int64_t integer_at(int dtype, const void *array, size_t i)
{
    switch (dtype) {
    case HVD_DTYPE_uint8:
        return ((const uint8_t *)array)[i];
    case HVD_DTYPE_int8:
        return ((const int8_t *)array)[i];
    case HVD_DTYPE_uint16:
        return ((const uint16_t *)array)[i];
    case HVD_DTYPE_int16:
        return ((const int16_t *)array)[i];
    case HVD_DTYPE_int32:
        return ((const int32_t *)array)[i];
    case HVD_DTYPE_int64:
        return ((const int64_t *)array)[i];
    default:
        return ((const uint8_t *)array)[i] != 0;
    }
}

/* The lowest 64 bits of a whole number that may be far larger, by long division. */
static uint64_t low_bits(double value)
{
    if (!isfinite(value))
        return 0;
    value = trunc(value);
    double rest = fmod(fabs(value), 0x1p64);
    uint64_t bits = (uint64_t)rest;
    return value < 0 ? -bits : bits;
}

static int64_t source_at(int dtype, const struct hvd_scale *scale, const void *array, size_t i)
{
    int64_t value = integer_at(dtype, array, i);
    return scale->first == 1.0 ? value : (int64_t)low_bits((double)value * scale->first);
}

static uint64_t reduced_integer(int dtype, const struct hvd_scale *scale, const void *const *src, int n, size_t i)
{
    int64_t sum = source_at(dtype, scale, src[0], i);
    for (int k = 1; k < n; k++) {
        int64_t next = source_at(dtype, scale, src[k], i);
        if (scale->op == HVD_OP_sum)
            sum = (int64_t)(uint64_t)((__int128)sum + next);
        else if (scale->op == HVD_OP_product)
            sum = (int64_t)((uint64_t)sum * (uint64_t)next);
        else if (scale->op == HVD_OP_min ? next < sum : next > sum)
            sum = next;
    }
    sum /= scale->divide;
    return scale->factor == 1.0 ? (uint64_t)sum : low_bits((double)sum * scale->factor);
}

void slow_reduce(int dtype, const struct hvd_scale *scale, void *dst, const void *const *src, int n, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (n == 1 && scale->factor == 1.0 && scale->divide == 1 && scale->first == 1.0) {
            size_t bytes = (size_t)hvd_dtype_bytes(dtype);
            memcpy((char *)dst + i * bytes, (const char *)src[0] + i * bytes, bytes);
        } else if (dtype == HVD_DTYPE_float64) {
            double sum = ((const double *)src[0])[i];
            for (int k = 1; k < n; k++)
                sum = combined_double(scale->op, sum, ((const double *)src[k])[i]);
            sum *= scale->factor;
            ((double *)dst)[i] = isnan(sum) ? (double)NAN : sum;
        } else if (hvd_is_float(dtype)) {
            float sum = float_at(dtype, src[0], i);
            for (int k = 1; k < n; k++)
                sum = combined_float(scale->op, sum, float_at(dtype, src[k], i));
            sum *= (float)scale->factor;
            if (dtype == HVD_DTYPE_float32)
                ((float *)dst)[i] = isnan(sum) ? NAN : sum;
            else
                slow_set_half(dtype, dst, i, slow_half_of_value(dtype, (double)sum));
        } else {
            uint64_t value = reduced_integer(dtype, scale, src, n, i);
            memcpy((char *)dst + i * (size_t)hvd_dtype_bytes(dtype), &value, (size_t)hvd_dtype_bytes(dtype));
        }
    }
}
