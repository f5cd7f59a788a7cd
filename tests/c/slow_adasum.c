/* slow_adasum.c - what is the right answer, if time does not matter?
 *
 * Ranks (0,1), (2,3), ... are combined, then those pairs in pairs; an odd one is carried up. Nothing is shared with
 * csrc/: every node of the tree is computed, and its dots are taken anew.
 */
#include "slow_adasum.h"

#include "slow_reduce.h"

static void combine(double *a, const double *b, size_t count)
{
    double both = 0, left = 0, right = 0;
    for (size_t k = 0; k < count; k++) {
        both += a[k] * b[k];
        left += a[k] * a[k];
        right += b[k] * b[k];
    }
    double of_a = left > 0 ? 1 - both / (2 * left) : 1, of_b = right > 0 ? 1 - both / (2 * right) : 1;
    for (size_t k = 0; k < count; k++)
        a[k] = of_a * a[k] + of_b * b[k];
}

void slow_adasum(double *const *a, int n, size_t count)
{
    for (int width = 1; width < n; width *= 2)
        for (int i = 0; i + width < n; i += 2 * width)
            combine(a[i], a[i + width], count);
}

double slow_get(int dtype, const void *array, size_t i)
{
    if (dtype == HVD_DTYPE_float64)
        return ((const double *)array)[i];
    if (dtype == HVD_DTYPE_float32)
        return (double)((const float *)array)[i];
    return slow_value_of_half(dtype, slow_half_at(dtype, array, i));
}

void slow_put(int dtype, void *array, size_t i, double value)
{
    if (dtype == HVD_DTYPE_float64)
        ((double *)array)[i] = value;
    else if (dtype == HVD_DTYPE_float32)
        ((float *)array)[i] = (float)value;
    else
        slow_set_half(dtype, array, i, slow_half_of_value(dtype, value));
}

double slow_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return (double)(int64_t)(*seed >> 11) * 0x1p-52 - 1.0;
}
