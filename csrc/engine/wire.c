/* wire.c - the streams of process sets in the engine's hands.
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
 * The bytes lie in sparse memory that is mapped with the first stream: a world of one host has none.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "engine.h"

#include "../ground/memory.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define WIRES_MAX 65536 /* greatest descriptor + 1 */
#define OURS      0x80
#define ARMED_IN  0x01
#define ARMED_OUT 0x02
#define ARMED_END 0x04

#define NEWS_MAX          256
#define LOOK_FITTING_NS   30000u /* looking, before a listener sleeps */
#define LOOK_CROWDED_NS   5000u
#define SETTLE_NAP_NS     50000
#define SETTLE_NAP_MAX_NS 5000000
#define LISTEN_NS         20000000u /* then the turn is given back, for whoever else may want it */

static void drop(const int *fd, int count)
{
    for (int i = 0; fd && i < count; i++)
        if (fd[i] >= 0)
            close(fd[i]);
}

void hvd_wire_drop(const struct hvd_streams *streams, int count)
{
    drop(streams->vote_fd, count);
    drop(streams->tensor_fd, count);
}

static int note(struct hvd_engine *engine, int fd, struct hvd_error *error)
{
    if (fd >= WIRES_MAX)
        return hvd_fail(error, HVD_EINIT, HVD120 "rank %d: descriptor %d is beyond %d, the greatest for a stream",
                        engine->options.rank, fd, WIRES_MAX - 1);
    if (!engine->wire_byte)
        engine->wire_byte = hvd_memory_private(WIRES_MAX, error);
    if (!engine->wire_byte)
        return HVD_ENOMEM;
    atomic_store(&engine->wire_byte[fd], OURS);
    if (fd >= atomic_load(&engine->wire_high))
        atomic_store(&engine->wire_high, fd + 1);
    return HVD_OK;
}

static struct hvd_wires *new_wires(struct hvd_engine *engine, int size, struct hvd_error *error)
{
    struct hvd_wires *wires = calloc(1, sizeof *wires + (size_t)size * (sizeof wires->of[0] + sizeof wires->link[0]));
    if (!wires) {
        hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for streams", engine->options.rank);
        return NULL;
    }
    wires->size = size;
    wires->of = (struct hvd_link *)(wires + 1);
    wires->link = (struct hvd_link **)(wires->of + size);
    return wires;
}

/* Over the stream, or over it and signed. */
static int open_link(struct hvd_link *link, int fd, int peer, const unsigned char *keys, const char *what,
                     struct hvd_error *error)
{
    struct hvd_link_signing signing = {keys, what};
    link->self = &signing;
    return keys ? hvd_link_signed.open(link, fd, peer, error) : hvd_link_tcp.open(link, fd, peer, error);
}

int hvd_wire_open(struct hvd_engine *engine, const struct hvd_streams *streams, bool votes, const int *member, int size,
                  struct hvd_wires **wires, struct hvd_error *error)
{
    const int *fd = votes ? streams->vote_fd : streams->tensor_fd;
    const unsigned char *keys = votes ? streams->vote_keys : streams->tensor_keys;
    *wires = NULL;
    if (!fd)
        return HVD_OK;
    struct hvd_wires *mine = new_wires(engine, size, error);
    int code = mine ? HVD_OK : HVD_ENOMEM;
    for (int peer = 0; peer < size; peer++) {
        if (fd[peer] < 0)
            continue;
        if (code == HVD_OK)
            code = note(engine, fd[peer], error);
        if (code == HVD_OK)
            code = open_link(&mine->of[peer], fd[peer], peer, keys ? keys + (size_t)peer * HVD_KEY_PAIR_BYTES : NULL,
                             votes ? "votes" : "tensors", error);
        if (code != HVD_OK) {
            if (engine->wire_byte && fd[peer] < WIRES_MAX)
                atomic_store(&engine->wire_byte[fd[peer]], 0);
            close(fd[peer]);
            continue;
        }
        hvd_text_copy(mine->of[peer].called, sizeof mine->of[peer].called, engine->who[member[peer]].called);
        mine->of[peer].kind->give_up_after(&mine->of[peer], engine->options.peer_timeout_ms, votes);
        mine->link[peer] = &mine->of[peer];
    }
    if (code != HVD_OK && mine) {
        hvd_wire_close(engine, mine);
        mine = NULL;
    }
    *wires = mine;
    return code;
}

int hvd_wire_open_mpi(struct hvd_engine *engine, uintptr_t comm, const int *member, int size, const int *peers,
                      int count, struct hvd_wires **wires, struct hvd_error *error)
{
    struct hvd_wires *mine = *wires = new_wires(engine, size, error);
    for (int i = 0; mine && i < count; i++) {
        struct hvd_link *link = &mine->of[peers[i]];
        link->self = (void *)comm;
        int code = hvd_link_mpi.open(link, -1, peers[i], error);
        if (code != HVD_OK)
            return code; /* what is there is closed with the set */
        hvd_text_copy(link->called, sizeof link->called, engine->who[member[peers[i]]].called);
        mine->link[peers[i]] = link;
    }
    return mine ? HVD_OK : HVD_ENOMEM;
}

void hvd_wire_close(struct hvd_engine *engine, struct hvd_wires *wires)
{
    if (!wires)
        return;
    for (int peer = 0; peer < wires->size; peer++)
        if (wires->link[peer]) {
            if (wires->of[peer].fd >= 0)
                atomic_store(&engine->wire_byte[wires->of[peer].fd], 0); /* epoll forgets what is closed */
            wires->of[peer].kind->close(&wires->of[peer]);
        }
    free(wires);
}

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
        atomic_store(&engine->wire_byte[fd], OURS | want);
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

void hvd_wire_watch(struct hvd_engine *engine)
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

/* Under a lock: if of two threads one took it and one gave it, and epoll heard of that in the other order, then the
 * engine thread would never hear its bell again. */
static void mask_bell(struct hvd_engine *engine, bool masked)
{
    struct epoll_event entry = {.events = masked ? 0 : EPOLLIN | EPOLLET, .data.u64 = (uint64_t)HVD_EVENT_BELL << 32};
    pthread_mutex_lock(&engine->bell_lock);
    if (atomic_load(&engine->bell_masked) != masked) {
        atomic_store(&engine->bell_masked, masked);
        epoll_ctl(engine->epoll, EPOLL_CTL_MOD, engine->bell, &entry);
    }
    pthread_mutex_unlock(&engine->bell_lock);
}

void hvd_wire_give_bell(struct hvd_engine *engine)
{
    if (atomic_load_explicit(&engine->bell_masked, memory_order_relaxed))
        mask_bell(engine, false);
}

bool hvd_wire_listen(struct hvd_engine *engine, bool asleep, uint64_t *since_ns)
{
    _Atomic uint32_t *word = &engine->host.control->seat[engine->host.rank].asleep.word;
    uint64_t now = hvd_now_ns();
    *since_ns = *since_ns ? *since_ns : now;
    if (now - *since_ns < (engine->spins ? LOOK_FITTING_NS : LOOK_CROWDED_NS)) {
        sched_yield(); /* who is waited for may be queued behind us: ranks of other hosts are not counted */
        return true;
    }
    if (!asleep || now - *since_ns >= LISTEN_NS || atomic_load(&engine->failed))
        return false;
    if (engine->thread_runs && !atomic_load_explicit(&engine->bell_masked, memory_order_relaxed))
        mask_bell(engine, true);
    atomic_store(&engine->listening, 1);
    atomic_store(word, 1);
    atomic_thread_fence(memory_order_seq_cst);
    bool on = hvd_turn_once(engine) || sleep_on_news(engine, *since_ns + LISTEN_NS - now);
    atomic_store(word, 0);
    atomic_store(&engine->listening, 0);
    return on;
}

static void add(struct hvd_link_counts *sum, const struct hvd_wires *wires)
{
    for (int peer = 0; wires && peer < wires->size; peer++) {
        const struct hvd_link_counts *counts = &wires->of[peer].counts;
        sum->bytes_out += counts->bytes_out;
        sum->bytes_in += counts->bytes_in;
        sum->messages_out += counts->messages_out;
        sum->messages_in += counts->messages_in;
    }
}

void hvd_wire_count(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_link_counts now = {0}, *before = &set->crossed;
    add(&now, set->wires);
    add(&now, set->vote_wires);
    hvd_count(engine, HVD_COUNT_link_bytes_out, (int64_t)(now.bytes_out - before->bytes_out));
    hvd_count(engine, HVD_COUNT_link_bytes_in, (int64_t)(now.bytes_in - before->bytes_in));
    hvd_count(engine, HVD_COUNT_link_messages_out, (int64_t)(now.messages_out - before->messages_out));
    hvd_count(engine, HVD_COUNT_link_messages_in, (int64_t)(now.messages_in - before->messages_in));
    *before = now;
}

struct asked {
    struct hvd_engine *engine;
    int number, peer, found;
    struct hvd_link_counts *counts;
};

static bool stopped(void *self)
{
    return atomic_load(&((struct asked *)self)->engine->stopped);
}

/* With the turn, whose the counts are. */
static bool look_up(void *self)
{
    struct asked *asked = self;
    const struct hvd_set *set = asked->engine->by_number[asked->number];
    struct hvd_wires *wires[] = {set ? set->wires : NULL, set ? set->vote_wires : NULL};
    for (int i = 0; i < 2; i++) {
        if (!wires[i] || asked->peer >= wires[i]->size || !wires[i]->link[asked->peer])
            continue;
        const struct hvd_link_counts *counts = &wires[i]->link[asked->peer]->counts;
        asked->counts->bytes_out += counts->bytes_out;
        asked->counts->bytes_in += counts->bytes_in;
        asked->counts->messages_out += counts->messages_out;
        asked->counts->messages_in += counts->messages_in;
        asked->found = 1;
    }
    return true;
}

int hvd_wire_counts(struct hvd_engine *engine, int number, int peer, struct hvd_link_counts *counts)
{
    struct asked asked = {.engine = engine, .number = number, .peer = peer, .counts = counts};
    *counts = (struct hvd_link_counts){0};
    if (number < 0 || number >= HVD_SETS_MAX || peer < 0)
        return 0;
    while (!stopped(&asked))
        if (hvd_turn_take_over(engine, stopped, &asked)) {
            hvd_turn_drive(engine, look_up, &asked, 0);
            return asked.found;
        }
    return HVD_ESTATE;
}

void hvd_wire_heard(struct hvd_engine *engine, int fd)
{
    uint8_t has = atomic_load(&engine->wire_byte[fd]);
    while (has && !atomic_compare_exchange_weak(&engine->wire_byte[fd], &has, OURS))
        ; /* 0: it was closed meanwhile */
    if (atomic_exchange(&engine->host.control->seat[engine->host.rank].asleep.word, 0) &&
        atomic_load(&engine->listening))
        hvd_turn_ring(engine); /* the listener believes that it will be rung */
}

static bool settled(struct hvd_wires *wires)
{
    bool all = true;
    for (int peer = 0; wires && peer < wires->size; peer++)
        if (wires->link[peer])
            all &= wires->of[peer].kind->settle(&wires->of[peer]);
    return all;
}

void hvd_wire_settle(struct hvd_engine *engine, int timeout_ms)
{
    uint64_t until_ns = hvd_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (long nap_ns = SETTLE_NAP_NS;; nap_ns = nap_ns < SETTLE_NAP_MAX_NS ? 2 * nap_ns : nap_ns) {
        bool all = true;
        for (int i = 0; i < engine->sets; i++) {
            all &= settled(engine->set[i]->vote_wires);
            all &= settled(engine->set[i]->wires);
        }
        if (all || hvd_now_ns() >= until_ns)
            return;
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL); /* no event tells of what was acknowledged */
    }
}

void hvd_wire_end(struct hvd_engine *engine)
{
    if (engine->wire_byte)
        hvd_memory_unmap(engine->wire_byte, WIRES_MAX);
    engine->wire_byte = NULL;
}

void hvd_wire_close_in_child(struct hvd_engine *engine)
{
    int high = atomic_load(&engine->wire_high);
    for (int fd = 0; fd < high; fd++)
        if (atomic_load(&engine->wire_byte[fd]))
            close(fd);
}
