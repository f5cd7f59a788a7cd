/* trace.h - one ring of events per rank: the timeline and the flight recorder are the same thing.
 *
 * Any thread writes (one atomic add, one clock read, four relaxed stores); nobody waits. A reader copies the
 * newest events; one that is being overwritten meanwhile may come out mixed, which a recorder can live with.
 */
#ifndef HVD_TRACE_H
#define HVD_TRACE_H

#include "../ground/ground.h"

#include <stdatomic.h>

/* X(name): what happened. Tag and value: slot index and bytes unless said otherwise. */
#define HVD_TRACE_EVENTS(X)                                   \
    X(submit)                                                 \
    X(round)  /* tag: round number */                         \
    X(plan)   /* tag: items, value: buckets */                \
    X(start)  /* tag: items of the bucket, value: elements */ \
    X(finish) /* tag: slot, value: code */                    \
    X(sleep)                                                  \
    X(wake)                                                   \
    X(abort) /* tag: culprit */                               \
    X(leave)

enum {
#define X(name) HVD_TRACE_##name,
    HVD_TRACE_EVENTS(X)
#undef X
        HVD_TRACE_COUNT
};

struct hvd_trace_slot {
    _Atomic uint64_t time_ns, what_tag, value;
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
/* The newest `count` events, oldest first; returns how many there were. */
int hvd_trace_copy(struct hvd_trace_ring *ring, struct hvd_event *events, int count);

#endif
