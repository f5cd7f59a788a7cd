/* slow_quantize.h - one exchange of a quantized sum over several ranks, done slowly: what the kernels must make. */
#ifndef HVD_TESTS_SLOW_QUANTIZE_H
#define HVD_TESTS_SLOW_QUANTIZE_H

#include "kernel/kernel.h"

#define TENSORS_MAX 6
#define GAP         20 /* bytes after the sums of each rank */
#define BYTES(bits) (4 + 32 * (size_t)(bits))

/* A rank. should: its tensors after the exchange; out, came: the bytes that it sends and gets. */
struct slow_seat {
    struct hvd_quantized job;
    struct hvd_quantized_tensor tensors[TENSORS_MAX], should[TENSORS_MAX];
    unsigned char *out, *came;
    size_t out_bytes, first; /* first: block of its own */
};

/* Of what `tensors` give: fills should, out and came of all ranks, and sums: those of all ranks as they are gathered.
 */
void slow_exchange(struct slow_seat *seats, unsigned char *sums, size_t blocks);

#endif
