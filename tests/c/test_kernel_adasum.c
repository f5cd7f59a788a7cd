/* test_kernel_adasum.c - dots, coefficients and conversions, against slow ones, in every variant. */
#include "check.h"
#include "kernel/adasum.h"
#include "slow_adasum.h"
#include "slow_reduce.h"

#include <math.h>
#include <string.h>

enum { ARRAYS = 9, COUNT = 1337 };

static const int dtypes[] = {HVD_DTYPE_float16, HVD_DTYPE_bfloat16,      HVD_DTYPE_float32,
                             HVD_DTYPE_float64, HVD_DTYPE_float8_e4m3fn, HVD_DTYPE_float8_e5m2};
static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};

static void dots_are_right_and_the_same_in_every_variant(int dtype, size_t count)
{
    static double memory[ARRAYS][COUNT];
    const void *src[ARRAYS];
    double first[HVD_GRAM_COUNT(ARRAYS)];
    uint64_t seed = 88172645463325252u;
    size_t element = (size_t)hvd_dtype_bytes(dtype);
    bool have_first = false;
    for (int i = 0; i < ARRAYS; i++) {
        src[i] = (char *)memory[i] + element; /* off the cache line */
        for (size_t k = 0; k < count; k++)
            slow_put(dtype, (char *)memory[i] + element, k, slow_random(&seed));
    }
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++) {
        double gram[HVD_GRAM_COUNT(ARRAYS)];
        if (hvd_kernel_use(variants[v]) != HVD_OK)
            continue;
        for (size_t k = 0; k < HVD_COUNT_OF(gram); k++)
            gram[k] = 3;
        hvd_gram_add(dtype, src, ARRAYS, count, gram);
        for (int i = 0; i < ARRAYS; i++)
            for (int j = 0; j <= i; j++) {
                long double wanted = 3;
                for (size_t k = 0; k < count; k++)
                    wanted += (long double)slow_get(dtype, src[i], k) * (long double)slow_get(dtype, src[j], k);
                CHECK(fabs((double)(wanted - gram[HVD_GRAM_AT(i, j)])) <= 1e-15 * (double)(count + 3),
                      "%s, %s: dot %d, %d of %zu is %.17g, not %.17g", variants[v], hvd_dtype_name(dtype), i, j, count,
                      gram[HVD_GRAM_AT(i, j)], (double)wanted);
            }
        if (have_first)
            CHECK(memcmp(first, gram, sizeof gram) == 0, "%s gives other bits", variants[v]);
        memcpy(first, gram, sizeof gram);
        have_first = true;
    }
    CHECK(have_first && hvd_kernel_use(NULL) == HVD_OK, "no variant runs here");
}

/* a: n arrays, which are used up. */
static void compare_with_the_tree(double (*a)[COUNT], int n, size_t count, const char *what)
{
    double gram[HVD_GRAM_COUNT(HVD_LOCAL_MAX)] = {0}, coefficient[HVD_LOCAL_MAX], sum[COUNT] = {0};
    double *array[HVD_LOCAL_MAX] = {0}, largest = 0;
    for (int i = 0; i < n; i++)
        array[i] = a[i];
    hvd_gram_add(HVD_DTYPE_float64, (const void *const *)array, n, count, gram);
    hvd_adasum_coefficients(gram, n, coefficient);
    for (int i = 0; i < n; i++)
        for (size_t k = 0; k < count; k++) {
            sum[k] += coefficient[i] * a[i][k];
            largest = fmax(largest, fabs(a[i][k]));
        }
    slow_adasum(array, n, count);
    for (size_t k = 0; k < count; k++)
        CHECK(fabs(sum[k] - a[0][k]) <= 1e-12 * largest * n, "%s, %d arrays: element %zu is %.17g, not %.17g", what, n,
              k, sum[k], a[0][k]);
}

static void coefficients_are_those_of_the_tree(int n)
{
    static double a[HVD_LOCAL_MAX][COUNT];
    uint64_t seed = 88172645463325252u + (uint64_t)n;
    for (int zeros = 0; zeros <= 3; zeros++) { /* none; the first; every second; all but the last */
        for (int alike = 0; alike < 2; alike++) {
            for (int i = 0; i < n; i++) {
                bool zero = (zeros == 1 && i == 0) || (zeros == 2 && i % 2) || (zeros == 3 && i < n - 1);
                for (size_t k = 0; k < 50; k++) {
                    double value = slow_random(&seed) + (alike ? sin((double)k) * 3 : 0);
                    a[i][k] = zero ? 0 : value;
                }
            }
            compare_with_the_tree(a, n, 50, alike ? "similar" : "random");
        }
    }
}

/* Closed forms: what Adasum is for. */
static void parallel_arrays_are_averaged_and_orthogonal_ones_added(void)
{
    double coefficient[HVD_LOCAL_MAX];
    for (int n = 1; n <= HVD_LOCAL_MAX; n *= 2) {
        double gram[HVD_GRAM_COUNT(HVD_LOCAL_MAX)];
        for (size_t k = 0; k < HVD_GRAM_COUNT(n); k++)
            gram[k] = 7;
        hvd_adasum_coefficients(gram, n, coefficient);
        for (int i = 0; i < n; i++)
            CHECK(coefficient[i] == 1.0 / n, "%d equal arrays: %g", n, coefficient[i]);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++)
                gram[HVD_GRAM_AT(i, j)] = 0;
        hvd_adasum_coefficients(gram, n, coefficient);
        for (int i = 0; i < n; i++)
            CHECK(coefficient[i] == 1.0, "%d orthogonal arrays: %g", n, coefficient[i]);
    }
    const double opposite[] = {5, -5, 5, 2, -2, 3}; /* a, -a, and one that they must not disturb */
    hvd_adasum_coefficients(opposite, 3, coefficient);
    CHECK(coefficient[0] == coefficient[1] && coefficient[2] == 1.0, "%g %g %g", coefficient[0], coefficient[1],
          coefficient[2]);
    const double nearly[] = {1, -1, 1 + 4e-16, 0.3, 0.1, 1}; /* the difference is rounding, not a direction */
    hvd_adasum_coefficients(nearly, 3, coefficient);
    for (int i = 0; i < 3; i++)
        CHECK(fabs(coefficient[i]) < 2, "a quotient of rounding errors: %g", coefficient[i]);
    const double wild[] = {1, (double)NAN, 1};
    hvd_adasum_coefficients(wild, 2, coefficient);
    CHECK(isnan(coefficient[0]) && isnan(coefficient[1]), "%g %g", coefficient[0], coefficient[1]);
}

static void narrow_ones_go_through_floats_and_back(int dtype)
{
    enum { ALL = 65536 };
    static uint16_t half[ALL], again[ALL]; /* room for either width */
    static float single[ALL];
    for (int i = 0; i < ALL; i++)
        slow_set_half(dtype, half, (size_t)i, (uint16_t)i);
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++) {
        if (hvd_kernel_use(variants[v]) != HVD_OK)
            continue;
        memset(again, 0, sizeof again);
        hvd_floats_of_narrow(dtype, single, half, ALL, 0.3);
        hvd_narrow_of_floats(dtype, again, single, ALL - 3);
        for (int i = 0; i < ALL; i++) {
            float wanted = (float)slow_value_of_half(dtype, slow_half_at(dtype, half, (size_t)i)) * 0.3f;
            CHECK(wanted == single[i] || (isnan(wanted) && isnan(single[i])), "%s: %g, not %g", hvd_dtype_name(dtype),
                  (double)single[i], (double)wanted);
            uint16_t back = i < ALL - 3 ? slow_half_of_value(dtype, (double)wanted) : 0;
            CHECK(slow_half_at(dtype, again, (size_t)i) == back, "%s, %s: %g became %04x, not %04x", variants[v],
                  hvd_dtype_name(dtype), (double)wanted, slow_half_at(dtype, again, (size_t)i), back);
        }
    }
    CHECK(hvd_kernel_use(NULL) == HVD_OK, "none");
}

static void only_floats_are_taken(void)
{
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++) {
        const char *name = hvd_dtype_name(dtype), *text = hvd_adasum_check(dtype);
        bool is_float = strstr(name, "float") != NULL;
        CHECK(is_float == !text, "%s: %s", name, text ? text : "accepted");
        CHECK(is_float || (strstr(text, "Adasum") && strstr(text, "cast")), "%s", text);
    }
}

int main(void)
{
    for (size_t i = 0; i < HVD_COUNT_OF(dtypes); i++)
        for (size_t count = 0; count <= COUNT - 1; count = count * 5 / 2 + 1)
            dots_are_right_and_the_same_in_every_variant(dtypes[i], count);
    for (int n = 1; n <= ARRAYS; n++)
        coefficients_are_those_of_the_tree(n);
    coefficients_are_those_of_the_tree(HVD_LOCAL_MAX);
    parallel_arrays_are_averaged_and_orthogonal_ones_added();
    narrow_ones_go_through_floats_and_back(HVD_DTYPE_float16);
    narrow_ones_go_through_floats_and_back(HVD_DTYPE_bfloat16);
    narrow_ones_go_through_floats_and_back(HVD_DTYPE_float8_e4m3fn);
    narrow_ones_go_through_floats_and_back(HVD_DTYPE_float8_e5m2);
    only_floats_are_taken();
    return 0;
}
