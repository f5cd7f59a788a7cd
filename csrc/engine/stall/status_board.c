/* status_board.c - the desk of a host: shared memory where ranks leave accounts for the leader of the host.
 *
 * The leader is the first rank that is not gone. All ranks read the same word, so no election is needed. A rank that
 * wants something sets a bit and rings the leader. A rank that goes sets its own bit first and then rings the next
 * leader.
 */
#include "rank_status.h"
#include "../engine.h"

#include <unistd.h>

struct hvd_inbox *hvd_inbox(const struct hvd_engine *engine)
{
    return hvd_host_desk(&engine->host);
}

int hvd_stall_leader(const struct hvd_engine *engine)
{
    uint64_t there = ~atomic_load(&hvd_inbox(engine)->gone);
    int first = there ? __builtin_ctzll(there) : 0;
    return first < engine->host.size ? first : 0;
}

bool hvd_inbox_leads(const struct hvd_engine *engine)
{
    return engine->host.rank == hvd_stall_leader(engine);
}

/* Wakes the engine thread of a rank of this host, asleep or not. */
void hvd_stall_ring(const struct hvd_engine *engine, int local)
{
    uint64_t one = 1;
    if (local == engine->host.rank) {
        hvd_turn_call(engine);
        return;
    }
    ssize_t written = write(engine->host.bells.eventfd[local], &one, sizeof one);
    (void)written;
}

/* The bit comes before the look for who is to be rung, here as in `want`: who leads next misses nothing. */
void hvd_stall_gone(struct hvd_engine *engine, int local)
{
    atomic_fetch_or(&hvd_inbox(engine)->gone, (uint64_t)1 << local);
    hvd_stall_ring(engine, hvd_stall_leader(engine));
}

/* Another rank is rung each time: a listener of its (stream_watch.c) may have taken the ring before, and only its
 * engine thread serves this. */
void hvd_inbox_want(struct hvd_engine *engine, uint64_t what)
{
    atomic_fetch_or(&hvd_inbox(engine)->wanted, what);
    if (!hvd_inbox_leads(engine))
        hvd_stall_ring(engine, hvd_stall_leader(engine));
}
