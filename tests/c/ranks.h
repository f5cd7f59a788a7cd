/* ranks.h - many coordinators in one process: what the transcripts, the simulator, the fuzzer and the bench share.
 *
 * A round has three parts, so that a test can let things happen between them: each rank votes, the votes are
 * merged (in random trees, whose bytes must be equal), each rank decides. Every vote is checked before it is
 * merged; after the last decide the plans and the agreed state of all ranks must be the same.
 */
#ifndef HVD_TESTS_RANKS_H
#define HVD_TESTS_RANKS_H

#include "negotiation/negotiation.h"

struct ranks {
    int size;
    struct hvd_coord_limits limits;
    struct hvd_coord **coord;
    struct hvd_vote **vote;
    size_t vote_bytes;
    struct hvd_vote *agreed, *again;
    struct hvd_plan *plan;
    bool *voted, *decided;
    int voters, deciders;
    uint64_t seed;
};

extern const struct hvd_coord_names ranks_names;

uint64_t ranks_random(uint64_t *seed);                /* 64 bits */
uint32_t ranks_below(uint64_t *seed, uint32_t bound); /* 0 <= result < bound */

extern bool ranks_forgive; /* those that are opened from here on; see hvd_coord_limits */
void ranks_open(struct ranks *ranks, int size, uint32_t slots, uint32_t fresh, uint32_t tickets, uint64_t seed);
void ranks_close(struct ranks *ranks);

void ranks_vote(struct ranks *ranks, int rank);    /* may be repeated until all have voted */
void ranks_agree(struct ranks *ranks, int shapes); /* merges in so many random tree shapes */
/* True for the last: then everything has been compared. */
bool ranks_decide(struct ranks *ranks, int rank);
/* All three parts at once, for all ranks. */
void ranks_round(struct ranks *ranks);
bool ranks_news(const struct ranks *ranks); /* of any rank */

/* A float32 sum allreduce of a vector, the usual request. */
struct hvd_signature ranks_signature(int64_t elements);
/* Hash of the agreed state. */
uint64_t ranks_digest(const struct hvd_coord *coord);

#endif
