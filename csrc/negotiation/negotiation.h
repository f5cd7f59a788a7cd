/* negotiation.h - how ranks agree on what to do next. Pure: no clock, lock, log, allocation or I/O.
 *
 * Negotiation is itself an allreduce. Every rank's saying (a vote) is merged with an associative and
 * commutative operator; every rank computes the same plan from the same merged vote. No master, no response
 * message, no separate cache.
 *
 * One coordinator serves one process set on one rank:
 *
 *     submit()  a local event: this rank has a tensor ready            (any number, between rounds)
 *     vote()    what this rank says in the next round                  (once per round)
 *     merge()   joins two sayings                                      (in any tree shape)
 *     decide()  the agreed vote -> the plan, the same on all ranks     (once per round)
 *     fuse()    the plan -> buckets, the same on all ranks
 *
 * KNOWN tensors have a slot, the same on every rank, because slots are handed out only by decide. A rank says
 * "ready" with one bit, merged with AND, cumulative: it stays 1 until decided. FRESH tensors travel as
 * descriptors of fixed size sorted by key; merging adds the counts of ranks and marks different signatures.
 * Descriptors are deltas: decide gives a slot to every fresh key that it sees, ready or not, so that each
 * travels once per rank. Where a vote has no room for all, the keys that come first in the round's order stay
 * (this keeps merge associative and the kept counts exact) and the rest are announced again in the next round.
 * The order of keys is shuffled anew in every round (the same on all ranks), so that none starves.
 *
 * Rules (each has a transcript in tests/c/):
 *   1. A fresh key that has a slot (a rank changed the shape of a known tensor) makes everyone forget the
 *      slot and announce an outstanding request again in the next round; nobody else could ever agree.
 *      (Where all announce the same change in one round, it is done in that round.)
 *   2. Signatures that differ are decided once every active rank has announced the key: then a detail round
 *      for that key alone collects up to HVD_DETAIL_MAX signatures with their rank bitmaps and the name, and
 *      the plan carries the error text; the key's slot is freed and the set goes on. Several such keys have
 *      their detail rounds one after another.
 *   3. Unnamed requests have the keys {0, counter}, one counter per set across kinds; their slot ends with them.
 *   4. A group (same non-zero `group` and `group_count` in the signature) is held until all its members are ready.
 *      A member that fails by rule 2 counts as arrived: the others are done, and none waits for ever.
 *      Should more groups be incomplete than the table has slots, groups are held no longer.
 *      The same id and count again only when all members of the earlier use are finished on this rank.
 *   5. A rank that joined votes the identity: all bits 1, nothing fresh. What is needed is size - joined.
 *      While somebody has joined, allreduce, reduce and barrier go on; other kinds fail with HVD_EINVAL on every rank
 *      that asked, in the round that would have done them. Requests that a rank submitted before it joined
 *      (or submits later) are still announced, with a count of 0. When all have joined and nothing is
 *      outstanding anywhere, plan.joined names the last rank that did (greatest round, then greatest rank),
 *      joined ranks are reset, and the counters of unnamed requests continue at the same number everywhere.
 *   6. leave: plan.left is the rank that left first (of several in one round the smallest); in that round and
 *      from then on the coordinator plans nothing.
 *   7. A full slot table evicts the slot unused for longest (rounds, then index); never one of this decide.
 *      Outstanding requests of an evicted slot are announced again. A key for which no slot can be had is done
 *      without one if all have announced it, else it is announced again. All computed in decide.
 *   8. IN_PLANE ("my buffers lie in plane memory") is merged with AND, for fresh and known alike.
 *   9. Items of a plan are sorted by (greater priority, order, key), order being the smallest submission number
 *      any rank gave when the slot was made: gradients keep the order in which backward produces them, also those
 *      whose shape has changed since.
 *  10. A send concerns two ranks, its sender and its receiver. The others say "ready" from the start: their bits of
 *      its slot are 1 as long as the slot lives, and two announcements are all. They get the item without a
 *      ticket, because the plane moves it with everybody's help. Sends are named, in no group, and matched by sender,
 *      receiver and name.
 *  11. A LEARNED plan. When rank 0 has submitted the same sequence of named allreduces twice, it proposes their
 *      slots, as a list, in its vote. decide adopts it, unless what it plans in that round is no prefix of the list
 *      from where rank 0 stands. From then on the list repeats for ever: a vote says "of the learned, the next k are
 *      ready", merged with MIN, and has no bits of them (none at all, if nothing else is outstanding). What is fresh
 *      or not in the list travels beside it as before. A rank that gets something of the list out of turn, or with
 *      memory that lies in the plane now and did not before, says so (deviates, OR): all forget the list in that
 *      decide, what is outstanding goes back to bits, and the next list is proposed after twice as many repetitions,
 *      at most HVD_PATIENCE_MAX. So a dynamic graph costs one more round, now and then. The list is forgotten, too,
 *      when one of its slots is, or a rank has joined. Lists are of what is in no group.
 *  12. A setting that a rank proposes rides in its next vote; of several in one round the greatest is agreed, and
 *      all ranks apply it to the plan of that very round.
 *  13. Dates, for what is ordered beyond one set: a vote says the latest that the engine knows, merged with MAX, and
 *      a plan is dated one later. What dates are good for is the engine's business (engine/device/order.c).
 *  14. What the NaN guard has found in a rank's tensor is part of its signature. It goes the way of a mismatch, also
 * where all ranks have found the same: fresh, and a detail round that tells who found what. Then the request fails on
 * all ranks, or, where that is forgiven, all forget what was found and announce it again, with its key and its order,
 *      so that it is planned as if it had been submitted a few rounds later.
 */
#ifndef HVD_NEGOTIATION_NEGOTIATION_H
#define HVD_NEGOTIATION_NEGOTIATION_H

#include "../base/base.h"

#define HVD_DETAIL_MAX   4  /* different signatures that an error can show */
#define HVD_PATIENCE_MAX 64 /* repetitions that a list needs at most */
#define HVD_TICKET_NONE  UINT32_MAX
#define HVD_DATE_MAX     (UINT64_MAX / 2)
#define HVD_SLOTLESS     UINT32_MAX /* in a plan: done without a slot */

struct hvd_key {
    uint64_t high, low; /* {0, counter}: unnamed; else a 128-bit hash of set and name (of a send also of sender and
                           receiver), high != 0 */
};

/* What all ranks must have in common. Compared byte by byte: no padding, unused fields zero. */
struct hvd_signature {
    int32_t kind, op, dtype, ndim;
    int32_t root, peer; /* send: the sender and the receiver */
    uint32_t group_count;
    int32_t priority;
    uint64_t group;
    uint64_t not_finite; /* what the NaN guard has found: NaN << 32 | infinities; rule 14 */
    double prescale, postscale;
    int64_t dims[HVD_DIMS_MAX]; /* allgather, alltoall: dims[0] is 0 where it may differ between ranks */
};

#define HVD_FRESH_MISMATCH 1u /* set by merge, OR */
#define HVD_FRESH_IN_PLANE 2u /* AND */

struct hvd_fresh {
    struct hvd_key key;
    struct hvd_signature signature; /* of several different ones the smallest by memcmp */
    uint64_t order;                 /* smallest */
    uint32_t count;                 /* ranks that said so and have not joined, added */
    uint32_t flags;
};

/* The wire form, aligned to 8 bytes: a header, then ready bits, in-plane bits (both or, while a list is learned, none),
 * at most one detail section (its size depends on the size of the set only), a proposed list of slots, descriptors.
 * `bytes` is the length of all; a reader checks every field before it believes it (hvd_vote_check), because votes come
 * from other processes. A vote has one spelling: what is unused is zero, so that equal sayings are equal bytes. */
struct hvd_vote {
    uint32_t bytes, wire;
    uint64_t round;
    uint32_t ranks;      /* merged so far */
    uint32_t joined;     /* ranks that have joined */
    uint64_t join_round; /* greatest, with join_rank beside it */
    uint32_t join_rank;
    uint32_t busy;        /* ranks that have joined and still have requests outstanding */
    uint32_t leaving;     /* ranks that have left */
    uint32_t leave_rank;  /* smallest, UINT32_MAX if none */
    uint32_t slots;       /* bits in each of the two maps, rounded up to 64 in storage; agreed, or 0: all are 0 */
    uint32_t fresh;       /* descriptors */
    uint32_t detail_slot; /* slot the detail section speaks of, UINT32_MAX: none */
    uint16_t detail;      /* signatures in the detail section */
    uint16_t name_bytes;
    uint64_t date;     /* greatest */
    uint64_t tune;     /* proposed size of a bucket + 1, 0: none; greatest */
    uint32_t ahead;    /* of the learned list the next so many are ready; smallest */
    uint32_t deviates; /* 1: this is not what was learned; OR */
    uint32_t list;     /* slots in a proposed list; rank 0 only */
    uint32_t list_at;  /* of the list, the next to be planned */
    uint64_t body[];
};

/* What error texts call things; index = number, NULL = no such number. Coord may not look into kernel/. */
struct hvd_coord_names {
    const char *const *kind, *const *op, *const *dtype;
    int kinds, ops, dtypes; /* entries; a number beyond is refused in submit and in votes */
    int on_device;          /* the dtypes from here on are those of tensors on devices, in the same order, and behind
                               them others that are only there; 0: none is */
};

struct hvd_coord_limits {
    int rank, size;                      /* in the set; size up to 1,000,000 */
    uint32_t slots;                      /* known tensors at most */
    uint32_t tickets;                    /* requests in flight on this rank at most */
    uint32_t fresh;                      /* descriptors in one vote at most */
    uint64_t set;                        /* part of the hash of every name */
    bool forgives;                       /* agreed: what is not finite is told, and then reduced; rule 14 */
    bool zeroed;                         /* open()'s memory is zero-filled: large tables cost nothing until used */
    const struct hvd_coord_names *names; /* lent as long as the coordinator lives; may not be NULL */
    const int *called;                   /* what errors call the ranks of the set, ascending; lent; NULL: 0, 1, ... */
};

struct hvd_plan_item {
    struct hvd_signature signature;
    struct hvd_key key;
    uint64_t order;
    uint64_t count;  /* elements: product of dims; allgather: of one row */
    uint32_t ticket; /* what submit was given; HVD_TICKET_NONE on a rank that has joined, or that a send passes by */
    uint32_t slot;
    uint32_t flags;  /* HVD_FRESH_IN_PLANE as agreed */
    uint32_t bucket; /* set by fuse */
    int32_t code;    /* HVD_OK, or why this item fails on every rank instead of being done */
};

struct hvd_plan {
    uint64_t round;
    uint32_t items, items_max;
    uint32_t buckets;       /* set by fuse; numbers rise with the first item of each */
    uint32_t active;        /* ranks that have not joined: what "divide by active" would divide by */
    int32_t left;           /* rank that has left, -1: none; pending and later requests fail */
    uint32_t leaving;       /* ranks that have left so far */
    int32_t joined;         /* all have joined, this one last; -1: not yet */
    uint32_t learned;       /* a list of so many was adopted in this round, 0: none */
    bool deviated;          /* the list was forgotten, because a rank has deviated from it */
    uint64_t date;          /* later than what any rank has said */
    int64_t tuned;          /* size of a bucket, agreed in this round, -1: none */
    uint32_t failed_ticket; /* a mismatch was resolved (`text` is not empty, the same on all ranks): this
                               request of this rank, if it has one, fails with `failed_code` and the text */
    int32_t failed_code;    /* HVD_EMISMATCH, HVD_ENAN */
    bool not_finite;        /* `text` tells what the NaN guard has found, and no mismatch. Where that is forgiven
                               nothing fails; the request follows in a later plan */
    char text[HVD_TEXT_MAX];
    struct hvd_plan_item *item; /* room for items_max, given by the engine; items_max >= slots + fresh */
};

struct hvd_coord;

/* Memory is the caller's: bytes() says how much, open() lays the coordinator out in it (64-byte aligned). */
size_t hvd_coord_bytes(const struct hvd_coord_limits *limits);
struct hvd_coord *hvd_coord_open(void *memory, const struct hvd_coord_limits *limits);
/* Bytes of the largest vote that may arise, details included. */
size_t hvd_vote_bytes_max(const struct hvd_coord_limits *limits);

/* This rank is ready. `name` (NULL: unnamed) and its memory are lent until the ticket is planned or failed.
 * The signature's dims beyond ndim are cleared here.
 * Returns HVD_OK, HVD_EDUP (the name is in flight on this rank), HVD_ESTATE (somebody has left), HVD_EINVAL (a
 * number that no table has, a negative dimension, 2^63 elements or more, a group that has more members than slots, a
 * send that is not this rank's, has no name or is in a group).
 * Ticket < limits.tickets and not in use, which the engine sees to: a ticket is free again when decide has planned or
 * failed it. */
int hvd_coord_submit(struct hvd_coord *coord, uint32_t ticket, const char *name, const struct hvd_signature *signature,
                     uint32_t flags);
/* This rank joins (its ticket-less request ends with plan.joined) or leaves. */
void hvd_coord_join(struct hvd_coord *coord);
void hvd_coord_leave(struct hvd_coord *coord);
/* This rank proposes a size of buckets; all ranks hear of it in plan.tuned. */
void hvd_coord_tune(struct hvd_coord *coord, int64_t bucket_bytes);
/* The latest date that this rank knows, for its next vote; it is no news by itself. */
void hvd_coord_date(struct hvd_coord *coord, uint64_t date);

/* Would my vote say something that the last one did not, or must a round be held for something agreed (a
 * detail)? Then a round is wanted. */
bool hvd_coord_news(const struct hvd_coord *coord);
/* Number of the next round; counts from 1. */
uint64_t hvd_coord_round(const struct hvd_coord *coord);
/* Write my saying for the next round; returns its length. Calling it again before decide adds later news. */
size_t hvd_coord_vote(struct hvd_coord *coord, struct hvd_vote *vote, size_t room);
/* Is this a well-formed vote of at most `room` bytes for this set and round? HVD_OK or HVD_EINVAL. */
int hvd_vote_check(const struct hvd_coord *coord, const struct hvd_vote *vote, size_t room);
/* into := into (+) from. `into` has room for hvd_vote_bytes_max. Both were checked. */
void hvd_vote_merge(const struct hvd_coord *coord, struct hvd_vote *into, const struct hvd_vote *from);
/* The agreed vote (all ranks merged, in any order) -> what to do, in order. Advances the round. */
void hvd_coord_decide(struct hvd_coord *coord, const struct hvd_vote *agreed, struct hvd_plan *plan);
/* Cut the plan into buckets: allreduces with the same op, dtype, scales and flags travel together up to
 * bucket_bytes (a larger tensor travels alone; 0: nothing is fused); everything else alone, also each item
 * that fails (code). A bucket may take a later item past others of another dtype, its place is that of its
 * first item. bytes_of: bytes of a dtype. */
void hvd_plan_fuse(struct hvd_plan *plan, uint64_t bucket_bytes, const uint8_t *bytes_of);

/* Is this ticket's request the only one of this rank that is outstanding? Then what it was submitted as; false: no. */
bool hvd_coord_only(const struct hvd_coord *coord, uint32_t ticket, struct hvd_key *key,
                    struct hvd_signature *signature);
/* Of a ticket in use: what its request is known by, and how many were submitted before it; true: it is outstanding,
 * false: it is planned. */
bool hvd_coord_waits(const struct hvd_coord *coord, uint32_t ticket, struct hvd_key *key, uint64_t *number);
/* Requests of this rank that are outstanding, for errors and reports: calls see() for each. */
void hvd_coord_pending(const struct hvd_coord *coord, void (*see)(void *self, uint32_t ticket), void *self);

/* Hash of a name in a set: 128 bits, high never 0. key_for: of a send with its ranks. */
struct hvd_key hvd_key_of(uint64_t set, const char *name);
struct hvd_key hvd_key_for(uint64_t set, const char *name, const struct hvd_signature *signature);

#endif
