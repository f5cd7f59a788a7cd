/* quantize.c - the sum of float32 tensors over ranks in 8 or 4 bits: which blocks a rank owns, and the three calls.
 *
 * A rank sends all blocks but its own (encode), adds what comes for those that it owns and encodes the sums (sum), and
 * all ranks read all sums (decode). The residual of a block, what rounding has lost, is written by `sum` alone, once
 * the first exchange has succeeded: an exchange that fails changes nothing, and encode and decode may be repeated.
 */
#include "quantize.h"

#include "loops.h"

static uint64_t first_of(const struct hvd_quantized *job, int rank)
{
    return job->blocks * (uint64_t)rank / (uint64_t)job->ranks;
}

static struct hvd_quantized_place at_block(const struct hvd_quantized *job, uint64_t block)
{
    struct hvd_quantized_place place = {block, 0, 0};
    uint64_t before = 0;
    for (; place.tensor < job->count; place.tensor++) {
        uint64_t of_tensor = (job->tensors[place.tensor].count + HVD_QUANTIZED_BLOCK - 1) / HVD_QUANTIZED_BLOCK;
        if (block < before + of_tensor)
            break;
        before += of_tensor;
    }
    place.offset = (block - before) * HVD_QUANTIZED_BLOCK;
    return place;
}

int64_t hvd_quantized_first(struct hvd_quantized *job, int rank)
{
    if ((job->bits != 8 && job->bits != 4) || job->ranks < 1 || job->rank < 0 || job->rank >= job->ranks || rank < 0 ||
        rank > job->ranks)
        return HVD_EINVAL;
    job->blocks = 0;
    for (int i = 0; i < job->count; i++)
        job->blocks += (job->tensors[i].count + HVD_QUANTIZED_BLOCK - 1) / HVD_QUANTIZED_BLOCK;
    return (int64_t)first_of(job, rank);
}

void hvd_quantized_encode(struct hvd_quantized *job, unsigned char *out)
{
    for (int i = 0; i < job->count; i++)
        job->tensors[i].given = (struct hvd_quantized_stats){0};
    for (int r = 0; r < job->ranks; r++) {
        uint64_t first = first_of(job, r), end = first_of(job, r + 1);
        if (r == job->rank || first == end)
            continue;
        hvd_loops_chosen()->quantized_encode(job, at_block(job, first), end, out);
        out += (end - first) * HVD_QUANTIZED_BYTES(job->bits);
    }
}

void hvd_quantized_sum(struct hvd_quantized *job, const unsigned char *out, const unsigned char *came,
                       unsigned char *sums)
{
    if (job->summed) /* a signal handler came between this call and what its caller noted of it */
        return;
    const struct hvd_loops *loops = hvd_loops_chosen();
    uint64_t mine = first_of(job, job->rank), mine_end = first_of(job, job->rank + 1);
    for (int r = 0; r < job->ranks; r++) {
        uint64_t first = first_of(job, r), end = first_of(job, r + 1);
        if (r == job->rank || first == end)
            continue;
        loops->quantized_settle(job, at_block(job, first), end, out);
        out += (end - first) * HVD_QUANTIZED_BYTES(job->bits);
    }
    loops->quantized_sum(job, at_block(job, mine), mine_end, came, (mine_end - mine) * HVD_QUANTIZED_BYTES(job->bits),
                         sums);
    job->summed = 1;
}

void hvd_quantized_decode(struct hvd_quantized *job, const unsigned char *sums, size_t gap)
{
    for (int i = 0; i < job->count; i++)
        job->tensors[i].result = (struct hvd_quantized_stats){0};
    for (int r = 0; r < job->ranks; r++) {
        uint64_t first = first_of(job, r), end = first_of(job, r + 1);
        hvd_loops_chosen()->quantized_decode(job, at_block(job, first), end, sums);
        sums += (end - first) * HVD_QUANTIZED_BYTES(job->bits) + gap;
    }
}
