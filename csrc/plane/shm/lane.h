/* lane.h - the memory that the ranks of the shm plane share, and the words by which they tell each other.
 *
 * Private to plane/shm. Everything that moves is cut into *segments*, numbered without end from 0 and never
 * reset, the same on every rank; a work takes as many numbers as all ranks compute from agreed fields, so no
 * barrier stands between works. Each rank has a *lane*: one shared memory segment, a ring of HVD_SHM_RING slots for
 * staged bytes with three kinds of words. It alone writes the words; into a slot others write only their sums, between
 * its `in` and their `out` of that segment (halves).
 *
 *   in[slot]    = g + 1: my part of segment g is in my slot (or, if it is tiny, in the word's own cache line)
 *   out[slot]   = g + 1: my slice of segment g is reduced and lies where it belongs
 *   finished    = g: I have read all I want of every segment below g. Published by broadcasts and exchanges only: in
 * all other works `in` says it too, by the rule of flow.
 *
 * The rule of flow: a rank that publishes in(g) has finished every segment up to g - HVD_SHM_RING + 1. So whoever
 * has seen in(g - 1) of all ranks may overwrite the slot of segment g - HVD_SHM_RING, which is that of g. One
 * line per slot, not one per rank: what a rank says about segment g stays readable until all have read it.
 */
#ifndef HVD_SHM_LANE_H
#define HVD_SHM_LANE_H

#include "../plane.h"
#include "arena.h"
#include "scatter_list.h"

#include "../../kernel/kernel.h"

#define HVD_SHM_RING       4
#define HVD_SHM_SLOT_BYTES (256u << 10)
#define HVD_SHM_PLACES     (HVD_SHM_SLOT_BYTES / 16) /* pieces whose place in plane memory fits a slot */
#define HVD_SHM_TINY_BYTES 48 /* with word and mark they fill one cache line: one transfer carries all */

/* The low bits of a mark are the rank's own part in the work; the rest must be the same on all. */
#define HVD_SHM_JOINED        UINT64_C(1)
#define HVD_SHM_TAKES_NOTHING UINT64_C(2)
#define HVD_SHM_PART_BITS     2

struct hvd_shm_word {
    _Atomic uint64_t value;
    uint64_t mark; /* in only: what this rank believes the work to be, and its part in it */
    unsigned char tiny[HVD_SHM_TINY_BYTES];
    char pad[HVD_CACHE_LINE]; /* processors fetch lines in pairs */
};

struct hvd_shm_lane {
    struct hvd_shm_word in[HVD_SHM_RING];
    struct hvd_shm_word out[HVD_SHM_RING];
    struct hvd_shm_word finished;
    _Alignas(HVD_PAGE) unsigned char slot[HVD_SHM_RING][HVD_SHM_SLOT_BYTES];
};

/* The work in flight. `entered`, `combined` and `gathered` count its segments through the three stages of
 * pipeline.c; `from_*` is the rank at which the wait for all goes on, so that a poll repeats nothing. */
struct hvd_shm_now {
    const struct hvd_shm_way *way;
    uint64_t base, segments;
    uint64_t entered, combined, gathered;
    int from_flow, from_in, from_out;
    uint64_t part; /* elements done of the segment being combined, for ways that do it in several steps */
    uint64_t group_begin, group_count; /* direct: the elements of the group being combined */
    size_t element_bytes;
    uint64_t segment_count; /* elements of a full segment */
    uint64_t mark;
    uint64_t active;       /* bitmap of ranks that have something to reduce; exchange: to give or to take */
    uint64_t takers;       /* allreduce: bitmap of ranks that want the result */
    uint64_t gives, takes; /* exchange: segments in which this rank does */
    struct hvd_scale scale;
    struct hvd_shm_cursor at[3];
    bool tiny, announced, finished;
};

/* exchange.c: what one rank gives another, in all and in the slices that travel in one segment each. */
struct hvd_shm_pair {
    uint64_t count, slice; /* elements; the last slice may be shorter, or empty */
    uint64_t place;        /* where the slice lies in the giver's slot */
    uint64_t at;           /* where the pair's first element lies in the giver's input or the taker's output */
};

struct hvd_shm {
    int rank, size;
    const struct hvd_bells *bells;
    struct hvd_share *share;
    struct hvd_shm_lane *lane[HVD_LOCAL_MAX];
    uint64_t next;  /* the number of the next work's first segment */
    uint64_t floor; /* every rank has finished every segment below this */
    struct hvd_shm_now now;
    struct hvd_shm_cursor walk[HVD_LOCAL_MAX];                      /* allgather: where each rank's stream stands */
    struct hvd_shm_pair gives[HVD_LOCAL_MAX], takes[HVD_LOCAL_MAX]; /* exchange: from me, to me */
    struct hvd_shm_arena *arena;                                    /* NULL: no plane memory here */
    bool unrung;      /* words were said, and nobody who sleeps was woken for them yet */
    bool any_awaited; /* likewise words that others await of all ranks: g + 1 of each, by out and slot; 0: none */
    uint64_t awaited[2][HVD_SHM_RING];
    struct hvd_error failed;
};

/* One way of working: what is done with segment i (0 .. segments - 1) of the work in flight. */
struct hvd_shm_way {
    const char *name;
    uint64_t ahead; /* segments that may be entered before the oldest is finished, at most RING - 2 */
    void (*enter)(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i);
    /* When all ranks have entered i. HVD_AGAIN: a slice is done, call again. Negative: error is filled. */
    int (*combine)(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i, struct hvd_error *error);
    /* When all ranks have combined i; NULL: nothing is left to do then. */
    void (*gather)(struct hvd_shm *shm, const struct hvd_work *work, uint64_t i);
};

extern const struct hvd_shm_way hvd_shm_flat, hvd_shm_halves, hvd_shm_direct, hvd_shm_allgather, hvd_shm_barrier;

/* flow.c. all: 1 when every rank has said its word for segment g, 0 not yet, negative: a rank said nonsense. */
void hvd_shm_publish(struct hvd_shm *shm, struct hvd_shm_word *word, uint64_t value);
void hvd_shm_publish_to_all(struct hvd_shm *shm, bool out, uint64_t g); /* in or out of g: awaited of all ranks */
void hvd_shm_ring(struct hvd_shm *shm);
bool hvd_shm_may_enter(struct hvd_shm *shm, uint64_t g);
int hvd_shm_all_in(struct hvd_shm *shm, uint64_t g, struct hvd_error *error);
int hvd_shm_all_out(struct hvd_shm *shm, uint64_t g, struct hvd_error *error);
int hvd_shm_one_in(struct hvd_shm *shm, int rank, uint64_t g, struct hvd_error *error);

/* pipeline.c, broadcast.c and exchange.c: some steps of the work in flight; HVD_OK: it is done. */
int hvd_shm_pipeline(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error);
int hvd_shm_broadcast(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error);
int hvd_shm_exchange(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error);

/* How many segments, of how many elements; fills now.segments and what the way needs besides. */
void hvd_shm_plan_allreduce(struct hvd_shm *shm, const struct hvd_work *work);
void hvd_shm_plan_allgather(struct hvd_shm *shm, const struct hvd_work *work);
void hvd_shm_plan_exchange(struct hvd_shm *shm, const struct hvd_work *work);

/* Elements of segment i, and where rank's staged bytes of it lie. */
static inline uint64_t hvd_shm_length(const struct hvd_shm_now *now, uint64_t total, uint64_t i)
{
    uint64_t from = i * now->segment_count;
    return total - from < now->segment_count ? total - from : now->segment_count;
}
static inline unsigned char *hvd_shm_staged(struct hvd_shm *shm, int rank, uint64_t i)
{
    uint64_t slot = (shm->now.base + i) % HVD_SHM_RING;
    return shm->now.tiny ? shm->lane[rank]->in[slot].tiny : shm->lane[rank]->slot[slot];
}
/* Where rank's slice of `length` elements begins: slices are whole cache lines, the last may be empty. */
static inline uint64_t hvd_shm_cut(const struct hvd_shm *shm, uint64_t length, int rank)
{
    uint64_t line = HVD_CACHE_LINE / shm->now.element_bytes;
    uint64_t slice = HVD_ALIGN_UP((length + (uint64_t)shm->size - 1) / (uint64_t)shm->size, line);
    return slice * (uint64_t)rank < length ? slice * (uint64_t)rank : length;
}

#endif
