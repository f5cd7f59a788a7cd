/* deferred_wake.c - submissions that wake nobody now, and yet are sent within a millisecond.
 *
 * To wake a sleeping engine thread costs the submitter some microseconds, and on a machine whose CPUs are all taken by
 * the ranks' own threads that thread then works against them. Who submits many small tensors and waits for them at
 * the end is better off doing it all himself, in one round. Who does not wait must not be forgotten. Nobody knows
 * which of the two a caller is, so the first such submission sets an alarm clock (a timerfd in the engine
 * thread's epoll), and a waiter who takes the turn before it rings turns it off.
 *
 * The same clock serves works of planes that wake nobody (MPI), and votes that cross from host to host over MPI: the
 * engine thread looks again after 30 us, and up to a millisecond later each time that nothing has moved. For votes that
 * never ends, since any host may open a round.
 *
 * And MPI may owe others bytes of works that are over here (`linger` of a plane): the engine thread calls it again
 * after a millisecond, and as long again as it has been quiet, up to 128 ms. That never ends either, as nobody tells
 * when the last of these bytes has come; but it does not keep the alarm clock from others. The thread that ends a work
 * may not be the engine thread, which then sleeps for what is left of these 128 ms: whoever leaves the turn behind such
 * a work sets the alarm clock for that millisecond, or the others would wait so long for a broadcast.
 *
 * Nothing is lost: a submitter pushes and then looks at `armed`; whoever clears `armed` looks at the queue after
 * that, both sequentially consistent, so that one of them sees the other. The lock keeps `armed` and the timer
 * in step; who finds it armed does not take it.
 */
#include "engine.h"

#include <sys/timerfd.h>
#include <unistd.h>

#define SOON_NS      1000000
#define NAP_FIRST_NS 30000L
#define NAPS_GROWING 5 /* to a millisecond */

#define LINGER_FIRST_NS 1000000
#define LINGER_LAST_NS  128000000
#define LINGER_TAKEN_NS 10000000u /* somebody else has the turn: if he waits for MPI, he calls it */

static void set(struct hvd_alarm *soon, uint32_t armed, long ns)
{
    const struct itimerspec when = {.it_value.tv_nsec = ns};
    pthread_mutex_lock(&soon->lock);
    if (atomic_exchange(&soon->armed, armed) != armed)
        timerfd_settime(soon->timer, 0, &when, NULL);
    pthread_mutex_unlock(&soon->lock);
}

bool hvd_alarm_open(struct hvd_alarm *soon)
{
    pthread_mutex_init(&soon->lock, NULL);
    soon->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    return soon->timer >= 0;
}

void hvd_alarm_close(struct hvd_alarm *soon)
{
    if (soon->timer >= 0) {
        close(soon->timer);
        pthread_mutex_destroy(&soon->lock);
    }
    soon->timer = -1;
}

static void arm(struct hvd_alarm *soon, long ns)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&soon->armed, memory_order_relaxed))
        set(soon, 1, ns);
}

void hvd_alarm_arm(struct hvd_alarm *soon)
{
    arm(soon, SOON_NS);
}

enum hvd_silence hvd_alarm_silence(const struct hvd_engine *engine)
{
    enum hvd_silence most = HVD_RINGS;
    if (!atomic_load_explicit(&engine->silent, memory_order_relaxed))
        return most;
    for (int i = 0; i < engine->sets; i++) {
        const struct hvd_moving *moving = &engine->set[i]->moving;
        if (engine->set[i]->on_stream || (engine->set[i]->tree && engine->set[i]->tree->polled))
            most = HVD_SILENT;
        if (!moving->busy || moving->waits)
            continue;
        bool staged = moving->stage.phase != HVD_STAGE_NONE;
        const struct hvd_plane *plane = moving->by ? moving->by->plane : NULL;
        if (plane && (plane->polled))
            return HVD_POLLED;
        if (staged || (moving->by && moving->by->plane->silent))
            most = HVD_SILENT;
    }
    return most;
}

void hvd_alarm_nap(struct hvd_engine *engine)
{
    if (!engine->thread_runs || atomic_load_explicit(&engine->failed, memory_order_relaxed))
        return;
    if (hvd_alarm_silence(engine) == HVD_RINGS) {
        if (engine->linger.owes) /* the engine thread may just have begun to sleep for long */
            arm(&engine->soon, LINGER_FIRST_NS);
        return;
    }
    long ns = NAP_FIRST_NS << (engine->naps < NAPS_GROWING ? engine->naps++ : NAPS_GROWING);
    arm(&engine->soon, ns);
}

void hvd_alarm_disarm(struct hvd_alarm *soon)
{
    if (atomic_load_explicit(&soon->armed, memory_order_relaxed))
        set(soon, 0, 0);
    atomic_thread_fence(memory_order_seq_cst);
}

void hvd_alarm_rang(struct hvd_alarm *soon)
{
    uint64_t times;
    ssize_t got = read(soon->timer, &times, sizeof times);
    (void)got; /* EAGAIN: turned off, or set anew, meanwhile */
    atomic_store(&soon->armed, 0);
    atomic_thread_fence(memory_order_seq_cst);
}

void hvd_alarm_linger(struct hvd_engine *engine)
{
    bool any = false;
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed)) {
        engine->linger.next_ns = 0;
        return;
    }
    for (int i = 0; i < engine->sets; i++) {
        const struct hvd_set *set = engine->set[i];
        for (int k = 0; k < set->planes_count; k++)
            if (set->planes[k].plane->linger && !set->planes[k].refused) {
                set->planes[k].plane->linger(set->planes[k].self);
                any = true;
            }
    }
    uint64_t now = any ? hvd_now_ns() : 0, quiet_ns;
    if (engine->linger.owes || engine->linger.next_ns == 0)
        engine->linger.since_ns = now;
    engine->linger.owes = false;
    quiet_ns = now - engine->linger.since_ns;
    quiet_ns = quiet_ns < LINGER_FIRST_NS ? LINGER_FIRST_NS : quiet_ns > LINGER_LAST_NS ? LINGER_LAST_NS : quiet_ns;
    engine->linger.next_ns = any ? now + quiet_ns : 0;
}

int hvd_alarm_until_alarm(struct hvd_engine *engine, int sleep_ms)
{
    uint64_t alarm_ns = atomic_load_explicit(&engine->alarm_ns, memory_order_relaxed), now;
    if (engine->hosts > 1) {
        uint64_t tick_ns = engine->ticked_ns + (uint64_t)hvd_silence_tick_ms(engine) * 1000000u;
        alarm_ns = alarm_ns && alarm_ns < tick_ns ? alarm_ns : tick_ns;
    }
    if (engine->stall.next_ns != UINT64_MAX && engine->stall.next_ns)
        alarm_ns = alarm_ns && alarm_ns < engine->stall.next_ns ? alarm_ns : engine->stall.next_ns;
    if (alarm_ns == 0 && engine->linger.next_ns == 0)
        return sleep_ms;
    now = hvd_now_ns();
    if (engine->linger.next_ns) {
        if (engine->linger.next_ns <= now)
            engine->linger.next_ns = now + LINGER_TAKEN_NS;
        alarm_ns = alarm_ns && alarm_ns < engine->linger.next_ns ? alarm_ns : engine->linger.next_ns;
    }
    int left_ms = alarm_ns > now ? (int)((alarm_ns - now) / 1000000u) + 1 : 1;
    return sleep_ms < 0 || left_ms < sleep_ms ? left_ms : sleep_ms;
}
