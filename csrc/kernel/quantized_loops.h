/* quantized_loops.h - the loops of a quantized sum for one variant: a template, included by every_dtype.h.
 *
 * The contract is that of hvdlite.h (struct hvd_quantized). Every function takes all blocks, or those that one rank
 * owns. All arithmetic is float32 in a fixed order, without fused multiply-add, so that every variant and every rank
 * gets the same bits. Magnitudes are compared as integers, and rounding to nearest even is the addition of 1.5 * 2^23:
 * both become vector code without any option that changes arithmetic.
 */

#define QUANTIZED TARGET static
#define ROUNDS    12582912.0f /* 1.5 * 2^23: of a sum with it, the low bits are the nearest integer */
#define ROUNDS_AS 0x4b400000u
#define LANES     16

/* Of the elements of a block at `offset` that the tensor has. */
QUANTIZED size_t quantized_count(const struct hvd_quantized_tensor *tensor, uint64_t offset)
{
    uint64_t left = tensor->count - offset;
    return left < HVD_QUANTIZED_BLOCK ? (size_t)left : HVD_QUANTIZED_BLOCK;
}

/* Greatest magnitude of a block, as bits; what is not below INFINITE_BITS is NaN or infinite. */
QUANTIZED uint32_t quantized_greatest(const float *v)
{
    int32_t all = 0;
    for (int i = 0; i < HVD_QUANTIZED_BLOCK; i++) {
        int32_t one = (int32_t)(hvd_bits_of_float(v[i]) & 0x7fffffffu);
        all = one > all ? one : all;
    }
    return (uint32_t)all;
}

/* to := from * factor, of which stats are taken. Returns the greatest magnitude. One loop for each, since a compiler
 * keeps the lanes of one in registers, and those of two in memory. */
QUANTIZED uint32_t quantized_scale(const float *restrict from, float factor, float *restrict to,
                                   struct hvd_quantized_stats *stats)
{
    float square[LANES] = {0};
    for (int i = 0; i < HVD_QUANTIZED_BLOCK; i++)
        to[i] = from[i] * factor;
    for (int i = 0; i < HVD_QUANTIZED_BLOCK && stats; i += LANES)
        for (int k = 0; k < LANES; k++)
            square[k] += to[i + k] * to[i + k];
    uint32_t all = quantized_greatest(to);
    if (!stats)
        return all;
    for (int k = 0; k < LANES; k++)
        stats->square += (double)square[k];
    if (all > hvd_bits_of_float(stats->greatest))
        stats->greatest = hvd_float_of_bits(all);
    for (int i = 0; i < HVD_QUANTIZED_BLOCK && all >= HVD_INFINITE_BITS; i++)
        stats->not_finite += (hvd_bits_of_float(to[i]) & 0x7fffffffu) >= HVD_INFINITE_BITS;
    return all;
}

/* v += residual, whose first n elements there are. */
QUANTIZED uint32_t quantized_restore(const float *restrict residual, size_t n, float *restrict v)
{
    for (size_t i = 0; i < n; i++)
        v[i] += residual[i];
    return quantized_greatest(v);
}

/* v := from * factor + residual, zeros after the tensor's end. Returns the greatest magnitude. */
QUANTIZED uint32_t quantized_load(const struct hvd_quantized_tensor *tensor, uint64_t offset, float factor, float *v,
                                  struct hvd_quantized_stats *stats)
{
    float padded[HVD_QUANTIZED_BLOCK];
    size_t n = quantized_count(tensor, offset);
    const float *from = tensor->from + offset;
    if (n < HVD_QUANTIZED_BLOCK) {
        memset(padded, 0, sizeof padded);
        from = memcpy(padded, from, n * sizeof *from);
    }
    uint32_t greatest = quantized_scale(from, factor, v, stats);
    if (!tensor->residual || greatest >= HVD_INFINITE_BITS)
        return greatest;
    return n < HVD_QUANTIZED_BLOCK ? quantized_restore(tensor->residual + offset, n, v)
                                   : quantized_restore(tensor->residual + offset, HVD_QUANTIZED_BLOCK, v);
}

/* One block on the wire. */
QUANTIZED void quantized_store(int bits, const float *v, uint32_t greatest, unsigned char *to)
{
    float most = bits == 8 ? 127.0f : 7.0f, top = hvd_float_of_bits(greatest), by = most / top, scale = top / most;
    if (scale * most > FLT_MAX) /* rounded up, it would make the greatest number there is infinite */
        scale = hvd_float_of_bits(hvd_bits_of_float(scale) - 1);
    if (greatest >= HVD_INFINITE_BITS || top < HVD_QUANTIZED_TINY) {
        by = 0;
        scale = greatest >= HVD_INFINITE_BITS ? hvd_float_of_bits(0x7fc00000u) : 0.0f;
    }
    int8_t q[HVD_QUANTIZED_BLOCK];
    if (by == 0)
        memset(q, 0, sizeof q);
    else
        for (int i = 0; i < HVD_QUANTIZED_BLOCK; i++)
            q[i] = (int8_t)(hvd_bits_of_float(v[i] * by + ROUNDS) - ROUNDS_AS);
    memcpy(to, &scale, sizeof scale);
    if (bits == 8)
        memcpy(to + sizeof scale, q, sizeof q);
    else
        for (int i = 0; i < HVD_QUANTIZED_BLOCK / 2; i++)
            to[sizeof scale + (size_t)i] = (unsigned char)((q[i] + 8) | (q[i + HVD_QUANTIZED_BLOCK / 2] + 8) << 4);
}

/* v := what a block on the wire means, or v += that. False: NaN. */
HVD_INLINE TARGET bool quantized_take(int bits, const unsigned char *restrict from, float *restrict v, bool add)
{
    float scale;
    memcpy(&scale, from, sizeof scale);
    from += sizeof scale;
    if (bits == 8)
        for (int i = 0; i < HVD_QUANTIZED_BLOCK; i++) {
            float one = (float)(int8_t)from[i] * scale;
            v[i] = add ? v[i] + one : one;
        }
    else
        for (int i = 0; i < HVD_QUANTIZED_BLOCK / 2; i++) {
            float low = (float)((from[i] & 15) - 8) * scale, high = (float)((from[i] >> 4) - 8) * scale;
            v[i] = add ? v[i] + low : low;
            v[i + HVD_QUANTIZED_BLOCK / 2] = add ? v[i + HVD_QUANTIZED_BLOCK / 2] + high : high;
        }
    return scale == scale;
}

QUANTIZED bool quantized_read(int bits, const unsigned char *from, float *v)
{
    return quantized_take(bits, from, v, false);
}

/* The tensor's residual := v - sent; what is not finite leaves it. */
QUANTIZED void quantized_keep(struct hvd_quantized_tensor *tensor, uint64_t offset, const float *v, const float *sent)
{
    size_t n = quantized_count(tensor, offset);
    float *residual = tensor->residual + offset;
    for (size_t i = 0; i < n; i++)
        residual[i] = v[i] - sent[i];
}

QUANTIZED void quantized_encode(struct hvd_quantized *job, struct hvd_quantized_place place, uint64_t end,
                                unsigned char *to)
{
    float v[HVD_QUANTIZED_BLOCK];
    for (uint64_t b = place.block; b < end; b++, hvd_quantized_next(job, &place)) {
        struct hvd_quantized_tensor *tensor = job->tensors + place.tensor;
        uint32_t greatest = quantized_load(tensor, place.offset, job->prescale, v, &tensor->given);
        quantized_store(job->bits, v, greatest, to);
        to += HVD_QUANTIZED_BYTES(job->bits);
    }
}

QUANTIZED void quantized_settle(struct hvd_quantized *job, struct hvd_quantized_place place, uint64_t end,
                                const unsigned char *sent)
{
    float v[HVD_QUANTIZED_BLOCK], was_sent[HVD_QUANTIZED_BLOCK];
    for (uint64_t b = place.block; b < end; b++, hvd_quantized_next(job, &place)) {
        struct hvd_quantized_tensor *tensor = job->tensors + place.tensor;
        if (tensor->residual && quantized_read(job->bits, sent, was_sent)) {
            (void)quantized_load(tensor, place.offset, job->prescale, v, NULL);
            quantized_keep(tensor, place.offset, v, was_sent);
        }
        sent += HVD_QUANTIZED_BYTES(job->bits);
    }
}

QUANTIZED void quantized_sum(struct hvd_quantized *job, struct hvd_quantized_place place, uint64_t end,
                             const unsigned char *came, size_t stride, unsigned char *to)
{
    float mine[HVD_QUANTIZED_BLOCK], v[HVD_QUANTIZED_BLOCK], sum[HVD_QUANTIZED_BLOCK];
    for (uint64_t b = place.block; b < end; b++, hvd_quantized_next(job, &place)) {
        struct hvd_quantized_tensor *tensor = job->tensors + place.tensor;
        (void)quantized_load(tensor, place.offset, job->prescale, mine, &tensor->given);
        memset(sum, 0, sizeof sum);
        const unsigned char *part = came;
        for (int r = 0; r < job->ranks; r++) {
            if (r != job->rank) {
                (void)quantized_take(job->bits, part, sum, true);
                part += stride;
                continue;
            }
            for (int i = 0; i < HVD_QUANTIZED_BLOCK; i++)
                sum[i] += mine[i];
        }
        quantized_store(job->bits, sum, quantized_greatest(sum), to);
        if (tensor->residual && quantized_read(job->bits, to, v))
            quantized_keep(tensor, place.offset, sum, v);
        came += HVD_QUANTIZED_BYTES(job->bits);
        to += HVD_QUANTIZED_BYTES(job->bits);
    }
}

QUANTIZED void quantized_decode(struct hvd_quantized *job, struct hvd_quantized_place place, uint64_t end,
                                const unsigned char *from)
{
    float v[HVD_QUANTIZED_BLOCK], rest[HVD_QUANTIZED_BLOCK];
    for (uint64_t b = place.block; b < end; b++, hvd_quantized_next(job, &place)) {
        struct hvd_quantized_tensor *tensor = job->tensors + place.tensor;
        size_t n = quantized_count(tensor, place.offset);
        float *to = tensor->to + place.offset;
        (void)quantized_read(job->bits, from, v);
        (void)quantized_scale(v, job->factor, n < HVD_QUANTIZED_BLOCK ? rest : to, &tensor->result);
        if (n < HVD_QUANTIZED_BLOCK)
            memcpy(to, rest, n * sizeof *to);
        from += HVD_QUANTIZED_BYTES(job->bits);
    }
}

#undef QUANTIZED
#undef ROUNDS
#undef ROUNDS_AS
#undef LANES
