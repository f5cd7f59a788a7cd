/* every_dtype.h - one variant whole: instantiates the loops for every dtype and makes the table of them.
 *
 * Included once by each variant's source, which defines VARIANT (the table's suffix), NAME, TARGET (the instruction
 * set, as a function attribute), VECTOR (bytes in a vector) and, if there are instructions that convert a vector of
 * float16, WIDEN and NARROW. Adding a dtype: its row in kernel.h and its traits here.
 */
#include "loops.h"
#include "number.h"

#define AS_IS(x)         (x)
#define NEVER(x)         0
#define UNSCALED(x, by)  (x)
#define IS_NAN(x)        ((x) != (x))
#define TIMES(x, by)     ((x) * (by))
#define SETTLED32(x, by) hvd_float_settled((x) * (by))
#define SETTLED64(x, by) hvd_double_settled((x) * (by))
#define TRUTH(x)         ((x) != 0)

#include "float16.h"
#include "wide.h"

#include "dots.h"
#include "quantized_loops.h"

#define NAMED(verb) verb##_uint8
#define ELEMENT     uint8_t
#define ACCUMULATOR uint8_t
#define WRAPPING    uint32_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_int8
#define ELEMENT     int8_t
#define ACCUMULATOR int8_t
#define WRAPPING    uint32_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_uint16
#define ELEMENT     uint16_t
#define ACCUMULATOR uint16_t
#define WRAPPING    uint32_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_int16
#define ELEMENT     int16_t
#define ACCUMULATOR int16_t
#define WRAPPING    uint32_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_int32
#define ELEMENT     int32_t
#define ACCUMULATOR int32_t
#define WRAPPING    uint32_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_int64
#define ELEMENT     int64_t
#define ACCUMULATOR int64_t
#define WRAPPING    uint64_t
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#define NAMED(verb) verb##_bool
#define ELEMENT     uint8_t
#define ACCUMULATOR uint8_t
#define WRAPPING    uint32_t
#define LOAD        TRUTH
#define STORE       AS_IS
#define ISNAN       NEVER
#define SCALED      UNSCALED
#include "one_dtype.h"

#ifndef WIDEN
#define CONVERTED
#define NAMED(verb) verb##_float16
#define ELEMENT     uint16_t
#define ACCUMULATOR float
#define WRAPPING    float
#define LOAD        hvd_float_of_float16
#define STORE       hvd_float16_of_float
#define ISNAN       IS_NAN
#define SCALED      TIMES
#include "one_dtype.h"
#endif

#define CONVERTED
#define NAMED(verb) verb##_float8_e4m3fn
#define ELEMENT     uint8_t
#define ACCUMULATOR float
#define WRAPPING    float
#define LOAD        hvd_float_of_float8_e4m3fn
#define STORE       hvd_float8_e4m3fn_of_float
#define ISNAN       IS_NAN
#define SCALED      TIMES
#include "one_dtype.h"

#define CONVERTED
#define NAMED(verb) verb##_float8_e5m2
#define ELEMENT     uint8_t
#define ACCUMULATOR float
#define WRAPPING    float
#define LOAD        hvd_float_of_float8_e5m2
#define STORE       hvd_float8_e5m2_of_float
#define ISNAN       IS_NAN
#define SCALED      TIMES
#include "one_dtype.h"

#define NAMED(verb) verb##_float32
#define ELEMENT     float
#define ACCUMULATOR float
#define WRAPPING    float
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       IS_NAN
#define SCALED      SETTLED32
#include "one_dtype.h"

#define NAMED(verb) verb##_float64
#define ELEMENT     double
#define ACCUMULATOR double
#define WRAPPING    double
#define LOAD        AS_IS
#define STORE       AS_IS
#define ISNAN       IS_NAN
#define SCALED      SETTLED64
#include "one_dtype.h"

#define JOINED(a, b)      a##b
#define TABLE_OF(variant) JOINED(hvd_loops_, variant)

const struct hvd_loops TABLE_OF(VARIANT) = {
    NAME,
    {
#define X(number, dtype, bytes)             \
    [number] = {[HVD_OP_sum] = sum_##dtype, \
                [HVD_OP_min] = min_##dtype, \
                [HVD_OP_max] = max_##dtype, \
                [HVD_OP_product] = product_##dtype},
        HVD_DTYPES(X)
#undef X
    },
    {
#define X(number, dtype, bytes)                  \
    [number] = {[HVD_OP_sum] = both_sum_##dtype, \
                [HVD_OP_min] = both_min_##dtype, \
                [HVD_OP_max] = both_max_##dtype, \
                [HVD_OP_product] = both_product_##dtype},
        HVD_DTYPES(X)
#undef X
    },
    {[HVD_DTYPE_uint8] = wide_uint8,
     [HVD_DTYPE_int8] = wide_int8,
     [HVD_DTYPE_uint16] = wide_uint16,
     [HVD_DTYPE_int16] = wide_int16,
     [HVD_DTYPE_int32] = wide_int32,
     [HVD_DTYPE_int64] = wide_int64},
    {[HVD_DTYPE_float16] = doubles_float16,
     [HVD_DTYPE_bfloat16] = doubles_bfloat16,
     [HVD_DTYPE_float8_e4m3fn] = doubles_float8_e4m3fn,
     [HVD_DTYPE_float8_e5m2] = doubles_float8_e5m2,
     [HVD_DTYPE_float32] = doubles_float32,
     [HVD_DTYPE_float64] = doubles_float64},
    dot_of_doubles,
    {[HVD_DTYPE_float16] = floats_float16,
     [HVD_DTYPE_bfloat16] = floats_bfloat16,
     [HVD_DTYPE_float8_e4m3fn] = floats_float8_e4m3fn,
     [HVD_DTYPE_float8_e5m2] = floats_float8_e5m2},
    {[HVD_DTYPE_float16] = narrow_float16,
     [HVD_DTYPE_bfloat16] = narrow_bfloat16,
     [HVD_DTYPE_float8_e4m3fn] = narrow_float8_e4m3fn,
     [HVD_DTYPE_float8_e5m2] = narrow_float8_e5m2},
    quantized_encode,
    quantized_settle,
    quantized_sum,
    quantized_decode,
};
