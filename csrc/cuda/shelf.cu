/* shelf.cu - the kernel that adds up what ranks of one device have laid on their shelves.
 *
 * One block sums one chunk of one tensor, which it finds by its number as pack.cu does. The bits are those of the
 * CPU's loops (kernel/kernel.h): all shelves in the order of ranks, floats of 16 bits in float32, then one factor, one
 * rounding to the nearest, ties to even, and a NaN is the one quiet NaN of its dtype. Where the result lies on 16 bytes
 * a thread takes 16 at a time, else single values.
 *
 * Compiled ahead by tests/gpu/embed.py into shelf_ptx.c; C, too, for the tests' GPU that is none, like pack.cu.
 */
#include "shelf.h"

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#define INLINE static __device__ __forceinline__
INLINE float from_half(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
INLINE uint16_t to_half(float value)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#define FLOAT_BITS(value) __float_as_uint(value)
#define BITS_FLOAT(bits)  __uint_as_float(bits)
#define DOUBLE_NAN        __longlong_as_double(0x7ff8000000000000LL)
#define SMALL             _Pragma("unroll 1")
#endif

INLINE uint16_t half_of_sum(float value)
{
    return value == value ? to_half(value) : (uint16_t)0x7e00;
}

INLINE float brain_value(uint16_t bits)
{
    return BITS_FLOAT((uint32_t)bits << 16);
}

INLINE uint16_t brain_of_sum(float value)
{
    uint32_t bits = FLOAT_BITS(value);
    return value == value ? (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) : (uint16_t)0x7fc0;
}

INLINE float float_of_sum(float value)
{
    return value == value ? value : BITS_FLOAT(0x7fc00000u);
}

INLINE double double_of_sum(double value)
{
    return value == value ? value : DOUBLE_NAN;
}

#define ITSELF(value) (value)

#define SUM_ALL(type, wide, load, store, by)                                                      \
    do {                                                                                          \
        uint64_t rest = begin;                                                                    \
        if ((row.to & 15) == 0) {                                                                 \
            rest = end & ~(uint64_t)15;                                                           \
            SMALL for (uint64_t at = begin + (uint64_t)threadIdx.x * 16; at < rest;               \
                       at += (uint64_t)HVD_SHELF_THREADS * 16) {                                  \
                union {                                                                           \
                    struct uint4 whole;                                                           \
                    type value[16 / sizeof(type)];                                                \
                } some;                                                                           \
                wide sum[16 / sizeof(type)];                                                      \
                some.whole = *(const struct uint4 *)(table.from[0] + row.at + at);                \
                for (unsigned i = 0; i < 16 / sizeof(type); i++)                                  \
                    sum[i] = load(some.value[i]);                                                 \
                SMALL for (uint32_t k = 1; k < table.sources; k++) {                              \
                    some.whole = *(const struct uint4 *)(table.from[k] + row.at + at);            \
                    for (unsigned i = 0; i < 16 / sizeof(type); i++)                              \
                        sum[i] = sum[i] + load(some.value[i]);                                    \
                }                                                                                 \
                for (unsigned i = 0; i < 16 / sizeof(type); i++)                                  \
                    some.value[i] = store(sum[i] * (by));                                         \
                *(struct uint4 *)(row.to + at) = some.whole;                                      \
            }                                                                                     \
        }                                                                                         \
        SMALL for (uint64_t at = rest + (uint64_t)threadIdx.x * sizeof(type); at < end;           \
                   at += (uint64_t)HVD_SHELF_THREADS * sizeof(type)) {                            \
            wide sum = load(*(const type *)(table.from[0] + row.at + at));                        \
            SMALL for (uint32_t k = 1; k < table.sources; k++)                                    \
                sum = sum + load(*(const type *)(table.from[k] + row.at + at));                   \
            *(type *)(row.to + at) = store(sum * (by));                                           \
        }                                                                                         \
    } while (0)

KERNEL void hvd_shelf_sum(const struct hvd_shelf_table table)
{
    uint32_t low = 0, high = table.rows - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (table.end[middle] > blockIdx.x)
            high = middle;
        else
            low = middle + 1;
    }
    const struct hvd_shelf_row row = table.row[low];
    uint64_t begin = (uint64_t)(blockIdx.x - (low ? table.end[low - 1] : 0)) * HVD_SHELF_CHUNK;
    uint64_t end = row.bytes - begin < HVD_SHELF_CHUNK ? row.bytes : begin + HVD_SHELF_CHUNK;
    float factor = (float)table.factor;
    if (table.kind == HVD_SHELF_FLOAT16)
        SUM_ALL(uint16_t, float, from_half, half_of_sum, factor);
    else if (table.kind == HVD_SHELF_BFLOAT16)
        SUM_ALL(uint16_t, float, brain_value, brain_of_sum, factor);
    else if (table.kind == HVD_SHELF_FLOAT32)
        SUM_ALL(float, float, ITSELF, float_of_sum, factor);
    else
        SUM_ALL(double, double, ITSELF, double_of_sum, table.factor);
}
