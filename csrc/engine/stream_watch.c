/* stream_watch.c - the streams of process sets in the engine's hands.
 *
 * What is there to do beside reading and writing, which planes and votes do? Own the descriptors: close them whatever
 * becomes of the call that brought them, and in a forked child, which would keep a dead rank's streams open. And wake
 * the engine thread for them: it sleeps in epoll, and what is news changes with every step of a collective.
 *
 * WATCHING. Whoever leaves the turn says what would be news now (the plane's `watch`); each descriptor is armed for one
 * event. While a thread holds the turn it looks by itself, and an armed descriptor that speaks meanwhile wakes the
 * engine thread once, for nothing, and not again. One byte for each descriptor remembers what it is armed for, so that
 * what stays the same costs no system call: most of what p2p watches are ends of peers.
 *
 * A wake-up must not be lost between a holder that is leaving and the engine thread that finds the turn still held: so
 * the engine thread clears its seat's `asleep` word before it tries, as a peer that rings does, and a holder looks at
 * that word after it has let go.
 *
 * LISTENING. A waiter that holds the turn sleeps on the streams itself: a message then costs one wake-up instead of a
 * hand-off to the engine thread and another one back. Spinning would be no better: each look costs system calls, and a
 * spinner that has used up its time slice on a busy machine sits out everybody else's, milliseconds, when the message
 * comes, whereas a sleeper that wakes is preferred. News of this host's ranks come by the bell, as ever. The engine
 * thread would hear it, too, find the turn held and sleep again, for some 10 us of CPU each time: so a listener takes
 * the bell from it (`bell_masked`), and who leaves the turn to be woken by it gives it back. In between the engine
 * thread dozes and looks by itself, and a thread of this process that rings gives it back as well. The bell is watched
 * for edges, so that the engine thread reads nothing that the listener waits for. What only the engine thread serves
 * (an inquiry, a record, its end) does not come by the bell in this process, but by `call`.
 *
 * Where ranks outnumber the CPUs a waiter listens even without streams. Before, it yielded for 2 ms and then left the
 * turn: of 4 ranks on 2 CPUs that sleep for 0 to 1 ms between sends each used 3.9 ms of CPU in a step of 10.5 ms, and
 * now 1.3 ms in as long a step. What it does not use is there for ranks that compute.
 *
 * The bytes lie in sparse memory that is mapped with the first stream: a world of one host has none.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "engine.h"

#include "../base/shared_memory.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define ARMED_IN  0x01
#define ARMED_OUT 0x02
#define ARMED_END 0x04

#define NEWS_MAX          256
#define LOOK_FITTING_NS   30000u /* looking, before a listener sleeps */
#define LOOK_CROWDED_NS   5000u
#define LOOK_BUSY_NS      20000u /* the CPU has other work: without giving it away */
#define LOOK_NEAR_NS      25000u /* crowded, without streams: a look costs no system call */
#define SETTLE_NAP_NS     50000
#define SETTLE_NAP_MAX_NS 5000000
#define LISTEN_NS         20000000u /* then the turn is given back, for whoever else may want it */

static void arm(struct hvd_engine *engine, const struct pollfd *news, int count)
{
    for (int i = 0; i < count; i++) {
        int fd = news[i].fd;
        uint8_t want = (uint8_t)((news[i].events & POLLIN ? ARMED_IN : 0) | (news[i].events & POLLOUT ? ARMED_OUT : 0) |
                                 (news[i].events & POLLRDHUP ? ARMED_END : 0));
        uint8_t has = atomic_load(&engine->wire_byte[fd]);
        if ((has & want) == want) /* more than is wanted wakes once, for nothing */
            continue;
        struct epoll_event entry = {.events = (uint32_t)EPOLLONESHOT | (want & ARMED_IN ? (uint32_t)EPOLLIN : 0) |
                                              (want & ARMED_OUT ? (uint32_t)EPOLLOUT : 0) |
                                              (want & ARMED_END ? (uint32_t)EPOLLRDHUP : 0),
                                    .data.u64 = (uint64_t)HVD_EVENT_WIRE << 32 | (uint32_t)fd};
        atomic_store(&engine->wire_byte[fd], HVD_WIRE_OURS | want);
        if (epoll_ctl(engine->epoll, EPOLL_CTL_MOD, fd, &entry) != 0)
            epoll_ctl(engine->epoll, EPOLL_CTL_ADD, fd, &entry);
    }
}

/* What would be news to one set; news: room for HVD_NEAR_MAX and its ranks. Returns how many. */
static int news_of(const struct hvd_set *set, struct pollfd *news)
{
    int count = set->tree ? hvd_tree_watch(set->tree, news) : 0;
    if (set->moving.busy && set->moving.by && set->moving.by->plane->watch)
        count += set->moving.by->plane->watch(set->moving.by->self, news + count);
    return count;
}

void hvd_stream_watch(struct hvd_engine *engine)
{
    struct pollfd news[HVD_NEAR_MAX + HVD_RANKS_MAX];
    if (atomic_load(&engine->failed)) /* nobody reads any more: what comes would be news for ever */
        return;
    for (int i = 0; i < engine->sets; i++)
        arm(engine, news, news_of(engine->set[i], news));
}

/* Asleep until there may be news. False: there is too much to listen to. */
static bool sleep_on_news(struct hvd_engine *engine, uint64_t ns)
{
    struct pollfd news[NEWS_MAX] = {{.fd = engine->bell, .events = POLLIN}};
    nfds_t count = 1;
    for (int i = 0; i < engine->sets; i++) {
        if (count + HVD_NEAR_MAX + (nfds_t)engine->set[i]->size > NEWS_MAX)
            return false;
        count += (nfds_t)news_of(engine->set[i], news + count);
    }
    struct timespec timeout = {.tv_sec = 0, .tv_nsec = (long)ns};
    uint64_t rings;
    if (ppoll(news, count, &timeout, NULL) > 0 && news[0].revents) {
        ssize_t got = read(engine->bell, &rings, sizeof rings); /* who rang has stored the news before */
        (void)got;
    }
    return true;
}

bool hvd_stream_listen(struct hvd_engine *engine, bool asleep, uint64_t *since_ns,
                       bool (*look)(struct hvd_engine *engine))
{
    _Atomic uint32_t *word = &engine->host.control->seat[engine->host.rank].asleep.word;
    uint64_t now = hvd_now_ns();
    *since_ns = *since_ns ? *since_ns : now;
    engine->busy_cpus &= now < engine->busy_until_ns;
    uint64_t look_ns = engine->busy_cpus   ? LOOK_BUSY_NS
                       : engine->spins     ? LOOK_FITTING_NS
                       : engine->wire_byte ? LOOK_CROWDED_NS
                                           : LOOK_NEAR_NS;
    if (now - *since_ns < look_ns && engine->busy_cpus) {
        hvd_pause();
        return true;
    } else if (now - *since_ns < look_ns) {
        sched_yield(); /* who is waited for may be queued behind us: ranks of other hosts are not counted */
        return true;
    }
    if (!asleep || now - *since_ns >= LISTEN_NS || atomic_load(&engine->failed))
        return false;
    if (engine->thread_runs && !atomic_load_explicit(&engine->bell_masked, memory_order_relaxed))
        hvd_mask_bell(engine, true);
    atomic_store(&engine->listening, 1);
    atomic_store(word, 1);
    atomic_thread_fence(memory_order_seq_cst);
    bool on = look(engine) || sleep_on_news(engine, *since_ns + LISTEN_NS - now);
    atomic_store(word, 0);
    atomic_store(&engine->listening, 0);
    return on;
}

void hvd_stream_tell_listener(struct hvd_engine *engine)
{
    if (atomic_exchange(&engine->host.control->seat[engine->host.rank].asleep.word, 0) &&
        atomic_load(&engine->listening))
        hvd_turn_ring(engine); /* the listener believes that it will be rung */
}

void hvd_stream_heard(struct hvd_engine *engine, int fd)
{
    uint8_t has = atomic_load(&engine->wire_byte[fd]);
    while (has && !atomic_compare_exchange_weak(&engine->wire_byte[fd], &has, HVD_WIRE_OURS))
        ; /* 0: it was closed meanwhile */
    hvd_stream_tell_listener(engine);
}

static bool settled(struct hvd_stream_table *wires)
{
    bool all = true;
    for (int peer = 0; wires && peer < wires->size; peer++)
        if (wires->link[peer])
            all &= wires->of[peer].kind->settle(&wires->of[peer]);
    return all;
}

void hvd_stream_settle(struct hvd_engine *engine, int timeout_ms)
{
    uint64_t until_ns = hvd_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (long nap_ns = SETTLE_NAP_NS;; nap_ns = nap_ns < SETTLE_NAP_MAX_NS ? 2 * nap_ns : nap_ns) {
        bool all = true;
        for (int i = 0; i < engine->sets; i++) {
            struct hvd_tree *tree = engine->set[i]->tree; /* last words that found no room at once */
            for (int k = 0; tree && k < tree->count; k++)
                hvd_neighbor_flush(engine, engine->set[i], &tree->near[k]);
            all &= (!tree || hvd_tree_idle(tree)) && settled(engine->set[i]->vote_wires);
            all &= settled(engine->set[i]->wires);
        }
        if (all || hvd_now_ns() >= until_ns)
            return;
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL); /* no event tells of what was acknowledged */
    }
}

void hvd_stream_end(struct hvd_engine *engine)
{
    if (engine->wire_byte)
        hvd_memory_unmap(engine->wire_byte, HVD_WIRES_MAX);
    engine->wire_byte = NULL;
}

void hvd_stream_close_in_child(struct hvd_engine *engine)
{
    int high = atomic_load(&engine->wire_high);
    for (int fd = 0; fd < high; fd++)
        if (atomic_load(&engine->wire_byte[fd]))
            close(fd);
}
