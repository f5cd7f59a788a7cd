/* trace.c - the ring of events.
 *
 * A writer takes a number (atomic add), which is its slot modulo the size of the ring, and fills it with
 * relaxed stores: well under 50 ns. There is no lock and no wait, so that tracing can be always on and can
 * be called from any thread. A reader may see an event that is half overwritten after the ring has gone round
 * once meanwhile; it is a recorder, not a ledger.
 */
#include "trace.h"

#include <stdlib.h>

int hvd_trace_open(struct hvd_trace_ring *ring, int events)
{
    uint64_t size = 16;
    while (size < (uint64_t)events)
        size *= 2;
    ring->slot = calloc(size, sizeof *ring->slot);
    ring->mask = size - 1;
    atomic_store(&ring->next, 0);
    return ring->slot ? HVD_OK : HVD_ENOMEM;
}

void hvd_trace_close(struct hvd_trace_ring *ring)
{
    free(ring->slot);
    ring->slot = NULL;
}

void hvd_trace_add(struct hvd_trace_ring *ring, uint32_t what, uint32_t tag, uint64_t value)
{
    uint64_t number = atomic_fetch_add_explicit(&ring->next, 1, memory_order_relaxed);
    struct hvd_trace_slot *slot = &ring->slot[number & ring->mask];
    atomic_store_explicit(&slot->time_ns, hvd_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&slot->what_tag, (uint64_t)what << 32 | tag, memory_order_relaxed);
    atomic_store_explicit(&slot->value, value, memory_order_relaxed);
}

int hvd_trace_copy(struct hvd_trace_ring *ring, struct hvd_event *events, int count)
{
    uint64_t end = atomic_load(&ring->next);
    uint64_t have = end > ring->mask + 1 ? ring->mask + 1 : end;
    if (count < 0)
        return 0;
    if (have > (uint64_t)count)
        have = (uint64_t)count;
    for (uint64_t i = 0; i < have; i++) {
        struct hvd_trace_slot *slot = &ring->slot[(end - have + i) & ring->mask];
        uint64_t what_tag = atomic_load_explicit(&slot->what_tag, memory_order_relaxed);
        events[i].time_ns = atomic_load_explicit(&slot->time_ns, memory_order_relaxed);
        events[i].what = (uint32_t)(what_tag >> 32);
        events[i].tag = (uint32_t)what_tag;
        events[i].value = atomic_load_explicit(&slot->value, memory_order_relaxed);
    }
    return (int)have;
}

const char *hvd_trace_name(int what)
{
    static const char *const names[] = {
#define X(name) #name,
        HVD_TRACE_EVENTS(X)
#undef X
    };
    return what >= 0 && what < HVD_TRACE_COUNT ? names[what] : NULL;
}
