/* abort.c - what ends a job: death, abort, leave.
 *
 * Death never uses votes, since no round completes without the dead. The first witness writes what it knows into
 * its own seat, then puts (epoch, witness, culprit, code) into the control segment's abort word with one
 * compare-and-swap; whoever loses that race keeps silent. Then it rings everyone and tells the store. Every
 * turn looks at the word; whoever finds it set takes the text from the witness's seat (it was written before
 * the word) and fails all its handles. There are no locks in shared memory and nothing to clean up.
 *
 * Leaving is not dying: `left` in a seat says that a rank took its leave, and its process may end. Work that
 * was agreed before the leave still completes, because the leaver stays until its own part of it is done (if others
 * keep it from that for too long, it aborts instead), and until all that it has sent is with the others' machines
 * (wire.c); so an end of a stream after a leave is no death, unless agreed work still needs that stream. What is
 * pending beyond that can never be agreed and fails, naming the leaver. A rank leaves each set that it is in, by that
 * set's own votes, so that no other set's rounds are disturbed: sets without the leaver go on.
 */
#include "engine.h"

#include "report.h"

#include <stdio.h>
#include <string.h>

#define PATIENCE_NS 200000000u /* how long the bare end of a stream waits for somebody to say who died */

/* The abort word: epoch 16 | witness 16 | culprit + 1 24 | -code 8. Never 0. */
static uint64_t pack(uint64_t epoch, int witness, int culprit, int code)
{
    return (epoch & 0xffff) << 48 | (uint64_t)(witness & 0xffff) << 32 | (uint64_t)((culprit + 1) & 0xffffff) << 8 |
           (uint64_t)(-code & 0xff);
}

static _Atomic uint64_t *abort_word(struct hvd_engine *engine)
{
    return engine->alone ? &engine->abort_alone : &engine->host.control->abort;
}

void hvd_abort_text(struct hvd_engine *engine, uint32_t slot, const char *why, char *text, size_t text_bytes)
{
    const struct hvd_request *request = &engine->handles.slot[slot].request;
    char where[32] = "";
    if (request->process_set)
        snprintf(where, sizeof where, " in process set %d", request->process_set);
    if (request->name)
        hvd_text_write(text, text_bytes, "%s of '%.*s' on rank %d%s: %s", hvd_engine_kind(request->kind), HVD_NAME_MAX,
                       HVD_SHOWN(request->name), engine->options.rank, where, why);
    else
        hvd_text_write(text, text_bytes, "%s on rank %d%s: %s", hvd_engine_kind(request->kind), engine->options.rank,
                       where, why);
}

/* Does the request belong to the set? Of NULL, which stands for all, each does. */
static bool belongs(const struct hvd_slot *slot, const struct hvd_set *set)
{
    return !set || (slot->request.process_set == set->number && slot->life == set->life &&
                    slot->request.kind != HVD_ENGINE_SET_CLOSE);
}

void hvd_abort_handles(struct hvd_engine *engine, const struct hvd_set *set, int code, const char *why)
{
    uint32_t high = atomic_load(&engine->handles.high);
    for (uint32_t i = 0; i < high; i++)
        if (engine->handles.slot[i].with_turn && belongs(&engine->handles.slot[i], set)) {
            char text[HVD_TEXT_MAX];
            hvd_abort_text(engine, i, why, text, sizeof text);
            if (set)
                hvd_flight_end(engine, i, code, text);
            else /* of all one event has said it, and older ones are worth more */
                hvd_handles_finish(&engine->handles, i, code, text);
        }
}

bool hvd_abort_seen(struct hvd_engine *engine)
{
    uint64_t word = atomic_load_explicit(abort_word(engine), memory_order_acquire);
    if (word == 0 || atomic_load_explicit(&engine->failed, memory_order_relaxed))
        return false;
    int witness = (int)(word >> 32 & 0xffff), culprit = (int)(word >> 8 & 0xffffff) - 1, code = -(int)(word & 0xff);
    struct hvd_error *failure = &engine->failure;
    const struct hvd_seat *seat = engine->alone ? NULL : &engine->host.control->seat[witness % engine->host.size];
    char who[96];
    if (engine->alone) {
        failure->code = code; /* the text lies there already */
    } else if (word >> 48 != (engine->options.epoch & 0xffff)) {
        hvd_fail(failure, HVD_EINTERNAL,
                 HVD901 "the abort word belongs to another epoch; the control segment is damaged");
    } else if (atomic_load_explicit(&seat->text_ready, memory_order_acquire)) {
        hvd_fail_rank(failure, code, culprit, "%.*s", HVD_TEXT_MAX - 1, seat->text);
    } else {
        hvd_text_copy(who, sizeof who, culprit < 0 ? "somebody" : engine->who[culprit % engine->options.size].called);
        hvd_fail_rank(failure, code, culprit, HVD456 "%s ended the job", who);
    }
    atomic_store(&engine->failed, 1);
    for (int i = 0; i < engine->sets; i++) /* before anybody who hears of it ends a stream */
        if (engine->set[i]->tree)
            hvd_tree_flood(engine, engine->set[i], failure);
    hvd_trace_add(&engine->trace, HVD_TRACE_abort, (uint32_t)culprit, (uint64_t)-code);
    hvd_flight_keep(engine);
    hvd_abort_handles(engine, NULL, failure->code, failure->text);
    hvd_device_part(engine, true);
    hvd_flight_ask(engine, HVD_WHY_ABORT);
    return true;
}

void hvd_engine_abort(struct hvd_engine *engine, int culprit, int code, const char *reason)
{
    /* One witness per rank is enough: a second thread of it would overwrite the text that may be in use. */
    if (atomic_exchange(&engine->witnessing, 1))
        return;
    uint64_t none = 0, mine = pack(engine->options.epoch, engine->host.rank, culprit, code);
    bool first = atomic_load(abort_word(engine)) == 0;
    if (engine->alone) {
        if (first)
            hvd_fail_rank(&engine->failure, code, culprit, "%s", reason);
        engine->failure.code = code;
        atomic_compare_exchange_strong(&engine->abort_alone, &none, mine);
    } else {
        struct hvd_seat *seat = &engine->host.control->seat[engine->host.rank];
        if (first) {
            hvd_text_copy(seat->text, sizeof seat->text, reason);
            atomic_store_explicit(&seat->text_ready, 1, memory_order_release);
            first = atomic_compare_exchange_strong(&engine->host.control->abort, &none, mine);
        }
        if (first)
            hvd_report_abort(&engine->host.store, culprit, code, reason);
        hvd_bells_ring_all(&engine->host.bells);
    }
    hvd_turn_kick(engine);
}

void hvd_abort_suspect(struct hvd_engine *engine, const struct hvd_set *set, int rank, bool missed, const char *text)
{
    struct hvd_suspicion *suspicion = &engine->suspicion;
    if (suspicion->since_ns || (!missed && hvd_abort_has_left(engine, rank)))
        return;
    suspicion->since_ns = hvd_now_ns();
    suspicion->culprit = rank;
    suspicion->set = set->number;
    suspicion->missed = missed;
    hvd_text_copy(suspicion->text, sizeof suspicion->text, text);
    atomic_store(&engine->alarm_ns, suspicion->since_ns + PATIENCE_NS);
    hvd_turn_call(engine); /* it may sleep without end */
}

/* Whoever is in a set that somebody has left may end its streams, unless they are still needed. */
static bool is_harmless(const struct hvd_engine *engine, const struct hvd_suspicion *suspicion)
{
    const struct hvd_set *set = engine->by_number[suspicion->set];
    return !suspicion->missed && (!set || set->left || hvd_abort_has_left(engine, suspicion->culprit));
}

bool hvd_abort_judge(struct hvd_engine *engine)
{
    struct hvd_suspicion *suspicion = &engine->suspicion;
    if (suspicion->since_ns == 0 || hvd_now_ns() - suspicion->since_ns < PATIENCE_NS)
        return false;
    suspicion->since_ns = 0;
    atomic_store(&engine->alarm_ns, 0);
    if (!is_harmless(engine, suspicion))
        hvd_engine_abort(engine, suspicion->culprit, HVD_EPEER, suspicion->text);
    return true;
}

bool hvd_abort_has_left(const struct hvd_engine *engine, int rank)
{
    if (rank < 0 || rank >= engine->options.size)
        return false;
    const struct hvd_who *who = &engine->who[rank];
    if (who->host == engine->who[engine->options.rank].host)
        return atomic_load_explicit(&engine->host.control->seat[who->local].left, memory_order_acquire);
    return atomic_load(&engine->left) == (uint32_t)rank + 1;
}

void hvd_abort_lost(struct hvd_engine *engine, int local)
{
    int rank = engine->host.member[local];
    if (hvd_abort_has_left(engine, rank)) {
        hvd_stall_gone(engine, local);
        return;
    }
    char text[256], where[96];
    const char *host = strstr(engine->who[rank].called, " (host ");
    hvd_text_copy(where, sizeof where, host ? host : "");
    if (host) /* "rank 3 (pid 77, host b)" */
        snprintf(where, sizeof where, ", %s", host + 2);
    hvd_text_write(text, sizeof text,
                   HVD450
                   "rank %d (pid %d%s is lost: its process ended without leaving the job; its own last output says why",
                   rank, engine->host.pid[local], host ? where : ")");
    hvd_engine_abort(engine, rank, HVD_EPEER, text);
}

void hvd_abort_left_text(int rank, char *text, size_t text_bytes)
{
    hvd_text_write(text, text_bytes,
                   HVD451 "rank %d left the job (its script ended, perhaps by SystemExit, or it called shutdown) and "
                          "takes part in nothing more; do all ranks make the same number of steps?",
                   rank);
}

struct pending {
    struct hvd_engine *engine;
    const char *why;
};

static void fail_pending(void *self, uint32_t ticket)
{
    struct pending *pending = self;
    char text[HVD_TEXT_MAX];
    hvd_abort_text(pending->engine, ticket, pending->why, text, sizeof text);
    hvd_flight_end(pending->engine, ticket, HVD_EPEER, text);
}

void hvd_abort_left(struct hvd_engine *engine, struct hvd_set *set, int rank)
{
    char why[256];
    set->left = true;
    set->leaver = set->member[rank];
    hvd_abort_left_text(set->leaver, why, sizeof why);
    hvd_trace_add(&engine->trace, HVD_TRACE_leave, (uint32_t)set->leaver, hvd_trace_value(0, set->number, 0));
    if (set->number == 0)
        atomic_store(&engine->left, (uint32_t)set->leaver + 1);
    if (set->leaver != engine->options.rank && !atomic_load(&engine->leaver))
        atomic_store(&engine->leaver, (uint32_t)set->leaver + 1);
    hvd_coord_pending(set->coord, fail_pending, &(struct pending){engine, why});
    if (set->join_slot != HVD_SLOT_NONE)
        fail_pending(&(struct pending){engine, why}, set->join_slot);
    set->join_slot = HVD_SLOT_NONE;
}

/* Whatever was agreed is done here; with `agreed`, in all sets that others are in a leave is agreed too. */
static bool over(const struct hvd_engine *engine, bool agreed)
{
    for (int i = 0; i < engine->sets; i++) {
        const struct hvd_set *set = engine->set[i];
        if (agreed && set->tree && !hvd_tree_idle(set->tree))
            return false;
        if (!hvd_work_empty(set) || (agreed && !set->left && !set->alone))
            return false;
    }
    return true;
}

static bool own_part_done(void *self)
{
    struct hvd_engine *engine = self;
    return atomic_load(&engine->failed) || over(engine, false);
}

static bool leave_done(void *self)
{
    struct hvd_engine *engine = self;
    return atomic_load(&engine->failed) || over(engine, true);
}

/* The time is up. Others may never finish what was agreed without this rank: then its end is no leave. */
static void give_up_unfinished(struct hvd_engine *engine)
{
    if (hvd_turn_take(engine) && hvd_turn_drive(engine, own_part_done, engine, 0))
        return;
    char text[320];
    hvd_text_write(
        text, sizeof text,
        HVD452 "rank %d ends although collectives that all ranks agreed on are not finished: another rank did not take "
               "part in them within %d ms of its shutdown (HVDLITE_LEAVE_TIMEOUT); synchronize before the script ends",
        engine->options.rank, engine->options.leave_timeout_ms);
    hvd_engine_abort(engine, engine->options.rank, HVD_EPEER, text);
}

bool hvd_engine_leaving(struct hvd_engine *engine, uint64_t until_ns)
{
    bool done = engine->alone;
    if (!done && !atomic_exchange(&engine->leave_wanted, 1))
        hvd_turn_kick(engine);
    while (!done && hvd_now_ns() < until_ns) {
        if (hvd_turn_take(engine))
            done = hvd_turn_drive(engine, leave_done, engine, until_ns);
        if (!done) /* the turn is elsewhere, or others are late: look again in a millisecond */
            hvd_futex_wait(&engine->left, atomic_load(&engine->left), 1000000u);
    }
    return done;
}

void hvd_engine_leave(struct hvd_engine *engine, uint64_t until_ns)
{
    if (!hvd_engine_leaving(engine, until_ns))
        give_up_unfinished(engine);
    if (!engine->alone)
        atomic_store_explicit(&engine->host.control->seat[engine->host.rank].left, 1, memory_order_release);
}

uint64_t hvd_engine_leave_until(const struct hvd_engine *engine)
{
    return hvd_now_ns() + (uint64_t)engine->options.leave_timeout_ms * 1000000u;
}
