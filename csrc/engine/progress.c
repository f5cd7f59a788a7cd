/* progress.c - the progress engine: who runs it, who sleeps, and who wakes whom.
 *
 * THE TURN is a token: one atomic word. Its holder passes over everything (abort word, submissions, and of each
 * process set the votes and the moving bucket) again and again while anything moves. The engine thread holds it when
 * work goes on in the background; a thread that waits for a collective takes it while the engine thread sleeps, which
 * spares two hand-offs between threads (some 20 us each on a virtual machine). A plane that is bound to one thread
 * forbids that.
 *
 * SLEEPING. The engine thread sleeps in epoll: own doorbell (eventfd), the peers' pidfds, the store. The seat's
 * `asleep` word says "nobody here looks": whoever has news for this rank (a peer, or a submitting thread)
 * clears it and rings. Leaving the turn therefore goes: set the word, fence, look once more, release, and
 * look whether somebody rang in between (then that wake-up may have found the turn taken and been lost).
 * Death is noticed by the engine thread even while another thread holds the turn: it needs no turn to write
 * the abort word, and the holder looks at that word in every pass.
 *
 * GIVING WAY. Where the engine thread holds the turn while a thread comes to wait, every collective would cost two
 * hand-offs, for ever: it finds the next submission before it gives the turn up. So a waiter counts itself among the
 * `takers` and tries for a little; the engine thread sees that and releases the turn at once. A taker that gives up
 * looks once more after it has stopped counting, and the engine thread looks at the count once more after it has
 * released: one of them has the turn then, or another holder has.
 *
 * DOZING. A loop of small collectives takes and leaves the turn every few microseconds; if each time peers had to
 * ring, and thereby woke an engine thread that has nothing to do, that would cost more than the collectives. So
 * when a waiter leaves twice within some milliseconds, the engine thread is told to doze: it looks by itself every
 * millisecond, nobody rings, and when ten of them went by without a waiter it falls asleep properly. Until it has
 * heard so, nobody relies on it. It is not told by the bell, which a listener may take from it before it wakes
 * (stream_watch.c): then epoll forgets the ring, as it would what only the engine thread serves. A round that this rank
 * has entered without having anything in it needs nobody: its vote lies on its board.
 *
 * SILENT PLANES. MPI wakes nobody. While a work of such a plane is under way, whoever leaves the turn sets the alarm
 * clock of deferred_wake.c, and the engine thread looks again: after 30 us, and up to a millisecond later each time
 * that nothing has moved. MPI even moves nothing unless it is called (`polled`), so a waiter calls it, yielding, for as
 * long as such a work is under way: all ranks have agreed on it, so all are at it. It gives way to the clock of
 * silence.c only.
 *
 * A CPU FOR EACH RANK. Where a host has as many ranks as CPUs, the engine thread shall work on the CPU of the thread
 * that submits. Linux wakes it on another one as readily: engine threads of two ranks on one CPU delay the rank that
 * computes there, and all others wait for that rank (98 MB of gradients, 2 ranks: 12 ms of a step, instead of 8). So
 * each submission writes down its CPU, and an engine thread that finds itself on another rank's CPU moves to its own,
 * and is bound to it from then on (if it may leave again: 10 ms). Not where CUDA is found: NCCL's threads would inherit
 * the binding. `hvdlite-run --bind-to` binds whole ranks.
 *
 * BUSY CPUS. Ranks may fit the CPUs and other work may be there all the same. A waiter that spins then uses up its time
 * slice, and sits out everybody else's when the news comes; a sleeper that wakes is preferred. It shows in the
 * waiter's own clock: two readings that lie far apart. Then waiters sleep on their bell, without streams too, for
 * BUSY_NS and twice as long each time that it shows again soon after. With HVDLITE_SPIN_US they do as they are asked.
 *
 * A waiter spins only while ranks fit the usable CPUs, and no longer than spin_ns without progress. Ranks may fit, and
 * two of them be on one CPU all the same, since somebody else has the other: each writes down where it runs, and who
 * sees that after some pauses yields (4 KB on such a CPU: 130 us without that look). The engine thread spins only while
 * somebody waits. Where ranks do not fit, or there are streams, a waiter looks for a moment and then sleeps on its bell
 * and the streams with the turn in hand (stream_watch.c). Only where a plane is silent it pauses five times and yields
 * instead.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <sched.h>
#include <unistd.h>

#define PAUSES_CROWDED   5    /* measured: 100 pauses double the time of an op when ranks outnumber CPUs */
#define PAUSES_FITTING   1000 /* some 30 us; then give way, because the peer may be queued behind us on this CPU */
#define PAUSES_PER_CLOCK 64
#define LOST_CPU_NS      150000u /* between two readings of the clock, some microseconds apart: other work was run */
#define BUSY_NS          10000000u
#define BUSY_MAX_NS      1000000000u
#define TAKE_TRY_NS      500000u /* for a turn that another thread holds: some passes of the engine thread */

static void leave_all_sets(struct hvd_engine *engine)
{
    atomic_store(&engine->leave_wanted, 2);
    for (int i = 0; i < engine->sets; i++)
        if (!engine->set[i]->alone)
            hvd_coord_leave(engine->set[i]->coord);
}

bool hvd_turn_once(struct hvd_engine *engine)
{
    bool moved = hvd_abort_seen(engine);
    if (hvd_handles_queued(&engine->handles))
        moved |= hvd_votes_submit_queued(engine);
    if (!atomic_load_explicit(&engine->failed, memory_order_relaxed)) {
        if (engine->suspicion.since_ns)
            moved |= hvd_abort_judge(engine);
        if (atomic_load_explicit(&engine->leave_wanted, memory_order_relaxed) == 1)
            leave_all_sets(engine);
        for (int i = 0; i < engine->sets; i++) {
            moved |= hvd_votes_step(engine, engine->set[i]);
            moved |= hvd_work_step(engine, engine->set[i]);
        }
    }
    return moved;
}

bool hvd_turn_take_over(struct hvd_engine *engine, bool (*done)(void *self), void *self)
{
    if (hvd_turn_take(engine))
        return true;
    bool taken = false;
    uint64_t until_ns = hvd_now_ns() + TAKE_TRY_NS;
    atomic_fetch_add(&engine->takers, 1);
    for (uint32_t i = 1; !taken && !done(self); i++) {
        if (engine->spins && i < PAUSES_FITTING)
            hvd_pause();
        else
            sched_yield();
        taken = hvd_turn_take(engine);
        if (i % 16 == 0 && hvd_now_ns() >= until_ns)
            break;
    }
    atomic_fetch_sub(&engine->takers, 1);
    return taken || hvd_turn_take(engine); /* the engine thread may just have stepped aside */
}

/* By the engine thread. False: nobody took the turn after all, and it is still held. */
static bool step_aside(struct hvd_engine *engine)
{
    atomic_store(&engine->turn, 0);
    return atomic_load(&engine->takers) || !hvd_turn_take(engine);
}

/* A waiter has what it came for. True: the turn was released to a dozing engine thread. */
static bool leave_dozing(struct hvd_engine *engine)
{
    if (hvd_engine_busy(engine) || hvd_handles_queued(&engine->handles))
        return false; /* there is work: somebody must do it now */
    uint32_t dozing = atomic_load_explicit(&engine->dozing, memory_order_relaxed);
    if (dozing == HVD_DOZE_ASKED) /* it has not heard yet */
        return false;
    if (!dozing) {
        uint64_t now = hvd_now_ns(), before = engine->left_turn_ns;
        engine->left_turn_ns = now;
        if (now - before > HVD_DOZE_MS * HVD_DOZE_TICKS * 1000000u)
            return false;
        atomic_store(&engine->dozing, HVD_DOZE_ASKED);
        hvd_turn_call(engine);
    }
    engine->active = HVD_DOZE_TICKS;
    atomic_store(&engine->turn, 0);
    return true;
}

/* True: the turn is released. False: there is more to do and it is still held. hand_over: the caller has what it
 * came for; the engine thread shall do the rest. */
static bool leave(struct hvd_engine *engine, bool hand_over)
{
    hand_over &= engine->thread_runs;
    if (hand_over && leave_dozing(engine))
        return true;
    hvd_stream_give_bell(engine);
    atomic_store(hvd_asleep_word(engine), 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (hvd_turn_once(engine)) {
        engine->naps = 0;
        atomic_store(hvd_asleep_word(engine), 0);
        if (!hand_over)
            return false;
        atomic_store(&engine->turn, 0);
        hvd_turn_ring(engine);
        return true;
    }
    if (engine->wire_byte)
        hvd_stream_watch(engine);
    if (atomic_load_explicit(&engine->silent, memory_order_relaxed))
        hvd_alarm_nap(engine);
    atomic_store(&engine->turn, 0);
    if (atomic_load(hvd_asleep_word(engine)))
        return true;
    if (!hand_over)
        return !hvd_turn_take(engine);
    hvd_turn_ring(engine);
    return true;
}

/* Is that CPU, as a seat has it, where another rank of this host runs? */
static bool is_of_another(const struct hvd_engine *engine, int32_t cpu)
{
    bool another = false;
    for (int i = 0; i < engine->host.size; i++)
        another |= i != engine->host.rank &&
                   atomic_load_explicit(&engine->host.control->seat[i].cpu, memory_order_relaxed) == cpu;
    return another;
}

void hvd_turn_note_cpu(const struct hvd_engine *engine)
{
    _Atomic int32_t *cpu = &engine->host.control->seat[engine->host.rank].cpu;
    int32_t here = sched_getcpu() + 1;
    if (atomic_load_explicit(cpu, memory_order_relaxed) != here)
        atomic_store_explicit(cpu, here, memory_order_relaxed);
}

void hvd_turn_go_to_cpu(const struct hvd_engine *engine)
{
    const struct hvd_control *control = engine->host.control;
    int32_t own = atomic_load_explicit(&control->seat[engine->host.rank].cpu, memory_order_relaxed);
    int32_t here = sched_getcpu() + 1;
    if (own && own != here && is_of_another(engine, here))
        hvd_move_to_cpu(own - 1);
}

/* Notes where this rank runs. Is another one of this host waited for on the same CPU, behind us? */
static bool shares_cpu(const struct hvd_engine *engine, bool look)
{
    if (!engine->host.control)
        return false;
    hvd_turn_note_cpu(engine);
    return look && is_of_another(engine, sched_getcpu() + 1);
}

/* Without spinning there is nothing but yielding or sleeping; a world of one has no bell to sleep on. */
static bool listens(const struct hvd_engine *engine)
{
    return (engine->wire_byte || ((!engine->spins || engine->busy_cpus) && !engine->alone)) &&
           !atomic_load_explicit(&engine->silent, memory_order_relaxed);
}

/* A spinning waiter has read the clock. */
static void note_busy_cpus(struct hvd_engine *engine, uint64_t now_ns)
{
    bool lost = engine->breath_ns && now_ns - engine->breath_ns > LOST_CPU_NS;
    engine->breath_ns = now_ns;
    if (!lost || !engine->spins || engine->options.spin_us > 0)
        return;
    bool again = now_ns - engine->busy_until_ns < 2 * engine->busy_ns;
    uint64_t twice_ns = 2 * engine->busy_ns < BUSY_MAX_NS ? 2 * engine->busy_ns : BUSY_MAX_NS;
    engine->busy_ns = again ? twice_ns : BUSY_NS;
    engine->busy_until_ns = now_ns + engine->busy_ns;
    engine->busy_cpus = true;
}

/* One breath of a holder that cannot get on; false when its patience is at an end. */
static bool breathe(struct hvd_engine *engine, bool waiter, uint32_t *idle, uint64_t *since_ns)
{
    if (*idle == 0)
        *since_ns = engine->breath_ns = 0;
    ++*idle;
    if (listens(engine))
        return hvd_stream_listen(engine, waiter, since_ns, hvd_turn_once);
    if (*idle <= (engine->spins ? PAUSES_FITTING : PAUSES_CROWDED)) {
        hvd_pause();
        if (!engine->spins || *idle % PAUSES_PER_CLOCK)
            return true;
        if (shares_cpu(engine, true))
            sched_yield();
    } else {
        sched_yield();
    }
    uint64_t now = hvd_now_ns();
    note_busy_cpus(engine, now);
    if (*since_ns == 0)
        *since_ns = now;
    if (waiter && hvd_alarm_silence(engine) == HVD_POLLED)
        return !atomic_load_explicit(&engine->tick_due, memory_order_relaxed);
    return now - *since_ns < engine->spin_ns;
}

bool hvd_turn_drive(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns)
{
    uint64_t since_ns = 0;
    bool over;
    if (engine->spins)
        shares_cpu(engine, false);
    do {
        uint32_t idle = 0;
        while (!(over = done(self))) {
            if (hvd_turn_once(engine)) {
                idle = 0;
            } else if (!breathe(engine, true, &idle, &since_ns) || (since_ns && hvd_now_ns() >= until_ns)) {
                break;
            }
        }
    } while (!leave(engine, over));
    return over; /* done may look at what the turn owns, and that is not ours any more */
}

void hvd_turn_run(struct hvd_engine *engine)
{
    uint64_t since_ns = 0;
    do {
        uint32_t idle = 0;
        for (;;) {
            if (atomic_load_explicit(&engine->takers, memory_order_relaxed) && step_aside(engine))
                return;
            if (hvd_turn_once(engine))
                idle = engine->naps = 0;
            else if (!engine->spins || !atomic_load_explicit(&engine->waiters, memory_order_relaxed) ||
                     !breathe(engine, false, &idle, &since_ns))
                break;
        }
    } while (!leave(engine, false));
}
