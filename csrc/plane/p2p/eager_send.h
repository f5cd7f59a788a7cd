/* eager_send.h - the message of a small work that leaves before the work is agreed on.
 *
 * In algorithm `whole` every rank sends its buffer to all others and waits for nobody's word before. So a rank that
 * guesses the next work sends that at once. If the guess was right, the receivers find the very message that they
 * expect: they cannot tell. If it was wrong they find one with the mark of another work that says `early`, and skip it.
 * A mark names work, tensor and plan, so a message that comes too late is never taken for another.
 *
 * Who guesses wrong guesses less often. Until all of it has left for a peer, the rest is the link's (link.h): so planes
 * that share links never leave each other half a message. Used by the turn only.
 */
#ifndef HVD_PLANE_P2P_EAGER_SEND_H
#define HVD_PLANE_P2P_EAGER_SEND_H

#include "../../link/link.h"

#define HVD_EARLY_BYTES ((size_t)8 << 10) /* of a buffer, at most: sockets take it at once */

struct hvd_work;

struct hvd_p2p_head {
    uint64_t mark;        /* of the work, the same on all ranks */
    uint32_t step, early; /* early: 1: it left before the work was agreed on, or 0 */
    uint64_t bytes;
};

struct hvd_p2p_early {
    uint64_t mark;                /* what has left, or is leaving; 0: nothing */
    uint32_t rest, resting;       /* guesses to sit out after a wrong one; of these still */
    int rank, size;               /* of the set */
    size_t bytes;                 /* of the message, its head included */
    uint16_t sent[HVD_RANKS_MAX]; /* of it, by rank */
    unsigned char message[sizeof(struct hvd_p2p_head) + HVD_EARLY_BYTES];
};

/* Everything that all ranks must agree on of a work of so many elements, and its number. */
uint64_t hvd_p2p_mark(const struct hvd_work *work, uint64_t number, uint64_t count, bool whole);
/* A work of this mark may be next: send its message to everyone, or begin to. */
void hvd_p2p_early_send(struct hvd_p2p_early *early, struct hvd_link *const *link, int rank, int size, uint64_t mark,
                        const void *buffer, size_t bytes);
/* A work starts. True: its message has left, or is leaving. */
bool hvd_p2p_early_was(struct hvd_p2p_early *early, uint64_t mark);
/* The plane is closed: what has yet to leave never will. */
void hvd_p2p_early_close(const struct hvd_p2p_early *early, struct hvd_link *const *link, int rank, int size);

#endif
