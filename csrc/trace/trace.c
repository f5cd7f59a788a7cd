/* trace.c - the ring of events.
 *
 * A writer takes a number (atomic add), which is its slot modulo the size of the ring, and fills it with relaxed
 * stores: well under 50 ns. There is no lock and no wait, so that tracing can be always on and can be called from any
 * thread.
 *
 * A reader may come while a slot is being written, or two writers may be in one slot, when the ring has gone round
 * while the first was not let run. So a slot carries a check of its number and all that it holds. A mixture of two
 * events, or an older one, does not fit the number under which it is looked for, and is left out. That needs no order
 * among the stores, and is as right on processors that reorder them.
 */
#include "trace.h"

#include <stdlib.h>

static uint64_t turned(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static uint64_t check_of(uint64_t number, uint64_t time_ns, uint64_t what_tag, uint64_t value)
{
    return (number + 1) * 0x9e3779b97f4a7c15u ^ time_ns ^ turned(what_tag, 21) ^ turned(value, 42);
}

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

void hvd_trace_add_at(struct hvd_trace_ring *ring, uint64_t now_ns, uint32_t what, uint32_t tag, uint64_t value)
{
    uint64_t number = atomic_fetch_add_explicit(&ring->next, 1, memory_order_relaxed);
    uint64_t what_tag = (uint64_t)what << 32 | tag;
    struct hvd_trace_slot *slot = &ring->slot[number & ring->mask];
    atomic_store_explicit(&slot->time_ns, now_ns, memory_order_relaxed);
    atomic_store_explicit(&slot->what_tag, what_tag, memory_order_relaxed);
    atomic_store_explicit(&slot->value, value, memory_order_relaxed);
    atomic_store_explicit(&slot->check, check_of(number, now_ns, what_tag, value), memory_order_relaxed);
}

void hvd_trace_add(struct hvd_trace_ring *ring, uint32_t what, uint32_t tag, uint64_t value)
{
    hvd_trace_add_at(ring, hvd_now_ns(), what, tag, value);
}

/* False: it is not there yet, not there any more, or torn. */
static bool read_one(struct hvd_trace_ring *ring, uint64_t number, struct hvd_event *event)
{
    struct hvd_trace_slot *slot = &ring->slot[number & ring->mask];
    uint64_t time_ns = atomic_load_explicit(&slot->time_ns, memory_order_relaxed);
    uint64_t what_tag = atomic_load_explicit(&slot->what_tag, memory_order_relaxed);
    uint64_t value = atomic_load_explicit(&slot->value, memory_order_relaxed);
    if (atomic_load_explicit(&slot->check, memory_order_relaxed) != check_of(number, time_ns, what_tag, value))
        return false;
    *event = (struct hvd_event){
        .time_ns = time_ns, .what = (uint32_t)(what_tag >> 32), .tag = (uint32_t)what_tag, .value = value};
    return true;
}

int hvd_trace_copy(struct hvd_trace_ring *ring, struct hvd_event *events, int count)
{
    uint64_t end = atomic_load(&ring->next);
    uint64_t have = end > ring->mask + 1 ? ring->mask + 1 : end;
    int copied = 0;
    if (count < 0)
        return 0;
    if (have > (uint64_t)count)
        have = (uint64_t)count;
    for (uint64_t number = end - have; number < end; number++)
        copied += read_one(ring, number, &events[copied]);
    return copied;
}

int hvd_trace_read(struct hvd_trace_ring *ring, uint64_t *from, struct hvd_event *events, int count, uint64_t *lost)
{
    int copied = 0;
    uint64_t end = atomic_load(&ring->next);
    while (copied < count && *from < end) {
        if (end - *from > ring->mask + 1) { /* they are overwritten */
            uint64_t first = end - ring->mask - 1;
            *lost += first - *from;
            *from = first;
        }
        if (read_one(ring, *from, &events[copied])) {
            copied++;
        } else {
            end = atomic_load(&ring->next);
            if (end - *from <= ring->mask + 1)
                break; /* its writer is at it: next time */
            continue;
        }
        ++*from;
    }
    return copied;
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
