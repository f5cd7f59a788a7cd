/* slow_quantize.c - the reference of quantized sums: one block after the other over all ranks, rounded by rintf. */
#include "slow_quantize.h"

#include <math.h>
#include <string.h>

static float magnitude_of(const float *v)
{
    float greatest = 0;
    for (int i = 0; i < 256; i++)
        greatest = isnan(greatest) || isnan(v[i]) ? NAN : fabsf(v[i]) > greatest ? fabsf(v[i]) : greatest;
    return greatest;
}

/* Sixteen sums of float32 for each block: so many on every processor, since ranks compare what comes of them. */
static void slow_stats(struct hvd_quantized_stats *stats, const float *v)
{
    float part[16] = {0}, greatest = magnitude_of(v);
    for (int i = 0; i < 256; i++) {
        part[i % 16] += v[i] * v[i];
        stats->not_finite += !isfinite(v[i]);
    }
    for (int k = 0; k < 16; k++)
        stats->square += (double)part[k];
    if (!isnan(stats->greatest) && !(greatest <= stats->greatest))
        stats->greatest = greatest;
}

static void slow_load(struct slow_seat *seat, int tensor, uint64_t offset, float *v)
{
    struct hvd_quantized_tensor *from = &seat->should[tensor];
    for (uint64_t i = 0; i < 256; i++)
        v[i] = offset + i < from->count ? from->from[offset + i] * seat->job.prescale : 0;
    slow_stats(&from->given, v);
    for (uint64_t i = 0; isfinite(magnitude_of(v)) && i < 256 && from->residual && offset + i < from->count; i++)
        v[i] += from->residual[offset + i];
}

/* Writes v to the wire; v becomes what that means, and the residual what it lacks. */
static void slow_wire(struct slow_seat *seat, int tensor, uint64_t offset, float *v, unsigned char *to)
{
    float most = seat->job.bits == 8 ? 127 : 7, greatest = magnitude_of(v), scale = 0, *residual;
    if (!isfinite(greatest))
        scale = NAN;
    else if (greatest >= 1.5e-36f)
        scale = isinf(greatest / most * most) ? nextafterf(greatest / most, 0) : greatest / most;
    memcpy(to, &scale, 4);
    residual = isnan(scale) ? NULL : seat->should[tensor].residual;
    for (uint64_t i = 0; i < 256; i++) {
        int q = scale > 0 ? (int)rintf(v[i] * (most / greatest)) : 0;
        if (seat->job.bits == 8)
            to[4 + i] = (unsigned char)q;
        else
            to[4 + i % 128] = (unsigned char)(i < 128 ? q + 8 : to[4 + i % 128] | (q + 8) << 4);
        if (residual && offset + i < seat->should[tensor].count)
            residual[offset + i] = v[i] - (float)q * scale;
        v[i] = (float)q * scale;
    }
}

void slow_exchange(struct slow_seat *seats, unsigned char *sums, size_t blocks)
{
    int ranks = seats->job.ranks, owner = 0;
    size_t block = 0, bytes = BYTES(seats->job.bits);
    for (int tensor = 0; tensor < seats->job.count; tensor++)
        for (uint64_t offset = 0; offset < seats->tensors[tensor].count; offset += 256, block++, sums += bytes) {
            float sum[256] = {0}, v[256];
            for (; block >= blocks * (size_t)(owner + 1) / (size_t)ranks; owner++)
                sums += GAP;
            unsigned char *came = seats[owner].came + (block - seats[owner].first) * bytes;
            for (int r = 0; r < ranks; r++) {
                slow_load(&seats[r], tensor, offset, v);
                if (r != owner) {
                    slow_wire(&seats[r], tensor, offset, v, came);
                    memcpy(seats[r].out + seats[r].out_bytes, came, bytes);
                    seats[r].out_bytes += bytes;
                    came += (blocks * (size_t)(owner + 1) / (size_t)ranks - seats[owner].first) * bytes;
                }
                for (int i = 0; i < 256; i++)
                    sum[i] += v[i];
            }
            slow_wire(&seats[owner], tensor, offset, sum, sums);
            for (int i = 0; i < 256; i++)
                sum[i] *= seats->job.factor;
            for (int r = 0; r < ranks; r++) {
                struct hvd_quantized_tensor *to = &seats[r].should[tensor];
                slow_stats(&to->result, sum);
                for (uint64_t i = 0; i < 256 && offset + i < to->count; i++)
                    to->to[offset + i] = sum[i];
            }
        }
}
