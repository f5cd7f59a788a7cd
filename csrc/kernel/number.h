/* number.h - what happens to a single number: conversions and roundings that every variant shares.
 *
 * How does one element get into the accumulator, and out of it? Everything here is written without
 * branches on data where the loops need it, so that a compiler turns a loop over it into vector code; and
 * without undefined behaviour, so that it means the same everywhere:
 *   - float16 and bfloat16 are carried as their bits (uint16_t), the two float8 as theirs (uint8_t). Conversions
 *     round to nearest even; too large becomes infinite (the largest number in float8_e4m3fn, which has no infinity);
 * subnormals are exact. They use only normal float32 numbers on the way, so they do not depend on whether the processor
 *     flushes subnormals.
 *   - A NaN that is computed is stored as the one quiet NaN of its dtype. Which of two NaNs survives an
 *     addition depends on how a compiler orders the operands; this makes the result the same bits anyway.
 *   - Integers are added as unsigned numbers.
 */
#ifndef HVD_KERNEL_NUMBER_H
#define HVD_KERNEL_NUMBER_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define HVD_INLINE static inline __attribute__((always_inline, unused))

/* The iterations of the next loop are independent: it may only alias as dst[i] == src[i]. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* not vectorised under a sanitizer: that is fine */
#define HVD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define HVD_ONE_VECTOR  _Pragma("clang loop vectorize(enable)")
#else
#define HVD_INDEPENDENT _Pragma("GCC ivdep")
#define HVD_ONE_VECTOR  _Pragma("GCC unroll 1") /* unrolled first, a loop of few iterations becomes no vector */
#endif

#define HVD_FLOAT16_NAN  0x7e00u
#define HVD_BFLOAT16_NAN 0x7fc0u
#define HVD_FLOAT8_NAN   0x7fu /* of both */

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

/* yes or no, without a branch: given `?:`, compilers move a floating point operation that only one side needs
 * behind a jump, and then make no vectors. */
HVD_INLINE uint32_t hvd_either(bool condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* Bits without the sign are compared as signed numbers, since AVX2 has no other comparison. */

HVD_INLINE float hvd_float_of_float16(uint16_t half)
{
    const uint32_t rebias = (127u - 15u) << 23;
    int32_t rest = (half & 0x7fff) << 13; /* exponent and mantissa, in float32's places */
    bool subnormal = rest < 1 << 23;
    /* Infinity and NaN: exponent 31 becomes 255. */
    uint32_t bits = (uint32_t)rest + rebias + hvd_either(rest >= 31 << 23, rebias, 0);
    /* A subnormal is m * 2^-24: give it the exponent -14, then take the implicit one away again. */
    bits += hvd_either(subnormal, 1u << 23, 0);
    float value = hvd_float_of_bits(bits) - hvd_float_of_bits(hvd_either(subnormal, 113u << 23, 0));
    return hvd_float_of_bits(hvd_bits_of_float(value) | (uint32_t)(half & 0x8000) << 16);
}

HVD_INLINE uint16_t hvd_float16_of_float(float value)
{
    const uint32_t rebias = (127u - 15u) << 23;
    const uint32_t magic = (127u - 15u + 23u - 10u + 1u) << 23; /* a float32 whose last place is 2^-24 */
    uint32_t sign = hvd_bits_of_float(value) >> 16 & 0x8000u;
    uint32_t bits = hvd_bits_of_float(value) & 0x7fffffffu;
    int32_t order = (int32_t)bits;
    /* Normal: rebias, add just under half of the last place (or half, if odd), cut. A carry into the exponent is
     * right, also into infinity. Below 2^-14 the addition of magic rounds for us. */
    uint32_t normal = (bits - rebias + 0xfffu + (bits >> 13 & 1u)) >> 13;
    uint32_t subnormal = hvd_bits_of_float(hvd_float_of_bits(bits) + hvd_float_of_bits(magic)) - magic;
    uint32_t half = hvd_either(order < 113 << 23, subnormal, normal);
    half = sign | hvd_either(order >= (127 + 16) << 23, 31u << 10, half);
    return (uint16_t)hvd_either(order > 255 << 23, HVD_FLOAT16_NAN, half);
}

HVD_INLINE float hvd_float_of_bfloat16(uint16_t half)
{
    return hvd_float_of_bits((uint32_t)half << 16);
}

HVD_INLINE uint16_t hvd_bfloat16_of_float(float value)
{
    uint32_t bits = hvd_bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)hvd_either((int32_t)(bits & 0x7fffffffu) > 255 << 23, HVD_BFLOAT16_NAN, rounded);
}

/* 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa. All bits set is NaN; the exponent's highest value has numbers
 * like any other, up to 448, which stands for all that is larger, as in PyTorch since 2.13 and on NVIDIA's devices. */
HVD_INLINE float hvd_float_of_float8_e4m3fn(uint8_t eighth)
{
    int32_t rest = (eighth & 0x7f) << 20;
    bool subnormal = rest < 1 << 23;
    uint32_t bits = (uint32_t)rest + ((127u - 7u) << 23) + hvd_either(subnormal, 1u << 23, 0);
    float value = hvd_float_of_bits(bits) - hvd_float_of_bits(hvd_either(subnormal, 121u << 23, 0));
    bits = hvd_either(rest == 0x7f << 20, 0x7fc00000u, hvd_bits_of_float(value));
    return hvd_float_of_bits(bits | (uint32_t)(eighth & 0x80) << 24);
}

HVD_INLINE uint8_t hvd_float8_e4m3fn_of_float(float value)
{
    const uint32_t rebias = (127u - 7u) << 23;
    const uint32_t magic = (127u - 7u + 23u - 3u + 1u) << 23; /* a float32 whose last place is 2^-9 */
    const int32_t largest = 0x43e80000;                       /* 464: half way from 448 to what would be 480 */
    uint32_t sign = hvd_bits_of_float(value) >> 24 & 0x80u;
    uint32_t bits = hvd_bits_of_float(value) & 0x7fffffffu;
    int32_t order = (int32_t)bits;
    uint32_t normal = (bits - rebias + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
    uint32_t subnormal = hvd_bits_of_float(hvd_float_of_bits(bits) + hvd_float_of_bits(magic)) - magic;
    uint32_t eighth = hvd_either(order < 121 << 23, subnormal, normal);
    eighth = sign | hvd_either(order > largest, 0x7eu, eighth);
    return (uint8_t)hvd_either(order > 255 << 23, HVD_FLOAT8_NAN, eighth);
}

/* 1 bit of sign, 5 of exponent, 2 of mantissa: the upper half of a float16. */
HVD_INLINE float hvd_float_of_float8_e5m2(uint8_t eighth)
{
    return hvd_float_of_float16((uint16_t)(eighth << 8));
}

HVD_INLINE uint8_t hvd_float8_e5m2_of_float(float value)
{
    const uint32_t rebias = (127u - 15u) << 23;
    const uint32_t magic = (127u - 15u + 23u - 2u + 1u) << 23; /* a float32 whose last place is 2^-16 */
    uint32_t sign = hvd_bits_of_float(value) >> 24 & 0x80u;
    uint32_t bits = hvd_bits_of_float(value) & 0x7fffffffu;
    int32_t order = (int32_t)bits;
    uint32_t normal = (bits - rebias + 0xfffffu + (bits >> 21 & 1u)) >> 21;
    uint32_t subnormal = hvd_bits_of_float(hvd_float_of_bits(bits) + hvd_float_of_bits(magic)) - magic;
    uint32_t eighth = hvd_either(order < 113 << 23, subnormal, normal);
    eighth = sign | hvd_either(order >= (127 + 16) << 23, 31u << 2, eighth);
    return (uint8_t)hvd_either(order > 255 << 23, HVD_FLOAT8_NAN, eighth);
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
