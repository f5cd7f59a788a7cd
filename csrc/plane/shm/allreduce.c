/* allreduce.c - sums of private memory, staged through the lanes: flat and halves.
 *
 * Which way is cheapest for memory that only its owner can read? Either everybody copies its input to its slot, reads
 * all slots and sums everything (*flat*: one synchronisation). Or a segment is divided (*halves*): everybody stages
 * what others are to sum, sums its own slice, writes the sum back into the slots where it found the parts, and
 * everybody takes the rest from its own slot. That is two synchronisations, and wins once bytes cost more than words.
 *
 * What costs, then, are lines that travel between cores. In flat each byte travels once to be read, and when the slot
 * is written again once more to be written. In halves a line travels to the rank that sums it, with the right to write
 * (hvd_reduce_to), and back to its owner, with that right (hvd_copy_back), who then finds it in his cache when he
 * stages the next segment there: with two ranks that is one trip per byte and rank instead of two. 16 MB with two ranks
 * on two cores: 2.7 ms instead of 4.3.
 *
 * The own part is read from the caller's memory, not from the slot. Sources are always taken in rank order, so
 * the bits do not depend on the way, the segment or the place in a bucket. Joined ranks stage nothing and are
 * left out of the sources, which is the identity of every op; they still reduce their slice for the others.
 */
#include "lane.h"

#define SEGMENT_BYTES (128u << 10) /* half a slot: with four ranks whole ones were no faster, for twice the memory */
#define HALVES_BYTES  (32u << 10)  /* from here on halves beats flat */
#define DIRECT_BYTES  (8u << 10)   /* below, copying is cheaper than the second synchronisation */

/* The sources of a run at element `from` of segment i, in rank order: mine from the caller's memory. */
static int sources_of(struct hvd_shm *shm, const struct hvd_shm_run *run, uint64_t i, uint64_t from,
                      const void **source)
{
    const struct hvd_shm_now *now = &shm->now;
    int sources = 0;
    for (int rank = 0; rank < shm->size; rank++)
        if (now->active >> rank & 1)
            source[sources++] =
                rank == shm->rank ? (const void *)run->in : hvd_shm_staged(shm, rank, i) + from * now->element_bytes;
    return sources;
}

static void enter_flat(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    if (!(now->mark & HVD_SHM_JOINED))
        hvd_shm_copy_in(work, &now->at[0], i * now->segment_count, hvd_shm_length(now, work->count, i),
                        now->element_bytes, hvd_shm_staged(shm, shm->rank, i));
}

static int combine_flat(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    struct hvd_shm_now *now = &shm->now;
    uint64_t length = hvd_shm_length(now, work->count, i);
    for (uint64_t done = 0; done < length;) {
        struct hvd_shm_run run =
            hvd_shm_run(work, &now->at[1], i * now->segment_count + done, length - done, now->element_bytes);
        const void *source[HVD_LOCAL_MAX];
        int sources = sources_of(shm, &run, i, done, source);
        if (run.out)
            hvd_reduce(work->dtype, &now->scale, run.out, source, sources, run.count);
        done += run.count;
    }
    return HVD_OK;
}

static void enter_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    if (now->mark & HVD_SHM_JOINED)
        return;
    uint64_t start = i * now->segment_count, length = hvd_shm_length(now, work->count, i);
    uint64_t mine = hvd_shm_cut(shm, length, shm->rank), after = hvd_shm_cut(shm, length, shm->rank + 1);
    unsigned char *slot = hvd_shm_staged(shm, shm->rank, i);
    hvd_shm_copy_in(work, &now->at[0], start, mine, now->element_bytes, slot);
    hvd_shm_copy_in(work, &now->at[0], start + after, length - after, now->element_bytes,
                    slot + after * now->element_bytes);
}

/* My slice of segment i: to my output, and into the slots of all who want it. */
static int combine_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    struct hvd_shm_now *now = &shm->now;
    uint64_t length = hvd_shm_length(now, work->count, i), end = hvd_shm_cut(shm, length, shm->rank + 1);
    for (uint64_t at = hvd_shm_cut(shm, length, shm->rank); at < end;) {
        struct hvd_shm_run run =
            hvd_shm_run(work, &now->at[1], i * now->segment_count + at, end - at, now->element_bytes);
        const void *source[HVD_LOCAL_MAX];
        void *place[HVD_LOCAL_MAX];
        int places = 0, sources = sources_of(shm, &run, i, at, source);
        if (run.out)
            place[places++] = run.out;
        for (int rank = 0; rank < shm->size; rank++)
            if (rank != shm->rank && now->takers >> rank & 1)
                place[places++] = hvd_shm_staged(shm, rank, i) + at * now->element_bytes;
        if (places > 0)
            hvd_reduce_to(work->dtype, &now->scale, place, places, source, sources, run.count);
        at += run.count;
    }
    return HVD_OK;
}

static void gather_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t start = i * now->segment_count, length = hvd_shm_length(now, work->count, i);
    uint64_t mine = hvd_shm_cut(shm, length, shm->rank), after = hvd_shm_cut(shm, length, shm->rank + 1);
    unsigned char *slot = hvd_shm_staged(shm, shm->rank, i);
    hvd_shm_take_back(work, &now->at[2], start, mine, now->element_bytes, slot);
    hvd_shm_take_back(work, &now->at[2], start + after, length - after, now->element_bytes,
                      slot + after * now->element_bytes);
}

const struct hvd_shm_way hvd_shm_flat = {"flat", 0, enter_flat, combine_flat, NULL};
const struct hvd_shm_way hvd_shm_halves = {"halves", HVD_SHM_RING - 2, enter_halves, combine_halves, gather_halves};

void hvd_shm_plan_allreduce(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t bytes = work->count * now->element_bytes;
    now->tiny = bytes <= HVD_SHM_TINY_BYTES;
    now->segment_count = SEGMENT_BYTES / now->element_bytes;
    if (work->flags & HVD_WORK_IN_PLANE && bytes >= DIRECT_BYTES && shm->arena) {
        now->way = &hvd_shm_direct;
        now->segments = (work->pieces + HVD_SHM_PLACES - 1) / HVD_SHM_PLACES;
        return;
    }
    now->way = bytes < HALVES_BYTES ? &hvd_shm_flat : &hvd_shm_halves;
    now->segments = (work->count + now->segment_count - 1) / now->segment_count;
}
