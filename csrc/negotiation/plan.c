/* plan.c - the agreed vote becomes the plan.
 *
 * Every rank runs this on the same bytes and on the same agreed state, in integers, so every rank gets the
 * same plan and the same next state. The steps, in their order:
 *
 *     left       somebody leaves: nothing is planned any more
 *     detail     the mismatch at the head of the queue is told and its slot taken back
 *     conflicts  fresh keys that have a slot: forget it (rule 1)
 *     ready      slots whose bit is 1 on all ranks are due, and of a learned list as many as are on all ranks
 *     accept     fresh keys get slots; those that all ranks announced are due at once
 *     emit       what is due, sorted, with this rank's tickets
 *     learn      a list is adopted or forgotten
 *
 * "Due" means: a mismatch is queued for its detail, a member of a group is held until the group is complete,
 * everything else is planned. A round costs the words of the two bit maps, plus what became due or fresh;
 * nothing is proportional to the size of the table.
 *
 * When all ranks have joined, bits say nothing any more (all are 1). If some rank still has something
 * outstanding, all slots but held ones are forgotten, so that the next round shows by descriptors what is left.
 */
#include "state.h"

struct turn {
    const struct hvd_vote *vote;
    const struct hvd_fresh *fresh;
    uint64_t round;
    uint32_t active; /* ranks whose saying is needed */
};

/* How many ranks must announce it; those that have joined do not count. Of a send's two ranks one may have joined,
 * which a descriptor does not show: then the bits of its slot tell in the next round (see accept). */
static uint32_t needed(const struct hvd_signature *signature, const struct turn *turn)
{
    return signature->kind == HVD_SEND && turn->active > 2 ? 2 : turn->active;
}

static void release_group(struct hvd_coord *coord, struct hvd_key group, uint64_t round)
{
    for (uint32_t slot; (slot = hvd_group_release(coord, group)) != HVD_NONE;)
        hvd_plan_slot(coord, slot, round);
}

/* Entries for groups have run out: whatever is still held goes now. */
static void release_all_groups(struct hvd_coord *coord, uint64_t round)
{
    for (uint32_t slot; (slot = hvd_group_release_next(coord, coord->used.head)) != HVD_NONE;)
        hvd_plan_slot(coord, slot, round);
}

/* All active ranks are ready for this slot. */
static void due(struct hvd_coord *coord, uint32_t slot, bool in_plane, uint64_t round)
{
    struct hvd_known *known = &coord->known[slot];
    known->flags = (known->flags & ~(uint32_t)HVD_KNOWN_IN_PLANE) | (in_plane ? HVD_KNOWN_IN_PLANE : 0);
    hvd_slot_touch(coord, slot, round);
    if (known->flags & HVD_KNOWN_MISMATCH) {
        hvd_slot_queue(coord, slot);
    } else if (known->signature.group == 0) {
        hvd_plan_slot(coord, slot, round);
    } else if (hvd_group_arrive(coord, slot)) {
        if (!(known->flags & HVD_KNOWN_HELD))
            hvd_plan_slot(coord, slot, round);
        release_group(coord, hvd_group_key(&known->signature), round);
    }
}

static void unnamed_done(struct hvd_coord *coord, struct hvd_key key)
{
    if (key.high == 0 && key.low >= coord->unnamed_done)
        coord->unnamed_done = key.low + 1;
}

/* The head of the queue had its detail round: tell, and take the slot back. True: its request has failed. */
static bool tell_detail(struct hvd_coord *coord, const struct turn *turn, struct hvd_plan *plan)
{
    uint32_t slot = coord->details.head;
    struct hvd_key key = coord->known[slot].key;
    hvd_detail_text(coord, turn->vote, key, plan->text, sizeof plan->text);
    plan->not_finite = hvd_detail_not_finite(coord, turn->vote);
    bool failed = !plan->not_finite || !coord->limits.forgives;
    if (failed) {
        plan->failed_ticket = hvd_slot_detach(coord, slot);
        plan->failed_code = plan->not_finite ? HVD_ENAN : HVD_EMISMATCH;
        unnamed_done(coord, key);
    } else if (coord->known[slot].ticket != HVD_TICKET_NONE) {
        coord->mine[coord->known[slot].ticket].signature.not_finite = 0; /* and forgetting announces it again */
    }
    hvd_slot_forget(coord, slot);
    return failed;
}

/* What failed counts as arrived in each group that a rank took it for a member of. */
static void fail_groups(struct hvd_coord *coord, const struct turn *turn)
{
    const struct hvd_signature *said = hvd_detail_signatures(turn->vote);
    for (uint32_t i = 0; i < turn->vote->detail; i++) {
        struct hvd_key group = hvd_group_key(&said[i]);
        bool seen = group.high == 0;
        for (uint32_t j = 0; j < i; j++)
            seen = seen || (said[j].group == group.high && said[j].group_count == group.low);
        if (!seen && hvd_group_fail(coord, group))
            release_group(coord, group, turn->round);
    }
}

/* Rule 1. What is left in `order` are the descriptors to accept, sorted so that slots are handed out in the
 * order of submission. Returns how many. */
static uint32_t forget_conflicts(struct hvd_coord *coord, const struct turn *turn)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < turn->vote->fresh; i++) {
        const struct hvd_fresh *fresh = &turn->fresh[i];
        uint32_t slot = hvd_map_find(&coord->slot_of, fresh->key);
        if (slot != HVD_NONE) {
            hvd_slot_forget(coord, slot);
            /* All whom it concerns say the same new thing, joined ranks nothing: nobody needs the next round. */
            if (fresh->count < needed(&fresh->signature, turn) || fresh->flags & HVD_FRESH_MISMATCH || turn->vote->busy)
                continue;
        }
        /* A send whose other rank has joined is refused by way of a slot only: others may not keep it from one. */
        uint64_t order = fresh->signature.kind == HVD_SEND && turn->vote->joined ? 0 : fresh->order;
        coord->order[count++] = (struct hvd_sortable){order, fresh->key.high, fresh->key.low, i, 0};
    }
    hvd_sort(coord->order, count);
    return count;
}

static void find_ready(struct hvd_coord *coord, const struct turn *turn)
{
    uint32_t words = hvd_words(turn->vote->slots);
    const uint64_t *ready = turn->vote->body, *plane = ready + words;
    for (uint32_t i = 0; i < words; i++)
        for (uint64_t bits = ready[i] & coord->listen[i]; bits; bits &= bits - 1) {
            uint32_t slot = i * 64 + (uint32_t)__builtin_ctzll(bits);
            if (coord->known[slot].used != turn->round) /* else released by its group a moment ago */
                due(coord, slot, hvd_bit(plane, slot), turn->round);
        }
}

static void accept(struct hvd_coord *coord, const struct turn *turn, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        struct hvd_sortable item = coord->order[i];
        const struct hvd_fresh *fresh = &turn->fresh[item.id];
        bool complete = fresh->count >= needed(&fresh->signature, turn);
        uint32_t slot = hvd_slot_take(coord, fresh, turn->round);
        if (slot != HVD_NONE) {
            if (complete)
                due(coord, slot, fresh->flags & HVD_FRESH_IN_PLANE, turn->round);
            else if (fresh->signature.kind == HVD_SEND && turn->vote->joined)
                coord->news = true; /* its other rank may have joined, and then nobody else would ask for a round */
        } else if (complete && !(fresh->flags & HVD_FRESH_MISMATCH) && fresh->signature.group == 0) {
            item.id |= HVD_DONE_DIRECT;
            item.front = hvd_front_of(&fresh->signature);
            coord->done[coord->done_count++] = item;
        }
    }
}

/* My request for a key that is done without a slot. */
static uint32_t take_direct(struct hvd_coord *coord, const struct hvd_fresh *fresh)
{
    uint32_t ticket = hvd_map_find(&coord->fresh_of, fresh->key);
    if (ticket == HVD_NONE || !hvd_signature_same(&coord->mine[ticket].signature, &fresh->signature))
        return HVD_TICKET_NONE;
    hvd_mine_withdraw(coord, ticket);
    coord->outstanding--;
    return ticket;
}

static uint64_t elements(const struct hvd_signature *signature)
{
    uint64_t count = 1;
    for (int i = hvd_kind_ragged(signature->kind); i < signature->ndim; i++)
        count *= (uint64_t)signature->dims[i];
    return count;
}

static int code_of(const struct hvd_signature *signature, const struct hvd_vote *vote)
{
    bool may = signature->kind == HVD_ALLREDUCE || signature->kind == HVD_REDUCE || signature->kind == HVD_BARRIER;
    return may || vote->joined == 0 ? HVD_OK : HVD_EINVAL;
}

static void learn(struct hvd_coord *coord, const struct hvd_vote *vote, struct hvd_plan *plan)
{
    struct hvd_pattern *learn = &coord->learn;
    if (vote->deviates) {
        hvd_pattern_restart(coord);
        learn->patience = learn->patience < HVD_PATIENCE_MAX ? 2 * learn->patience : HVD_PATIENCE_MAX;
        plan->deviated = true;
    }
    bool adopt = vote->list && !vote->deviates && vote->joined == 0;
    if (learn->count && (adopt || vote->deviates))
        hvd_pattern_forget(coord);
    if (adopt && hvd_pattern_adopt(coord, vote))
        plan->learned = learn->count;
}

static void emit(struct hvd_coord *coord, const struct turn *turn, struct hvd_plan *plan)
{
    HVD_ASSERT(coord->done_count <= plan->items_max);
    hvd_sort(coord->done, coord->done_count);
    for (uint32_t i = 0; i < coord->done_count; i++) {
        struct hvd_plan_item *item = &plan->item[i];
        uint32_t id = coord->done[i].id;
        item->key = (struct hvd_key){coord->done[i].high, coord->done[i].low};
        item->order = coord->done[i].major;
        item->bucket = 0;
        if (id & HVD_DONE_DIRECT) {
            const struct hvd_fresh *fresh = &turn->fresh[id & ~HVD_DONE_DIRECT];
            item->signature = fresh->signature;
            item->slot = HVD_SLOTLESS;
            item->flags = fresh->flags & HVD_FRESH_IN_PLANE;
            item->ticket = take_direct(coord, fresh);
        } else {
            const struct hvd_known *known = &coord->known[id];
            item->signature = known->signature;
            item->slot = id;
            item->flags = known->flags & HVD_KNOWN_IN_PLANE ? HVD_FRESH_IN_PLANE : 0;
            item->ticket = hvd_slot_detach(coord, id);
        }
        item->count = elements(&item->signature);
        item->code = code_of(&item->signature, turn->vote);
        unnamed_done(coord, item->key);
        /* Of a send whose ranks have both joined all bits are 1 although nobody asks: refused once, not every round. */
        bool over = item->key.high == 0 || (item->signature.kind == HVD_SEND && item->code != HVD_OK);
        if (over && item->slot != HVD_SLOTLESS)
            hvd_slot_forget(coord, item->slot);
    }
    plan->items = coord->done_count;
}

/* All have joined, and bits say nothing any more. What is held for its group is settled already; forgetting
 * that too would keep a group that does not fit into one vote from ever being complete. */
static void forget_all(struct hvd_coord *coord)
{
    for (uint32_t slot = coord->used.head, next; slot != HVD_NONE; slot = next) {
        next = coord->known[slot].next;
        if (!(coord->known[slot].flags & HVD_KNOWN_HELD))
            hvd_slot_forget(coord, slot);
    }
}

/* All have joined and nothing was outstanding when the votes were written. What this rank has submitted since
 * starts afresh, its unnamed requests with the number that all ranks go on with. */
static void end_join(struct hvd_coord *coord, const struct hvd_vote *vote, struct hvd_plan *plan)
{
    plan->joined = (int32_t)vote->join_rank;
    coord->joined = coord->said_busy = false;
    hvd_mine_renumber(coord, coord->unnamed_done);
}

void hvd_coord_decide(struct hvd_coord *coord, const struct hvd_vote *agreed, struct hvd_plan *plan)
{
    uint32_t size = (uint32_t)coord->limits.size;
    struct turn turn = {
        .vote = agreed,
        .fresh = (const struct hvd_fresh *)(agreed->body + hvd_vote_fresh_at(coord, agreed)),
        .round = coord->round++,
        .active = size > agreed->joined ? size - agreed->joined : 0,
    };
    plan->round = turn.round;
    plan->items = plan->buckets = 0;
    plan->active = turn.active;
    plan->joined = -1;
    plan->learned = 0;
    plan->deviated = false;
    plan->date = agreed->date + 1;
    plan->tuned = (int64_t)(agreed->tune - 1); /* 0, none: -1 */
    if (coord->tune == coord->said_tune)       /* else a later proposal, not said yet */
        coord->tune = 0;
    plan->failed_ticket = HVD_TICKET_NONE;
    plan->not_finite = false;
    plan->text[0] = 0;
    if (agreed->leaving && coord->left < 0)
        coord->left = (int32_t)agreed->leave_rank;
    coord->leaving = agreed->leaving;
    plan->left = coord->left;
    plan->leaving = coord->leaving;
    if (coord->left >= 0)
        return;
    coord->done_count = 0;
    bool ungrouped = coord->ungrouped;
    bool failed = agreed->detail_slot != HVD_NONE && tell_detail(coord, &turn, plan);
    uint32_t fresh = forget_conflicts(coord, &turn);
    if (agreed->joined && coord->learn.count)
        hvd_pattern_forget(coord);
    if (turn.active > 0) {
        find_ready(coord, &turn);
        if (coord->learn.count) /* else it was forgotten a moment ago, with one of its slots or because of a join */
            hvd_pattern_plan(coord, agreed->ahead, turn.round);
    } else if (agreed->busy > 0) {
        forget_all(coord);
    } else {
        end_join(coord, agreed, plan);
    }
    if (failed)
        fail_groups(coord, &turn);
    accept(coord, &turn, fresh);
    if (coord->ungrouped && !ungrouped)
        release_all_groups(coord, turn.round);
    emit(coord, &turn, plan);
    learn(coord, agreed, plan);
}
