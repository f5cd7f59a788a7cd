/* failure.c - a failure is recorded once, by whoever sees it first, and everybody is woken to look at it.
 *
 * The lowest file of death: it writes the abort word and what somebody is suspected of, and calls nothing that acts on
 * them. That is abort.c, in the turn.
 */
#include "../engine.h"
#include "store_frames.h"

#include <stdio.h>

/* The abort word: epoch 16 | witness 16 | culprit + 1 24 | -code 8. Never 0. */
static uint64_t pack(uint64_t epoch, int witness, int culprit, int code)
{
    return (epoch & 0xffff) << 48 | (uint64_t)(witness & 0xffff) << 32 | (uint64_t)((culprit + 1) & 0xffffff) << 8 |
           (uint64_t)(-code & 0xff);
}

_Atomic uint64_t *hvd_abort_word(struct hvd_engine *engine)
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

void hvd_abort_left_text(int rank, char *text, size_t text_bytes)
{
    hvd_text_write(text, text_bytes,
                   HVD451 "rank %d left the job (its script ended, perhaps by SystemExit, or it called shutdown) and "
                          "takes part in no further collective. Do all ranks make the same number of steps? "
                          "(hvd.uneven_inputs)",
                   rank);
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

void hvd_engine_abort(struct hvd_engine *engine, int culprit, int code, const char *reason)
{
    /* One witness per rank is enough: a second thread of it would overwrite the text that may be in use. */
    if (atomic_exchange(&engine->witnessing, 1))
        return;
    uint64_t none = 0, mine = pack(engine->options.epoch, engine->host.rank, culprit, code);
    bool first = atomic_load(hvd_abort_word(engine)) == 0;
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

void hvd_engine_script_ended(struct hvd_engine *engine)
{
    if (!engine->alone)
        hvd_report_leaving(&engine->host.store);
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
    suspicion->waited = set->waited;
    hvd_text_copy(suspicion->text, sizeof suspicion->text, text);
    atomic_store(&engine->alarm_ns, suspicion->since_ns + HVD_PATIENCE_NS);
    hvd_turn_call(engine); /* it may sleep without end */
}
