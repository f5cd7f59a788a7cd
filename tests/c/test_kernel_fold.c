/* test_kernel_fold.c - names, refusals, and scales folded into one factor, against closed forms. */
#include "check.h"
#include "kernel/kernel.h"

#include <math.h>
#include <string.h>

static void every_dtype_and_op_has_a_name_and_a_number(void)
{
#define X(number, name, size) \
    CHECK(strcmp(hvd_dtype_name(number), #name) == 0 && hvd_dtype_bytes(number) == size, "dtype %d", number);
    HVD_DTYPES(X)
#undef X
    int i = 0;
#define X(number, name)                                                                            \
    CHECK(strcmp(hvd_op_name(number), #name) == 0 && hvd_op_number(i) == number, "op %d", number); \
    i++;
    HVD_OPS(X)
#undef X
    CHECK(hvd_op_number(i) < 0 && hvd_op_number(-1) < 0, "op numbers end with a negative one");
    CHECK(!hvd_op_name(6) && !hvd_op_name(-1), "numbers without an op have no name");
    CHECK(!hvd_dtype_name(HVD_DTYPES_MAX) && !hvd_dtype_name(-1) && hvd_dtype_bytes(HVD_DTYPES_MAX) == 0 &&
              hvd_dtype_bytes(-1) == 0,
          "dtypes end");
}

static void what_cannot_be_reduced_is_refused_with_a_remedy(void)
{
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        for (int i = 0; hvd_op_number(i) >= 0; i++) {
            int op = hvd_op_number(i);
            bool wrong = (dtype == HVD_DTYPE_bool && op == HVD_OP_average) || op == HVD_OP_adasum;
            CHECK(!hvd_reduce_check(op, dtype, 1, 1) == !wrong, "%s of %s", hvd_op_name(op), hvd_dtype_name(dtype));
            wrong = dtype == HVD_DTYPE_bool || op == HVD_OP_adasum;
            CHECK(!hvd_reduce_check(op, dtype, 0.5, 1) == !wrong && !hvd_reduce_check(op, dtype, 1, 2) == !wrong,
                  "scaled %s of %s", hvd_op_name(op), hvd_dtype_name(dtype));
        }
    const char *text = hvd_reduce_check(HVD_OP_average, HVD_DTYPE_bool, 1, 1);
    CHECK(strstr(text, "average") && strstr(text, "bool") && strstr(text, "cast"), "the text is: %s", text);
    CHECK(hvd_reduce_check(2, HVD_DTYPE_float32, 1, 1) && hvd_reduce_check(99, HVD_DTYPE_float32, 1, 1) &&
              hvd_reduce_check(-1, HVD_DTYPE_float32, 1, 1),
          "unknown ops are refused");
    CHECK(hvd_reduce_check(HVD_OP_sum, -1, 1, 1) && hvd_reduce_check(HVD_OP_sum, HVD_DTYPES_MAX, 1, 1),
          "unknown dtypes are refused");
}

/* One element per rank through fold and reduce, as a plane does it. */
static double reduced_float(int op, int n, int divide_by, double pre, double post, const float *values)
{
    struct hvd_scale scale = hvd_scale_fold(op, HVD_DTYPE_float32, n, divide_by, pre, post);
    const void *src[HVD_LOCAL_MAX];
    for (int k = 0; k < n; k++)
        src[k] = &values[k];
    float result;
    hvd_reduce(HVD_DTYPE_float32, &scale, &result, src, n, 1);
    return result;
}

static long reduced_uint8(int op, int n, int divide_by, double pre, double post, const uint8_t *values)
{
    struct hvd_scale scale = hvd_scale_fold(op, HVD_DTYPE_uint8, n, divide_by, pre, post);
    const void *src[HVD_LOCAL_MAX];
    for (int k = 0; k < n; k++)
        src[k] = &values[k];
    uint8_t result;
    hvd_reduce(HVD_DTYPE_uint8, &scale, &result, src, n, 1);
    return result;
}

static int64_t reduced_int64(int op, int n, int divide_by, double pre, double post, const int64_t *values)
{
    struct hvd_scale scale = hvd_scale_fold(op, HVD_DTYPE_int64, n, divide_by, pre, post);
    const void *src[HVD_LOCAL_MAX];
    for (int k = 0; k < n; k++)
        src[k] = &values[k];
    int64_t result;
    hvd_reduce(HVD_DTYPE_int64, &scale, &result, src, n, 1);
    return result;
}

static void floats_get_one_factor(void)
{
    const float v[] = {3, -1, 4};
#define EXPECT(op, divide_by, pre, post, want)                                                                    \
    do {                                                                                                          \
        double got = reduced_float(HVD_OP_##op, 3, divide_by, pre, post, v);                                      \
        CHECK(got == (want), "%s with prescale %g, postscale %g is %g", #op, (double)(pre), (double)(post), got); \
    } while (0)
    EXPECT(sum, 3, 1, 1, 6);
    EXPECT(sum, 3, 0.5, 4, 12);
    EXPECT(average, 3, 1, 1, 2);
    EXPECT(average, 4, 2, 1, 3); /* four active ranks, one of which sent nothing */
    EXPECT(min, 3, 1, 1, -1);
    EXPECT(max, 3, 1, 1, 4);
    EXPECT(min, 3, -2, 1, -8); /* the largest becomes the smallest */
    EXPECT(max, 3, -2, 1, 2);
    EXPECT(max, 3, 2, -1, -8); /* a postscale comes after the choice */
    EXPECT(product, 3, 1, 1, -12);
    EXPECT(product, 3, 2, 0.5, -48); /* 2^3 / 2 */
#undef EXPECT
    struct hvd_scale scale = hvd_scale_fold(HVD_OP_average, HVD_DTYPE_float64, 3, 3, 1, 1);
    CHECK(scale.op == HVD_OP_sum && scale.divide == 1 && scale.factor == 1.0 / 3, "average of floats");
}

static void integers_divide_and_truncate(void)
{
    const uint8_t v[] = {200, 100, 250};
    CHECK(reduced_uint8(HVD_OP_sum, 3, 3, 1, 1, v) == (200 + 100 + 250) % 256, "a sum wraps");
    CHECK(reduced_uint8(HVD_OP_average, 3, 3, 1, 1, v) == 183, "an average does not wrap on the way");
    CHECK(reduced_uint8(HVD_OP_sum, 3, 3, 1, 0.5, v) == 275 % 256, "nor does a scaled sum, but its result does");
    const uint8_t odd[] = {3, 5, 255};
    CHECK(reduced_uint8(HVD_OP_sum, 2, 2, 0.5, 1, odd) == 1 + 2, "a prescale truncates every rank's own value");
    CHECK(reduced_uint8(HVD_OP_average, 3, 3, 0.5, 3, odd) == (1 + 2 + 127) / 3 * 3, "prescale, average, postscale");
    CHECK(reduced_uint8(HVD_OP_product, 2, 2, 0.5, 1, odd) == 1 * 2, "of a product as well");
    CHECK(reduced_uint8(HVD_OP_max, 3, 3, -1, 1, v) == 256 - 100, "max of negated values, wrapped");
    CHECK(reduced_uint8(HVD_OP_sum, 3, 3, NAN, 1, v) == 0, "NaN gives 0");
    const int64_t w[] = {-7, INT64_C(-4611686018427387904), INT64_MAX, INT64_MIN};
    CHECK(reduced_int64(HVD_OP_average, 1, 2, 1, 1, w) == -3, "towards zero");
    CHECK(reduced_int64(HVD_OP_average, 2, 2, 1, 1, w) == (-4611686018427387904 - 7) / 2, "exact beyond 2^53");
    CHECK(reduced_int64(HVD_OP_sum, 1, 1, 1, 0.25, w) == -1, "-1.75 truncates");
    CHECK(reduced_int64(HVD_OP_sum, 1, 1, 1, 1e18, w) == (int64_t)(0 - UINT64_C(7000000000000000000)), "still fits");
    CHECK(reduced_int64(HVD_OP_sum, 1, 1, 1, 0x1p62, w) == (int64_t)(UINT64_C(1) << 62), "-7 * 2^62 mod 2^64");
    CHECK(reduced_int64(HVD_OP_sum, 1, 1, 1, 0x1p64, w) == 0 && reduced_int64(HVD_OP_sum, 1, 1, 1, INFINITY, w) == 0,
          "nothing is left of multiples of 2^64");
    const int64_t limits[] = {INT64_MAX, 1};
    CHECK(reduced_int64(HVD_OP_sum, 2, 2, 1, 1, limits) == INT64_MIN, "int64 wraps");
}

/* More than any host has: what crosses hosts is combined at once, too. Rounded at every hop, sums of 16 bits would end
 * at 256. */
static void as_many_sources_as_a_job_has_ranks(void)
{
    static const uint16_t one = 0x3f80; /* of bfloat16 */
    static const int32_t least = INT32_MIN;
    const void *ones[HVD_RANKS_MAX], *leasts[HVD_RANKS_MAX];
    for (int k = 0; k < HVD_RANKS_MAX; k++) {
        ones[k] = &one;
        leasts[k] = &least;
    }
    static const int sizes[] = {HVD_LOCAL_MAX + 1, 100, 257, HVD_RANKS_MAX};
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        int n = sizes[i];
        uint16_t sum;
        int32_t average;
        struct hvd_scale scale = hvd_scale_fold(HVD_OP_average, HVD_DTYPE_bfloat16, n, n, 1, 1000);
        hvd_reduce(HVD_DTYPE_bfloat16, &scale, &sum, ones, n, 1);
        CHECK(sum == 0x447a, "the average of %d ones, times 1000, is %x", n, sum);
        scale = hvd_scale_fold(HVD_OP_average, HVD_DTYPE_int32, n, n, 1, 1);
        hvd_reduce(HVD_DTYPE_int32, &scale, &average, leasts, n, 1);
        CHECK(average == least, "the average of %d of the least integers is %d", n, average);
    }
}

static void bools_are_or_and_and(void)
{
    const uint8_t a[] = {0, 0, 1, 1, 2, 2}, b[] = {0, 1, 0, 1, 0, 4};
    const void *src[] = {a, b};
    uint8_t result[6];
    static const int ors[] = {HVD_OP_sum, HVD_OP_max}, ands[] = {HVD_OP_product, HVD_OP_min};
    for (int i = 0; i < 2; i++) {
        struct hvd_scale scale = hvd_scale_fold(ors[i], HVD_DTYPE_bool, 2, 2, 1, 1);
        hvd_reduce(HVD_DTYPE_bool, &scale, result, src, 2, 6);
        CHECK(memcmp(result, "\0\1\1\1\1\1", 6) == 0, "or");
        scale = hvd_scale_fold(ands[i], HVD_DTYPE_bool, 2, 2, 1, 1);
        hvd_reduce(HVD_DTYPE_bool, &scale, result, src, 2, 6);
        CHECK(memcmp(result, "\0\0\0\1\0\1", 6) == 0, "and");
    }
}

static void a_copy_copies(void)
{
    static char from[100003], to[100003];
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (char)(i * 7);
    for (size_t bytes = 0; bytes < sizeof from - 3; bytes = bytes * 3 + 1) {
        memset(to, 0, sizeof to);
        hvd_copy(to + 1, from + 2, bytes);
        CHECK(memcmp(to + 1, from + 2, bytes) == 0 && to[0] == 0 && to[bytes + 1] == 0, "%zu bytes", bytes);
    }
}

int main(void)
{
    every_dtype_and_op_has_a_name_and_a_number();
    what_cannot_be_reduced_is_refused_with_a_remedy();
    floats_get_one_factor();
    integers_divide_and_truncate();
    as_many_sources_as_a_job_has_ranks();
    bools_are_or_and_and();
    a_copy_copies();
    return 0;
}
