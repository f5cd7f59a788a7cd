/* flow.c - saying and hearing: the only file of the plane that touches the shared words.
 *
 * How does a rank know that a peer's bytes are there, and that a slot may be overwritten, without a barrier and
 * without ever blocking? Words only grow, each is written by one rank, a release store follows the bytes it
 * speaks of and an acquire load precedes reading them. A wait for all ranks is a scan that stops at the first
 * silent one and goes on from there at the next poll.
 *
 * A word belongs to one segment until all have read it (rule of flow, lane.h), so a value beyond the expected
 * one can only come from a peer that runs another version of events: that is an error with the peer's name, as
 * is a mark that describes another work. Nothing else is believed of what a peer wrote here; offsets are
 * checked where they are used (direct.c).
 *
 * After each word sleepers are rung: a fence and, when all are awake, one glance per rank. Where nobody goes on before
 * the last rank has said its word, only the last one rings: of 8 ranks on 2 CPUs each was woken seven times for every
 * word, six times for nothing. Two ranks that are last at the same time see each other, since each stores its word,
 * then fences, then reads those of the others.
 */
#include "lane.h"

#include <inttypes.h>
#include <string.h>

void hvd_shm_publish(struct hvd_shm *shm, struct hvd_shm_word *word, uint64_t value)
{
    atomic_store_explicit(&word->value, value, memory_order_release);
    shm->unrung = true;
}

static uint64_t read_word(struct hvd_shm_word *word)
{
    return atomic_load_explicit(&word->value, memory_order_acquire);
}

static struct hvd_shm_word *word_of(struct hvd_shm *shm, int rank, bool out, uint64_t g)
{
    struct hvd_shm_lane *lane = shm->lane[rank];
    return out ? &lane->out[g % HVD_SHM_RING] : &lane->in[g % HVD_SHM_RING];
}

void hvd_shm_publish_to_all(struct hvd_shm *shm, bool out, uint64_t g)
{
    atomic_store_explicit(&word_of(shm, shm->rank, out, g)->value, g + 1, memory_order_release);
    shm->awaited[out][g % HVD_SHM_RING] = g + 1;
    shm->any_awaited = true;
}

/* Have all said one of the words that this rank has said since it last rang? */
static bool is_last(struct hvd_shm *shm)
{
    bool last = false;
    for (int out = 0; out < 2; out++)
        for (int slot = 0; slot < HVD_SHM_RING; slot++) {
            uint64_t value = shm->awaited[out][slot];
            bool all = value != 0;
            for (int rank = 0; all && rank < shm->size; rank++)
                all = read_word(word_of(shm, rank, out, (uint64_t)slot)) >= value;
            last |= all;
        }
    return last;
}

void hvd_shm_ring(struct hvd_shm *shm)
{
    if (!shm->unrung && !shm->any_awaited)
        return;
    if (shm->bells && /* none where this rank is alone */
        (shm->unrung || (hvd_bells_any_asleep(shm->bells) && is_last(shm))))
        hvd_bells_ring_all(shm->bells);
    if (shm->any_awaited)
        memset(shm->awaited, 0, sizeof shm->awaited);
    shm->unrung = shm->any_awaited = false;
}

bool hvd_shm_may_enter(struct hvd_shm *shm, uint64_t g)
{
    uint64_t needed = g < HVD_SHM_RING ? 0 : g - HVD_SHM_RING + 1;
    if (shm->floor >= needed)
        return true;
    for (int *rank = &shm->now.from_flow; *rank < shm->size; ++*rank) {
        struct hvd_shm_lane *lane = shm->lane[*rank];
        if (*rank != shm->rank && read_word(&lane->in[(g - 1) % HVD_SHM_RING]) < g &&
            read_word(&lane->finished) < needed)
            return false;
    }
    shm->now.from_flow = 0;
    shm->floor = needed;
    return true;
}

static int check_word(int rank, uint64_t found, uint64_t wanted, struct hvd_error *error)
{
    if (found <= wanted)
        return found == wanted;
    return hvd_fail_rank(error, HVD_EINTERNAL, rank,
                         HVD901 "shared memory of rank %d is at segment %" PRIu64 " where %" PRIu64
                                " was expected: its works run in another order; please report this",
                         rank, found - 1, wanted - 1);
}

int hvd_shm_one_in(struct hvd_shm *shm, int rank, uint64_t g, struct hvd_error *error)
{
    struct hvd_shm_word *word = &shm->lane[rank]->in[g % HVD_SHM_RING];
    int there = check_word(rank, read_word(word), g + 1, error);
    if (there != 1 || word->mark >> HVD_SHM_PART_BITS == shm->now.mark >> HVD_SHM_PART_BITS)
        return there;
    return hvd_fail_rank(error, HVD_EINTERNAL, rank,
                         HVD901 "rank %d works on another collective than rank %d at segment %" PRIu64
                                " of shared memory; please report this",
                         rank, shm->rank, g);
}

int hvd_shm_all_in(struct hvd_shm *shm, uint64_t g, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    for (; now->from_in < shm->size; now->from_in++) {
        int there = now->from_in == shm->rank ? 1 : hvd_shm_one_in(shm, now->from_in, g, error);
        if (there != 1)
            return there;
    }
    now->from_in = 0;
    if (g + 2 > HVD_SHM_RING && shm->floor < g + 2 - HVD_SHM_RING)
        shm->floor = g + 2 - HVD_SHM_RING;
    return 1;
}

int hvd_shm_all_out(struct hvd_shm *shm, uint64_t g, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    for (; now->from_out < shm->size; now->from_out++) {
        int rank = now->from_out;
        uint64_t found = read_word(&shm->lane[rank]->out[g % HVD_SHM_RING]);
        int there = rank == shm->rank ? 1 : check_word(rank, found, g + 1, error);
        if (there != 1)
            return there;
    }
    now->from_out = 0;
    return 1;
}
