/* abort.c - what ends a job: death, abort, leave.
 *
 * Death never uses votes, since no round completes without the dead. The first witness writes what it knows into
 * its own seat, then puts (epoch, witness, culprit, code) into the control segment's abort word with one
 * compare-and-swap; whoever loses that race keeps silent. Then it rings everyone and tells the store. Every
 * turn looks at the word; whoever finds it set takes the text from the witness's seat (it was written before
 * the word) and fails all its handles. There are no locks in shared memory and nothing to clean up.
 *
 * A stream that ends without a reason only raises a suspicion: its peer is blamed after HVD_PATIENCE_NS, unless a
 * reason arrives first. Reading continues after a send has failed, because the reason lies in front of the end of the
 * stream.
 *
 * Leaving is not dying: `left` in a seat says that a rank took its leave, and its process may end. Work that
 * was agreed before the leave still completes, because the leaver stays until its own part of it is done (if others
 * keep it from that for too long, it aborts instead), and until all that it has sent is with the others' machines
 * (stream_watch.c); so an end of a stream after a leave is no death, unless agreed work still needs that stream. What
 * is pending beyond that can never be agreed and fails, naming the leaver. A rank leaves each set that it is in, by
 * that set's own votes, so that no other set's rounds are disturbed: sets without the leaver go on.
 */
#include "engine.h"

#include "engine/state/store_frames.h"

#include <stdio.h>
#include <string.h>

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
    uint64_t word = atomic_load_explicit(hvd_abort_word(engine), memory_order_acquire);
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
        hvd_text_copy(who, sizeof who,
                      culprit < 0 ? "another rank" : engine->who[culprit % engine->options.size].called);
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

/* Whoever is in a set that somebody has left may end its streams, unless they are still needed. */
static bool is_harmless(const struct hvd_engine *engine, const struct hvd_suspicion *suspicion)
{
    const struct hvd_set *set = engine->by_number[suspicion->set];
    return !suspicion->missed && (!set || set->left || hvd_abort_has_left(engine, suspicion->culprit));
}

bool hvd_abort_judge(struct hvd_engine *engine)
{
    struct hvd_suspicion *suspicion = &engine->suspicion;
    uint64_t now = hvd_now_ns();
    if (suspicion->since_ns == 0 || now - suspicion->since_ns < HVD_PATIENCE_NS)
        return false;
    atomic_store(&engine->alarm_ns, 0);
    if (hvd_silence_decides(engine, now)) /* it looks with each of its ticks */
        return false;
    suspicion->since_ns = 0;
    if (!is_harmless(engine, suspicion))
        hvd_engine_abort(engine, suspicion->culprit, HVD_EPEER, suspicion->text);
    return true;
}

void hvd_abort_lost(struct hvd_engine *engine, int local)
{
    int rank = engine->host.member[local];
    if (hvd_abort_has_left(engine, rank)) {
        hvd_stall_gone(engine, local);
        return;
    }
    char text[384], where[96];
    const char *host = strstr(engine->who[rank].called, " (host ");
    hvd_text_copy(where, sizeof where, host ? host : "");
    if (host) /* "rank 3 (pid 77, host b)" */
        snprintf(where, sizeof where, ", %s", host + 2);
    hvd_text_write(
        text, sizeof text,
        HVD450 "rank %d (pid %d%s is lost: its process ended without leaving the job; its last output says why, or "
               "nothing does if SIGKILL ended it (out of memory, a limit, kill -9): see dmesg and the scheduler's log",
        rank, engine->host.pid[local], host ? where : ")");
    hvd_engine_abort(engine, rank, HVD_EPEER, text);
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
    if (set->number == 0) {
        atomic_store(&engine->left, (uint32_t)set->leaver + 1);
        hvd_futex_wake(&engine->left, INT32_MAX); /* who waits to leave, see shutdown.c */
    }
    if (set->leaver != engine->options.rank && !atomic_load(&engine->leaver))
        atomic_store(&engine->leaver, (uint32_t)set->leaver + 1);
    hvd_coord_pending(set->coord, fail_pending, &(struct pending){engine, why});
    if (set->join_slot != HVD_SLOT_NONE)
        fail_pending(&(struct pending){engine, why}, set->join_slot);
    set->join_slot = HVD_SLOT_NONE;
}
