/* test_kernel_float16.c - float16, bfloat16 and float8: every value there is, and every tie between two of them.
 *
 * Read through hvd_reduce itself, in every variant: a float16 value times 1 comes back; the sum of two equal
 * halves of a value rounds as the definition says; and the scalar conversions agree with the definition for
 * all 2^16 patterns and around every rounding boundary.
 */
#include "check.h"
#include "kernel/number.h"
#include "slow_reduce.h"

#include <string.h>

#define PATTERNS 65536

static uint16_t source[2][PATTERNS], result[PATTERNS];

static void check_scalar_conversions(void)
{
    for (uint32_t bits = 0; bits < PATTERNS; bits++)
        for (int which = 0; which < 2; which++) {
            int dtype = which ? HVD_DTYPE_bfloat16 : HVD_DTYPE_float16;
            uint16_t half = (uint16_t)bits;
            float got = which ? hvd_float_of_bfloat16(half) : hvd_float_of_float16(half);
            float want = (float)slow_value_of_half(dtype, half);
            CHECK(isnan(want) ? isnan(got) : hvd_bits_of_float(want) == hvd_bits_of_float(got), "%s %#x: %g, not %g",
                  hvd_dtype_name(dtype), bits, (double)got, (double)want);
            uint16_t back = which ? hvd_bfloat16_of_float(got) : hvd_float16_of_float(got);
            uint16_t nan = which ? HVD_BFLOAT16_NAN : HVD_FLOAT16_NAN;
            CHECK(back == (isnan(want) ? nan : half), "%s %#x comes back as %#x", hvd_dtype_name(dtype), bits, back);
        }
}

/* All float32 whose low bits are at, just below and just above a rounding boundary of either format. */
static void check_scalar_rounding(void)
{
    static const uint32_t low_of_float16[] = {0, 1, 0xfff, 0x1000, 0x1001, 0x1fff};
    static const uint32_t low_of_bfloat16[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t high = 0; high < 1u << 19; high++)
        for (size_t i = 0; i < HVD_COUNT_OF(low_of_float16); i++) {
            float value = hvd_float_of_bits(high << 13 | low_of_float16[i]);
            uint16_t got = hvd_float16_of_float(value), want = slow_half_of_value(HVD_DTYPE_float16, value);
            CHECK(got == want, "float32 %#x as float16: %#x, not %#x", hvd_bits_of_float(value), got, want);
            if (high >= PATTERNS)
                continue;
            value = hvd_float_of_bits(high << 16 | low_of_bfloat16[i]);
            got = hvd_bfloat16_of_float(value);
            want = slow_half_of_value(HVD_DTYPE_bfloat16, value);
            CHECK(got == want, "float32 %#x as bfloat16: %#x, not %#x", hvd_bits_of_float(value), got, want);
        }
}

static float float_of_eighth(int dtype, uint8_t bits)
{
    return dtype == HVD_DTYPE_float8_e5m2 ? hvd_float_of_float8_e5m2(bits) : hvd_float_of_float8_e4m3fn(bits);
}

static uint8_t eighth_of_float(int dtype, float value)
{
    return dtype == HVD_DTYPE_float8_e5m2 ? hvd_float8_e5m2_of_float(value) : hvd_float8_e4m3fn_of_float(value);
}

static void check_eighths(int dtype)
{
    static const uint32_t low[] = {0, 1, 0x7ffff, 0x80000, 0x80001, 0xfffff};
    for (uint32_t bits = 0; bits < 256; bits++) {
        float got = float_of_eighth(dtype, (uint8_t)bits), want = (float)slow_value_of_half(dtype, (uint16_t)bits);
        CHECK(isnan(want) ? isnan(got) : hvd_bits_of_float(want) == hvd_bits_of_float(got), "%s %#x: %g, not %g",
              hvd_dtype_name(dtype), bits, (double)got, (double)want);
        uint8_t back = eighth_of_float(dtype, got);
        CHECK(back == (isnan(want) ? HVD_FLOAT8_NAN : bits), "%s %#x comes back as %#x", hvd_dtype_name(dtype), bits,
              back);
    }
    for (uint32_t high = 0; high < 1u << 12; high++)
        for (size_t i = 0; i < HVD_COUNT_OF(low); i++) {
            float value = hvd_float_of_bits(high << 20 | low[i]);
            uint16_t got = eighth_of_float(dtype, value), want = slow_half_of_value(dtype, (double)value);
            CHECK(got == want, "float32 %#x as %s: %#x, not %#x", hvd_bits_of_float(value), hvd_dtype_name(dtype), got,
                  want);
        }
    CHECK(eighth_of_float(HVD_DTYPE_float8_e4m3fn, 464) == 0x7e &&
              eighth_of_float(HVD_DTYPE_float8_e4m3fn, -465) == 0xfe &&
              eighth_of_float(HVD_DTYPE_float8_e4m3fn, -INFINITY) == 0xfe &&
              eighth_of_float(HVD_DTYPE_float8_e5m2, 61439) == 0x7b &&
              eighth_of_float(HVD_DTYPE_float8_e5m2, 61440) == 0x7c,
          "where numbers end");
}

static void check_loops(int dtype)
{
    static const double factors[] = {1.0000001, 0.5, 0x1p-10, 3.0, 0x1p-14, 1.0 / 3};
    const void *src[2] = {source[0], source[1]};
    static uint16_t want[PATTERNS];
    for (uint32_t i = 0; i < PATTERNS; i++) { /* of float8: every pair of values */
        slow_set_half(dtype, source[0], i, (uint16_t)i);
        slow_set_half(dtype, source[1], i, (uint16_t)(hvd_dtype_bytes(dtype) == 1 ? i >> 8 : i * 40503u + 7u));
    }
    for (size_t f = 0; f < HVD_COUNT_OF(factors); f++)
        for (int n = 1; n <= 2; n++) {
            struct hvd_scale scale = {HVD_OP_sum, 1, factors[f], 1.0};
            slow_reduce(dtype, &scale, want, src, n, PATTERNS);
            hvd_reduce(dtype, &scale, result, src, n, PATTERNS);
            for (uint32_t i = 0; i < PATTERNS; i++)
                CHECK(slow_half_at(dtype, result, i) == slow_half_at(dtype, want, i),
                      "%s %s %#x (n=%d) times %g: %#x, not %#x", hvd_kernel_name(), hvd_dtype_name(dtype), i, n,
                      factors[f], slow_half_at(dtype, result, i), slow_half_at(dtype, want, i));
        }
}

int main(void)
{
    static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};
    check_scalar_conversions();
    check_scalar_rounding();
    check_eighths(HVD_DTYPE_float8_e4m3fn);
    check_eighths(HVD_DTYPE_float8_e5m2);
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++)
        if (hvd_kernel_use(variants[v]) == HVD_OK) {
            check_loops(HVD_DTYPE_float16);
            check_loops(HVD_DTYPE_bfloat16);
            check_loops(HVD_DTYPE_float8_e4m3fn);
            check_loops(HVD_DTYPE_float8_e5m2);
        }
    return 0;
}
