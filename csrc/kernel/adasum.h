/* adasum.h - the arithmetic of Adasum: dots, coefficients, and 16-bit floats in float32 and back. HOT.
 *
 * Called by engine/execution/adasum.c; nothing here blocks, allocates or keeps a pointer. A *Gram matrix* of n arrays
 * holds their dots, n * (n + 1) / 2 of them: the lower triangle, row after row.
 */
#ifndef HVD_KERNEL_ADASUM_H
#define HVD_KERNEL_ADASUM_H

#include "kernel.h"

#define HVD_GRAM_COUNT(n) ((size_t)(n) * ((size_t)(n) + 1) / 2)
#define HVD_GRAM_AT(i, j) ((size_t)(i) * ((size_t)(i) + 1) / 2 + (size_t)(j)) /* j <= i */

/* NULL if Adasum combines this dtype; else a sentence that names it and the remedy. Static. */
const char *hvd_adasum_check(int dtype);

/* Add to `gram` the dots of `count` elements of each of the n arrays, taken in float64. The same bits on every
 * processor. n <= HVD_LOCAL_MAX. */
void hvd_gram_add(int dtype, const void *const *src, int n, size_t count, double *gram);

/* Adasum of n arrays is the sum of coefficient[i] times array i. Pure: the same bits from the same Gram matrix. */
void hvd_adasum_coefficients(const double *gram, int n, double *coefficient);

/* A narrow float (hvd_is_narrow) times factor (rounded to float32) as float32, and float32 rounded to one of them. */
void hvd_floats_of_narrow(int dtype, float *to, const void *from, size_t count, double factor);
void hvd_narrow_of_floats(int dtype, void *to, const float *from, size_t count);

#endif
