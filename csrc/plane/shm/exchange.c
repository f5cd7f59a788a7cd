/* exchange.c - alltoall and reducescatter: every pair of ranks has bytes of its own.
 *
 * How do n ranks give each other n * n different amounts through one slot per rank? A *pair* is what one rank gives
 * another; its elements are cut into as many slices as the work has segments, and segment i of a rank's slot holds
 * slice i of all that it gives, one part after the other. A part is as large as its pair needs, so a slot is full
 * whatever the amounts are: with one pair alone its part is the slot. Every rank finds the same layout from
 * count_of, and reads its part from every other rank's slot. Cutting all pairs into equally many slices, and not one
 * pair after the other, keeps the readers evenly busy in every segment.
 *
 * Taking is all that differs. Alltoall copies a part to its place in the output. Reducescatter reduces the parts
 * that lie in n slots, in rank order and with the work's scale, so the bits are those of an allreduce. What a
 * rank gives itself never leaves the process: it is read from the input.
 *
 * Point-to-point is an alltoall of one pair, so a *bystander* must cost little: a rank says `in` only for segments in
 * which it gives, waits only for those that give it something, and one that does neither says `finished` for the whole
 * work and is through at once. Who does not give to the end says `finished` as it takes, half a ring at a time, as in
 * a broadcast; who does, says it with `in`. Bystanders' bells are rung for the last words only, which the flow of the
 * next work needs.
 *
 * Invariants: the parts of one segment fit a slot (plan); taken + 1 >= given, or nothing is left to take: the rule of
 * flow. Input and output never overlap. Cost: one word per segment and giver; each byte is written once, read once.
 */
#include "lane.h"

#define STEPS_PER_POLL 6
#define AHEAD          1 /* segments given before the oldest is taken; at most RING - 2 */

static uint64_t count_between(const struct hvd_work *work, int size, int from, int to)
{
    return work->count_of[work->kind == HVD_ALLTOALL ? from * size + to : to];
}

/* The most elements that one rank has to put into its slot, or to take from itself; `active`: who is no bystander. */
static uint64_t largest_load(const struct hvd_work *work, int size, uint64_t *active)
{
    uint64_t largest = 0;
    *active = 0;
    for (int from = 0; from < size; from++) {
        uint64_t own = 0, others = 0;
        for (int to = 0; to < size; to++) {
            uint64_t count = count_between(work, size, from, to);
            *(from == to ? &own : &others) += count;
            if (count > 0)
                *active |= UINT64_C(1) << from | UINT64_C(1) << to;
        }
        largest = own > largest ? own : largest;
        largest = others > largest ? others : largest;
    }
    return largest;
}

static struct hvd_shm_pair pair_between(const struct hvd_shm *shm, const struct hvd_work *work, int from, int to)
{
    struct hvd_shm_pair pair = {.count = count_between(work, shm->size, from, to)};
    pair.slice = pair.count;
    if (shm->now.segments > 1)
        pair.slice = HVD_ALIGN_UP((pair.count + shm->now.segments - 1) / shm->now.segments,
                                  HVD_CACHE_LINE / shm->now.element_bytes);
    return pair;
}

/* What lies before `to`'s part in the slot of `from`. */
static uint64_t place_of(const struct hvd_shm *shm, const struct hvd_work *work, int from, int to)
{
    uint64_t place = 0;
    for (int before = 0; before < to; before++)
        if (before != from)
            place += pair_between(shm, work, from, before).slice;
    return place;
}

/* Segments that a pair has something in. */
static uint64_t segments_of(const struct hvd_shm_pair *pair)
{
    return pair->count ? (pair->count + pair->slice - 1) / pair->slice : 0;
}

void hvd_shm_plan_exchange(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    const uint64_t slot = HVD_SHM_SLOT_BYTES / now->element_bytes, line = HVD_CACHE_LINE / now->element_bytes;
    uint64_t load = largest_load(work, shm->size, &now->active),
             room = slot - (uint64_t)shm->size * line; /* for whole lines */
    if (work->kind == HVD_REDUCESCATTER)
        now->scale = hvd_scale_fold(work->op, work->dtype, shm->size, work->divide_by, work->prescale, work->postscale);
    now->tiny = load * now->element_bytes <= HVD_SHM_TINY_BYTES;
    now->segments = load <= slot ? load > 0 : (load + room - 1) / room;
    uint64_t place = 0, given = 0, taken = 0;
    for (int rank = 0; rank < shm->size && now->segments > 0; rank++) {
        struct hvd_shm_pair *give = &shm->gives[rank], *take = &shm->takes[rank];
        *give = pair_between(shm, work, shm->rank, rank);
        give->place = place;
        give->at = given;
        place += rank == shm->rank ? 0 : give->slice;
        given += give->count;
        *take = pair_between(shm, work, rank, shm->rank);
        take->place = place_of(shm, work, rank, shm->rank);
        if (work->kind == HVD_ALLTOALL)
            take->at = taken;
        taken += take->count;
        uint64_t gives = rank == shm->rank ? 0 : segments_of(give), takes = segments_of(take);
        now->gives = gives > now->gives ? gives : now->gives;
        now->takes = takes > now->takes ? takes : now->takes;
    }
    HVD_ASSERT(place <= slot);
}

/* Elements of segment i in a pair's part. */
static uint64_t slice_count(const struct hvd_shm_pair *pair, uint64_t i)
{
    uint64_t from = i * pair->slice;
    if (from >= pair->count)
        return 0;
    return pair->count - from < pair->slice ? pair->count - from : pair->slice;
}

/* The first element of slice i: where it lies in the giver's slot, in my input, in my output. */
static unsigned char *in_slot(struct hvd_shm *shm, int rank, const struct hvd_shm_pair *pair, uint64_t i)
{
    return hvd_shm_staged(shm, rank, i) + pair->place * shm->now.element_bytes;
}
static const char *in_input(const struct hvd_shm *shm, const struct hvd_work *work, int to, uint64_t i)
{
    const struct hvd_shm_pair *pair = &shm->gives[to];
    return (const char *)work->piece[0].in + (pair->at + i * pair->slice) * shm->now.element_bytes;
}
static char *in_output(const struct hvd_shm *shm, const struct hvd_work *work, int from, uint64_t i)
{
    const struct hvd_shm_pair *pair = &shm->takes[from];
    return (char *)work->piece[0].out + (pair->at + i * pair->slice) * shm->now.element_bytes;
}

/* Tell whom it concerns; near the end all, as they may be in the next work already. */
static void publish(struct hvd_shm *shm, struct hvd_shm_word *word, uint64_t value)
{
    const struct hvd_shm_now *now = &shm->now;
    if (value + HVD_SHM_RING >= now->base + now->segments) {
        hvd_shm_publish(shm, word, value);
        return;
    }
    atomic_store_explicit(&word->value, value, memory_order_release);
    for (int rank = 0; rank < shm->size; rank++)
        if (rank != shm->rank && now->active >> rank & 1)
            hvd_bells_ring(shm->bells, rank);
}

static bool give(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t i = now->entered, g = now->base + i;
    if (i == now->gives || i > now->combined + AHEAD || !hvd_shm_may_enter(shm, g))
        return false;
    for (int step = 1; step < shm->size; step++) {
        int to = (shm->rank + step) % shm->size;
        const struct hvd_shm_pair *pair = &shm->gives[to];
        uint64_t count = slice_count(pair, i);
        if (count > 0)
            hvd_copy(in_slot(shm, shm->rank, pair, i), in_input(shm, work, to, i), count * now->element_bytes);
    }
    struct hvd_shm_word *word = &shm->lane[shm->rank]->in[g % HVD_SHM_RING];
    word->mark = now->mark;
    now->entered++;
    publish(shm, word, g + 1);
    return true;
}

static void take_part(struct hvd_shm *shm, const struct hvd_work *work, int from, uint64_t i)
{
    const struct hvd_shm_pair *pair = &shm->takes[from];
    const void *source = from == shm->rank ? (const void *)in_input(shm, work, from, i) : in_slot(shm, from, pair, i);
    uint64_t count = slice_count(pair, i);
    if (count > 0)
        hvd_copy(in_output(shm, work, from, i), source, count * shm->now.element_bytes);
}

static void take_sums(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    const void *source[HVD_LOCAL_MAX];
    for (int rank = 0; rank < shm->size; rank++)
        source[rank] =
            rank == shm->rank ? (const void *)in_input(shm, work, rank, i) : in_slot(shm, rank, &shm->takes[rank], i);
    hvd_reduce(work->dtype, &shm->now.scale, in_output(shm, work, shm->rank, i), source, shm->size,
               slice_count(&shm->takes[shm->rank], i));
}

/* 1: moved, 0: nothing to do yet, negative: error. */
static int take(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t i = now->combined;
    if (i == now->segments)
        return 0;
    /* Givers know of us by our last word, and must not wait for news that comes only after a segment of theirs. */
    if (i == 0 && now->segments > 1 && now->gives < now->segments && now->takes > 0 && !now->announced) {
        now->announced = true;
        publish(shm, &shm->lane[shm->rank]->finished, now->base);
    }
    for (; i < now->takes && now->from_in < shm->size; now->from_in++) {
        int from = (shm->rank + now->from_in) % shm->size; /* my own is there; not all take from rank 0 first */
        bool gives = from != shm->rank && slice_count(&shm->takes[from], i) > 0;
        int there = gives ? hvd_shm_one_in(shm, from, now->base + i, error) : 1;
        if (there != 1)
            return there;
        if (work->kind == HVD_ALLTOALL)
            take_part(shm, work, from, i);
    }
    now->from_in = 0;
    if (i < now->takes && work->kind == HVD_REDUCESCATTER)
        take_sums(shm, work, i);
    now->combined = i + 1 < now->takes ? i + 1 : now->segments;
    if (now->gives < now->segments && (now->combined == now->segments || now->combined % (HVD_SHM_RING / 2) == 0))
        publish(shm, &shm->lane[shm->rank]->finished, now->base + now->combined);
    return 1;
}

int hvd_shm_exchange(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    for (int step = 0; step < STEPS_PER_POLL; step++) {
        bool given = give(shm, work);
        int taken = take(shm, work, error);
        if (taken < 0)
            return taken;
        if (given || taken)
            *progress = true;
        if (now->entered == now->gives && now->combined == now->segments)
            return HVD_OK;
        if (!given && !taken)
            return HVD_AGAIN;
    }
    return HVD_AGAIN;
}
