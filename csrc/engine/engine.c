/* engine.c - what framework threads ask of an engine: submit, wait, result, forget.
 *
 * A submission is a slot and a push; it wakes the engine thread, or not, as it asks (handle.h, deferred_wake.c). A
 * waiter does the engine's work itself where nobody else does (progress.c), and else sleeps on its handle. In a world
 * of one rank there is no engine thread: who submits does the work at once.
 *
 * Local mistakes in a request are found in validate.c, before anyone else hears of them.
 */
#include "engine.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#define NAP_ALONE_NS 50000u
#define ON_DEVICE_US 50
#define LARGE_BYTES  (1 << 20) /* worth waking the engine thread at once */

static int64_t bytes_of(const struct hvd_request *request)
{
    int64_t bytes = hvd_dtype_bytes(request->dtype);
    for (int i = 0; i < request->ndim; i++)
        bytes *= request->dims[i];
    return bytes;
}

int64_t hvd_engine_push(struct hvd_engine *engine, const struct hvd_request *request,
                        const struct hvd_membership *membership, struct hvd_error *error)
{
    struct hvd_slot *slot = hvd_handles_take(&engine->handles, request);
    if (!slot)
        return hvd_fail(error, HVD_ENOMEM,
                        HVD266 "%d collectives are in flight on rank %d; synchronize some before submitting more",
                        HVD_HANDLES_MAX, engine->options.rank);
    slot->life = membership->life;
    slot->size = membership->size;
    int64_t handle = hvd_handles_handle(&engine->handles, slot);
    if (request->quiet != HVD_ASIDE)
        hvd_count(engine, HVD_COUNT_submits, 1);
    hvd_flight_submit(engine, slot, bytes_of(request));
    hvd_steps_submitted(&engine->steps, request, atomic_load_explicit(&slot->submitted_ns, memory_order_relaxed));
    hvd_handles_push(&engine->handles, slot);
    if (!engine->alone) {
        bool soon = request->quiet == HVD_SOON || request->quiet == HVD_ASIDE;
        if (engine->cpu_each && request->quiet != HVD_QUIET)
            hvd_turn_note_cpu(engine);
        if (request->quiet == HVD_NOW || (soon && bytes_of(request) >= LARGE_BYTES))
            hvd_turn_kick(engine);
        else if (soon)
            hvd_alarm_arm(&engine->soon);
    } else {
        while (hvd_handles_queued(&engine->handles)) { /* no thread here: submitters do it at once, each or another */
            if (hvd_turn_take(engine))
                hvd_turn_run(engine);
            else if (atomic_load(&engine->stop)) /* the turn is never given back, and this came too late for it */
                return hvd_fail(error, HVD_ESTATE, HVD457 "hvdlite was shut down on rank %d", engine->options.rank);
            else
                sched_yield();
        }
    }
    return handle;
}

int hvd_engine_check(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_error *error)
{
    struct hvd_membership membership;
    int code = hvd_set_look_up(engine, request, &membership, error);
    return code == HVD_OK ? hvd_request_check(&membership, request, error) : code;
}

int64_t hvd_engine_submit(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_error *error)
{
    struct hvd_membership membership;
    int code = hvd_set_look_up(engine, request, &membership, error);
    if (code == HVD_OK)
        code = hvd_request_check(&membership, request, error);
    if (code == HVD_OK && engine->options.nan_guard)
        return hvd_guard_push(engine, request, &membership, error);
    return code == HVD_OK ? hvd_engine_push(engine, request, &membership, error) : code;
}

/* The queue holds what nobody has looked at yet: quiet submissions, or what a waiter is about to fetch. */
void hvd_engine_kick(struct hvd_engine *engine)
{
    if (hvd_handles_queued(&engine->handles))
        hvd_turn_kick(engine);
}

int hvd_engine_poll(struct hvd_engine *engine, int64_t handle)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot)
        return HVD_EHANDLE;
    if (hvd_slot_state(slot) == HVD_SLOT_DONE)
        return slot->behind && hvd_gpu_event_reached(slot->behind, NULL) == HVD_AGAIN ? HVD_AGAIN : HVD_OK;
    if (engine->alone && hvd_turn_take(engine))
        hvd_turn_run(engine);
    hvd_engine_kick(engine); /* it may have been submitted quietly, and a poll promises that it goes on */
    return HVD_AGAIN;
}

static bool slot_done(const struct hvd_slot *slot)
{
    return hvd_slot_state(slot) == HVD_SLOT_DONE;
}

/* What a waiter waits for. Where two wait for one handle, the other may have the result, and the slot a new request,
 * before this one looks again: so it asks for the whole word. */
struct awaited {
    struct hvd_slot *slot;
    uint32_t busy; /* the word of the slot while the request is under way */
};

static bool over(void *self)
{
    const struct awaited *awaited = self;
    return atomic_load_explicit(&awaited->slot->word, memory_order_acquire) != awaited->busy;
}

/* Sleep on the handle. */
static void wait_asleep(struct hvd_engine *engine, const struct awaited *awaited, uint64_t until_ns)
{
    struct hvd_slot *slot = awaited->slot;
    /* The holder may have looked at the queue for the last time before this request was pushed, unannounced. */
    hvd_engine_kick(engine);
    uint64_t now = hvd_now_ns();
    atomic_fetch_add(&slot->waiters, 1);
    if (atomic_load(&slot->word) == awaited->busy && now < until_ns)
        hvd_futex_wait(&slot->word, awaited->busy, until_ns - now);
    atomic_fetch_sub(&slot->waiters, 1);
}

bool hvd_engine_take_part(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns,
                          bool *patient)
{
    if (engine->bound || !*patient || !hvd_turn_take_over(engine, done, self))
        return false;
    hvd_count(engine, HVD_COUNT_turns_taken_by_waiters, 1);
    hvd_alarm_disarm(&engine->soon);
    *patient = hvd_turn_drive(engine, done, self, until_ns);
    return true;
}

static int unknown(char *text, size_t text_bytes)
{
    hvd_text_copy(text, text_bytes, "this handle is unknown, or was synchronized already" HVD_ENDS(218));
    return HVD_EHANDLE;
}

/* A waiter has what it came for. now_ns: as hvd_flight_watch has it. */
static int told(struct hvd_engine *engine, const struct awaited *awaited, uint64_t now_ns, char *text,
                size_t text_bytes)
{
    struct hvd_slot *slot = awaited->slot;
    if (atomic_load_explicit(&slot->word, memory_order_acquire) != awaited->busy - HVD_SLOT_BUSY + HVD_SLOT_DONE)
        return unknown(text, text_bytes);
    hvd_flight_watch(engine, slot, false, now_ns);
    if (slot->code != HVD_OK)
        hvd_text_copy(text, text_bytes, slot->text ? slot->text : "failed" HVD_ENDS(951));
    return slot->code;
}

/* *since_ns: when the wait began; 0: now, and it is set if the clock was read. */
static int wait_for(struct hvd_engine *engine, int64_t handle, uint64_t *since_ns, int64_t wait_ns, char *text,
                    size_t text_bytes)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot)
        return unknown(text, text_bytes);
    struct awaited awaited = {slot, (uint32_t)(handle >> 16) << 2 | HVD_SLOT_BUSY};
    if (over(&awaited)) /* and nobody needs the time */
        return told(engine, &awaited, 0, text, text_bytes);
    *since_ns = *since_ns ? *since_ns : hvd_now_ns();
    uint64_t now_ns = *since_ns, until_ns = *since_ns + (uint64_t)(wait_ns > 0 ? wait_ns : 0);
    bool patient = true;
    atomic_fetch_add(&engine->waiters, 1);
    hvd_flight_watch(engine, slot, true, now_ns);
    while (!over(&awaited)) {
        if (!hvd_engine_take_part(engine, over, &awaited, until_ns, &patient))
            wait_asleep(engine, &awaited, engine->alone ? hvd_now_ns() + NAP_ALONE_NS : until_ns);
        patient |= engine->alone; /* no thread here: a work on a device ends when a waiter looks */
        if ((now_ns = hvd_now_ns()) >= until_ns)
            break;
    }
    atomic_fetch_sub(&engine->waiters, 1);
    if (now_ns != *since_ns && slot->request.kind != HVD_JOIN)
        hvd_count(engine, HVD_COUNT_exposed_ns, (int64_t)(now_ns - *since_ns));
    return over(&awaited) ? told(engine, &awaited, now_ns, text, text_bytes) : HVD_AGAIN;
}

int hvd_engine_wait(struct hvd_engine *engine, int64_t handle, int timeout_ms, char *text, size_t text_bytes)
{
    uint64_t since_ns = 0;
    return wait_for(engine, handle, &since_ns, (int64_t)timeout_ms * 1000000, text, text_bytes);
}

int hvd_engine_behind(struct hvd_engine *engine, int64_t handle, void *stream, struct hvd_error *error)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot || !slot_done(slot))
        return hvd_fail(error, HVD_EHANDLE, HVD218 "this handle is unknown, or not finished");
    if (slot->behind && atomic_load(&engine->failed)) /* it may have ended there without its peers */
        return hvd_fail(error, engine->failure.code, "%s", engine->failure.text);
    return slot->behind ? hvd_gpu_event_follow(slot->behind, stream, error) : HVD_OK;
}

/* Of a result that may be fetched; NULL: error says why not. */
static struct hvd_slot *slot_to_fetch(struct hvd_engine *engine, int64_t handle, struct hvd_error *error)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot || !slot_done(slot) || slot->code != HVD_OK)
        hvd_fail(error, HVD_EHANDLE, HVD218 "this handle is unknown, not finished, or has failed");
    else if (slot->behind && atomic_load(&engine->failed))
        hvd_fail(error, engine->failure.code, "%s", engine->failure.text);
    else
        return slot;
    return NULL;
}

int hvd_engine_fetch(struct hvd_engine *engine, int64_t handle, uintptr_t to, void *stream, struct hvd_error *error)
{
    struct hvd_slot *slot = slot_to_fetch(engine, handle, error);
    if (!slot)
        return error->code;
    if (!slot->block)
        return hvd_engine_behind(engine, handle, stream, error);
    return hvd_block_fetch(slot->block, slot->behind, to, (size_t)slot->bytes, stream, error);
}

int hvd_engine_reached(struct hvd_engine *engine, const struct hvd_slot *slot, uint64_t until_ns, char *text,
                       size_t text_bytes)
{
    struct hvd_error error;
    int code = HVD_OK;
    hvd_error_none(&error);
    uint64_t since_ns = slot->behind ? hvd_now_ns() : 0;
    while (slot->behind && (code = hvd_gpu_event_reached(slot->behind, &error)) == HVD_AGAIN &&
           hvd_now_ns() < until_ns && !atomic_load(&engine->failed))
        usleep(ON_DEVICE_US);
    if (slot->behind)
        hvd_count(engine, HVD_COUNT_exposed_ns, (int64_t)(hvd_now_ns() - since_ns));
    if (slot->behind && atomic_load(&engine->failed)) { /* it may have ended there without its peers */
        error.code = HVD_OK;
        code = hvd_fail(&error, engine->failure.code, "%s", engine->failure.text);
    }
    if (code < 0)
        hvd_text_copy(text, text_bytes, error.text);
    return code;
}

/* since_ns: when the wait began, 0: now. */
static int finish(struct hvd_engine *engine, int64_t handle, uint64_t since_ns, int64_t wait_ns, char *text,
                  size_t text_bytes)
{
    int code = wait_for(engine, handle, &since_ns, wait_ns, text, text_bytes);
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot && code == HVD_OK) { /* two threads waited for it, and the other one has forgotten it */
        hvd_text_copy(text, text_bytes, "this handle was synchronized by another thread meanwhile" HVD_ENDS(218));
        return HVD_EHANDLE;
    }
    if (code == HVD_OK && slot->behind) { /* nobody will ask for its mark */
        uint64_t until_ns = (since_ns ? since_ns : hvd_now_ns()) + (uint64_t)(wait_ns > 0 ? wait_ns : 0);
        code = hvd_engine_reached(engine, slot, until_ns, text, text_bytes);
    }
    if (code != HVD_AGAIN)
        hvd_handles_forget(&engine->handles, handle);
    return code;
}

int hvd_engine_finish(struct hvd_engine *engine, int64_t handle, int64_t wait_ns, char *text, size_t text_bytes)
{
    return finish(engine, handle, 0, wait_ns, text, text_bytes);
}

int64_t hvd_engine_run(struct hvd_engine *engine, const struct hvd_request *request, int64_t wait_ns, char *text,
                       size_t text_bytes)
{
    struct hvd_error error;
    int64_t handle;
    hvd_error_none(&error);
    bool ragged = (request->kind == HVD_ALLGATHER || request->kind == HVD_ALLTOALL) && !request->even;
    if (wait_ns > 0 && (ragged || request->kind == HVD_JOIN))
        handle = hvd_fail(&error, HVD_EINVAL, HVD901 "%s has a result: submit it, wait, and fetch that",
                          hvd_engine_kind(request->kind));
    else
        handle = hvd_engine_submit(engine, request, &error);
    if (handle < 0)
        hvd_text_copy(text, text_bytes, error.text);
    if (handle < 0 || wait_ns <= 0)
        return handle;
    const struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    uint64_t since_ns = slot ? atomic_load_explicit(&slot->submitted_ns, memory_order_relaxed) : 0;
    int code = finish(engine, handle, since_ns, wait_ns, text, text_bytes);
    return code == HVD_AGAIN ? handle : code;
}

int hvd_engine_result(struct hvd_engine *engine, int64_t handle, struct hvd_output *output)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot || !slot_done(slot))
        return HVD_EHANDLE;
    *output = (struct hvd_output){.data = slot->block ? (void *)slot->block->at : slot->data,
                                  .bytes = slot->bytes,
                                  .rows = slot->rows,
                                  .rows_of = slot->rows_of,
                                  .size = slot->size};
    return HVD_OK;
}

int hvd_engine_forget(struct hvd_engine *engine, int64_t handle)
{
    const struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot || hvd_slot_state(slot) == HVD_SLOT_DONE)
        return hvd_handles_forget(&engine->handles, handle);
    hvd_engine_kick(engine); /* as a poll: it may have been submitted quietly */
    return HVD_AGAIN;
}

void *hvd_engine_alloc(struct hvd_engine *engine, size_t bytes)
{
    const struct hvd_open_plane *first = &engine->global->planes[0];
    return first->plane->alloc ? first->plane->alloc(first->self, bytes) : NULL;
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
    struct hvd_stream_table *wires[] = {set ? set->wires : NULL, set ? set->vote_wires : NULL};
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

int hvd_stream_counts(struct hvd_engine *engine, int number, int peer, struct hvd_link_counts *counts)
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

int64_t hvd_guard_push(struct hvd_engine *engine, const struct hvd_request *request,
                       const struct hvd_membership *membership, struct hvd_error *error)
{
    struct hvd_request looked_at = *request;
    looked_at.not_finite = hvd_guard_look(engine->options.nan_guard, request);
    return hvd_engine_push(engine, &looked_at, membership, error);
}
