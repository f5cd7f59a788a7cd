/* pipeline.c - every collective but broadcast, alltoall and reducescatter: three stages per segment, a few segments
 * under way.
 *
 * How does a collective advance without ever blocking? It is cut into segments, and a segment passes three
 * stages: *enter* (put my part where all can read it, say `in`), *combine* (once everyone has entered: reduce
 * what is mine to reduce, say `out`), *gather* (once everyone has combined: fetch the rest). A way of working is
 * these three functions (struct hvd_shm_way); a way without the last finishes a segment when it is combined. A
 * poll moves each stage as far as the peers' words allow, oldest segment first where there is a choice, so
 * copying in the next segment overlaps with waiting for a slow peer.
 *
 * Invariants: gathered <= combined <= entered <= gathered + ahead + 1 and ahead <= RING - 2, which is the rule of
 * flow of lane.h. A poll returns after a few slices, so that a turn can look at other things.
 */
#include "lane.h"

#define STEPS_PER_POLL 6

/* Who takes part, once the first segment's words are all there. */
static int count_active(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    int active = 0;
    now->active = now->takers = 0;
    for (int rank = 0; rank < shm->size; rank++) {
        uint64_t mark = rank == shm->rank ? now->mark : shm->lane[rank]->in[now->base % HVD_SHM_RING].mark;
        bool joined = mark & HVD_SHM_JOINED;
        active += !joined;
        now->active |= (uint64_t)!joined << rank;
        now->takers |= (uint64_t) !(mark & HVD_SHM_TAKES_NOTHING) << rank;
    }
    if (work->kind != HVD_ALLREDUCE)
        return HVD_OK;
    if (active == 0)
        return hvd_fail(error, HVD_EINTERNAL,
                        HVD901 "every rank has joined, and no rank gave a tensor; please report this");
    now->scale = hvd_scale_fold(work->op, work->dtype, active, work->divide_by, work->prescale, work->postscale);
    return HVD_OK;
}

static bool enter(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t g = now->base + now->entered;
    uint64_t done = now->way->gather ? now->gathered : now->combined;
    if (now->entered == now->segments || now->entered > done + now->way->ahead || !hvd_shm_may_enter(shm, g))
        return false;
    struct hvd_shm_word *word = &shm->lane[shm->rank]->in[g % HVD_SHM_RING];
    word->mark = now->mark;
    now->way->enter(shm, work, now->entered++);
    hvd_shm_publish_to_all(shm, false, g);
    return true;
}

/* 1: moved, 0: nothing to do yet, negative: error. So is gather. */
static int combine(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t g = now->base + now->combined;
    if (now->combined == now->entered)
        return 0;
    if (now->part == 0) {
        int there = hvd_shm_all_in(shm, g, error);
        if (there != 1)
            return there;
        int code = now->combined == 0 ? count_active(shm, work, error) : HVD_OK;
        if (code)
            return code;
    }
    int code = now->way->combine(shm, work, now->combined, error);
    if (code == HVD_AGAIN)
        return 1;
    if (code)
        return code;
    now->part = 0;
    now->combined++;
    if (now->way->gather)
        hvd_shm_publish_to_all(shm, true, g);
    return 1;
}

static int gather(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    if (!now->way->gather || now->gathered == now->combined)
        return 0;
    int there = hvd_shm_all_out(shm, now->base + now->gathered, error);
    if (there == 1)
        now->way->gather(shm, work, now->gathered++);
    return there;
}

int hvd_shm_pipeline(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    for (int step = 0; step < STEPS_PER_POLL; step++) {
        bool moved = enter(shm, work);
        int combined = combine(shm, work, error);
        int gathered = combined < 0 ? combined : gather(shm, work, error);
        if (gathered < 0)
            return gathered;
        if ((now->way->gather ? now->gathered : now->combined) == now->segments) {
            *progress = true;
            return HVD_OK;
        }
        if (!moved && !combined && !gathered)
            return HVD_AGAIN;
        *progress = true;
    }
    return HVD_AGAIN;
}
