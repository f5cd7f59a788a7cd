/* count_not_finite.c - how many elements are NaN, and how many infinite?
 *
 * The NaN guard asks it of every tensor before it is combined with others, so the answer "none" must cost no more than
 * reading the memory. NaN and infinity are the numbers whose exponent is all ones: with the sign taken away, and one
 * added to the exponent, they and no others carry into the sign's place. A block of elements is judged by one such sum
 * for each, or-ed together, which compilers make vectors of for every dtype and processor. Only a block that has some
 * is counted, element by element: mantissa zero is infinite, anything else is NaN.
 *
 * Integers and bool have neither. Bits are looked at as integers, so nothing here raises a floating point exception.
 */
#include "number.h"

#include "kernel.h"

#define BLOCK 4096 /* elements judged at once: they fit the cache, and are counted from there */

/* last: the lowest bit of the exponent. */
#define COUNT(word, last)                                                                                   \
    static void count_##word##_##last(const void *from, size_t count, uint64_t *nans, uint64_t *infinities) \
    {                                                                                                       \
        const word sign = (word)((word)1 << (8 * sizeof(word) - 1)), rest = (word)~sign;                    \
        const word one = (word)((word)1 << last), infinite = (word)(rest & (word) ~(word)(one - 1));        \
        const word *value = from;                                                                           \
        for (size_t at = 0; at < count; at += BLOCK) {                                                      \
            size_t end = count - at < BLOCK ? count : at + BLOCK;                                           \
            word any = 0;                                                                                   \
            for (size_t i = at; i < end; i++)                                                               \
                any |= (word)((value[i] & rest) + one);                                                     \
            for (size_t i = at; any & sign && i < end; i++) {                                               \
                *nans += (value[i] & rest) > infinite;                                                      \
                *infinities += (value[i] & rest) == infinite;                                               \
            }                                                                                               \
        }                                                                                                   \
    }
COUNT(uint8_t, 0)
COUNT(uint8_t, 2)
COUNT(uint16_t, 10)
COUNT(uint16_t, 7)
COUNT(uint32_t, 23)
COUNT(uint64_t, 52)
#undef COUNT

void hvd_count_not_finite(int dtype, const void *from, size_t count, uint64_t *nans, uint64_t *infinities)
{
    *nans = *infinities = 0;
    switch (dtype) {
    case HVD_DTYPE_float8_e4m3fn: /* no infinities; the one pattern of all ones is NaN */
        count_uint8_t_0(from, count, infinities, nans);
        break;
    case HVD_DTYPE_float8_e5m2:
        count_uint8_t_2(from, count, nans, infinities);
        break;
    case HVD_DTYPE_float16:
        count_uint16_t_10(from, count, nans, infinities);
        break;
    case HVD_DTYPE_bfloat16:
        count_uint16_t_7(from, count, nans, infinities);
        break;
    case HVD_DTYPE_float32:
        count_uint32_t_23(from, count, nans, infinities);
        break;
    case HVD_DTYPE_float64:
        count_uint64_t_52(from, count, nans, infinities);
        break;
    }
}
