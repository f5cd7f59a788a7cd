/* segments.c - how is a bucket cut for two sides that work at the same time, and where do its parts lie?
 *
 * All ranks cut alike, into as many segments as choice.c says. A segment has a slot for what cannot be worked on in
 * the caller's memory, and a third one waits until the first has left its own.
 *
 * What can stay where it is, is not packed: one tensor, which is not missing (a rank that has joined gives the
 * identity of the op; who wants no result still takes part in the last exchange). 16-bit floats are added up as
 * float32, so what is given is always packed.
 */
#include "state.h"

#include "../../kernel/adasum.h"

#include <stdlib.h>
#include <string.h>

uint64_t hvd_hier_share(uint64_t count, int shares, int i)
{
    uint64_t each = HVD_ALIGN_UP((count + (uint64_t)shares - 1) / (uint64_t)shares, HVD_CACHE_LINE);
    return each * (uint64_t)i < count ? each * (uint64_t)i : count;
}

uint64_t hvd_hier_length(const struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment)
{
    uint64_t begin = segment * hier->now.segment_count;
    return work->count - begin < hier->now.segment_count ? work->count - begin : hier->now.segment_count;
}

static int reserve(struct hvd_hier *hier, unsigned char **area, size_t *has, size_t bytes, struct hvd_error *error)
{
    if (bytes <= *has)
        return HVD_OK;
    free(*area);
    *has = 0;
    *area = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE));
    if (!*area)
        return hvd_fail_rank(error, HVD_ENOMEM, hier->rank, HVD951 "rank %d: no memory for %zu bytes of a bucket",
                             hier->rank, bytes);
    *has = bytes;
    return HVD_OK;
}

int hvd_hier_cut(struct hvd_hier *hier, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_hier_now *now = &hier->now;
    uint64_t wanted = hvd_hier_segments(&hier->place, work->count * now->bytes, hier->cost);
    now->segment_count = HVD_ALIGN_UP((work->count + wanted - 1) / wanted, HVD_CACHE_LINE);
    now->segments = work->count ? (work->count + now->segment_count - 1) / now->segment_count : 0;
    uint64_t most = work->count < now->segment_count ? work->count : now->segment_count;
    uint64_t slice = hvd_hier_share(most, hier->place.lanes, 1), chunk = hvd_hier_share(slice, hier->place.hosts, 1);
    bool packs = !now->gives_there || !now->lands_there;
    bool slices = work->kind == HVD_ALLREDUCE && hier->place.number < hier->place.lanes;
    int code = HVD_OK;
    for (int i = 0; i < HVD_HIER_SLOTS && (uint64_t)i < now->segments && code == HVD_OK; i++) {
        struct hvd_hier_slot *slot = &hier->slot[i];
        if (packs)
            code = reserve(hier, &slot->packed, &slot->packed_bytes, most * now->sum_bytes, error);
        if (slices && code == HVD_OK)
            code = reserve(hier, &slot->slice, &slot->slice_bytes, (slice + (now->wide ? chunk : 0)) * now->sum_bytes,
                           error);
    }
    return code;
}

struct hvd_work hvd_hier_unscaled(int kind, int op, int dtype, uint64_t count)
{
    return (struct hvd_work){
        .kind = kind, .op = op, .dtype = dtype, .divide_by = 1, .prescale = 1, .postscale = 1, .count = count};
}

static void fill_identity(const struct hvd_hier_now *now, unsigned char *to, uint64_t count)
{
    unsigned char element[16];
    hvd_op_identity(now->scale.op, now->sum_dtype, element);
    for (uint64_t i = 0; i < count; i++)
        memcpy(to + i * now->sum_bytes, element, now->sum_bytes);
}

const void *hvd_hier_given(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment)
{
    struct hvd_hier_now *now = &hier->now;
    uint64_t from = segment * now->segment_count, count = hvd_hier_length(hier, work, segment);
    if (now->gives_there)
        return (const char *)work->piece[0].in + from * now->bytes;
    unsigned char *packed = hier->slot[segment % HVD_HIER_SLOTS].packed;
    for (uint64_t at = 0; at < count;) {
        struct hvd_shm_run run = hvd_shm_run(work, &now->in, from + at, count - at, now->bytes);
        unsigned char *to = packed + at * now->sum_bytes;
        if (!run.in)
            fill_identity(now, to, run.count);
        else if (now->wide)
            hvd_floats_of_narrow(work->dtype, (float *)(void *)to, run.in, run.count, 1.0);
        else
            hvd_copy(to, run.in, run.count * now->bytes);
        at += run.count;
    }
    return packed;
}

void *hvd_hier_target(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment)
{
    const struct hvd_hier_now *now = &hier->now;
    if (now->lands_there)
        return (char *)work->piece[0].out + segment * now->segment_count * now->bytes;
    return hier->slot[segment % HVD_HIER_SLOTS].packed;
}

void hvd_hier_unpack(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment)
{
    struct hvd_hier_now *now = &hier->now;
    if (!now->lands_there)
        hvd_shm_copy_out(work, &now->out, segment * now->segment_count, hvd_hier_length(hier, work, segment),
                         now->bytes, hier->slot[segment % HVD_HIER_SLOTS].packed);
}
