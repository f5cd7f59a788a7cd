/* allreduce.c - sums of private memory, staged through the lanes: flat and halves.
 *
 * Which way is cheapest for memory that only its owner can read? Everyone copies its input to its slot anyway.
 * Then either everybody reads everything and sums everything (*flat*: one synchronisation, n reads per element
 * and rank), or everybody sums its own slice and fetches the others' (*halves*: reduce-scatter and allgather, two
 * synchronisations, about 3 reads whatever n is). With two ranks flat reads one peer's bytes, which is the least
 * possible, and wins at every size; with more it wins only while latency counts.
 *
 * A sum goes to the private output in blocks that fit the first cache, and each block is then copied, hot, to
 * the slot: one loop that stores to both was measured slower, up to 1.8 times, when the cores are far apart
 * (stores that take lines away from another core, between loads that miss to it).
 *
 * The own part is read from the caller's memory, not from the slot. Sources are always taken in rank order, so
 * the bits do not depend on the way, the segment or the place in a bucket. Joined ranks stage nothing and are
 * left out of the sources, which is the identity of every op; they still reduce their slice for the others.
 */
#include "lane.h"

#define SEGMENT_BYTES HVD_SHM_SLOT_BYTES
#define HOT_BYTES     (8u << 10)
#define HALVES_BYTES  (32u << 10) /* from here on halves beats flat with three ranks and more */
#define DIRECT_BYTES  (8u << 10)  /* below, copying is cheaper than the second synchronisation */

/* Reduce elements [from, from + count) of segment i, at most a run of one piece. The result goes to the output,
 * or where nobody wants it and `staged` is not NULL, there. Returns the elements done. */
static uint64_t reduce_run(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t i,
                           uint64_t from, uint64_t count, unsigned char *staged)
{
    const struct hvd_shm_now *now = &shm->now;
    struct hvd_shm_run run = hvd_shm_run(work, at, i * now->segment_count + from, count, now->element_bytes);
    const void *source[HVD_LOCAL_MAX];
    int sources = 0;
    for (int rank = 0; rank < shm->size; rank++)
        if (now->active >> rank & 1)
            source[sources++] =
                rank == shm->rank ? (const void *)run.in : hvd_shm_staged(shm, rank, i) + from * now->element_bytes;
    void *to = run.out ? (void *)run.out : (void *)staged;
    if (to)
        hvd_reduce(work->dtype, &now->scale, to, source, sources, run.count);
    if (staged && to != staged)
        hvd_copy(staged, to, run.count * now->element_bytes);
    return run.count;
}

static void enter_flat(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    if (!now->joined)
        hvd_shm_copy_in(work, &now->at[0], i * now->segment_count, hvd_shm_length(now, work->count, i),
                        now->element_bytes, hvd_shm_staged(shm, shm->rank, i));
}

static int combine_flat(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    struct hvd_shm_now *now = &shm->now;
    uint64_t length = hvd_shm_length(now, work->count, i);
    for (uint64_t done = 0; done < length;)
        done += reduce_run(shm, work, &now->at[1], i, done, length - done, NULL);
    return HVD_OK;
}

static void enter_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    if (now->joined)
        return;
    uint64_t start = i * now->segment_count, length = hvd_shm_length(now, work->count, i);
    uint64_t mine = hvd_shm_cut(shm, length, shm->rank), after = hvd_shm_cut(shm, length, shm->rank + 1);
    unsigned char *slot = hvd_shm_staged(shm, shm->rank, i);
    hvd_shm_copy_in(work, &now->at[0], start, mine, now->element_bytes, slot);
    hvd_shm_copy_in(work, &now->at[0], start + after, length - after, now->element_bytes,
                    slot + after * now->element_bytes);
}

static int combine_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    struct hvd_shm_now *now = &shm->now;
    uint64_t length = hvd_shm_length(now, work->count, i), hot = HOT_BYTES / now->element_bytes;
    uint64_t end = hvd_shm_cut(shm, length, shm->rank + 1);
    unsigned char *slot = hvd_shm_staged(shm, shm->rank, i);
    for (uint64_t at = hvd_shm_cut(shm, length, shm->rank); at < end;)
        at +=
            reduce_run(shm, work, &now->at[1], i, at, end - at < hot ? end - at : hot, slot + at * now->element_bytes);
    return HVD_OK;
}

static void gather_halves(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t length = hvd_shm_length(now, work->count, i);
    for (int step = 1; step < shm->size; step++) {
        int rank = (shm->rank + step) % shm->size;
        uint64_t from = hvd_shm_cut(shm, length, rank), end = hvd_shm_cut(shm, length, rank + 1);
        hvd_shm_copy_out(work, &now->at[2], i * now->segment_count + from, end - from, now->element_bytes,
                         hvd_shm_staged(shm, rank, i) + from * now->element_bytes);
    }
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
    now->way = shm->size == 2 || bytes < HALVES_BYTES ? &hvd_shm_flat : &hvd_shm_halves;
    if (now->way == &hvd_shm_halves && bytes < 2 * SEGMENT_BYTES) /* two at least, so that stages overlap */
        now->segment_count = HVD_ALIGN_UP((work->count + 1) / 2, HVD_CACHE_LINE / now->element_bytes);
    now->segments = (work->count + now->segment_count - 1) / now->segment_count;
}
