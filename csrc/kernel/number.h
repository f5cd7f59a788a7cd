/* number.h - what happens to a single number: conversions and roundings that every variant shares.
 *
 * How does one element get into the accumulator, and out of it? Everything here is written without
 * branches on data where the loops need it, so that a compiler turns a loop over it into vector code; and
 * without undefined behaviour, so that it means the same everywhere:
 *   - float16 and bfloat16 are carried as their bits (uint16_t). Conversions round to nearest even; too
 *     large becomes infinite; subnormals are exact. They use only normal float32 numbers on the way, so
 *     they do not depend on whether the processor flushes subnormals.
 *   - A NaN that is computed is stored as the one quiet NaN of its dtype. Which of two NaNs survives an
 *     addition depends on how a compiler orders the operands; this makes the result the same bits anyway.
 *   - Integers are added as unsigned numbers.
 */
#ifndef HVD_KERNEL_NUMBER_H
#define HVD_KERNEL_NUMBER_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define HVD_INLINE static inline __attribute__((always_inline, unused))

/* The iterations of the next loop are independent: it may only alias as dst[i] == src[i]. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* not vectorised under a sanitizer: that is fine */
#define HVD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HVD_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define HVD_FLOAT16_NAN  0x7e00u
#define HVD_BFLOAT16_NAN 0x7fc0u

HVD_INLINE uint32_t hvd_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

HVD_INLINE float hvd_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

HVD_INLINE float hvd_float_of_float16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = (uint32_t)(half & 0x7fffu) << 13; /* exponent and mantissa, in float32's places */
    uint32_t rebias = (127u - 15u) << 23;
    uint32_t normal = rest + rebias;
    uint32_t special = normal + rebias; /* infinity and NaN: exponent 31 becomes 255 */
    /* A subnormal m * 2^-24: give it the exponent -14, then take the implicit one away again. */
    uint32_t subnormal = hvd_bits_of_float(hvd_float_of_bits(normal + (1u << 23)) - hvd_float_of_bits(113u << 23));
    uint32_t bits = rest >= 31u << 23 ? special : normal;
    bits = rest < 1u << 23 ? subnormal : bits;
    return hvd_float_of_bits(sign | bits);
}

HVD_INLINE uint16_t hvd_float16_of_float(float value)
{
    uint32_t bits = hvd_bits_of_float(value);
    uint32_t sign = bits & 0x80000000u;
    bits ^= sign;
    /* Normal: rebias, add just under half of the last place (or half, if odd), cut. A carry is right, also into
     * infinity. */
    uint32_t normal = (bits - ((127u - 15u) << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
    /* Below 2^-14: an addition whose last place is 2^-24 rounds for us. */
    uint32_t magic = (127u - 15u + 23u - 10u + 1u) << 23;
    uint32_t subnormal = hvd_bits_of_float(hvd_float_of_bits(bits) + hvd_float_of_bits(magic)) - magic;
    uint32_t special = bits > 255u << 23 ? HVD_FLOAT16_NAN : 31u << 10;
    uint32_t half = bits >= (127u + 16u) << 23 ? special : normal;
    half = bits < 113u << 23 ? subnormal : half;
    half |= bits > 255u << 23 ? 0 : sign >> 16;
    return (uint16_t)half;
}

HVD_INLINE float hvd_float_of_bfloat16(uint16_t half)
{
    return hvd_float_of_bits((uint32_t)half << 16);
}

HVD_INLINE uint16_t hvd_bfloat16_of_float(float value)
{
    uint32_t bits = hvd_bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 255u << 23 ? HVD_BFLOAT16_NAN : rounded);
}

HVD_INLINE float hvd_float_settled(float value)
{
    return value == value ? value : hvd_float_of_bits(0x7fc00000u);
}

HVD_INLINE double hvd_double_settled(double value)
{
    return value == value ? value : (double)NAN;
}

/* Truncate towards zero; what does not fit wraps modulo 2^64; infinities and NaN give 0. */
HVD_INLINE uint64_t hvd_wrapped(double value)
{
    if (value > -0x1p63 && value < 0x1p63)
        return (uint64_t)(int64_t)value;
    /* An integer already: mantissa * 2^shift, of which the lowest 64 bits are wanted. */
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t mantissa = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
    int shift = (int)(bits >> 52 & 2047) - 1023 - 52; /* 11 at least; 972 for infinities and NaN */
    uint64_t magnitude = shift < 64 ? mantissa << shift : 0;
    return value < 0 ? 0 - magnitude : magnitude;
}

/* value / divide, truncating. Below 2^53 a division of doubles cannot round up to the next integer, and
 * is several times faster than one of 64-bit integers. */
HVD_INLINE int64_t hvd_quotient(int64_t value, int divide)
{
    if (value > -(INT64_C(1) << 53) && value < INT64_C(1) << 53)
        return (int64_t)((double)value / divide);
    return value / divide;
}

#endif
