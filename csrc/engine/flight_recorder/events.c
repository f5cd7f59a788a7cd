/* events.c - what is the ring told, and when does it become a file?
 *
 * One event when a thread submits a tensor, when it begins to wait for one that is not done and when it has it, when a
 * plan is taken, when a bucket begins, and one for each tensor that is finished: six for a collective alone, three a
 * tensor and a few a step for gradients. Nothing is told on a timer, so a rank that stands still for an hour still
 * knows what it did before.
 *
 * Counted in instructions (callgrind): an event takes 63, the number of a name of 52 bytes 108, all of it 349 of the
 * 7,362 of an allreduce of 4 KB from submit to wait. Of a gradient, with its hook in Python (19,300), that is 0.9 %,
 * and of a training step less by what backward computes.
 *
 * Tensors go by numbers (trace/names.h), which a slot keeps while its request lives. One without a name is known by how
 * many came before it in its set, as the coordinator has it.
 *
 * Records are written by the engine's thread, which needs nobody: not a rank's Python, which may sit in a loop, nor the
 * turn. When the job fails, after everyone has been told; the list of what was waited for is taken before, since
 * the failure ends all requests. When a signal comes that the user has named: its handler only rings,
 * and calls the one that it has replaced. And when Python
 * asks; then the asking thread writes. Without a folder there is nothing to do but for that.
 */
#include "../engine.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Of the process: a signal has no argument. */
static struct {
    _Atomic int asked; /* eventfd of the engine that is to write; -1: none */
    _Atomic uint32_t came;
    pid_t pid;
    int number;
    struct sigaction before;
} signals = {.asked = -1};

int hvd_flight_open(struct hvd_engine *engine, struct hvd_error *error)
{
    struct hvd_flight *flight = &engine->flight;
    const struct hvd_options *options = &engine->options;
    pthread_mutex_init(&flight->lock, NULL);
    flight->opened = true;
    if (options->host_name)
        hvd_text_copy(flight->host, sizeof flight->host, options->host_name[options->rank]);
    else if (gethostname(flight->host, sizeof flight->host - 1))
        hvd_text_copy(flight->host, sizeof flight->host, "?");
    flight->folder = options->trace_dir ? strdup(options->trace_dir) : NULL;
    if (options->trace_signal && !engine->alone)
        flight->asked = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return hvd_trace_names_open(&engine->names, error);
}

void hvd_flight_close(struct hvd_engine *engine)
{
    struct hvd_flight *flight = &engine->flight;
    hvd_trace_names_close(&engine->names);
    if (!flight->opened)
        return;
    if (flight->asked >= 0)
        close(flight->asked);
    pthread_mutex_destroy(&flight->lock);
    free(flight->folder);
    free(flight->waiting);
}

/* The next number of a request without a name; a set that was opened anew begins anew. */
static uint32_t next_unnamed(struct hvd_engine *engine, const struct hvd_slot *slot)
{
    _Atomic uint64_t *word = &engine->flight.unnamed[slot->request.process_set];
    uint64_t seen = atomic_load(word), next;
    do
        next = seen >> 32 == slot->life ? seen + 1 : (uint64_t)slot->life << 32 | 1;
    while (!atomic_compare_exchange_weak(word, &seen, next));
    return HVD_TRACE_UNNAMED | (uint32_t)(next - 1);
}

void hvd_flight_submit(struct hvd_engine *engine, struct hvd_slot *slot, int64_t bytes)
{
    const struct hvd_request *request = &slot->request;
    if (request->kind < 0 || request->quiet == HVD_ASIDE) /* the engine's own, or what no user knows of */
        return;
    uint64_t now_ns = hvd_now_ns(), value = hvd_trace_value(request->kind, request->process_set, (uint64_t)bytes);
    uint32_t tensor = request->name
                          ? hvd_trace_number(&engine->names, request->process_set, request->name, slot->name_bytes)
                          : next_unnamed(engine, slot);
    atomic_store_explicit(&slot->tensor, tensor, memory_order_relaxed);
    atomic_store_explicit(&slot->submitted, value, memory_order_relaxed);
    atomic_store_explicit(&slot->submitted_ns, now_ns, memory_order_release);
    hvd_trace_add_at(&engine->trace, now_ns, HVD_TRACE_submit, tensor, value);
}

/* Kind and set of a request, and something else. */
static uint64_t value_of(const struct hvd_slot *slot, uint64_t rest)
{
    return hvd_trace_value(slot->request.kind, slot->request.process_set, rest);
}

void hvd_flight_watch(struct hvd_engine *engine, struct hvd_slot *slot, bool begins, uint64_t now_ns)
{
    if (atomic_load_explicit(&slot->watched, memory_order_relaxed) == begins ||
        atomic_exchange(&slot->watched, begins) == begins || slot->request.kind < 0 || hvd_steps_aside(slot))
        return; /* a wait is one, though Python looks up every 50 ms */
    hvd_trace_add_at(&engine->trace, now_ns ? now_ns : hvd_now_ns(), begins ? HVD_TRACE_wait : HVD_TRACE_waited,
                     atomic_load(&slot->tensor), value_of(slot, 0));
}

void hvd_flight_round(struct hvd_engine *engine, struct hvd_set *set, uint32_t aside, uint64_t now_ns)
{
    uint32_t items = set->plan.items - aside, before = set->agenda.count - set->aside;
    set->aside += aside;
    if (items == 0)
        return;
    uint64_t buckets = set->plan.buckets < 0xffff ? set->plan.buckets : 0xffff;
    hvd_trace_add_at(&engine->trace, now_ns, HVD_TRACE_round, items,
                     hvd_trace_value(0, set->number, buckets << 32 | before));
}

void hvd_flight_start(struct hvd_engine *engine, struct hvd_set *set)
{
    const struct hvd_moving *moving = &set->moving;
    if (!moving->busy || moving->items == 0) /* an exchange of sizes, or a greeting */
        return;
    if (set->aside && moving->items == 1 && hvd_steps_aside(hvd_work_slot(engine, hvd_work_item(set, 0))))
        return;
    int by = moving->rode && hvd_set_spans_hosts(set) ? HVD_TRACE_BY_VOTES
             : moving->by                             ? moving->by->carrier
                                                      : HVD_TRACE_BY_CPU;
    hvd_trace_add_at(&engine->trace, moving->begun_ns, HVD_TRACE_start, moving->items,
                     hvd_trace_value(by, set->number, hvd_work_bytes(&moving->work)));
}

void hvd_flight_end(struct hvd_engine *engine, uint32_t index, int code, const char *text)
{
    const struct hvd_slot *slot = &engine->handles.slot[index];
    if (slot->request.kind >= 0 && !hvd_steps_aside(slot))
        hvd_trace_add(&engine->trace, HVD_TRACE_end, atomic_load(&slot->tensor), value_of(slot, (uint64_t)-code));
    hvd_handles_finish(&engine->handles, index, code, text);
}

void hvd_flight_keep(struct hvd_engine *engine)
{
    if (engine->flight.folder && !engine->flight.waiting)
        engine->flight.waiting = hvd_record_waiting(engine);
}

void hvd_flight_ask(struct hvd_engine *engine, uint32_t why)
{
    uint32_t none = 0;
    if (!engine->flight.folder)
        return;
    atomic_compare_exchange_strong(&engine->flight.due, &none, why);
    hvd_turn_call(engine);
}

static int write_record(struct hvd_engine *engine, const char *folder, uint32_t why, char *path, size_t path_bytes,
                        struct hvd_error *error)
{
    struct hvd_flight *flight = &engine->flight;
    bool failed = atomic_load(&engine->failed), failure = why == HVD_WHY_ABORT || why == HVD_WHY_ERROR;
    int code = HVD_OK;
    if (failed && failure)
        why = engine->failure.culprit == engine->options.rank ? HVD_WHY_ERROR : HVD_WHY_ABORT;
    pthread_mutex_lock(&flight->lock);
    if (!failure || !flight->failed_written)
        code = hvd_record_write(engine, folder ? folder : flight->folder, !folder && engine->options.trace_guarded, why,
                                path, path_bytes, error);
    flight->failed_written |= failure;
    pthread_mutex_unlock(&flight->lock);
    return code;
}

void hvd_flight_due(struct hvd_engine *engine)
{
    struct hvd_flight *flight = &engine->flight;
    char path[64];
    if (flight->asked >= 0 && atomic_load(&signals.asked) == flight->asked && atomic_exchange(&signals.came, 0) &&
        flight->folder)
        write_record(engine, NULL, HVD_WHY_SIGNAL, path, sizeof path, NULL);
    if (atomic_load_explicit(&flight->due, memory_order_relaxed))
        write_record(engine, NULL, atomic_exchange(&flight->due, 0), path, sizeof path, NULL);
}

int hvd_engine_dump(struct hvd_engine *engine, const char *folder, int why, char *text, size_t text_bytes)
{
    struct hvd_error error = {0};
    hvd_text_copy(text, text_bytes, "");
    if (!folder && !engine->flight.folder) {
        hvd_text_copy(text, text_bytes, "no folder for traces is set (HVDLITE_TRACE_DIR): name one" HVD_ENDS(725));
        return HVD_EINVAL;
    }
    if (why == HVD_WHY_ERROR && engine->thread_runs) {
        hvd_flight_ask(engine, HVD_WHY_ERROR);
        return HVD_OK;
    }
    int code = write_record(engine, folder, (uint32_t)why, text, text_bytes, &error);
    if (code != HVD_OK)
        hvd_text_copy(text, text_bytes, error.text);
    return code;
}

/* Whoever handled that signal before init still does. */
static void on_signal(int number, siginfo_t *info, void *where)
{
    int kept = errno, asked = atomic_load(&signals.asked);
    uint64_t one = 1;
    if (asked >= 0 && getpid() == signals.pid) { /* a forked child has the handler, and no engine */
        atomic_store(&signals.came, 1);
        ssize_t written = write(asked, &one, sizeof one);
        (void)written;
    }
    if (signals.before.sa_flags & SA_SIGINFO)
        signals.before.sa_sigaction(number, info, where);
    else if (signals.before.sa_handler != SIG_DFL && signals.before.sa_handler != SIG_IGN)
        signals.before.sa_handler(number);
    errno = kept;
}

void hvd_flight_signals(struct hvd_engine *engine, int number)
{
    struct sigaction now, ours = {.sa_sigaction = on_signal, .sa_flags = SA_RESTART | SA_SIGINFO};
    if (engine->flight.asked < 0)
        return;
    if (number > 0) {
        signals.pid = getpid();
        signals.number = number;
        sigaction(number, NULL, &signals.before); /* known before it is called */
        if (signals.before.sa_flags & SA_SIGINFO && signals.before.sa_sigaction == on_signal)
            signals.before = (struct sigaction){.sa_handler = SIG_DFL}; /* a script has put it back */
        atomic_store(&signals.asked, engine->flight.asked);
        if (sigaction(number, &ours, NULL))
            atomic_store(&signals.asked, -1);
    } else if (atomic_exchange(&signals.asked, -1) >= 0) {
        if (sigaction(signals.number, NULL, &now) == 0 && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal)
            sigaction(signals.number, &signals.before, NULL);
    }
}
