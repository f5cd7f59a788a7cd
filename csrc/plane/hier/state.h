/* state.h - what plane hier knows of a set, and of the work in flight.
 *
 * Private to plane/hier. A rank works on two *sides*: inside, with the ranks of its host, and across, with one rank of
 * every other host. A side is an opened plane and at most one work on it; all its ranks start the same works in the
 * same order, which is the rule that the planes rely on.
 *
 * A *lane* is one rank per host, those with the same number on their hosts. There are as many as the host with the
 * fewest ranks has; a rank with a higher number is in none and only helps inside.
 *
 * The bucket is cut into *segments*, of which up to two are open; each has a *slot*, memory for what cannot be
 * worked on in the caller's.
 */
#ifndef HVD_HIER_STATE_H
#define HVD_HIER_STATE_H

#include "../plane.h"
#include "../shm/scatter_list.h"

#include "../../kernel/kernel.h"

#define HVD_HIER_SLOTS 2

/* Where the ranks of the set are. Pure: lanes.c. */
struct hvd_hier_place {
    int hosts, lanes;
    int host, number;             /* mine; hosts are counted in the order of their first ranks */
    int locals;                   /* on my host */
    int local[HVD_LOCAL_MAX];     /* rank in the set of each of them */
    int across[HVD_RANKS_MAX];    /* rank in the set of my lane's rank on each host; unset without a lane */
    int host_of[HVD_RANKS_MAX];   /* of each rank of the set */
    int number_of[HVD_RANKS_MAX]; /* on its host */
};

struct hvd_hier_side {
    const struct hvd_plane *plane; /* NULL: this rank has no such side */
    void *self;
    struct hvd_work work;
    struct hvd_piece piece;
    uint64_t count_of[HVD_RANKS_MAX];
    uint64_t done, total; /* works of the bucket */
    bool busy;
};

struct hvd_hier_slot {
    unsigned char *packed; /* a segment: what is given, then the result */
    unsigned char *slice;  /* this lane's part of it: the sum inside, then of all; and room for a chunk of that */
    size_t packed_bytes, slice_bytes;
};

struct hvd_hier_now {
    uint64_t segments, segment_count; /* how many, of how many elements */
    int sum_dtype;                    /* in which values are added up: float32 for 16-bit floats */
    size_t bytes, sum_bytes;          /* of an element given, and added up */
    uint64_t parts;                   /* works across per segment */
    struct hvd_scale scale;           /* once, when all is added up */
    bool scaled, wide;                /* wide: sum_dtype is another one */
    bool gives_there, lands_there;    /* the caller's memory is worked on as it is: what is given, what comes */
    int root_host, root_number, lane; /* broadcast: where the root is; which lane carries it */
    uint64_t packed, closed;          /* broadcast: segments */
    struct hvd_shm_cursor in, out;
};

struct hvd_hier {
    int rank, size;
    bool any_order, always; /* always: also where another plane would be faster */
    struct hvd_cost cost;   /* of a message between hosts, agreed */
    uint64_t least_bytes;   /* of an allreduce that is faster here than on p2p */
    struct hvd_hier_place place;
    struct hvd_link *link[HVD_RANKS_MAX]; /* to the ranks of my lane, by host */
    struct hvd_hier_side inside, across;
    struct hvd_hier_slot slot[HVD_HIER_SLOTS];
    struct hvd_hier_now now;
    struct hvd_error failed;
};

/* lanes.c */
void hvd_hier_lay_out(const int *host_of, int size, int rank, struct hvd_hier_place *place);

/* choice.c. From agreed values only: the least bytes, a power of two, of an allreduce that is worth cutting by hosts.
 */
uint64_t hvd_hier_least_bytes(const struct hvd_hier_place *place, int size, bool any_order, struct hvd_cost cost);
/* Into how many segments a bucket is cut. */
uint64_t hvd_hier_segments(const struct hvd_hier_place *place, uint64_t bytes, struct hvd_cost cost);

/* segments.c: how a bucket is cut, and where its parts lie. */
int hvd_hier_cut(struct hvd_hier *hier, const struct hvd_work *work, struct hvd_error *error);
uint64_t hvd_hier_length(const struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment);
/* Elements of a part in front of share `i` of `shares`; i == shares: all. Shares are whole cache lines, but the last.
 */
uint64_t hvd_hier_share(uint64_t count, int shares, int i);
/* A work of a side, but for its piece: nothing is scaled in it. */
struct hvd_work hvd_hier_unscaled(int kind, int op, int dtype, uint64_t count);
/* What this rank gives of a segment, packed if need be, and where its result is to go. */
const void *hvd_hier_given(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment);
void *hvd_hier_target(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment);
/* The result lies at the target: bring it to where the caller wants it. Segment after segment. */
void hvd_hier_unpack(struct hvd_hier *hier, const struct hvd_work *work, uint64_t segment);

/* reduce.c and broadcast.c: begin; start the next work of a side if it may start now (false: not yet, or none is left);
 * what is to be done when it is over. */
struct hvd_hier_way {
    void (*begin)(struct hvd_hier *hier, const struct hvd_work *work);
    bool (*next_inside)(struct hvd_hier *hier, const struct hvd_work *work);
    bool (*next_across)(struct hvd_hier *hier, const struct hvd_work *work);
    void (*done_inside)(struct hvd_hier *hier, const struct hvd_work *work);
    void (*done_across)(struct hvd_hier *hier, const struct hvd_work *work);
};
extern const struct hvd_hier_way hvd_hier_reduce, hvd_hier_broadcast;

#endif
