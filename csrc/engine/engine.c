/* engine.c - open and stop an engine; submit, wait and forget.
 *
 * Open: meet the local ranks, lay out the coordinator, open every plane this build carries and keep those that
 * opened on all ranks (one rank without it must not split the job), then start the thread. Every step is
 * collective and fails on all ranks with the same words.
 *
 * Stop: vote leave and wait, bounded, until the others have acknowledged and own agreed work is done (peers may
 * still need it); take leave in the seat; stop the thread; finish whatever is left; close planes and host.
 *
 * Local mistakes in a request are found in check.c, before anyone else hears of them.
 */
#include "engine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGE_BYTES (1 << 20) /* worth waking the engine thread at once */

static int plane_allgather(void *self, const void *mine, size_t bytes, void *all, struct hvd_error *error)
{
    return hvd_host_exchange(self, mine, bytes, all, -1, NULL, error);
}

static struct hvd_share *plane_share(void *self, size_t bytes, struct hvd_error *error)
{
    return hvd_host_share(self, bytes, error);
}

/* Did all ranks open it? `why` collects the first reason why not. */
static int plane_agreed(struct hvd_engine *engine, bool opened, const struct hvd_error *mine, bool *all_opened,
                        char *why, size_t why_bytes, struct hvd_error *error)
{
    struct said {
        uint32_t opened;
        char text[252];
    } said = {.opened = opened}, all[HVD_LOCAL_MAX];
    hvd_text_copy(said.text, sizeof said.text, mine->text);
    int code = hvd_host_exchange(&engine->host, &said, sizeof said, all, -1, NULL, error);
    *all_opened = code == HVD_OK;
    for (int rank = 0; code == HVD_OK && rank < engine->options.size; rank++)
        if (!all[rank].opened && *all_opened) {
            *all_opened = false;
            snprintf(why, why_bytes, "%.251s (rank %d)", all[rank].text, rank);
        }
    return code;
}

static int open_planes(struct hvd_engine *engine, struct hvd_error *error)
{
    struct hvd_set *set = engine->global;
    struct hvd_plane_arg arg = {.rank = engine->options.rank,
                                .size = engine->options.size,
                                .one_host = true,
                                .cpus = hvd_cpus_usable(),
                                /* memory of /dev/shm is not sparse: no more of it than planes need to work */
                                .arena_bytes = engine->host.source == HVD_MEMORY_DEV_SHM ? 1 : 0,
                                .bells = engine->alone ? NULL : &engine->host.bells,
                                .self = &engine->host,
                                .allgather = plane_allgather,
                                .share = plane_share};
    char why[HVD_TEXT_MAX] = "";
    for (int i = 0; hvd_planes[i] && set->planes_count < HVD_PLANES_MAX; i++) {
        struct hvd_open_plane open = {.plane = hvd_planes[i]};
        struct hvd_error mine = {0};
        bool opened = open.plane->open(&arg, &open.self, &mine) == HVD_OK, all = opened;
        char reason[320] = "";
        hvd_text_copy(reason, sizeof reason, mine.text);
        int code = engine->alone ? HVD_OK : plane_agreed(engine, opened, &mine, &all, reason, sizeof reason, error);
        if (opened && !all)
            open.plane->close(open.self);
        if (code != HVD_OK)
            return code;
        if (!all) {
            size_t length = strlen(why);
            snprintf(why + length, sizeof why - length, "%s%s: %s", length ? "; " : "", open.plane->name, reason);
            continue;
        }
        hvd_set_insert_plane(set, open);
        engine->bound |= open.plane->bound;
    }
    return set->planes_count ? HVD_OK : hvd_fail(error, HVD_EINIT, "no plane works for these ranks: %s", why);
}

static int check_options(const struct hvd_options *options, bool in_process, struct hvd_error *error)
{
    if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
        return hvd_fail(error, HVD_EINIT, "rank %d of %d is not a rank", options->rank, options->size);
    if (options->local_size != options->size && !in_process)
        return hvd_fail(error, HVD_EINIT, "%d ranks on %d per host: several hosts are not yet supported", options->size,
                        options->local_size);
    if (options->size > HVD_LOCAL_MAX)
        return hvd_fail(error, HVD_EINIT, "%d ranks on one host: at most %d are supported", options->size,
                        HVD_LOCAL_MAX);
    if (options->slots_max < 1 || options->fusion_bytes < 0)
        return hvd_fail(error, HVD_EINIT, "cache capacity %d and fusion threshold %lld must not be negative or zero",
                        options->slots_max, (long long)options->fusion_bytes);
    return HVD_OK;
}

static int open_host(struct hvd_engine *engine, hvd_boot_allgather *allgather, void *self, struct hvd_error *error)
{
    struct hvd_host *host = &engine->host;
    host->rank = engine->options.rank;
    host->size = engine->options.size;
    host->in_process = engine->in_process;
    host->job = engine->options.job;
    host->epoch = engine->options.epoch;
    memcpy(host->secret, engine->options.secret, sizeof host->secret);
    host->store_fd = engine->options.store_fd;
    host->source = engine->options.shared_memory || !hvd_memory_has_memfd() ? HVD_MEMORY_DEV_SHM : HVD_MEMORY_BEST;
    host->deadline_ns = hvd_now_ns() + (uint64_t)engine->options.start_timeout_ms * 1000000u;
    host->allgather = allgather;
    host->allgather_self = self;
    if (engine->alone)
        return HVD_OK;
    int code = hvd_host_open(host, engine->global->vote_bytes, error);
    if (code == HVD_OK)
        hvd_set_meet(engine, engine->global);
    return code == HVD_OK ? hvd_space_open(&engine->space, host, host->board_bytes, error) : code;
}

static void decide_spinning(struct hvd_engine *engine)
{
    bool fits = engine->options.size <= hvd_cpus_usable();
    engine->spins = engine->options.spin_us < 0 ? fits : engine->options.spin_us > 0;
    engine->spin_ns = engine->options.spin_us > 0 ? (uint64_t)engine->options.spin_us * 1000u
                      : fits                      ? 500000u
                                                  : 2000000u; /* others run while it yields */
}

int hvd_engine_open(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, bool in_process,
                    uint32_t first_generation, struct hvd_engine **engine_out, struct hvd_error *error)
{
    *engine_out = NULL;
    int code = check_options(options, in_process, error);
    if (code != HVD_OK)
        return code;
    struct hvd_engine *engine = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(sizeof *engine, (size_t)HVD_CACHE_LINE));
    if (!engine)
        return hvd_fail(error, HVD_ENOMEM, "out of memory during init");
    memset(engine, 0, sizeof *engine);
    engine->options = *options;
    atomic_store(&engine->fusion_bytes, options->fusion_bytes);
    engine->in_process = in_process;
    engine->alone = options->size == 1;
    engine->epoll = engine->space.fd = engine->soon.timer = -1;
    pthread_mutex_init(&engine->opening_lock, NULL);
    pthread_mutex_init(&engine->records_lock, NULL);
    decide_spinning(engine);
    code = hvd_handles_open(&engine->handles, first_generation, error);
    if (code == HVD_OK)
        code = hvd_trace_open(&engine->trace, options->trace_events > 0 ? options->trace_events : 4096);
    if (code == HVD_OK)
        code = hvd_set_open_global(engine, error);
    if (code == HVD_OK)
        code = open_host(engine, allgather, self, error);
    if (code == HVD_OK)
        code = open_planes(engine, error);
    if (code == HVD_OK && !engine->alone)
        code = hvd_turn_thread_start(engine, error);
    if (code == HVD_OK) {
        atomic_store(&engine->asleep_alone, 1);
        *engine_out = engine;
    } else {
        hvd_engine_free(engine);
    }
    return code;
}

void hvd_engine_stop(struct hvd_engine *engine)
{
    hvd_turn_thread_stop(engine);
    while (!hvd_turn_take(engine))
        hvd_pause(); /* a waiter still drives; it comes back within its patience */
    atomic_store(&engine->stop, 1);
    hvd_fail(&engine->failure, HVD_ESTATE, "hvdlite was shut down on rank %d while this was pending",
             engine->options.rank);
    atomic_store(&engine->failed, 1);
    hvd_agree_submit_queued(engine);
    hvd_abort_handles(engine, NULL, engine->failure.code, engine->failure.text);
    atomic_store(&engine->stopped, 1);
    /* The turn is never given back: late waiters find their handles done. */
}

void hvd_engine_free(struct hvd_engine *engine)
{
    hvd_turn_thread_stop(engine);
    hvd_soon_close(&engine->soon);
    hvd_set_close_all(engine);
    hvd_space_close(&engine->space);
    if (!engine->alone && engine->host.size)
        hvd_host_close(&engine->host);
    pthread_mutex_destroy(&engine->opening_lock);
    pthread_mutex_destroy(&engine->records_lock);
    hvd_handles_close(&engine->handles);
    hvd_trace_close(&engine->trace);
    free(engine);
}

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
                        "%d collectives are in flight on rank %d; synchronize some before submitting more",
                        HVD_HANDLES_MAX, engine->options.rank);
    slot->life = membership->life;
    slot->size = membership->size;
    int64_t handle = hvd_handles_handle(&engine->handles, slot);
    hvd_count(engine, HVD_COUNT_submits, 1);
    hvd_trace_add(&engine->trace, HVD_TRACE_submit, hvd_handles_index(&engine->handles, slot), (uint64_t)request->kind);
    hvd_handles_push(&engine->handles, slot);
    if (!engine->alone) {
        if (request->quiet == HVD_NOW || (request->quiet == HVD_SOON && bytes_of(request) >= LARGE_BYTES))
            hvd_turn_kick(engine);
        else if (request->quiet == HVD_SOON)
            hvd_soon_arm(&engine->soon);
    } else {
        while (hvd_handles_queued(&engine->handles)) { /* no thread here: submitters do it at once, each or another */
            if (hvd_turn_take(engine))
                hvd_turn_run(engine);
            else if (atomic_load(&engine->stop)) /* the turn is never given back, and this came too late for it */
                return hvd_fail(error, HVD_ESTATE, "hvdlite was shut down on rank %d", engine->options.rank);
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
        return HVD_OK;
    hvd_engine_kick(engine); /* it may have been submitted quietly, and a poll promises that it goes on */
    return HVD_AGAIN;
}

static bool slot_done(void *self)
{
    return hvd_slot_state(self) == HVD_SLOT_DONE;
}

/* Sleep on the handle. */
static void wait_asleep(struct hvd_engine *engine, struct hvd_slot *slot, uint64_t until_ns)
{
    /* The holder may have looked at the queue for the last time before this request was pushed, unannounced. */
    hvd_engine_kick(engine);
    uint64_t now = hvd_now_ns();
    atomic_fetch_add(&slot->waiters, 1);
    uint32_t word = atomic_load(&slot->word);
    if ((word & 3) == HVD_SLOT_BUSY && now < until_ns)
        hvd_futex_wait(&slot->word, word, until_ns - now);
    atomic_fetch_sub(&slot->waiters, 1);
}

bool hvd_engine_take_part(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns,
                          bool *patient)
{
    if (engine->bound || !*patient || !hvd_turn_take_over(engine, done, self))
        return false;
    hvd_count(engine, HVD_COUNT_turns_taken_by_waiters, 1);
    hvd_soon_disarm(&engine->soon);
    *patient = hvd_turn_drive(engine, done, self, until_ns);
    return true;
}

int hvd_engine_wait(struct hvd_engine *engine, int64_t handle, int timeout_ms, char *text, size_t text_bytes)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot) {
        hvd_text_copy(text, text_bytes, "this handle is unknown, or was synchronized already");
        return HVD_EHANDLE;
    }
    uint64_t until_ns = hvd_now_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    bool patient = true;
    atomic_fetch_add(&engine->waiters, 1);
    while (!slot_done(slot)) {
        if (!hvd_engine_take_part(engine, slot_done, slot, until_ns, &patient))
            wait_asleep(engine, slot, until_ns);
        if (hvd_now_ns() >= until_ns)
            break;
    }
    atomic_fetch_sub(&engine->waiters, 1);
    if (!slot_done(slot))
        return HVD_AGAIN;
    if (slot->code != HVD_OK)
        hvd_text_copy(text, text_bytes, slot->text ? slot->text : "failed");
    return slot->code;
}

int hvd_engine_finish(struct hvd_engine *engine, int64_t handle, int timeout_ms, char *text, size_t text_bytes)
{
    int code = hvd_engine_wait(engine, handle, timeout_ms, text, text_bytes);
    if (code != HVD_AGAIN)
        hvd_handles_forget(&engine->handles, handle);
    return code;
}

int64_t hvd_engine_run(struct hvd_engine *engine, const struct hvd_request *request, int wait_ms, char *text,
                       size_t text_bytes)
{
    struct hvd_error error = {0};
    int64_t handle;
    if (wait_ms > 0 && (request->kind == HVD_ALLGATHER || request->kind == HVD_ALLTOALL || request->kind == HVD_JOIN))
        handle = hvd_fail(&error, HVD_EINVAL, "%s has a result: submit it, wait, and fetch that",
                          hvd_engine_kind(request->kind));
    else
        handle = hvd_engine_submit(engine, request, &error);
    if (handle < 0)
        hvd_text_copy(text, text_bytes, error.text);
    if (handle < 0 || wait_ms <= 0)
        return handle;
    int code = hvd_engine_finish(engine, handle, wait_ms, text, text_bytes);
    return code == HVD_AGAIN ? handle : code;
}

int hvd_engine_result(struct hvd_engine *engine, int64_t handle, struct hvd_output *output)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot || !slot_done(slot))
        return HVD_EHANDLE;
    *output = (struct hvd_output){
        .data = slot->data, .bytes = slot->bytes, .rows = slot->rows, .rows_of = slot->rows_of, .size = slot->size};
    return HVD_OK;
}

int hvd_engine_forget(struct hvd_engine *engine, int64_t handle)
{
    while (hvd_engine_poll(engine, handle) == HVD_AGAIN)
        hvd_engine_wait(engine, handle, 50, NULL, 0);
    return hvd_handles_forget(&engine->handles, handle);
}

void *hvd_engine_alloc(struct hvd_engine *engine, size_t bytes)
{
    const struct hvd_open_plane *first = &engine->global->planes[0];
    return first->plane->alloc ? first->plane->alloc(first->self, bytes) : NULL;
}
