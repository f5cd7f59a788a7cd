/* direct.c - allreduce of memory that all ranks can reach: nothing is staged.
 *
 * What is gained when the tensors lie in plane memory (alloc)? Each rank reduces its slice of the bucket straight
 * from everyone's inputs and writes the result into everyone's outputs: each element is read n times and
 * written n times over all ranks, with no copy in or out. Two synchronisations frame it: nobody reads before all
 * have said where their pieces lie, nobody returns before all have written.
 *
 * A segment here is a group of up to HVD_SHM_PLACES pieces, not a range of bytes: entering it publishes for each
 * piece where this rank's input and output lie in its arena (blocks lie at different offsets on each rank), in
 * the word's own line if there are few. The reduction goes through the slice in steps, so that a poll stays
 * short; one loop stores to all outputs (hvd_reduce_to).
 *
 * A peer's offset is believed only after it was found inside the peer's arena, from one copy of it: the peer
 * could change it while we look. A joined rank says NOWHERE and is left out.
 */
#include "lane.h"

#include <inttypes.h>
#include <string.h>

#define STEP_BYTES (256u << 10)
#define NOWHERE    UINT64_MAX

struct place {
    uint64_t in, out; /* offsets in the rank's arena */
};
_Static_assert(sizeof(struct place) * HVD_SHM_PLACES <= HVD_SHM_SLOT_BYTES, "a group's places fit a slot");

/* The pieces of group i. */
static uint32_t group_of(const struct hvd_work *work, uint64_t i, uint32_t *first)
{
    *first = (uint32_t)i * HVD_SHM_PLACES;
    return work->pieces - *first < HVD_SHM_PLACES ? work->pieces - *first : HVD_SHM_PLACES;
}

static unsigned char *table_of(struct hvd_shm *shm, const struct hvd_work *work, int rank, uint64_t i)
{
    uint64_t slot = (shm->now.base + i) % HVD_SHM_RING;
    bool few = work->pieces * sizeof(struct place) <= HVD_SHM_TINY_BYTES;
    return few ? shm->lane[rank]->in[slot].tiny : shm->lane[rank]->slot[slot];
}

static void enter_direct(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    uint32_t first, pieces = group_of(work, i, &first);
    unsigned char *table = table_of(shm, work, shm->rank, i);
    hvd_shm_arena_working(shm->arena);
    for (uint32_t k = 0; k < pieces; k++) {
        const struct hvd_piece *piece = &work->piece[first + k];
        struct place place = {NOWHERE, NOWHERE};
        size_t bytes = piece->count * shm->now.element_bytes;
        HVD_ASSERT(!bytes || !piece->in || hvd_shm_arena_owns(shm->arena, piece->in, bytes));
        HVD_ASSERT(!bytes || !piece->out || hvd_shm_arena_owns(shm->arena, piece->out, bytes));
        if (piece->in)
            place.in = hvd_shm_arena_offset(shm->arena, piece->in);
        if (piece->out)
            place.out = hvd_shm_arena_offset(shm->arena, piece->out);
        memcpy(table + k * sizeof place, &place, sizeof place);
    }
}

/* The address of a peer's offset, or NULL with the error filled. */
static char *reach(struct hvd_shm *shm, int rank, uint64_t offset, uint64_t skip, uint64_t count,
                   struct hvd_error *error)
{
    size_t bytes = hvd_shm_arena_bytes(shm->arena), element_bytes = shm->now.element_bytes;
    uint64_t end = (skip + count) * element_bytes;
    if (offset % element_bytes == 0 && offset <= bytes && end <= bytes - offset)
        return hvd_shm_arena_map(shm->arena, rank) + offset + skip * element_bytes;
    hvd_fail_rank(error, HVD_EINTERNAL, rank,
                  HVD901 "rank %d names plane memory at offset %" PRIu64
                         ", which is not inside its %zu bytes; please report "
                         "this",
                  rank, offset, bytes);
    return NULL;
}

/* Reduce `count` elements at `skip` of piece number k of group i into every output. */
static int reduce_run(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, uint32_t k, uint64_t skip,
                      uint64_t count, struct hvd_error *error)
{
    const struct hvd_shm_now *now = &shm->now;
    const void *source[HVD_LOCAL_MAX];
    void *output[HVD_LOCAL_MAX];
    int sources = 0, outputs = 0;
    for (int step = 0; step < shm->size; step++) {
        struct place place;
        memcpy(&place, table_of(shm, work, step, i) + k * sizeof place, sizeof place);
        if (now->active >> step & 1 && !(source[sources++] = reach(shm, step, place.in, skip, count, error)))
            return HVD_EINTERNAL;
        if (place.out != NOWHERE && !(output[outputs++] = reach(shm, step, place.out, skip, count, error)))
            return HVD_EINTERNAL;
    }
    if (outputs > 0)
        hvd_reduce_to(work->dtype, &now->scale, output, outputs, source, sources, count);
    return HVD_OK;
}

/* A slice of the group, `part` elements of which are done. */
static int combine_direct(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    uint32_t first, pieces = group_of(work, i, &first);
    if (now->part == 0) {
        now->group_begin += now->group_count;
        now->group_count = 0;
        for (uint32_t k = 0; k < pieces; k++)
            now->group_count += work->piece[first + k].count;
    }
    uint64_t at = hvd_shm_cut(shm, now->group_count, shm->rank) + now->part;
    uint64_t end = hvd_shm_cut(shm, now->group_count, shm->rank + 1);
    uint64_t step = STEP_BYTES / now->element_bytes;
    uint64_t stop = end - at < step ? end : at + step;
    while (at < stop) {
        uint64_t position = now->group_begin + at;
        struct hvd_shm_cursor *cursor = &now->at[0];
        struct hvd_shm_run run = hvd_shm_run(work, cursor, position, stop - at, now->element_bytes);
        int code = reduce_run(shm, work, i, cursor->piece - first, position - cursor->begin, run.count, error);
        if (code)
            return code;
        at += run.count;
        now->part += run.count;
    }
    return at < end ? HVD_AGAIN : HVD_OK;
}

/* That everyone has combined is all there is to wait for. */
static void gather_direct(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i)
{
    (void)shm;
    (void)work;
    (void)i;
}

const struct hvd_shm_way hvd_shm_direct = {"direct", HVD_SHM_RING - 2, enter_direct, combine_direct, gather_direct};
