/* wake.c - sleeping and waking: the engine thread's bell, and the token that is the turn.
 *
 * This is the lowest file of the turn. It calls no other file of the engine, so every file of the engine may call it.
 * progress.c has what the holder of the turn does, stream_watch.c how it sleeps on streams, thread.c the loop of the
 * engine thread.
 */
#include "../engine.h"

#include <sys/epoll.h>
#include <unistd.h>

_Atomic uint32_t *hvd_asleep_word(struct hvd_engine *engine)
{
    return engine->alone ? &engine->asleep_alone : &engine->host.control->seat[engine->host.rank].asleep.word;
}

/* Under a lock: if of two threads one took it and one gave it, and epoll heard of that in the other order, then the
 * engine thread would never hear its bell again. */
void hvd_mask_bell(struct hvd_engine *engine, bool masked)
{
    struct epoll_event entry = {.events = masked ? 0 : EPOLLIN | EPOLLET, .data.u64 = (uint64_t)HVD_EVENT_BELL << 32};
    pthread_mutex_lock(&engine->bell_lock);
    if (atomic_load(&engine->bell_masked) != masked) {
        atomic_store(&engine->bell_masked, masked);
        epoll_ctl(engine->epoll, EPOLL_CTL_MOD, engine->bell, &entry);
    }
    pthread_mutex_unlock(&engine->bell_lock);
}

void hvd_stream_give_bell(struct hvd_engine *engine)
{
    if (atomic_load_explicit(&engine->bell_masked, memory_order_relaxed))
        hvd_mask_bell(engine, false);
}

void hvd_turn_ring(struct hvd_engine *engine)
{
    uint64_t one = 1;
    hvd_stream_give_bell(engine);
    ssize_t written = engine->thread_runs ? write(engine->bell, &one, sizeof one) : 0;
    (void)written; /* EAGAIN: it is ringing already */
}

void hvd_turn_call(const struct hvd_engine *engine)
{
    uint64_t one = 1;
    ssize_t written = engine->thread_runs ? write(engine->call, &one, sizeof one) : 0;
    (void)written;
}

void hvd_turn_kick(struct hvd_engine *engine)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(hvd_asleep_word(engine), memory_order_relaxed)) {
        if (atomic_exchange(hvd_asleep_word(engine), 0))
            hvd_turn_ring(engine);
    } else if (atomic_load_explicit(&engine->dozing, memory_order_relaxed)) {
        hvd_turn_ring(engine);
    }
}

bool hvd_turn_take(struct hvd_engine *engine)
{
    uint32_t none = 0;
    if (atomic_load_explicit(&engine->turn, memory_order_relaxed) ||
        !atomic_compare_exchange_strong(&engine->turn, &none, 1))
        return false;
    if (atomic_load_explicit(hvd_asleep_word(engine), memory_order_relaxed))
        atomic_store(hvd_asleep_word(engine), 0);
    return true;
}
