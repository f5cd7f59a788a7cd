/* identity.c - the value that changes nothing: what a rank gives that has nothing to give.
 *
 * A rank that has joined leaves no hole in a sum over links, where the others cannot simply leave it out. So it gives
 * the identity of the op: 1 for a product, the extremes for min and max, and for a sum of floats minus zero, since
 * -0 + -0 is -0 where 0 + -0 is 0: only so are results the same bits as without this rank. An average is a sum.
 *
 * The narrower floats are written as their bits (IEEE 754 half; the upper half of a float32; float8, of which e4m3fn
 * has no infinity: its largest numbers, since NaN gives NaN either way).
 */
#include "kernel.h"

#include <math.h>
#include <string.h>

enum { ZERO, ONE, LEAST, MOST };

static const uint16_t half[] = {0x8000, 0x3C00, 0xFC00, 0x7C00}, brain[] = {0x8000, 0x3F80, 0xFF80, 0x7F80};
static const uint8_t e4m3fn[] = {0x80, 0x38, 0xFE, 0x7E}, e5m2[] = {0x80, 0x3C, 0xFC, 0x7C};

#define SET(type, zero, least, most)                                               \
    do {                                                                           \
        const type value[] = {(type)(zero), (type)1, (type)(least), (type)(most)}; \
        memcpy(element, &value[which], sizeof(type));                              \
    } while (0)

void hvd_op_identity(int op, int dtype, void *element)
{
    int which = op == HVD_OP_product ? ONE : op == HVD_OP_min ? MOST : op == HVD_OP_max ? LEAST : ZERO;
    switch (dtype) {
    case HVD_DTYPE_uint8:
        SET(uint8_t, 0, 0, UINT8_MAX);
        break;
    case HVD_DTYPE_int8:
        SET(int8_t, 0, INT8_MIN, INT8_MAX);
        break;
    case HVD_DTYPE_uint16:
        SET(uint16_t, 0, 0, UINT16_MAX);
        break;
    case HVD_DTYPE_int16:
        SET(int16_t, 0, INT16_MIN, INT16_MAX);
        break;
    case HVD_DTYPE_int32:
        SET(int32_t, 0, INT32_MIN, INT32_MAX);
        break;
    case HVD_DTYPE_int64:
        SET(int64_t, 0, INT64_MIN, INT64_MAX);
        break;
    case HVD_DTYPE_float16:
        memcpy(element, &half[which], sizeof half[which]);
        break;
    case HVD_DTYPE_bfloat16:
        memcpy(element, &brain[which], sizeof brain[which]);
        break;
    case HVD_DTYPE_float8_e4m3fn:
        memcpy(element, &e4m3fn[which], sizeof e4m3fn[which]);
        break;
    case HVD_DTYPE_float8_e5m2:
        memcpy(element, &e5m2[which], sizeof e5m2[which]);
        break;
    case HVD_DTYPE_float32:
        SET(float, -0.0, -INFINITY, INFINITY);
        break;
    case HVD_DTYPE_float64:
        SET(double, -0.0, -INFINITY, INFINITY);
        break;
    case HVD_DTYPE_bool:
        SET(uint8_t, 0, 0, 1);
        break;
    default:
        HVD_ASSERT(!"a dtype that has an identity");
    }
}
