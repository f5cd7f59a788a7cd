/* slow_adasum.h - Adasum by its definition: the tree, on the arrays themselves, in float64. */
#ifndef HVD_TESTS_SLOW_ADASUM_H
#define HVD_TESTS_SLOW_ADASUM_H

#include "kernel/kernel.h"

/* Combine n arrays into the first; the others are used up. */
void slow_adasum(double *const *a, int n, size_t count);

/* Element i of an array of a float dtype. put rounds. */
double slow_get(int dtype, const void *array, size_t i);
void slow_put(int dtype, void *array, size_t i, double value);

/* -1 .. 1, the same on every run; seed is not 0. */
double slow_random(uint64_t *seed);

#endif
