/* quantize.h - where in its tensors is a block of a quantized sum, and what is special about its numbers?
 *
 * Private to kernel/, for quantize.c and the loops of each variant. The calls and their contract are in hvdlite.h.
 * Blocks are counted over all tensors; the last one of a tensor is filled up with zeros, so that no block has numbers
 * of two.
 */
#ifndef HVD_KERNEL_QUANTIZE_H
#define HVD_KERNEL_QUANTIZE_H

#include "../hvdlite.h"

#include <stddef.h>

#define HVD_QUANTIZED_BYTES(bits) (4 + (size_t)(bits) * HVD_QUANTIZED_BLOCK / 8)
#define HVD_QUANTIZED_TINY        1.5e-36f    /* below it the scale would be subnormal: the block travels as zeros */
#define HVD_INFINITE_BITS         0x7f800000u /* of a float32 without its sign: infinite, or above it NaN */

struct hvd_quantized_place {
    uint64_t block;  /* of all tensors */
    int tensor;      /* the block is its */
    uint64_t offset; /* and begins at this element of it */
};

/* Empty tensors have no block. */
static inline void hvd_quantized_next(const struct hvd_quantized *job, struct hvd_quantized_place *place)
{
    place->block++;
    place->offset += HVD_QUANTIZED_BLOCK;
    while (place->tensor < job->count && place->offset >= job->tensors[place->tensor].count) {
        place->tensor++;
        place->offset = 0;
    }
}

#endif
