/* slow_reduce.h - the reduce kernel once more, as slow and as plain as can be, to compare with. */
#ifndef HVD_TESTS_SLOW_REDUCE_H
#define HVD_TESTS_SLOW_REDUCE_H

#include "kernel/kernel.h"

/* The value of a float16, a bfloat16 or a float8 (in the lowest bits), by the definition of the format. */
double slow_value_of_half(int dtype, uint16_t bits);
/* Nearest of them, ties to even, found by arithmetic in double; NaN is the one quiet NaN. */
uint16_t slow_half_of_value(int dtype, double value);
/* Element i of an array of them. */
uint16_t slow_half_at(int dtype, const void *array, size_t i);
void slow_set_half(int dtype, void *array, size_t i, uint16_t bits);

/* hvd_reduce, element by element; dst overlaps no source. */
void slow_reduce(int dtype, const struct hvd_scale *scale, void *dst, const void *const *src, int n, size_t count);

#endif
