/* plane.h - what moves and reduces bytes. One file csrc/plane/x.c per plane, exporting only hvd_plane_x.
 *
 * The engine asks `can`, then `start`, then `poll` until it is not HVD_AGAIN. Works of one set start in plan
 * order on all ranks: this is the deadlock proof and the only rule a plane may rely on. At most one work of a
 * set is in flight on one plane. A plane never calls back up; it gets what it needs in hvd_plane_arg.
 */
#ifndef HVD_PLANE_H
#define HVD_PLANE_H

#include "../base/base.h"
#include "../algo/algo.h"
#include "../cuda/gpu_event.h"
#include "../base/wait.h"
#include "../link/link.h"

#include <poll.h>

/* One tensor of a bucket. The bucket is the concatenation of its pieces; nothing is packed beforehand. */
struct hvd_piece {
    const void *in; /* NULL: this rank has joined and gives the op's identity; allreduce only */
    void *out;      /* NULL: nobody here wants the result (joined rank, reduce: not the root). May equal in, but for
                       alltoall and reducescatter. */
    uint64_t count; /* elements; allgather: of this rank; alltoall: that this rank gives in all; reducescatter: of in */
};

#define HVD_WORK_IN_PLANE  1u /* agreed: every rank's pieces lie in memory from alloc, at any address */
#define HVD_WORK_ON_DEVICE 2u /* agreed: every rank's pieces lie in the memory of its device */

/* One collective on one bucket, all of one kind, op, dtype, scale and root. Written by the engine, read-only
 * for the plane but for `room` and `behind`; lent from start until poll returns something else than
 * HVD_AGAIN.
 */
struct hvd_work {
    int kind, op, dtype, root;
    uint32_t flags;
    int rooted;    /* allreduce, agreed: only this rank wants the result, counted from 1; 0: all do, but for pieces that
                      have no place for it */
    int divide_by; /* average: ranks to divide by */
    int active;    /* ranks of the set that give something (have not joined), agreed; 0 is read as all */
    double prescale, postscale;
    const struct hvd_piece *piece;
    uint32_t pieces;
    uint64_t count;           /* sum over pieces[].count */
    const uint64_t *count_of; /* allgather: elements by piece and rank, count_of[piece * size + rank];
                                 out of a piece receives all ranks' elements in rank order.
                                 alltoall (one piece): from every rank to every rank, count_of[from * size + to]; in
                                 holds what goes to rank 0, 1, ... one after the other, out receives likewise.
                                 reducescatter (one piece): count_of[rank] is the share of rank, in order; out
                                 receives this rank's */
    uint64_t tag;             /* agreed: of which tensors, in which plan; 0: not told */
    void *const *ready;       /* on a device: for each piece the event after which it may be read and written, NULL: it
                                 may now. NULL: so may all */
    void *vacant;             /* on a device: and what they write, after this event; NULL: at once */
    int device;               /* on which device this rank's pieces lie, counted from 1; 0: it has none */
    struct hvd_gpu_event
        *behind;       /* on a device, set by the poll that says HVD_OK: the work lies on the device's stream, and
                     the memory may be touched behind this mark; a reference that is the caller's */
    uint64_t room[24]; /* the plane's own state for this work; start may assume nothing about it */
};

/* What of it crosses between ranks, as counts and traces tell it: the values once. */
static inline uint64_t hvd_work_bytes(const struct hvd_work *work)
{
    return work->count * (uint64_t)hvd_dtype_bytes(work->dtype);
}

/* Shared memory of the ranks of one set on one host: rank r's segment is mapped at map[r] in this process.
 * Counted: a plane holds one reference, every block handed out as a view another; the last one unmaps. */
struct hvd_share {
    void *map[HVD_LOCAL_MAX];
    size_t bytes; /* of each segment; zero-filled and sparse: a page costs memory when it is touched */
    int size;
    int fd; /* of this rank's own segment; -1: there is none, it is memory of this process */
    _Atomic uint32_t references;
    void (*unmap)(struct hvd_share *share); /* set by who made it; called by hvd_share_drop */
};
static inline void hvd_share_keep(struct hvd_share *share)
{
    atomic_fetch_add(&share->references, 1);
}
static inline void hvd_share_drop(struct hvd_share *share)
{
    if (atomic_fetch_sub(&share->references, 1) == 1)
        share->unmap(share);
}

struct hvd_plane;

/* What a plane is opened with. The functions are for `open` only, may block, and are collective: every rank
 * of the set calls them in the same order, and meets those on its host. `bells` stays valid until close. Bells and
 * shares are of the set's ranks on this host, in the order of the set. */
struct hvd_plane_arg {
    int rank, size;     /* in the set */
    int local_rank;     /* of this process among all ranks on its host, in the job */
    bool one_host;      /* all ranks of the set proved to be on this host */
    const int *host_of; /* the number of each rank's host; NULL: all are on one. Lent until open returns */
    int cpus;           /* usable by this process */
    size_t arena_bytes; /* of plane memory (alloc) per rank, sparse; 0: as much as the machine has; HVD_ARENA_NONE:
                           open none, and ask for one share at most: then neither function below blocks, and
                           allgather may not be called */
    struct hvd_bells *bells;
    struct hvd_link *const *link; /* to every other rank of the set, for this set alone; lent until close. NULL: none */
    struct hvd_cost link_cost;    /* of an exchange over them, agreed; both 0: not known */
    const bool *leaving;          /* once true, a peer may end its link with nothing missing; NULL: never */
    void *comm;           /* an MPI communicator of the set, for this plane alone; lent until close. NULL: none */
    bool any_order;       /* agreed: sums may be taken in another order than that of ranks where that is faster;
                             their bits then depend on where in a bucket a value lies. false: deterministic
                             mode, in which a plane that cannot do without must not do floats */
    const char *algo;     /* the one to be used wherever it can, agreed; NULL: the cheapest. Lent until close */
    bool shares_gpus;     /* ranks that share a GPU shall use NCCL where it can do that */
    bool nccl_blocks;     /* NCCL's calls would wait, whatever is asked of them */
    int start_timeout_ms; /* how long ranks may take to meet; 0: as long as they like */
    const struct hvd_plane *wanted; /* the plane that was asked for by name, agreed: it shall do what it can do, also
                                       where another is faster. NULL: none was */
    void *self;                     /* first argument of the two below */
    int (*allgather)(void *self, const void *mine, size_t bytes, void *all, struct hvd_error *error);
    /* Every rank gets `bytes` (the same on all) of its own, mapped by all. NULL on failure. */
    struct hvd_share *(*share)(void *self, size_t bytes, struct hvd_error *error);
};

#define HVD_PLANE_SHARE_MAX ((size_t)2 << 20) /* what a plane may ask of `share` per rank, but for plane memory */
#define HVD_ARENA_NONE      SIZE_MAX
#define HVD_HELLO_BYTES     512

enum hvd_plane_order { HVD_ORDER_SET, HVD_ORDER_DEVICE }; /* see DESIGN: overlapping sets */

struct hvd_plane {
    const char *name;
    int preference; /* the working plane with the highest wins */
    enum hvd_plane_order order;
    bool silent; /* nobody rings when there is news for its works: whoever sleeps comes again by himself */
    bool polled; /* and nothing moves but inside poll: whoever waits for a work polls without a pause */
    bool bound;  /* its calls must all come from one thread: a waiting caller must not take the turn */
    bool device; /* it moves tensors that lie on devices, and no others; it opens on every rank, at no cost */

    /* Pure, on fields that are the same on all ranks: is it for a set like this? Then it fails to open for want of
     * something only. NULL: open tells. */
    bool (*fits)(const struct hvd_plane_arg *arg);
    /* Engine, at init, may block. On failure nothing stays allocated. *plane is passed to all below. */
    int (*open)(const struct hvd_plane_arg *arg, void **plane, struct hvd_error *error);
    /* Pure, on agreed fields only (kind, op, dtype, count, flags): the answer is the same on all ranks. */
    bool (*can)(void *plane, const struct hvd_work *work);
    /* Never blocks. HVD_OK: go on with poll; negative: refused, nothing was started on any rank. */
    int (*start)(void *plane, struct hvd_work *work, struct hvd_error *error);
    /* Never blocks for longer than one slice takes. HVD_OK: done, the caller's memory is no longer touched
     * by this rank. HVD_EPEER: the culprit's link has ended; it may be polled on, for the culprit may have left and be
     * missed no more. HVD_AGAIN: come again; *progress is set if anything moved. Peers that sleep are rung
     * when there is news for them, so after HVD_AGAIN without progress the caller may sleep on its bell. */
    int (*poll)(void *plane, struct hvd_work *work, bool *progress, struct hvd_error *error);
    /* Works that are over here may owe other ranks bytes that only move when the library is called: it is by this, now
     * and then, for as long as the plane is open (of one library, one plane will do). Never blocks. May be NULL. */
    void (*linger)(void *plane);
    /* Returns when nothing will touch the caller's memory; peers may be dead. Never fails. */
    void (*close)(void *plane);
    /* Memory that this plane moves without a copy, 64-byte aligned; NULL when there is none. Any thread.
     * release works after close; false: it is another plane's. So in front of such memory lies a cache line that says
     * whose it is. Both may be NULL. owns: does this whole range lie in memory of alloc? */
    void *(*alloc)(void *plane, size_t bytes);
    bool (*release)(void *memory);
    bool (*owns)(void *plane, const void *memory, size_t bytes);
    /* What a caller that sleeps until there is news for the work under way must hear, with what would be news to it: up
     * to one for each rank of the set, other ones after every poll. Returns how many. May be NULL: only bells. */
    int (*watch)(void *plane, struct pollfd *news);
    /* The next work may be this one; nothing is agreed. The plane may send of it what it likes, but neither hold on to
     * its memory nor believe it. Never blocks. May be NULL. */
    void (*foresee)(void *plane, const struct hvd_work *work);
    /* Planes for devices alone, by the turn. Before the first work of a set its ranks greet each other: hello fills in
     * what this rank says (HVD_HELLO_BYTES; a rank that fails says so), met is given what all have said, in the order
     * of ranks, and must come to the same on all of them. Its failure means that this plane is not for this set;
     * HVD_AGAIN that it is not for the next work, since a rank knew no device yet: they greet each other again.
     * Neither waits for another rank. part: nothing follows but close; begins to end what close then waits for, and
     * waits for nothing. abort: the job has failed, and what is under way must end without its peers, at once. settle:
     * is all that lies on the device's stream done? HVD_OK, HVD_AGAIN, or why it never will be. */
    void (*hello)(void *plane, const struct hvd_work *first, void *mine);
    int (*met)(void *plane, const void *all, struct hvd_error *error);
    void (*part)(void *plane, bool abort);
    int (*settle)(void *plane, struct hvd_error *error);
    void (*where)(void *plane, char *text, size_t text_bytes); /* for errors: on which device, by what */
    /* Any thread: this rank's bytes that are resident for moving, and those that alloc has handed out and not yet got
     * back; added to both. May be NULL. */
    void (*usage)(void *plane, uint64_t *resident, uint64_t *handed_out);
};

/* The table the build makes from the file names (-DHVD_PLANE_LIST="X(self) X(shm)"), NULL-terminated. */
extern const struct hvd_plane *const hvd_planes[];

/* `can` of a plane that does every kind of work, with whatever the kernel can reduce. */
bool hvd_plane_can_all(void *plane, const struct hvd_work *work);

#endif
