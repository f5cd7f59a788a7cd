/* state.h - what a coordinator remembers. Private to csrc/negotiation/ (and to the tests that compare ranks).
 *
 * Everything is either AGREED (a function of the votes decided so far, hence the same on every rank; only
 * decide and what it calls may write it) or MINE (what this rank has submitted). The split is the whole proof:
 * a plan is computed from agreed state alone, tickets are filled in from mine at the very end.
 *
 * Life of a request, as its own rank sees it:
 *
 *     submit -> FRESH (announced by descriptor until a slot takes it up)  -> SLOTTED (a ready bit) -> planned
 *            \-> SLOTTED (the key has a slot with the same signature)  <-+   |
 *                                 slot forgotten: FRESH again  <-------------+
 */
#ifndef HVD_NEGOTIATION_STATE_H
#define HVD_NEGOTIATION_STATE_H

#include "negotiation.h"

#include <string.h>

#define HVD_NONE UINT32_MAX

/* Keys to places: open addressing, linear probing, no tombstones. The keys lie at the start of the entries, so
 * that a cell is 4 bytes: index of the entry + 1, 0 for empty. */
struct hvd_map {
    const char *entry;
    size_t stride;
    uint32_t mask;
    uint32_t *cell;
};

uint32_t hvd_map_find(const struct hvd_map *map, struct hvd_key key); /* index or HVD_NONE */
void hvd_map_put(struct hvd_map *map, uint32_t index);                /* its key is not in the map */
void hvd_map_drop(struct hvd_map *map, uint32_t index);               /* it is in the map */

/* What sorting sees of an item: compared by front, major, high, low. */
struct hvd_sortable {
    uint64_t major, high, low;
    uint32_t id, front;
};

void hvd_sort(struct hvd_sortable *item, uint32_t count);
/* Keep the `max` smallest of a stream in a heap; follow with hvd_sort. */
void hvd_sort_keep(struct hvd_sortable *heap, uint32_t *count, uint32_t max, struct hvd_sortable item);

enum {
    HVD_KNOWN_MISMATCH = 1, /* signatures differ; when all are ready: detail */
    HVD_KNOWN_IN_PLANE = 2, /* as agreed when it became ready */
    HVD_KNOWN_QUEUED = 4,   /* waits for its detail round, in `details` instead of `used` */
    HVD_KNOWN_HELD = 8,     /* ready, waits for the rest of its group */
};

/* A slot. */
struct hvd_known {
    struct hvd_key key;
    uint64_t order;
    uint64_t used;           /* round that created it or found it ready */
    uint32_t previous, next; /* in `used` or `details`; next alone in `vacant` */
    uint32_t flags;
    uint32_t group_next; /* while HELD */
    uint32_t ticket;     /* MINE: the request behind my ready bit */
    uint32_t place;      /* in the learned list, HVD_NONE: not there */
    uint64_t born;       /* round that created it */
    uint32_t seen;       /* MINE: the recording that has it */
    uint32_t plane;      /* MINE: did my latest request lie in the plane? */
    struct hvd_signature signature;
};

struct hvd_list {
    uint32_t head, tail;
};

/* A group with members that have arrived, others not yet. Its key is {id, count}. */
struct hvd_group {
    struct hvd_key key;
    uint32_t arrived; /* held + failed */
    uint32_t head;    /* held members, through group_next; next of the vacant ones */
};

enum { HVD_MINE_IDLE, HVD_MINE_FRESH, HVD_MINE_SLOTTED };

/* A request of this rank, by ticket. */
struct hvd_mine {
    struct hvd_key key;
    uint64_t order;  /* what it is announced with */
    uint64_t number; /* how many were submitted before it */
    const char *name;
    uint32_t state, flags;
    uint32_t slot;  /* SLOTTED */
    uint32_t place; /* FRESH: index in `fresh` */
    struct hvd_signature signature;
};

/* A list of slots that is done again and again (steady_state.c). */
struct hvd_pattern {
    /* AGREED */
    uint32_t *list;
    uint32_t count;    /* 0: nothing is learned */
    uint32_t base;     /* the next to be planned */
    uint32_t patience; /* how often rank 0 must have seen a sequence before it proposes it */

    /* MINE */
    uint32_t ahead;    /* from base, so many are submitted */
    bool deviates;     /* I have submitted something else */
    uint32_t *record;  /* rank 0 alone: what it submits, */
    uint32_t recorded; /* until it comes again: */
    uint32_t length;   /* then of this length, 0: not yet */
    uint32_t at;       /* what is expected next, */
    uint32_t times;    /* after so many times in all */
    uint32_t number;   /* counts recordings, for known.seen */
    bool wanted;       /* it is to be proposed */
};

struct hvd_coord {
    struct hvd_coord_limits limits;
    struct hvd_pattern learn;

    /* AGREED */
    uint64_t round;          /* of the next vote */
    uint32_t high;           /* slots ever handed out: the bits of a vote */
    uint32_t vacant;         /* slots given back, a stack through next */
    struct hvd_list used;    /* by last use, oldest first: what eviction takes */
    struct hvd_list details; /* first in, first out: mismatches that wait for their detail round */
    uint64_t unnamed_done;   /* one past the greatest unnamed key that was planned or failed */
    int32_t left;
    uint32_t leaving;
    struct hvd_known *known;
    struct hvd_map slot_of;
    uint64_t *listen; /* slots whose ready bits mean something now */
    struct hvd_group *group;
    struct hvd_map group_of;
    uint32_t groups_high, groups_vacant;
    bool ungrouped; /* the entries were used up once: groups are not held any more */

    /* MINE */
    struct hvd_mine *mine;
    uint32_t mine_high; /* tickets ever used; beyond it `mine` is not initialised */
    uint32_t outstanding;
    uint64_t number;         /* requests submitted */
    uint64_t unnamed;        /* the next unnamed key */
    uint64_t *ready, *plane; /* my bits */
    uint32_t *fresh;         /* tickets, in no order */
    uint32_t fresh_count;
    struct hvd_map fresh_of;
    bool news, joined, leave, said_busy, said_leave;
    uint64_t join_round;      /* first round that said so; 0: not said yet */
    uint64_t tune, said_tune; /* as in a vote: my proposal, and as far as it was said */
    uint64_t date;            /* what my next vote says */

    /* Scratch of one call. */
    struct hvd_sortable *done;  /* slots + fresh: what this decide plans; id is a slot, or DIRECT | descriptor */
    struct hvd_sortable *order; /* fresh */
    uint32_t done_count;
};

#define HVD_DONE_DIRECT 0x80000000u

/* cache.c. Agreed, but for my request, which loses or finds its slot by the way. */
uint32_t hvd_slot_take(struct hvd_coord *coord, const struct hvd_fresh *fresh, uint64_t round); /* or HVD_NONE */
void hvd_slot_forget(struct hvd_coord *coord, uint32_t slot); /* a request of mine behind it is FRESH again */
void hvd_slot_touch(struct hvd_coord *coord, uint32_t slot, uint64_t round);
void hvd_slot_queue(struct hvd_coord *coord, uint32_t slot); /* for its detail round */
void hvd_slot_attach(struct hvd_coord *coord, uint32_t slot, uint32_t ticket);
uint32_t hvd_slot_detach(struct hvd_coord *coord, uint32_t slot); /* the ticket, which is IDLE now, or NONE */

/* submit.c */
void hvd_mine_announce(struct hvd_coord *coord, uint32_t ticket);
void hvd_mine_withdraw(struct hvd_coord *coord, uint32_t ticket);  /* no longer FRESH */
void hvd_mine_renumber(struct hvd_coord *coord, uint64_t unnamed); /* my unnamed requests start here */

/* steady_state.c. Agreed, but for what is said of mine: */
void hvd_pattern_plan(struct hvd_coord *coord, uint32_t ahead, uint64_t round); /* the next so many are due */
bool hvd_pattern_adopt(struct hvd_coord *coord, const struct hvd_vote *agreed); /* a proposed list, if it can be */
void hvd_pattern_forget(struct hvd_coord *coord); /* my outstanding requests go back to bits */
/* Mine: a request for a slot of the list; a request for any slot, for the record. */
void hvd_pattern_submit(struct hvd_coord *coord, uint32_t slot);
void hvd_pattern_record(struct hvd_coord *coord, uint32_t slot);
void hvd_pattern_restart(struct hvd_coord *coord); /* the recording */
/* What a vote says of it, but for the list; then the list, if I propose one. */
void hvd_pattern_say(const struct hvd_coord *coord, struct hvd_vote *vote);
void hvd_pattern_propose(const struct hvd_coord *coord, struct hvd_vote *vote);
bool hvd_pattern_check(const struct hvd_coord *coord, const struct hvd_vote *vote);
uint32_t hvd_front_of(const struct hvd_signature *signature);               /* cache.c */
void hvd_plan_slot(struct hvd_coord *coord, uint32_t slot, uint64_t round); /* cache.c */

/* group.c. arrive: true when the slot's group is complete with it; then release gives the held members one by
 * one, HVD_NONE at the end. */
bool hvd_group_arrive(struct hvd_coord *coord, uint32_t slot);
uint32_t hvd_group_release(struct hvd_coord *coord, struct hvd_key group);
uint32_t hvd_group_release_next(struct hvd_coord *coord, uint32_t slot); /* the first held from here in `used` */
void hvd_group_leave(struct hvd_coord *coord, uint32_t slot);            /* a held slot is forgotten */
bool hvd_group_fail(struct hvd_coord *coord, struct hvd_key group);      /* a member failed; true: now complete */
static inline struct hvd_key hvd_group_key(const struct hvd_signature *signature)
{
    return (struct hvd_key){signature->group, signature->group_count};
}

/* mismatch_detail.c, mismatch_text.c. The section of a vote that has a detail_slot. */
void hvd_detail_write(const struct hvd_coord *coord, struct hvd_vote *vote);
bool hvd_detail_check(const struct hvd_coord *coord, const struct hvd_vote *vote);
void hvd_detail_merge(const struct hvd_coord *coord, struct hvd_vote *into, const struct hvd_vote *from);
/* It tells of what is not finite, and of nothing that ranks disagree on. */
bool hvd_detail_not_finite(const struct hvd_coord *coord, const struct hvd_vote *agreed);
void hvd_detail_text(const struct hvd_coord *coord, const struct hvd_vote *agreed, struct hvd_key key, char *text,
                     size_t text_bytes);

/* A signature made of numbers that the tables have and of ranks of the set, with at most INT64_MAX elements? */
bool hvd_signature_sane(const struct hvd_coord_limits *limits, const struct hvd_signature *signature);
/* Is it a send between two other ranks? */
static inline bool hvd_passes_by(const struct hvd_coord *coord, const struct hvd_signature *signature)
{
    return signature->kind == HVD_SEND && signature->root != coord->limits.rank &&
           signature->peer != coord->limits.rank;
}
static inline bool hvd_kind_ragged(int32_t kind)
{
    return kind == HVD_ALLGATHER || kind == HVD_ALLTOALL;
}

/* Where the parts of a vote lie, in words of its body. */
static inline uint32_t hvd_words(uint32_t bits)
{
    return (uint32_t)(((uint64_t)bits + 63) / 64);
}

#define HVD_DETAIL_NAME_WORDS ((HVD_NAME_MAX + 8) / 8)
#define HVD_SIGNATURE_WORDS   (sizeof(struct hvd_signature) / 8)

static inline size_t hvd_detail_words(int size)
{
    return HVD_DETAIL_NAME_WORDS + HVD_DETAIL_MAX * (HVD_SIGNATURE_WORDS + hvd_words((uint32_t)size));
}
static inline size_t hvd_vote_detail_at(uint32_t slots)
{
    return 2 * (size_t)hvd_words(slots);
}
static inline const struct hvd_signature *hvd_detail_signatures(const struct hvd_vote *vote)
{
    return (const struct hvd_signature *)(vote->body + hvd_vote_detail_at(vote->slots) + HVD_DETAIL_NAME_WORDS);
}
static inline size_t hvd_vote_list_at(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    return hvd_vote_detail_at(vote->slots) + (vote->detail_slot == HVD_NONE ? 0 : hvd_detail_words(coord->limits.size));
}
static inline size_t hvd_list_words(uint32_t list)
{
    return ((size_t)list + 1) / 2;
}
static inline size_t hvd_vote_fresh_at(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    return hvd_vote_list_at(coord, vote) + hvd_list_words(vote->list);
}
static inline size_t hvd_vote_bytes(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    return sizeof *vote + 8 * hvd_vote_fresh_at(coord, vote) + vote->fresh * sizeof(struct hvd_fresh);
}

/* What my descriptors take in a vote. */
static inline size_t hvd_room_of_fresh(const struct hvd_coord *coord)
{
    uint32_t count = coord->fresh_count < coord->limits.fresh ? coord->fresh_count : coord->limits.fresh;
    return count * sizeof(struct hvd_fresh);
}

static inline bool hvd_key_below(struct hvd_key a, struct hvd_key b)
{
    return a.high != b.high ? a.high < b.high : a.low < b.low;
}

/* A round's order of keys: by place, then by the key. Shuffled in every round: see vote.c. */
static inline uint64_t hvd_key_place(struct hvd_key key, uint64_t round)
{
    uint64_t x = (key.high ^ key.low) + round * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

static inline bool hvd_bit(const uint64_t *bits, uint32_t i)
{
    return bits[i >> 6] >> (i & 63) & 1;
}
static inline void hvd_bit_set(uint64_t *bits, uint32_t i, bool on)
{
    uint64_t bit = (uint64_t)1 << (i & 63);
    bits[i >> 6] = on ? bits[i >> 6] | bit : bits[i >> 6] & ~bit;
}
static inline bool hvd_signature_same(const struct hvd_signature *a, const struct hvd_signature *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

#endif
