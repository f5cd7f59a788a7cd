/* test_kernel.c - every variant of every loop gives the bits of the slow reference.
 *
 * One matrix: dtype x op x scale x number of sources x count x alignment x where the result goes (an array of
 * its own, or one of the sources), for each variant this processor can run. Values are random bits sown with
 * the dtype's special values; the reference is computed from untouched copies.
 */
#include "check.h"
#include "slow_reduce.h"

#include <string.h>

#define COUNT_MAX 4097
#define SLACK     64 /* bytes before and after each array: shifts its alignment, and guards its end */
#define ROOM      (SLACK + COUNT_MAX * 8 + SLACK)

static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};
static const size_t counts[] = {0, 1, 7, 15, 16, 17, 1000, COUNT_MAX};
static const int sources[] = {1, 2, 3, 4, 7, 64};
static const int ops[] = {HVD_OP_sum, HVD_OP_min, HVD_OP_max, HVD_OP_product};

static _Alignas(64) char pristine[HVD_LOCAL_MAX][ROOM], arrays[HVD_LOCAL_MAX][ROOM];
static _Alignas(64) char expected[ROOM], apart[ROOM];

static uint64_t state = 20261121;

static uint64_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Little-endian bits of values where conversions and comparisons go wrong first. */
static uint64_t special_bits(int dtype)
{
    static const uint64_t doubles[] = {0,
                                       0x8000000000000000,
                                       0x7ff0000000000000,
                                       0xfff0000000000000,
                                       0x7ff8000000000001,
                                       0x7ff0000000000001,
                                       0xffffffffffffffff,
                                       1,
                                       0x000fffffffffffff,
                                       0x7fefffffffffffff,
                                       0x3ff0000000000000,
                                       0xbff0000000000000};
    static const uint64_t floats[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001,
                                      0xffffffff, 1,          0x007fffff, 0x7f7fffff, 0x3f800000, 0xbf800000};
    static const uint64_t float16s[] = {0, 0x8000, 0x7c00, 0xfc00, 0x7e01, 0x7c01, 0xffff,
                                        1, 0x03ff, 0x0400, 0x7bff, 0x3c00, 0x8001, 0x3c01};
    static const uint64_t bfloat16s[] = {0, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0x7f81, 0xffff,
                                         1, 0x007f, 0x0080, 0x7f7f, 0x3f80, 0x8001, 0x3f81};
    static const uint64_t eighths[] = {0, 0x80, 0x7f, 0xff, 0x7e, 0xfe, 0x7c, 0xfc, 0x7b, 0x78, 1, 0x81, 7, 8, 0x38, 4};
    static const uint64_t integers[] = {0,
                                        1,
                                        2,
                                        0xffffffffffffffff,
                                        0x7f,
                                        0x80,
                                        0x7fff,
                                        0x8000,
                                        0x7fffffff,
                                        0x80000000,
                                        0x7fffffffffffffff,
                                        0x8000000000000000};
#define ONE_OF(values) values[random_bits() % HVD_COUNT_OF(values)]
    switch (dtype) {
    case HVD_DTYPE_float64:
        return ONE_OF(doubles);
    case HVD_DTYPE_float32:
        return ONE_OF(floats);
    case HVD_DTYPE_float16:
        return ONE_OF(float16s);
    case HVD_DTYPE_bfloat16:
        return ONE_OF(bfloat16s);
    case HVD_DTYPE_float8_e4m3fn:
    case HVD_DTYPE_float8_e5m2:
        return ONE_OF(eighths);
    case HVD_DTYPE_bool:
        return random_bits() & 1;
    default:
        return ONE_OF(integers);
    }
}

/* A number near 1 in the float dtypes, so that sums and products of many stay finite and must round. */
static uint64_t tame_bits(int dtype)
{
    double value = 0.75 + (double)(random_bits() >> 11) * 0x1p-54;
    float single = (float)value;
    uint64_t bits = random_bits();
    switch (dtype) {
    case HVD_DTYPE_float64:
        memcpy(&bits, &value, sizeof value);
        return bits;
    case HVD_DTYPE_float32:
        memcpy(&bits, &single, sizeof single);
        return bits;
    case HVD_DTYPE_float16:
    case HVD_DTYPE_bfloat16:
    case HVD_DTYPE_float8_e4m3fn:
    case HVD_DTYPE_float8_e5m2:
        return slow_half_of_value(dtype, value);
    case HVD_DTYPE_bool:
        return bits & 1;
    default:
        return bits & 0x7f;
    }
}

static void fill(int dtype, int n, size_t count)
{
    size_t bytes = (size_t)hvd_dtype_bytes(dtype);
    for (int k = 0; k < n; k++) {
        memset(pristine[k], 0x5a, ROOM);
        for (size_t i = 0; i < count; i++) {
            uint64_t kind = random_bits() % 16, bits = random_bits();
            if (kind == 0)
                bits = special_bits(dtype);
            else if (kind < 12 || dtype == HVD_DTYPE_bool)
                bits = tame_bits(dtype);
            memcpy(pristine[k] + SLACK + i * bytes, &bits, bytes);
        }
    }
}

struct cell {
    int dtype, n;
    struct hvd_scale scale;
    size_t count;
    bool shifted; /* arrays start at odd multiples of the element, each at another */
};

static size_t shift(const struct cell *cell, int k)
{
    return cell->shifted ? (size_t)(k * 5 % 7 + 1) * (size_t)hvd_dtype_bytes(cell->dtype) : 0;
}

/* into: the source that receives the result, or -1 for an array apart. */
static void run_one(const struct cell *cell, int into)
{
    size_t bytes = (size_t)hvd_dtype_bytes(cell->dtype) * cell->count;
    const void *src[HVD_LOCAL_MAX];
    for (int k = 0; k < cell->n; k++) {
        char *start = arrays[k] + SLACK - shift(cell, k);
        memcpy(start, pristine[k] + SLACK, bytes);
        src[k] = start;
    }
    char *dst = into < 0 ? apart + SLACK - shift(cell, 3) : arrays[into] + SLACK - shift(cell, into);
    memset(dst + bytes, 0x5a, 8);
    memset(dst - 8, 0x5a, 8);
    hvd_reduce(cell->dtype, &cell->scale, dst, src, cell->n, cell->count);
    if (memcmp(dst, expected, bytes) != 0) {
        size_t at = 0;
        while (dst[at] == expected[at])
            at++;
        CHECK(0, "%s %s op %s factor %g divide %d n %d count %zu shifted %d into %d: first wrong element is %zu",
              hvd_kernel_name(), hvd_dtype_name(cell->dtype), hvd_op_name(cell->scale.op), cell->scale.factor,
              cell->scale.divide, cell->n, cell->count, cell->shifted, into, at / (size_t)hvd_dtype_bytes(cell->dtype));
    }
    for (int i = 0; i < 8; i++)
        CHECK(dst[bytes + (size_t)i] == 0x5a && dst[i - 8] == 0x5a, "%s %s wrote outside its array", hvd_kernel_name(),
              hvd_dtype_name(cell->dtype));
}

static void run_cell(struct cell *cell)
{
    const void *src[HVD_LOCAL_MAX];
    for (int k = 0; k < cell->n; k++)
        src[k] = pristine[k] + SLACK;
    slow_reduce(cell->dtype, &cell->scale, expected, src, cell->n, cell->count);
    for (size_t v = 0; v < HVD_COUNT_OF(variants); v++) {
        if (hvd_kernel_use(variants[v]) != HVD_OK)
            continue;
        for (cell->shifted = false;; cell->shifted = true) {
            /* All destinations; of 64 sources the middle ones only where they are short. */
            for (int into = -1; into < cell->n; into++)
                if (cell->n <= 7 || cell->count <= 17 || into <= 0 || into == cell->n - 1)
                    run_one(cell, into);
            if (cell->shifted)
                break;
        }
    }
}

static void run_dtype(int dtype)
{
    static const struct hvd_scale scales[] = {{0, 1, 1.0, 1.0}, {0, 1, 1.0 / 3, 1.0}, {0, 1, -0x1p40, 1.0},
                                              {0, 3, 1.0, 1.0}, {0, 2, 1e9, 1.0},     {0, 1, 1e200, 1.0},
                                              {0, 1, 1.0, 0.7}, {0, 2, 0.3, -1.5}};
    bool is_bool = dtype == HVD_DTYPE_bool;
    bool is_float = hvd_is_float(dtype);
    for (size_t s = 0; s < HVD_COUNT_OF(sources); s++)
        for (size_t c = 0; c < HVD_COUNT_OF(counts); c++) {
            fill(dtype, sources[s], counts[c]);
            for (size_t o = 0; o < HVD_COUNT_OF(ops); o++)
                for (size_t f = 0; f < (is_bool ? 1 : HVD_COUNT_OF(scales)); f++) {
                    struct cell cell = {dtype, sources[s], scales[f], counts[c], false};
                    cell.scale.op = ops[o];
                    if (cell.scale.divide != 1 && (is_float || ops[o] != HVD_OP_sum))
                        continue; /* only integer sums divide */
                    if (cell.scale.first != 1.0 && is_float)
                        continue; /* folded into the factor */
                    if (f > 1 && sources[s] == 64 && counts[c] > 17)
                        continue; /* time */
                    run_cell(&cell);
                }
        }
}

int main(void)
{
    const char *best = hvd_kernel_name();
    CHECK(hvd_kernel_use("abacus") == HVD_EINVAL, "a variant that does not exist was accepted");
    CHECK((hvd_kernel_use("portable") == HVD_OK) != (hvd_kernel_use("neon") == HVD_OK), "one baseline always runs");
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        run_dtype(dtype);
    hvd_kernel_use(NULL);
    CHECK(strcmp(hvd_kernel_name(), best) == 0, "the choice changed from %s to %s", best, hvd_kernel_name());
    printf("variants compared, best here: %s\n", best);
    return 0;
}
