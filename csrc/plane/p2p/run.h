/* run.h - the interpreter: one collective's steps, run over links. The only loop that does I/O between hosts.
 *
 * A run has a send cursor and a receive cursor over the steps of one algorithm (algo/algo.h). Sends run ahead of
 * receives and the other way round as far as the data allow, which is decided from the ranges of the steps alone:
 *
 *   - what a step sends must not be waited for by an earlier receive: bytes of the receive under way count as far as
 *     they have come, so that a ring passes a chunk on while it is still arriving;
 *   - what a step receives, or folds, must not replace what it or an earlier step has yet to send: what is to be
 *     combined waits in the block until its place has been sent.
 *
 * No cycle of waiting: the earliest step that any rank has not sent yet waits for nothing but its receiver, whose
 * receives wait only for its own sends of earlier steps. But in `exchange` a step sends the range that it receives. Of
 * its two ranks let A have sent no more than B. All that B has got of A then belongs to places that B has sent, so B
 * combines it, has room in its block, and reads on: what A sends always gets through, however little the sockets hold,
 * also where a link takes a whole record before it counts as sent (signed.c). Heads and early messages have no place,
 * and are read at any time: so the rest of an early message, which has to leave first, gets through as well.
 *
 * A message that left early (eager_send.h) is skipped where it belongs to nothing.
 *
 * Every message has a head, so that ranks that disagree about what they do find out at once and not by wrong sums.
 */
#ifndef HVD_P2P_RUN_H
#define HVD_P2P_RUN_H

#include "../../algo/algo.h"
#include "../../kernel/kernel.h"
#include "../../link/link.h"
#include "eager_send.h"

#include <poll.h>

#define HVD_P2P_BLOCK ((size_t)64 << 10) /* what is received before it is combined: it stays in the cache */
#define HVD_P2P_AHEAD                                                                               \
    ((size_t)1 << 20) /* what is packed before it leaves, in order: as much as a link takes at once \
                       */

struct hvd_p2p_bucket;

struct hvd_p2p_cursor {
    int i;     /* step; equal to `steps`: done */
    size_t at; /* bytes of its message that have moved, its head included */
    struct hvd_step step;
};

struct hvd_p2p_run {
    const struct hvd_algo *algo;
    struct hvd_shape shape;
    int steps, dtype;
    size_t element_bytes;
    struct hvd_scale hop, fold; /* of one combination on the way; of all of them at once, or of an ordered one */
    uint64_t mark;
    struct hvd_link *const *link; /* by rank; [shape.rank] is NULL */
    const unsigned char *source;  /* what is sent: alltoall: the input; else the same as buffer */
    unsigned char *buffer;
    unsigned char *kept;  /* contributions of others to this rank's chunk, one after the other by rank */
    unsigned char *block; /* HVD_P2P_BLOCK */
    struct hvd_p2p_cursor out, in;
    struct hvd_p2p_head head_out, head_in;
    struct hvd_p2p_early *early;   /* NULL: none */
    bool was_early;                /* this run's messages are early's */
    size_t skip;                   /* bytes of a wrong guess to be read past, where the receive cursor is */
    size_t block_fill;             /* received and not yet combined */
    int patrol;                    /* whose end was looked for last */
    struct hvd_p2p_bucket *bucket; /* packed and unpacked on the way where that may be; NULL: never */
    bool in_order;                 /* it is: one step sends and completes the buffer from its beginning to its end */
    const bool *leaving;           /* see plane.h; may be NULL */
};

/* Begin; all fields up to `block` are set. */
void hvd_p2p_begin(struct hvd_p2p_run *run);
/* Move what can be moved. HVD_OK: all steps are done; HVD_AGAIN; or an error, which names the peer. After HVD_EPEER it
 * may be called again, and goes on as far as it can without that peer. */
int hvd_p2p_step(struct hvd_p2p_run *run, bool *progress, struct hvd_error *error);
/* After HVD_AGAIN: on which descriptors to sleep, and for what. Only what the run waits for: bytes that come early, for
 * a later step, are left where they are, and would be news for ever. The end of any peer is news. Returns how many. */
int hvd_p2p_watch(const struct hvd_p2p_run *run, struct pollfd *news);
/* Bytes of `kept` that a run of this shape needs; 0 for algorithms that keep nothing. */
size_t hvd_p2p_kept_bytes(const struct hvd_algo *algo, const struct hvd_shape *shape, size_t element_bytes);

#endif
