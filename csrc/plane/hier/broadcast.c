/* broadcast.c - each byte crosses to every other host once, and is handed out there.
 *
 * The root's lane carries it, or the first where the root is in none. On the root's host the root gives to all inside,
 * among them the lane's rank, if it is another; on the other hosts the lane's rank gives to all what has come.
 * Both sides go through the segments in order, each as far as the other lets it: what is given away must be there.
 *
 * A segment is closed when both sides are through with it; its slot, if it needs one, serves the next but one then.
 */
#include "state.h"

static bool at_root(const struct hvd_hier *hier)
{
    return hier->place.host == hier->now.root_host;
}

static bool is_root(const struct hvd_hier *hier)
{
    return at_root(hier) && hier->place.number == hier->now.root_number;
}

static bool carries(const struct hvd_hier *hier)
{
    return hier->place.number == hier->now.lane;
}

static void begin(struct hvd_hier *hier, const struct hvd_work *work)
{
    struct hvd_hier_now *now = &hier->now;
    now->root_host = hier->place.host_of[work->root];
    now->root_number = hier->place.number_of[work->root];
    now->lane = now->root_number < hier->place.lanes ? now->root_number : 0;
    hier->inside.total = now->segments;
    hier->across.total = carries(hier) ? now->segments : 0;
}

/* A segment's memory, once it has a slot; false: not yet. */
static bool describe(struct hvd_hier *hier, const struct hvd_work *work, struct hvd_hier_side *side, int root)
{
    struct hvd_hier_now *now = &hier->now;
    uint64_t segment = side->done;
    bool in_slots = !now->lands_there || (is_root(hier) && !now->gives_there);
    if (in_slots && segment >= now->closed + HVD_HIER_SLOTS)
        return false;
    side->piece.out = hvd_hier_target(hier, work, segment);
    side->piece.in = side->piece.out;
    side->piece.count = hvd_hier_length(hier, work, segment);
    if (is_root(hier) && now->gives_there) {
        side->piece.in = hvd_hier_given(hier, work, segment);
    } else if (is_root(hier) && segment == now->packed) {
        (void)hvd_hier_given(hier, work, segment);
        now->packed++;
    }
    side->work = hvd_hier_unscaled(HVD_BROADCAST, HVD_OP_sum, work->dtype, side->piece.count);
    side->work.root = root;
    return true;
}

static bool next_inside(struct hvd_hier *hier, const struct hvd_work *work)
{
    const struct hvd_hier_now *now = &hier->now;
    if (!at_root(hier) && carries(hier) && hier->across.done <= hier->inside.done)
        return false;
    return describe(hier, work, &hier->inside, at_root(hier) ? now->root_number : now->lane);
}

static bool next_across(struct hvd_hier *hier, const struct hvd_work *work)
{
    if (at_root(hier) && !is_root(hier) && hier->inside.done <= hier->across.done)
        return false;
    return describe(hier, work, &hier->across, hier->now.root_host);
}

/* Both are through with the segment that this side has just done. */
static void close_segment(struct hvd_hier *hier, const struct hvd_work *work, const struct hvd_hier_side *side,
                          const struct hvd_hier_side *other)
{
    if (other->total && other->done <= side->done)
        return;
    hvd_hier_unpack(hier, work, hier->now.closed++);
}

static void done_inside(struct hvd_hier *hier, const struct hvd_work *work)
{
    close_segment(hier, work, &hier->inside, &hier->across);
}

static void done_across(struct hvd_hier *hier, const struct hvd_work *work)
{
    close_segment(hier, work, &hier->across, &hier->inside);
}

const struct hvd_hier_way hvd_hier_broadcast = {begin, next_inside, next_across, done_inside, done_across};
