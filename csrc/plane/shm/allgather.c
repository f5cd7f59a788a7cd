/* allgather.c - allgather and barrier, as ways of the pipeline.
 *
 * How do ranks with different amounts to give stay in step? Each rank's input is one stream, its pieces one
 * after the other; segment i holds the i-th slice of every stream, and there are as many segments as the longest
 * stream needs, which all compute from count_of. Whoever has nothing left enters an empty slice. Everyone
 * copies every other stream straight to its places in the output: piece p receives all ranks' elements of
 * piece p in rank order, so a run ends where a piece of that rank ends. The own elements never leave the
 * process: input to output, unless they are there already.
 *
 * A barrier is one empty segment. Cost: one synchronisation per segment; each byte is written once and read
 * once by every rank.
 */
#include "lane.h"

#include <string.h>

/* Elements that rank gives in all. */
static uint64_t stream_count(const struct hvd_work *work, int size, int rank)
{
    uint64_t total = 0;
    for (uint32_t piece = 0; piece < work->pieces; piece++)
        total += work->count_of[(size_t)piece * (size_t)size + (size_t)rank];
    return total;
}

/* The run of rank's stream at `from`, at most `count` long: its place in the output. */
static struct hvd_shm_run stream_run(struct hvd_shm *shm, const struct hvd_work *work, int rank, uint64_t from,
                                     uint64_t count)
{
    struct hvd_shm_cursor *at = &shm->walk[rank];
    const uint64_t *of = work->count_of + (size_t)at->piece * (size_t)shm->size;
    while (from >= at->begin + of[rank]) {
        at->begin += of[rank];
        at->piece++;
        of += shm->size;
        HVD_ASSERT(at->piece < work->pieces);
    }
    uint64_t skip = from - at->begin;
    struct hvd_shm_run run = {.count = of[rank] - skip < count ? of[rank] - skip : count};
    for (int before = 0; before < rank; before++)
        skip += of[before];
    if (work->piece[at->piece].out)
        run.out = (char *)work->piece[at->piece].out + skip * shm->now.element_bytes;
    return run;
}

/* Elements of rank's stream in segment i. */
static uint64_t stream_length(struct hvd_shm *shm, uint64_t total, uint64_t i)
{
    return i * shm->now.segment_count < total ? hvd_shm_length(&shm->now, total, i) : 0;
}

static void enter_allgather(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t from = i * now->segment_count, length = stream_length(shm, work->count, i);
    hvd_shm_copy_in(work, &now->at[0], from, length, now->element_bytes, hvd_shm_staged(shm, shm->rank, i));
}

static int combine_allgather(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)error;
    struct hvd_shm_now *now = &shm->now;
    for (int step = 0; step < shm->size; step++) {
        int rank = (shm->rank + step) % shm->size;
        uint64_t from = i * now->segment_count;
        uint64_t length = stream_length(shm, stream_count(work, shm->size, rank), i);
        for (uint64_t done = 0; done < length;) {
            struct hvd_shm_run run = stream_run(shm, work, rank, from + done, length - done);
            const void *source = hvd_shm_staged(shm, rank, i) + done * now->element_bytes;
            if (rank == shm->rank) {
                struct hvd_shm_run own = hvd_shm_run(work, &now->at[1], from + done, run.count, now->element_bytes);
                HVD_ASSERT(own.count == run.count);
                source = own.in;
            }
            if (run.out && source != run.out)
                hvd_copy(run.out, source, run.count * now->element_bytes);
            done += run.count;
        }
    }
    return HVD_OK;
}

static void enter_barrier(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    (void)shm;
    (void)work;
    (void)i;
}

static int combine_barrier(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    (void)shm;
    (void)work;
    (void)i;
    (void)error;
    return HVD_OK;
}

const struct hvd_shm_way hvd_shm_allgather = {"allgather", 1, enter_allgather, combine_allgather, NULL};
const struct hvd_shm_way hvd_shm_barrier = {"barrier", 0, enter_barrier, combine_barrier, NULL};

void hvd_shm_plan_allgather(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t longest = 0;
    for (int rank = 0; rank < shm->size; rank++) {
        uint64_t total = stream_count(work, shm->size, rank);
        longest = total > longest ? total : longest;
    }
    memset(shm->walk, 0, sizeof shm->walk);
    now->way = &hvd_shm_allgather;
    now->tiny = longest * now->element_bytes <= HVD_SHM_TINY_BYTES;
    now->segment_count = HVD_SHM_SLOT_BYTES / now->element_bytes;
    now->segments = (longest + now->segment_count - 1) / now->segment_count;
}
