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
 * Invariants: the parts of one segment fit a slot (plan); slices but the last are whole cache lines when there are
 * several segments. Input and output never overlap. Cost: one synchronisation per segment; each byte is written
 * once and read once.
 */
#include "lane.h"

static uint64_t count_between(const struct hvd_work *work, int size, int from, int to)
{
    return work->count_of[work->kind == HVD_ALLTOALL ? from * size + to : to];
}

/* The most elements that one rank has to put into its slot, or to take from itself. */
static uint64_t largest_load(const struct hvd_work *work, int size)
{
    uint64_t largest = 0;
    for (int from = 0; from < size; from++) {
        uint64_t own = count_between(work, size, from, from), others = 0;
        for (int to = 0; to < size; to++)
            others += count_between(work, size, from, to);
        others -= own;
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

void hvd_shm_plan_exchange(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    const uint64_t slot = HVD_SHM_SLOT_BYTES / now->element_bytes, line = HVD_CACHE_LINE / now->element_bytes;
    uint64_t load = largest_load(work, shm->size), room = slot - (uint64_t)shm->size * line; /* for whole lines */
    now->way = work->kind == HVD_ALLTOALL ? &hvd_shm_alltoall : &hvd_shm_reducescatter;
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

static void enter_exchange(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    for (int step = 1; step < shm->size; step++) {
        int to = (shm->rank + step) % shm->size;
        const struct hvd_shm_pair *pair = &shm->gives[to];
        uint64_t count = slice_count(pair, i);
        if (count > 0)
            hvd_copy(in_slot(shm, shm->rank, pair, i), in_input(shm, work, to, i), count * shm->now.element_bytes);
    }
}

static int combine_alltoall(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    for (int step = 0; step < shm->size; step++) { /* not all from rank 0 first */
        int from = (shm->rank + step) % shm->size;
        const struct hvd_shm_pair *pair = &shm->takes[from];
        uint64_t count = slice_count(pair, i);
        const void *source = step == 0 ? (const void *)in_input(shm, work, from, i) : in_slot(shm, from, pair, i);
        if (count > 0)
            hvd_copy(in_output(shm, work, from, i), source, count * shm->now.element_bytes);
    }
    return HVD_OK;
}

static int combine_reducescatter(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    const void *source[HVD_LOCAL_MAX];
    uint64_t count = slice_count(&shm->takes[shm->rank], i);
    if (count == 0)
        return HVD_OK;
    for (int rank = 0; rank < shm->size; rank++)
        source[rank] =
            rank == shm->rank ? (const void *)in_input(shm, work, rank, i) : in_slot(shm, rank, &shm->takes[rank], i);
    hvd_reduce(work->dtype, &shm->now.scale, in_output(shm, work, shm->rank, i), source, shm->size, count);
    return HVD_OK;
}

const struct hvd_shm_way hvd_shm_alltoall = {"alltoall", 1, enter_exchange, combine_alltoall, NULL};
const struct hvd_shm_way hvd_shm_reducescatter = {"reducescatter", 1, enter_exchange, combine_reducescatter, NULL};
