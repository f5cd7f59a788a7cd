/* pack.cu - the kernels that pack a bucket on a device: one block copies one chunk of one tensor.
 *
 * A block finds its row by its number, in the table's sums of chunks. Where both ends lie on 16 bytes it moves 16 at a
 * time, the rest of the row by single bytes (or values); otherwise 4, or 1. Values of 16 bits are multiplied in
 * float32 and rounded once, to the nearest, ties to even; float32 by the factor in float32, float64 in float64.
 *
 * Two more kernels cast: `narrow` packs float32 and float64 as values of 16 bits, multiplied on the way as above and
 * rounded once more, likewise; `widen` brings them back, exactly. There a row's bytes are those of the wide end. Four
 * values of float32 go at a time, and float64, which is rare, one by one.
 *
 * This file is compiled ahead, by tests/gpu/embed.py, into pack_ptx.c; a build needs no nvcc. It is C, too, but for what
 * whoever includes it defines: the tests' GPU that is none (tests/stub/launch.c) runs these very lines on the CPU.
 */
#include "pack.h"

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
static __device__ __forceinline__ float from_half(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
static __device__ __forceinline__ uint16_t to_half(float value)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#define FLOAT_BITS(value) __float_as_uint(value)
#define BITS_FLOAT(bits)  __uint_as_float(bits)
#define INLINE            static __device__ __forceinline__
#define SMALL             _Pragma("unroll 1") /* a loop that is not worth many instructions */
#endif

INLINE float from_brain(uint16_t bits)
{
    return BITS_FLOAT((uint32_t)bits << 16);
}

INLINE uint16_t to_brain(float value)
{
    uint32_t bits = FLOAT_BITS(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u); /* no number stays none */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* As float32, rounded to odd: what is rounded to fewer bits after this, to the nearest, is as if it had never been
 * float32. */
INLINE float odd_float(double value)
{
    float nearest = (float)value;
    uint32_t bits = FLOAT_BITS(nearest);
    if ((double)nearest == value)
        return nearest;
    if (value > 0 ? (double)nearest > value : (double)nearest < value)
        bits--;
    return BITS_FLOAT(bits | 1u);
}

/* Of this block: its row, and which bytes of it, [begin, end). */
#define FIND(table, row, begin, end)                                               \
    uint32_t low = 0, high = (table).rows - 1;                                     \
    while (low < high) {                                                           \
        uint32_t middle = (low + high) / 2;                                        \
        if ((table).end[middle] > blockIdx.x)                                      \
            high = middle;                                                         \
        else                                                                       \
            low = middle + 1;                                                      \
    }                                                                              \
    const struct hvd_pack_row row = (table).row[low];                              \
    uint64_t begin = (uint64_t)(blockIdx.x - (low ? (table).end[low - 1] : 0)) * HVD_PACK_CHUNK; \
    uint64_t end = row.bytes - begin < HVD_PACK_CHUNK ? row.bytes : begin + HVD_PACK_CHUNK

#define EACH(at, unit, begin, end) \
    uint64_t at = (begin) + (uint64_t)threadIdx.x * (unit); at < (end); at += (uint64_t)HVD_PACK_THREADS * (unit)

KERNEL void hvd_pack_copy(const struct hvd_pack_table table)
{
    FIND(table, row, begin, end);
    uint64_t ends = row.from | row.to, rest = begin;
    if ((ends & 15) == 0) {
        rest = end & ~(uint64_t)15;
        for (EACH(at, 16, begin, rest))
            *(struct uint4 *)(row.to + at) = *(const struct uint4 *)(row.from + at);
    } else if ((ends & 3) == 0) {
        rest = end & ~(uint64_t)3;
        SMALL for (EACH(at, 4, begin, rest))
            *(uint32_t *)(row.to + at) = *(const uint32_t *)(row.from + at);
    }
    SMALL for (EACH(at, 1, rest, end))
        *(unsigned char *)(row.to + at) = *(const unsigned char *)(row.from + at);
}

#define TIMES_FLOAT16(value)  to_half(from_half(value) * factor)
#define TIMES_BFLOAT16(value) to_brain(from_brain(value) * factor)
#define TIMES_FLOAT32(value)  ((value) * factor)
#define TIMES_FLOAT64(value)  ((value) * table.factor)

#define SCALE(type, times)                                             \
    do {                                                               \
        uint64_t rest = begin;                                         \
        if (((row.from | row.to) & 15) == 0) {                         \
            rest = end & ~(uint64_t)15;                                \
            SMALL for (EACH(at, 16, begin, rest)) {                    \
                union {                                                \
                    struct uint4 whole;                                \
                    type value[16 / sizeof(type)];                     \
                } some;                                                \
                some.whole = *(const struct uint4 *)(row.from + at);   \
                for (unsigned i = 0; i < 16 / sizeof(type); i++)       \
                    some.value[i] = times(some.value[i]);              \
                *(struct uint4 *)(row.to + at) = some.whole;           \
            }                                                          \
        }                                                              \
        SMALL for (EACH(at, sizeof(type), rest, end))                  \
            *(type *)(row.to + at) = times(*(const type *)(row.from + at)); \
    } while (0)

KERNEL void hvd_pack_scale(const struct hvd_pack_table table)
{
    float factor = (float)table.factor;
    FIND(table, row, begin, end);
    if (table.kind == HVD_PACK_FLOAT16)
        SCALE(uint16_t, TIMES_FLOAT16);
    else if (table.kind == HVD_PACK_BFLOAT16)
        SCALE(uint16_t, TIMES_BFLOAT16);
    else if (table.kind == HVD_PACK_FLOAT32)
        SCALE(float, TIMES_FLOAT32);
    else
        SCALE(double, TIMES_FLOAT64);
}

#define NARROWED_FLOAT32(value) ((value) * factor)
#define NARROWED_FLOAT64(value) odd_float((value) * table.factor)

/* Values of `wide` become some of 16 bits by `half`, after `cast` has made a float32 of each; or come from them. */
#define NARROW(wide, cast, half)                                                              \
    do {                                                                                      \
        uint64_t first = begin / sizeof(wide), last = end / sizeof(wide), rest = first;       \
        if (sizeof(wide) == 4 && ((row.from | row.to) & 15) == 0) {                           \
            rest = last & ~(uint64_t)3;                                                       \
            SMALL for (EACH(at, 4, first, rest)) {                                            \
                union {                                                                       \
                    struct uint4 whole;                                                       \
                    wide value[4];                                                            \
                } from;                                                                       \
                uint64_t to = 0;                                                              \
                from.whole = *(const struct uint4 *)(row.from + at * 4);                      \
                for (unsigned i = 0; i < 4; i++)                                              \
                    to |= (uint64_t)half(cast(from.value[i])) << 16 * i;                      \
                *(uint64_t *)(row.to + at * 2) = to;                                          \
            }                                                                                 \
        }                                                                                     \
        SMALL for (EACH(at, 1, rest, last))                                                   \
            ((uint16_t *)row.to)[at] = half(cast(((const wide *)row.from)[at]));              \
    } while (0)
#define WIDEN(wide, half)                                                                     \
    do {                                                                                      \
        uint64_t first = begin / sizeof(wide), last = end / sizeof(wide), rest = first;       \
        if (sizeof(wide) == 4 && ((row.from | row.to) & 15) == 0) {                           \
            rest = last & ~(uint64_t)3;                                                       \
            SMALL for (EACH(at, 4, first, rest)) {                                            \
                union {                                                                       \
                    struct uint4 whole;                                                       \
                    wide value[4];                                                            \
                } to;                                                                         \
                uint64_t from = *(const uint64_t *)(row.from + at * 2);                       \
                for (unsigned i = 0; i < 4; i++)                                              \
                    to.value[i] = half((uint16_t)(from >> 16 * i));                           \
                *(struct uint4 *)(row.to + at * 4) = to.whole;                                \
            }                                                                                 \
        }                                                                                     \
        SMALL for (EACH(at, 1, rest, last))                                                   \
            ((wide *)row.to)[at] = half(((const uint16_t *)row.from)[at]);                    \
    } while (0)

KERNEL void hvd_pack_narrow(const struct hvd_pack_table table)
{
    float factor = (float)table.factor;
    FIND(table, row, begin, end);
    if (table.kind == HVD_PACK_FLOAT16)
        NARROW(float, NARROWED_FLOAT32, to_half);
    else if (table.kind == HVD_PACK_BFLOAT16)
        NARROW(float, NARROWED_FLOAT32, to_brain);
    else if (table.kind == (HVD_PACK_FLOAT16 | HVD_PACK_OF_FLOAT64))
        NARROW(double, NARROWED_FLOAT64, to_half);
    else
        NARROW(double, NARROWED_FLOAT64, to_brain);
}

KERNEL void hvd_pack_widen(const struct hvd_pack_table table)
{
    FIND(table, row, begin, end);
    if (table.kind == HVD_PACK_FLOAT16)
        WIDEN(float, from_half);
    else if (table.kind == HVD_PACK_BFLOAT16)
        WIDEN(float, from_brain);
    else if (table.kind == (HVD_PACK_FLOAT16 | HVD_PACK_OF_FLOAT64))
        WIDEN(double, from_half);
    else
        WIDEN(double, from_brain);
}
