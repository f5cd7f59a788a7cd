/* quantized.h - the part of the C API that sums tensors in 8 or 4 bits. hvdlite.h includes it.
 *
 * The calls compute; they send nothing. The exchange itself is made of an alltoall and an allgather (quantized_sum.py):
 * each rank encodes, the owner of a block sums, all decode. cffi reads what stands between the marks, as in hvdlite.h.
 * The kernels are in kernel/quantize.c and kernel/quantized_loops.h.
 */
#ifndef HVD_QUANTIZED_H
#define HVD_QUANTIZED_H

/* cffi: begin */

/* The sum of float32 tensors over `ranks` ranks in 8 or 4 bits (kernel/quantize.c). Each tensor is cut into blocks of
 * 256 elements, the last one filled up with zeros. On the wire a block is a float32 scale and 256 integers: 260 bytes,
 * or 132 (element i in the low half of byte i, as value + 8, element i + 128 in the high half). scale = greatest
 * magnitude / 127 (or 7). NaN or infinity in a block makes the whole block NaN. Rank r owns blocks first(r) to
 * first(r + 1), first(r) being blocks * r / ranks: `first` returns that, counts `blocks`, and returns HVD_EINVAL for
 * what cannot be. encode writes all blocks but this rank's own. What came for these, in rank order, each rank's as many
 * as it owns, `sum` adds in rank order, with this rank's values as they are; it encodes the sums, and puts what
 * rounding has lost into the residuals, which are added to what is sent the next time. Called again it does nothing.
 * decode writes the sums of all ranks times `factor`; after those of each rank lie `gap` bytes of the caller's. given,
 * result: of what this rank gave (times prescale) and of what came of it. No call looks at what it reads: its caller
 * has counted the bytes. */
#define HVD_QUANTIZED_BLOCK 256
struct hvd_quantized_stats {
    double square;  /* sum of squares */
    float greatest; /* magnitude */
    uint64_t not_finite;
};
struct hvd_quantized_tensor {
    const float *from;
    float *to;       /* may be `from` */
    float *residual; /* NULL: none */
    uint64_t count;
    struct hvd_quantized_stats given, result;
};
struct hvd_quantized {
    struct hvd_quantized_tensor *tensors;
    int count, bits, ranks, rank, summed;
    float prescale, factor;
    uint64_t blocks;
};
int64_t hvd_quantized_first(struct hvd_quantized *job, int rank);
void hvd_quantized_encode(struct hvd_quantized *job, unsigned char *out);
void hvd_quantized_sum(struct hvd_quantized *job, const unsigned char *out, const unsigned char *came,
                       unsigned char *sums);
void hvd_quantized_decode(struct hvd_quantized *job, const unsigned char *sums, size_t gap);

/* cffi: end */

#endif
