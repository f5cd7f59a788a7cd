/* steady_state.c - what was done twice will be done again: agreement becomes a counter.
 *
 * Training submits the same tensors in the same order, step after step. Rank 0 records what it submits: named
 * allreduces in no group, by slot, until the first of them comes again; then it compares. When the sequence has come
 * often enough it proposes it, and decide adopts it. From then on a rank's readiness for the whole list is one number,
 * how far ahead of the next one to be planned it has submitted without a gap, and the smallest of all ranks is what
 * is due.
 *
 * Why rank 0 and not what was planned: decide sees in which rounds tensors became ready, which is a matter of timing,
 * and not the order inside a round. Nothing depends on rank 0 being typical: it only makes a proposal, which
 * becomes agreed by being decided, and a rank to which it does not apply deviates.
 *
 * Where to begin. A tensor has one request in flight per rank, so its n-th use is the same on all ranks. In its
 * proposal rank 0 says which use it waits for next. If the round that carries the proposal plans exactly the
 * next few of the list, all ranks know the place from which counting starts; else the proposal comes again.
 *
 * Forgetting is always safe, as with slots: the requests behind the list are ordinary requests of ordinary slots, whose
 * bits are set again. So whatever is unusual (a join, an evicted slot, another shape, another order) only forgets.
 * After a deviation the next list needs twice as many repetitions, so that a graph that changes all the time is left
 * alone.
 *
 * In-plane flags are as they were when the list was adopted; while a rank has joined nothing is planned from it. A rank
 * whose memory has moved into the plane or out of it since its request before deviates, and the next list has it right.
 */
#include "state.h"

#define FIRST_PATIENCE 2

static uint32_t slot_at(const struct hvd_pattern *learn, uint32_t ahead)
{
    uint32_t at = learn->base + ahead;
    return learn->list[at < learn->count ? at : at - learn->count];
}

void hvd_pattern_restart(struct hvd_coord *coord)
{
    struct hvd_pattern *learn = &coord->learn;
    if (learn->patience == 0)
        learn->patience = FIRST_PATIENCE;
    learn->number++;
    learn->recorded = learn->length = learn->at = learn->times = 0;
    learn->wanted = false;
}

static void append(struct hvd_coord *coord, uint32_t slot)
{
    coord->learn.record[coord->learn.recorded++] = slot;
    coord->known[slot].seen = coord->learn.number;
}

/* Is what was recorded not learned yet? A shorter list (of an evaluation between epochs) has to come for some time
 * before it takes the place of a longer one. */
static bool is_better(const struct hvd_coord *coord)
{
    const struct hvd_pattern *learn = &coord->learn;
    if (learn->length != learn->count)
        return learn->length > learn->count || learn->times >= HVD_PATIENCE_MAX;
    for (uint32_t i = 0; i < learn->length; i++)
        if (coord->known[learn->record[i]].place == HVD_NONE)
            return true;
    return false;
}

void hvd_pattern_record(struct hvd_coord *coord, uint32_t slot)
{
    struct hvd_pattern *learn = &coord->learn;
    const struct hvd_known *known = &coord->known[slot];
    if (coord->limits.rank != 0 || known->key.high == 0 || known->signature.kind != HVD_ALLREDUCE ||
        known->signature.group)
        return;
    if (learn->length == 0 && known->seen != learn->number) {
        append(coord, slot);
        return;
    }
    if (learn->length == 0) { /* it comes again: is that the second time of all? */
        learn->length = learn->recorded;
        learn->times = 1;
    }
    if (learn->record[learn->at] != slot) {
        hvd_pattern_restart(coord);
        append(coord, slot);
    } else if (++learn->at == learn->length) {
        learn->at = 0;
        learn->times += learn->times < 2 * HVD_PATIENCE_MAX;
        learn->wanted = learn->times >= learn->patience && is_better(coord);
    }
}

/* Does my request's memory lie where it lay before, and where the list says? (They differ after a join.) */
static bool plane_fits(const struct hvd_coord *coord, const struct hvd_known *known)
{
    uint32_t plane = coord->mine[known->ticket].flags & HVD_FRESH_IN_PLANE;
    return plane == known->plane && (plane || !(known->flags & HVD_KNOWN_IN_PLANE));
}

void hvd_pattern_submit(struct hvd_coord *coord, uint32_t slot)
{
    struct hvd_pattern *learn = &coord->learn;
    if (!learn->deviates && learn->ahead < learn->count && slot_at(learn, learn->ahead) == slot &&
        plane_fits(coord, &coord->known[slot]))
        learn->ahead++;
    else
        learn->deviates = true;
}

void hvd_pattern_say(const struct hvd_coord *coord, struct hvd_vote *vote)
{
    const struct hvd_pattern *learn = &coord->learn;
    if (learn->count == 0)
        return;
    vote->ahead = learn->ahead;
    vote->deviates = learn->deviates;
}

void hvd_pattern_propose(const struct hvd_coord *coord, struct hvd_vote *vote)
{
    const struct hvd_pattern *learn = &coord->learn;
    uint32_t count = learn->length, outstanding = 0, total = 0;
    if (!learn->wanted || coord->joined)
        return;
    for (uint32_t i = 0; i < count; i++)
        total += coord->known[learn->record[i]].ticket != HVD_TICKET_NONE;
    uint32_t at = learn->at;
    while (outstanding < total) {
        at = at ? at - 1 : count - 1;
        if (coord->known[learn->record[at]].ticket == HVD_TICKET_NONE)
            return; /* they were planned out of order just now */
        outstanding++;
    }
    uint64_t *words = vote->body + hvd_vote_list_at(coord, vote);
    words[hvd_list_words(count) - 1] = 0;
    memcpy(words, learn->record, count * sizeof *learn->record);
    vote->list = count;
    vote->list_at = at;
}

bool hvd_pattern_check(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    uint32_t learned = coord->left >= 0 ? 0 : coord->learn.count;
    if (vote->ahead > learned || vote->deviates > (learned > 0))
        return false;
    if (vote->list == 0)
        return vote->list_at == 0;
    if (vote->list_at >= vote->list)
        return false;
    const uint64_t *words = vote->body + hvd_vote_list_at(coord, vote);
    const uint32_t *list = (const uint32_t *)words;
    for (uint32_t i = 0; i < vote->list; i++)
        if (list[i] >= coord->high)
            return false;
    return vote->list % 2 == 0 || words[hvd_list_words(vote->list) - 1] >> 32 == 0;
}

void hvd_pattern_plan(struct hvd_coord *coord, uint32_t ahead, uint64_t round)
{
    struct hvd_pattern *learn = &coord->learn;
    for (uint32_t i = 0; i < ahead; i++)
        hvd_plan_slot(coord, slot_at(learn, i), round);
    uint32_t base = learn->base + ahead;
    learn->base = base < learn->count ? base : base - learn->count;
    learn->ahead -= learn->ahead < ahead ? learn->ahead : ahead;
}

/* Requests of mine that the list finds: counted while they come without a gap, else this rank deviates. */
static void count_mine(struct hvd_coord *coord)
{
    struct hvd_pattern *learn = &coord->learn;
    bool gap = false;
    learn->ahead = 0;
    learn->deviates = false;
    for (uint32_t i = 0; i < learn->count; i++) {
        uint32_t slot = slot_at(learn, i);
        const struct hvd_known *known = &coord->known[slot];
        hvd_bit_set(coord->ready, slot, false);
        hvd_bit_set(coord->plane, slot, false);
        if (known->ticket == HVD_TICKET_NONE) {
            gap = true;
        } else if (gap || !plane_fits(coord, known)) {
            learn->deviates = coord->news = gap = true;
        } else {
            learn->ahead++;
        }
    }
}

static bool may_be_learned(const struct hvd_coord *coord, uint32_t slot, uint64_t round)
{
    const struct hvd_known *known = &coord->known[slot];
    return hvd_bit(coord->listen, slot) && known->born < round && known->place == HVD_NONE && known->key.high &&
           known->signature.kind == HVD_ALLREDUCE && known->signature.group == 0 &&
           !(known->flags & HVD_KNOWN_MISMATCH);
}

bool hvd_pattern_adopt(struct hvd_coord *coord, const struct hvd_vote *agreed)
{
    struct hvd_pattern *learn = &coord->learn;
    const uint32_t *list = (const uint32_t *)(agreed->body + hvd_vote_list_at(coord, agreed));
    uint32_t count = agreed->list, places = 0, planned = 0;
    for (; places < count && may_be_learned(coord, list[places], agreed->round); places++)
        coord->known[list[places]].place = places;
    for (uint32_t i = 0; i < coord->done_count; i++) {
        uint32_t id = coord->done[i].id;
        planned += !(id & HVD_DONE_DIRECT) && coord->known[id].place != HVD_NONE;
    }
    bool fits = places == count;
    for (uint32_t i = 0; fits && i < planned; i++)
        fits = coord->known[list[(agreed->list_at + i) % count]].used == agreed->round;
    if (!fits) {
        while (places > 0)
            coord->known[list[--places]].place = HVD_NONE;
        return false;
    }
    memcpy(learn->list, list, count * sizeof *list);
    learn->count = count;
    learn->wanted = false;
    learn->base = (agreed->list_at + planned) % count;
    for (uint32_t i = 0; i < count; i++)
        hvd_bit_set(coord->listen, list[i], false);
    count_mine(coord);
    return true;
}

void hvd_pattern_forget(struct hvd_coord *coord)
{
    struct hvd_pattern *learn = &coord->learn;
    for (uint32_t i = 0; i < learn->count; i++) {
        uint32_t slot = learn->list[i];
        struct hvd_known *known = &coord->known[slot];
        known->place = HVD_NONE;
        hvd_bit_set(coord->listen, slot, true);
        if (known->ticket != HVD_TICKET_NONE) {
            hvd_slot_attach(coord, slot, known->ticket);
            coord->news = true;
        }
    }
    learn->count = learn->ahead = 0;
    learn->deviates = false;
    learn->wanted = learn->length > 0 && learn->times >= learn->patience;
}
