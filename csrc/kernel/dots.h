/* dots.h - dots in float64, and conversions between float types, for one variant.
 *
 * How does a sum that no compiler may reorder run in vectors? By having HVD_DOT_LANES partial sums from the start:
 * element i always goes to sum i modulo HVD_DOT_LANES, held in as many vectors as the variant needs, and these sums
 * are added in one fixed order. Conversions are plain loops, which compilers turn into vectors.
 *
 * The variant defines VECTOR (bytes). Included once by every_dtype.h.
 */

typedef double doubles __attribute__((vector_size(VECTOR)));

#define DOUBLES (VECTOR / 8) /* elements in a vector */

TARGET static double dot_of_doubles(const double *a, const double *b, size_t count)
{
    doubles sum[HVD_DOT_LANES / DOUBLES] = {{0}};
    for (size_t i = 0; i < count; i += HVD_DOT_LANES)
        for (size_t k = 0; k < HVD_DOT_LANES / DOUBLES; k++) {
            doubles x, y;
            memcpy(&x, a + i + k * DOUBLES, sizeof x);
            memcpy(&y, b + i + k * DOUBLES, sizeof y);
            sum[k] += x * y;
        }
    double lane[HVD_DOT_LANES];
    memcpy(lane, sum, sizeof lane);
    for (size_t half = HVD_DOT_LANES / 2; half > 0; half /= 2)
        for (size_t k = 0; k < half; k++)
            lane[k] += lane[k + half];
    return lane[0];
}

#define CONVERT(NAME, FROM, TO, CONVERTED)                                 \
    TARGET static void NAME(TO *restrict to, const void *of, size_t count) \
    {                                                                      \
        const FROM *from = of;                                             \
        HVD_INDEPENDENT                                                    \
        for (size_t i = 0; i < count; i++)                                 \
            to[i] = CONVERTED(from[i]);                                    \
    }
CONVERT(doubles_float16, uint16_t, double, hvd_float_of_float16)
CONVERT(doubles_bfloat16, uint16_t, double, hvd_float_of_bfloat16)
CONVERT(doubles_float8_e4m3fn, uint8_t, double, hvd_float_of_float8_e4m3fn)
CONVERT(doubles_float8_e5m2, uint8_t, double, hvd_float_of_float8_e5m2)
CONVERT(doubles_float32, float, double, AS_IS)
CONVERT(doubles_float64, double, double, AS_IS)
#undef CONVERT

#define NARROW_AND_FLOATS(NAME, ELEMENT)                                                             \
    TARGET static void floats_##NAME(float *restrict to, const void *of, size_t count, float factor) \
    {                                                                                                \
        const ELEMENT *from = of;                                                                    \
        HVD_INDEPENDENT                                                                              \
        for (size_t i = 0; i < count; i++)                                                           \
            to[i] = hvd_float_of_##NAME(from[i]) * factor;                                           \
    }                                                                                                \
    TARGET static void narrow_##NAME(void *of, const float *restrict from, size_t count)             \
    {                                                                                                \
        ELEMENT *to = of;                                                                            \
        HVD_INDEPENDENT                                                                              \
        for (size_t i = 0; i < count; i++)                                                           \
            to[i] = hvd_##NAME##_of_float(from[i]);                                                  \
    }
NARROW_AND_FLOATS(float16, uint16_t)
NARROW_AND_FLOATS(bfloat16, uint16_t)
NARROW_AND_FLOATS(float8_e4m3fn, uint8_t)
NARROW_AND_FLOATS(float8_e5m2, uint8_t)
#undef NARROW_AND_FLOATS
