/* reduce.c - allreduce: reduce-scatter inside the host, allreduce of each lane across, allgather inside.
 *
 * The works inside come in one order on all ranks of a host, R for reduce-scatter and G for allgather of a segment:
 *
 *     R0 R1 G0 R2 G1 R3 G2 ... G(n-1)
 *
 * so that while segment i crosses, i + 1 is prepared and i - 1 handed out, with two slots. Segment i crosses once R(i)
 * is over; G(i) begins once it has crossed, on ranks that are in a lane; the others wait for them inside.
 *
 * ONE ROUNDING. Sums inside and across are not scaled; what average, prescale and postscale come to is applied
 * once, by the lane's rank, before the last exchange. float32 and float64 are added in an order that is not that of
 * ranks. 16-bit floats are added up as float32 inside and across (there as a reduce-scatter, of 32 bits), rounded once,
 * and travel back with 16.
 */
#include "state.h"

#include "../../kernel/adasum.h"

#include <string.h>

static bool has_lane(const struct hvd_hier *hier)
{
    return hier->place.number < hier->place.lanes;
}

/* The k-th work inside: of which segment, and is it the allgather? */
static bool gathers(const struct hvd_hier *hier, uint64_t k, uint64_t *segment)
{
    bool last = k + 1 == 2 * hier->now.segments, gather = last || (k > 0 && k % 2 == 0);
    *segment = last ? hier->now.segments - 1 : gather ? k / 2 - 1 : (k + 1) / 2;
    return gather;
}

/* Segments that are reduced inside, once `done` works are over. */
static uint64_t reduced(const struct hvd_hier *hier, uint64_t done)
{
    uint64_t count = done == 0 ? 0 : done / 2 + 1;
    return count < hier->now.segments ? count : hier->now.segments;
}

/* This rank's slice of a segment, and where its sum lies. */
static uint64_t slice_count(const struct hvd_hier *hier, uint64_t length, int number)
{
    int lanes = hier->place.lanes;
    return number < lanes ? hvd_hier_share(length, lanes, number + 1) - hvd_hier_share(length, lanes, number) : 0;
}

static unsigned char *slice_of(const struct hvd_hier *hier, uint64_t segment)
{
    return hier->slot[segment % HVD_HIER_SLOTS].slice;
}

static void begin(struct hvd_hier *hier, const struct hvd_work *work)
{
    (void)work;
    hier->inside.total = 2 * hier->now.segments;
    hier->across.total = has_lane(hier) ? hier->now.parts * hier->now.segments : 0;
}

static bool next_inside(struct hvd_hier *hier, const struct hvd_work *work)
{
    struct hvd_hier_side *side = &hier->inside;
    const struct hvd_hier_now *now = &hier->now;
    uint64_t segment, length;
    bool gather = gathers(hier, side->done, &segment);
    if (gather && has_lane(hier) && hier->across.done < now->parts * (segment + 1))
        return false;
    length = hvd_hier_length(hier, work, segment);
    uint64_t mine = slice_count(hier, length, hier->place.number);
    for (int number = 0; number < hier->place.locals; number++)
        side->count_of[number] = slice_count(hier, length, number);
    side->work = hvd_hier_unscaled(gather ? HVD_ALLGATHER : HVD_REDUCESCATTER, now->scale.op,
                                   gather ? work->dtype : now->sum_dtype, gather ? mine : length);
    side->work.count_of = side->count_of;
    if (gather)
        side->piece = (struct hvd_piece){slice_of(hier, segment), hvd_hier_target(hier, work, segment), mine};
    else
        side->piece = (struct hvd_piece){hvd_hier_given(hier, work, segment), slice_of(hier, segment), length};
    return true;
}

static void done_inside(struct hvd_hier *hier, const struct hvd_work *work)
{
    uint64_t segment;
    if (gathers(hier, hier->inside.done, &segment))
        hvd_hier_unpack(hier, work, segment);
}

/* Where a chunk of the wide slice is summed. */
static float *chunk_of(const struct hvd_hier *hier, uint64_t segment, uint64_t count)
{
    return (float *)(void *)slice_of(hier, segment) + count;
}

static bool next_across(struct hvd_hier *hier, const struct hvd_work *work)
{
    struct hvd_hier_side *side = &hier->across;
    const struct hvd_hier_now *now = &hier->now;
    const struct hvd_hier_place *place = &hier->place;
    uint64_t segment = side->done / now->parts;
    if (reduced(hier, hier->inside.done) <= segment)
        return false;
    uint64_t count = slice_count(hier, hvd_hier_length(hier, work, segment), place->number);
    unsigned char *slice = slice_of(hier, segment);
    side->work = hvd_hier_unscaled(HVD_ALLREDUCE, now->scale.op, now->sum_dtype, count);
    side->piece = (struct hvd_piece){slice, slice, count};
    if (!now->wide)
        return true;
    for (int host = 0; host < place->hosts; host++)
        side->count_of[host] =
            hvd_hier_share(count, place->hosts, host + 1) - hvd_hier_share(count, place->hosts, host);
    side->work.count_of = side->count_of;
    if (side->done % 2 == 0) {
        side->work.kind = HVD_REDUCESCATTER;
        side->piece.out = chunk_of(hier, segment, count);
    } else {
        uint64_t mine = side->count_of[place->host];
        side->work.kind = HVD_ALLGATHER;
        side->work.dtype = work->dtype;
        side->work.count = mine;
        side->piece =
            (struct hvd_piece){slice + hvd_hier_share(count, place->hosts, place->host) * now->bytes, slice, mine};
    }
    return true;
}

static void done_across(struct hvd_hier *hier, const struct hvd_work *work)
{
    const struct hvd_hier_now *now = &hier->now;
    struct hvd_hier_side *side = &hier->across;
    const struct hvd_hier_place *place = &hier->place;
    if (now->wide && side->done % 2 == 1)
        return;
    uint64_t segment = side->done / now->parts;
    unsigned char *slice = slice_of(hier, segment);
    uint64_t count = side->piece.count, mine = now->wide ? side->count_of[place->host] : count;
    void *sum = now->wide ? (void *)chunk_of(hier, segment, count) : slice;
    const void *source = sum;
    if (now->scaled && mine)
        hvd_reduce(now->sum_dtype, &now->scale, sum, &source, 1, mine);
    if (now->wide && mine)
        hvd_narrow_of_floats(work->dtype, slice + hvd_hier_share(count, place->hosts, place->host) * now->bytes, sum,
                             mine);
}

const struct hvd_hier_way hvd_hier_reduce = {begin, next_inside, next_across, done_inside, done_across};
