/* trace.h - one ring of events per rank: the timeline and the flight recorder are the same thing.
 *
 * Any thread writes (one atomic add, one clock read, four relaxed stores); nobody waits. A reader copies the newest
 * events, or those since it last looked; one that is being overwritten meanwhile is recognised and left out.
 *
 * `tag` of what concerns a tensor is its number in the table of names (names.h). `value` has three parts: 8 bits of
 * `by` (the kind of collective; of a start the plane), 8 bits of the process set, 48 of the rest.
 */
#ifndef HVD_TRACE_H
#define HVD_TRACE_H

#include "../base/base.h"

#include <stdatomic.h>

/* X(name): what happened */
#define HVD_TRACE_EVENTS(X)                                                                                        \
    X(submit) /* tag: tensor; rest: bytes */                                                                       \
    X(wait)   /* tag: tensor; a thread waits for it */                                                             \
    X(waited) /* tag: tensor; and does not any more */                                                             \
    X(round)  /* of votes: tag: items of its plan; rest: buckets << 32 | items that were agreed before and wait */ \
    X(start)  /* of a bucket: tag: its items, the oldest agreed; by: plane; rest: bytes */                         \
    X(finish) /* tag: tensor; rest: -code; those of a bucket in its order */                                       \
    X(end)    /* tag: tensor; rest: -code; it ends otherwise than in a bucket */                                   \
    X(abort)  /* tag: culprit; rest: -code */                                                                      \
    X(leave)  /* tag: the rank that has left */

enum {
#define X(name) HVD_TRACE_##name,
    HVD_TRACE_EVENTS(X)
#undef X
        HVD_TRACE_COUNT
};

#define HVD_TRACE_REST_BITS 48
#define HVD_TRACE_REST_MAX  (((uint64_t)1 << HVD_TRACE_REST_BITS) - 1)
#define HVD_TRACE_BY_VOTES  254 /* in the place of a plane: it travelled with the votes */
#define HVD_TRACE_BY_CPU    255 /* from a device by way of the CPU */

static inline uint64_t hvd_trace_value(int by, int set, uint64_t rest)
{
    return (uint64_t)(by & 0xff) << 56 | (uint64_t)(set & 0xff) << HVD_TRACE_REST_BITS | (rest & HVD_TRACE_REST_MAX);
}

struct hvd_trace_slot {
    _Atomic uint64_t time_ns, what_tag, value, check;
};

struct hvd_trace_ring {
    struct hvd_trace_slot *slot;
    uint64_t mask;
    _Atomic uint64_t next;
};

/* events is rounded up to a power of two; returns HVD_ENOMEM if it cannot be had. */
int hvd_trace_open(struct hvd_trace_ring *ring, int events);
void hvd_trace_close(struct hvd_trace_ring *ring);
void hvd_trace_add(struct hvd_trace_ring *ring, uint32_t what, uint32_t tag, uint64_t value);
/* The same for who has looked at the clock already. */
void hvd_trace_add_at(struct hvd_trace_ring *ring, uint64_t now_ns, uint32_t what, uint32_t tag, uint64_t value);
/* The newest `count` events, oldest first; returns how many there were. */
int hvd_trace_copy(struct hvd_trace_ring *ring, struct hvd_event *events, int count);
/* At most `count` events from number *from on (0: the first ever), oldest first; *from becomes the number of the next
 * one, and *lost grows by those that were overwritten before anybody asked. Returns how many were copied. */
int hvd_trace_read(struct hvd_trace_ring *ring, uint64_t *from, struct hvd_event *events, int count, uint64_t *lost);

#endif
