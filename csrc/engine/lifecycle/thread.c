/* thread.c - the engine thread: what wakes it, and how long it may sleep then.
 *
 * It sleeps in epoll, on its bell, what calls it alone, the clock of deferred_wake.c, what asks for a flight record,
 * the store, the peers' pidfds and the streams that stream_watch.c arms. Each time it wakes it looks at what needs no
 * turn (a death, silence, an inquiry), and tries for the turn; if somebody else has it, that thread does the work
 * (progress.c).
 */
#define _GNU_SOURCE
#include "../engine.h"

#include "../state/store_frames.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void forget_descriptor(struct hvd_engine *engine, int fd)
{
    epoll_ctl(engine->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* All that is there: it is watched for edges, so that a part of a frame wakes nobody before the next one comes. */
static void hear_store(struct hvd_engine *engine)
{
    struct hvd_error error = {0};
    int code;
    while ((code = hvd_report_read(&engine->host.store, &error)) != HVD_AGAIN) {
        bool last = error.culprit < 0; /* none of the store's frames; or its end */
        if (last)
            forget_descriptor(engine, engine->host.store.fd);
        if (!hvd_abort_has_left(engine, error.culprit))
            hvd_engine_abort(engine, error.culprit, code, error.text);
        if (last)
            return;
        hvd_error_none(&error);
    }
}

static void hear(struct hvd_engine *engine, uint64_t tag)
{
    int rank = (int)(tag & 0xffffffff);
    switch ((int)(tag >> 32)) {
    case HVD_EVENT_BELL: /* an edge: what it counts is for hvd_stream_listen */
        break;
    case HVD_EVENT_SOON:
        hvd_alarm_rang(&engine->soon);
        break;
    case HVD_EVENT_STORE:
        hear_store(engine);
        break;
    case HVD_EVENT_PIDFD:
        forget_descriptor(engine, engine->host.pidfd[rank]);
        hvd_abort_lost(engine, rank);
        break;
    case HVD_EVENT_WIRE:
        hvd_stream_heard(engine, rank);
        break;
    case HVD_EVENT_SOCKET:
        forget_descriptor(engine, engine->host.socket[rank]);
        hvd_abort_lost(engine, rank);
        break;
    }
}

/* The engine thread looks around once; how long it may sleep then, for epoll. A tick: nobody has rung. */
static int look_around(struct hvd_engine *engine, bool tick)
{
    if (tick && hvd_handles_queued(&engine->handles) && !engine->patience) {
        engine->patience = true; /* somebody is about to submit more and to wait for it */
        return HVD_DOZE_MS;
    }
    engine->patience = false;
    uint32_t asked = HVD_DOZE_ASKED;
    atomic_compare_exchange_strong(&engine->dozing, &asked, HVD_DOZE_HEARD);
    if (!hvd_turn_take(engine)) {
        if (hvd_handles_queued(&engine->handles))
            hvd_stream_tell_listener(engine); /* what is quiet has not */
        return atomic_load(&engine->dozing) == HVD_DOZE_HEARD || hvd_handles_queued(&engine->handles) ||
                       atomic_load(&engine->polled)
                   ? HVD_DOZE_MS
                   : -1;
    }
    if (engine->cpu_each)
        hvd_turn_go_to_cpu(engine);
    hvd_alarm_linger(engine);
    if (atomic_load(&engine->dozing) == HVD_DOZE_HEARD) {
        while (hvd_turn_once(engine))
            ;
        if (engine->active-- > 0 && !hvd_engine_busy(engine)) {
            atomic_store(&engine->turn, 0);
            return HVD_DOZE_MS;
        }
        atomic_store(&engine->dozing, 0);
    }
    hvd_turn_run(engine);
    return -1;
}

/* Somebody else has the turn: then something moves, or he gives it back within milliseconds. */
static void tick_of_silence(struct hvd_engine *engine)
{
    uint64_t now = hvd_now_ns();
    bool due = engine->hosts > 1 && now - engine->ticked_ns >= (uint64_t)hvd_silence_tick_ms(engine) * 1000000u;
    bool taken = due && hvd_turn_take(engine);
    atomic_store(&engine->tick_due, due && !taken);
    if (!taken)
        return;
    engine->ticked_ns = now;
    hvd_silence_tick(engine);
    hvd_turn_run(engine);
}

static void *thread_main(void *self)
{
    struct hvd_engine *engine = self;
    struct epoll_event events[16];
    bool tick = false;
    while (!atomic_load(&engine->stop)) {
        int sleep_ms = hvd_alarm_until_alarm(engine, look_around(engine, tick));
        hvd_flight_due(engine);
        hvd_count(engine, HVD_COUNT_sleeps, 1);
        int count = epoll_wait(engine->epoll, events, HVD_COUNT_OF(events), sleep_ms);
        tick = count == 0;
        tick_of_silence(engine);
        hvd_stall_look(engine);
        for (int i = 0; i < count; i++)
            hear(engine, events[i].data.u64);
    }
    return NULL;
}

static bool watch(struct hvd_engine *engine, int fd, int event, int rank, uint32_t what)
{
    struct epoll_event entry = {.events = what, .data.u64 = (uint64_t)event << 32 | (uint32_t)rank};
    return fd < 0 || epoll_ctl(engine->epoll, EPOLL_CTL_ADD, fd, &entry) == 0;
}

int hvd_turn_thread_start(struct hvd_engine *engine, struct hvd_error *error)
{
    engine->bell = engine->host.bells.eventfd[engine->host.rank];
    engine->epoll = epoll_create1(EPOLL_CLOEXEC);
    engine->call = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    bool all = engine->epoll >= 0 && engine->call >= 0 && hvd_alarm_open(&engine->soon) &&
               watch(engine, engine->bell, HVD_EVENT_BELL, 0, EPOLLIN | EPOLLET) &&
               watch(engine, engine->call, HVD_EVENT_BELL, 0, EPOLLIN | EPOLLET) &&
               watch(engine, engine->soon.timer, HVD_EVENT_SOON, 0, EPOLLIN) &&
               watch(engine, engine->flight.asked, HVD_EVENT_BELL, 0, EPOLLIN | EPOLLET) &&
               watch(engine, engine->host.store.fd, HVD_EVENT_STORE, 0, EPOLLIN | EPOLLET);
    for (int rank = 0; rank < engine->host.size && all; rank++) {
        all = watch(engine, engine->host.pidfd[rank], HVD_EVENT_PIDFD, rank, EPOLLIN);
        if (engine->host.pidfd[rank] < 0) /* no pidfd: the socket's end of file tells, where there is a socket */
            all = all && watch(engine, engine->host.socket[rank], HVD_EVENT_SOCKET, rank, EPOLLRDHUP);
    }
    if (!all)
        return hvd_fail(error, HVD_EINIT, HVD120 "epoll cannot be set up (%s); is the limit of open files too low?",
                        strerror(errno));
    /* Signals are Python's: they must reach its main thread, never this one. */
    sigset_t block, before;
    sigfillset(&block);
    pthread_sigmask(SIG_SETMASK, &block, &before);
    engine->thread_runs = true;
    int failed = pthread_create(&engine->thread, NULL, thread_main, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        engine->thread_runs = false;
        return hvd_fail(error, HVD_EINIT, HVD952 "the engine thread cannot be started (%s)", strerror(failed));
    }
    return HVD_OK;
}

void hvd_turn_thread_stop(struct hvd_engine *engine)
{
    if (engine->thread_runs) {
        atomic_store(&engine->stop, 1);
        hvd_turn_call(engine);
        pthread_join(engine->thread, NULL);
        engine->thread_runs = false;
    }
    if (engine->epoll >= 0)
        close(engine->epoll);
    if (engine->call >= 0)
        close(engine->call);
    engine->epoll = engine->call = -1;
}
