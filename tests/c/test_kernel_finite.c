/* test_kernel_finite.c - NaN and infinities are counted as the C library counts them: all 16-bit patterns, every
 * exponent of the wider ones, every place in a block, and nothing in integers. */
#include "check.h"
#include "kernel/kernel.h"
#include "kernel/number.h"
#include "slow_reduce.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 4096

static void expect(int dtype, const void *from, size_t count, uint64_t nans, uint64_t infinities)
{
    uint64_t got[2] = {7, 7};
    hvd_count_not_finite(dtype, from, count, &got[0], &got[1]);
    CHECK(got[0] == nans && got[1] == infinities, "%s: %llu NaN and %llu infinities, not %llu and %llu",
          hvd_dtype_name(dtype), (unsigned long long)got[0], (unsigned long long)got[1], (unsigned long long)nans,
          (unsigned long long)infinities);
}

static void every_half(int dtype)
{
    static uint16_t all[65536];
    uint64_t nans = 0, infinities = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        all[i] = (uint16_t)i;
        double value = slow_value_of_half(dtype, all[i]);
        expect(dtype, &all[i], 1, isnan(value) != 0, isinf(value) != 0);
        nans += isnan(value) != 0;
        infinities += isinf(value) != 0;
    }
    expect(dtype, all, 65536, nans, infinities);
}

static void every_float8(int dtype)
{
    uint8_t all[256];
    uint64_t nans = 0, infinities = 0;
    for (int i = 0; i < 256; i++) {
        all[i] = (uint8_t)i;
        double value = slow_value_of_half(dtype, all[i]);
        expect(dtype, &all[i], 1, isnan(value) != 0, isinf(value) != 0);
        nans += isnan(value) != 0;
        infinities += isinf(value) != 0;
    }
    CHECK(nans == (dtype == HVD_DTYPE_float8_e5m2 ? 6 : 2), "%llu NaN", (unsigned long long)nans);
    expect(dtype, all, 256, nans, infinities);
}

static void every_exponent(void)
{
    for (uint32_t exponent = 0; exponent < 2048; exponent++)
        for (uint32_t i = 0; i < 8; i++) {
            uint64_t sign = i & 1, mantissa = i & 2 ? UINT64_C(1) << 51 : i & 4 ? 1 : 0;
            uint64_t wide = sign << 63 | (uint64_t)exponent << 52 | mantissa;
            double value;
            memcpy(&value, &wide, sizeof value);
            expect(HVD_DTYPE_float64, &value, 1, isnan(value) != 0, isinf(value) != 0);
            uint32_t narrow = (uint32_t)sign << 31 | (exponent & 255) << 23 | (uint32_t)(mantissa ? 1u << 22 : 0);
            float single = hvd_float_of_bits(narrow);
            expect(HVD_DTYPE_float32, &single, 1, isnan(single) != 0, isinf(single) != 0);
        }
}

/* One of each among many finite ones, wherever they stand; the memory ends where the elements do. */
static void every_place(int dtype, size_t bytes, uint64_t nan, uint64_t infinite)
{
    static const size_t counts[] = {0, 1, 2, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5};
    for (size_t k = 0; k < HVD_COUNT_OF(counts); k++) {
        size_t count = counts[k];
        unsigned char *memory = malloc(count * bytes + 1);
        CHECK(memory, "memory");
        memset(memory, 0x3a, count * bytes);
        expect(dtype, memory, count, 0, 0);
        for (size_t at = 0; at < count; at += at > 40 && at + 40 < count ? 97 : 1) {
            memcpy(memory + at * bytes, &nan, bytes);
            expect(dtype, memory, count, 1, 0);
            memcpy(memory + at * bytes, &infinite, bytes);
            expect(dtype, memory, count, 0, 1);
            if (at > 0) {
                memcpy(memory, &nan, bytes);
                expect(dtype, memory, count, 1, 1);
            }
            memset(memory, 0x3a, bytes);
            memset(memory + at * bytes, 0x3a, bytes);
        }
        free(memory);
    }
}

int main(void)
{
    every_half(HVD_DTYPE_float16);
    every_half(HVD_DTYPE_bfloat16);
    every_float8(HVD_DTYPE_float8_e4m3fn);
    every_float8(HVD_DTYPE_float8_e5m2);
    every_exponent();
    every_place(HVD_DTYPE_float16, 2, 0x7e00, 0xfc00);
    every_place(HVD_DTYPE_bfloat16, 2, 0xffc1, 0x7f80);
    every_place(HVD_DTYPE_float32, 4, 0x7f800001, 0xff800000);
    every_place(HVD_DTYPE_float64, 8, 0x7ff0000000000001, 0xfff0000000000000);
    static const unsigned char ones[64] = {[0 ... 63] = 0xff};
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        if (dtype < HVD_DTYPE_float16 || dtype == HVD_DTYPE_bool)
            expect(dtype, ones, 64 / (size_t)hvd_dtype_bytes(dtype), 0, 0);
    return 0;
}
