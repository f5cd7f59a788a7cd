/* broadcast.c - one rank gives, all others take: a pipeline with one source.
 *
 * How far may the root run ahead of slow readers? As far as the ring reaches: it copies segment after segment
 * into its slots and waits only before it overwrites one that somebody has not read. Readers never answer a
 * single segment with `in`, as the other collectives do, since nobody needs to hear from all of them; they
 * publish how far they have read (`finished`), once before a long broadcast and then half a ring at a time, which is
 * what frees the root's slots.
 * The root itself reads nothing, so it says so before it begins, and may return when the last segment is
 * staged: a small broadcast costs the root no waiting at all.
 *
 * Cost: each byte is written once and read once by every reader; one word per segment from the root and one per
 * two segments from each reader.
 */
#include "lane.h"

#include <string.h>

#define STEPS_PER_POLL 8

static bool give(struct hvd_shm *shm, const struct hvd_work *work)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t i = now->entered, g = now->base + i;
    if (!hvd_shm_may_enter(shm, g))
        return false;
    struct hvd_shm_lane *lane = shm->lane[shm->rank];
    if (i == 0) /* heard with the word that follows */
        atomic_store_explicit(&lane->finished.value, now->base + now->segments, memory_order_release);
    uint64_t from = i * now->segment_count, length = hvd_shm_length(now, work->count, i);
    hvd_shm_copy_in(work, &now->at[0], from, length, now->element_bytes, hvd_shm_staged(shm, shm->rank, i));
    lane->in[g % HVD_SHM_RING].mark = now->mark;
    now->entered++;
    hvd_shm_publish(shm, &lane->in[g % HVD_SHM_RING], g + 1);
    /* The own output, if it is another buffer, while the input is warm. */
    for (uint64_t done = 0; done < length;) {
        struct hvd_shm_run run = hvd_shm_run(work, &now->at[1], from + done, length - done, now->element_bytes);
        if (run.out && run.out != run.in)
            hvd_copy(run.out, run.in, run.count * now->element_bytes);
        done += run.count;
    }
    return true;
}

static int take(struct hvd_shm *shm, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    uint64_t i = now->entered, g = now->base + i;
    /* The root knows of us by our last word, which may be older than what we have read since; it must not
     * wait for news that comes only after two segments of its own. */
    if (i == 0 && now->segments > 1 && !now->announced) {
        now->announced = true;
        hvd_shm_publish(shm, &shm->lane[shm->rank]->finished, g);
    }
    int there = hvd_shm_one_in(shm, work->root, g, error);
    if (there != 1)
        return there;
    hvd_shm_copy_out(work, &now->at[0], i * now->segment_count, hvd_shm_length(now, work->count, i), now->element_bytes,
                     hvd_shm_staged(shm, work->root, i));
    now->entered++;
    if (now->entered == now->segments || now->entered % (HVD_SHM_RING / 2) == 0)
        hvd_shm_publish(shm, &shm->lane[shm->rank]->finished, g + 1);
    return 1;
}

int hvd_shm_broadcast(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    for (int step = 0; step < STEPS_PER_POLL && now->entered < now->segments; step++) {
        int moved = shm->rank == work->root ? give(shm, work) : take(shm, work, error);
        if (moved < 0)
            return moved;
        if (moved == 0)
            return HVD_AGAIN;
        *progress = true;
    }
    return now->entered < now->segments ? HVD_AGAIN : HVD_OK;
}
