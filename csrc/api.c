/* api.c - the public C API over the one engine of this process: the only global state of the core.
 *
 * Calls count themselves in and out, so that hvd_shutdown can take the engine away while other threads are
 * inside: it hides the pointer, stops the engine (every handle finishes, so every waiter returns), waits for the
 * count to reach zero, and only then frees. Handles of an earlier engine stay stale, because generations go
 * on counting across engines.
 *
 * A forked child inherits nothing: the fork handler closes every descriptor of the engine (else a DataLoader
 * worker would keep a dead rank's sockets open) and from then on every call fails with HVD_EFORK. The handler
 * must be async-signal-safe, so it frees and locks nothing.
 */
#include "api.h"

#include "kernel/kernel.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define VERSION "0.2.0"

static struct {
    struct hvd_engine *_Atomic engine;
    _Atomic uint32_t inside;
    _Atomic uint32_t forked;
    _Atomic uint32_t engines; /* opened so far */
    pthread_mutex_t life;     /* init and shutdown, one at a time */
    struct hvd_error refused; /* under life: why the last hvd_init failed */
    uint64_t leave_until_ns;  /* under life: of a shutdown that has begun */
} process = {.life = PTHREAD_MUTEX_INITIALIZER};

static void after_fork_in_child(void)
{
    struct hvd_engine *engine = atomic_load(&process.engine);
    /* The child of a child has opened other files under the same numbers. */
    if (!engine || atomic_exchange(&process.forked, 1) || engine->alone)
        return;
    hvd_host_close_in_child(&engine->host);
    if (engine->host.store.fd >= 0)
        close(engine->host.store.fd);
    if (engine->epoll >= 0)
        close(engine->epoll);
    if (engine->call >= 0)
        close(engine->call);
    if (engine->soon.timer >= 0)
        close(engine->soon.timer);
    if (engine->space.fd >= 0)
        close(engine->space.fd);
    hvd_stream_close_in_child(engine);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

static const char *text_of(int code)
{
    if (code == HVD_EFORK)
        return "this process is a forked child of a rank, such as a DataLoader worker: hvdlite works only in the "
               "process "
               "that called hvd.init(). Communicate there, or start the child with the 'spawn' method" HVD_ENDS(122);
    return "hvdlite has not been initialized; use hvd.init()." HVD_ENDS(101);
}

static int state(void)
{
    return atomic_load_explicit(&process.forked, memory_order_relaxed) ? HVD_EFORK : HVD_ESTATE;
}

struct hvd_engine *hvd_api_enter(void)
{
    if (atomic_load_explicit(&process.forked, memory_order_relaxed))
        return NULL;
    atomic_fetch_add(&process.inside, 1);
    struct hvd_engine *engine = atomic_load(&process.engine);
    if (!engine)
        atomic_fetch_sub(&process.inside, 1);
    return engine;
}

void hvd_api_go_out(void)
{
    atomic_fetch_sub(&process.inside, 1);
}

int hvd_api_state(char *text, size_t text_bytes)
{
    int code = state();
    hvd_text_copy(text, text_bytes, text_of(code));
    return code;
}

int hvd_init(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, char *text,
             size_t text_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (atomic_load(&process.forked)) {
        hvd_text_copy(text, text_bytes, text_of(HVD_EFORK));
        return HVD_EFORK;
    }
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&process.life);
    int code = HVD_OK;
    if (!atomic_load(&process.engine)) {
        struct hvd_engine *engine;
        struct hvd_error error = {0};
        uint32_t generation = atomic_fetch_add(&process.engines, 1) * 1000003u + 1;
        code = hvd_engine_open(options, allgather, self, false, generation, &engine, &error);
        hvd_text_copy(text, text_bytes, error.text);
        process.refused = error;
        atomic_store(&process.engine, engine);
        if (engine)
            hvd_flight_signals(engine, options->trace_signal);
    }
    pthread_mutex_unlock(&process.life);
    return code;
}

int hvd_shutdown(int wait_ms)
{
    if (atomic_load(&process.forked))
        return HVD_EFORK;
    pthread_mutex_lock(&process.life);
    struct hvd_engine *engine = atomic_load(&process.engine);
    if (engine) {
        if (!process.leave_until_ns)
            process.leave_until_ns = hvd_engine_leave_until(engine);
        uint64_t until_ns = hvd_now_ns() + (uint64_t)wait_ms * 1000000u;
        /* Others may still call in while we wait for the agreement. */
        if (wait_ms >= 0 && until_ns < process.leave_until_ns && !hvd_engine_leaving(engine, until_ns)) {
            pthread_mutex_unlock(&process.life);
            return HVD_AGAIN;
        }
        hvd_engine_leave(engine, process.leave_until_ns);
        process.leave_until_ns = 0;
        atomic_store(&process.engine, NULL);
        hvd_flight_signals(engine, 0);
        hvd_engine_stop(engine);
        while (atomic_load(&process.inside))
            usleep(100);
        hvd_engine_free(engine);
    }
    pthread_mutex_unlock(&process.life);
    return HVD_OK;
}

int hvd_abort(int culprit, int code, const char *reason)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return state();
    hvd_engine_abort(engine, culprit, code < 0 ? code : HVD_EPEER, reason ? reason : "aborted" HVD_ENDS(456));
    hvd_api_go_out();
    return HVD_OK;
}

int hvd_initialized(void)
{
    return atomic_load(&process.engine) && !atomic_load(&process.forked);
}

int hvd_forked(void)
{
    return (int)atomic_load(&process.forked);
}

static int tell(const struct hvd_error *error, int *culprit, int *code, char *text, size_t text_bytes)
{
    *culprit = error->culprit;
    *code = error->code;
    hvd_text_copy(text, text_bytes, error->text);
    return 1;
}

int hvd_failure(int *culprit, int *code, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine) {
        if (atomic_load(&process.forked))
            return HVD_EFORK;
        pthread_mutex_lock(&process.life);
        int answer = process.refused.code ? tell(&process.refused, culprit, code, text, text_bytes) : HVD_ESTATE;
        pthread_mutex_unlock(&process.life);
        return answer;
    }
    int failed = (int)atomic_load(&engine->failed);
    if (failed)
        tell(&engine->failure, culprit, code, text, text_bytes);
    hvd_api_go_out();
    return failed;
}

#define TOPOLOGY(name)                               \
    int hvd_##name(void)                             \
    {                                                \
        struct hvd_engine *engine = hvd_api_enter(); \
        if (!engine)                                 \
            return state();                          \
        int answer = engine->options.name;           \
        hvd_api_go_out();                            \
        return answer;                               \
    }

TOPOLOGY(rank)
TOPOLOGY(size)
TOPOLOGY(local_rank)
TOPOLOGY(local_size)
TOPOLOGY(cross_rank)
TOPOLOGY(cross_size)

int hvd_set_open(int number, uint32_t life, const int *ranks, int count, const int *vote_fd, const int *tensor_fd,
                 const unsigned char *vote_keys, const unsigned char *tensor_keys, char *text, size_t text_bytes)
{
    const struct hvd_streams streams = {vote_fd, tensor_fd, vote_keys, tensor_keys};
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine) {
        hvd_stream_drop(&streams, count);
        return hvd_api_state(text, text_bytes);
    }
    struct hvd_error error = {0};
    int code = hvd_engine_set_open(engine, number, life, ranks, count, &streams, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_set_close(int process_set, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_set_close(engine, process_set, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int64_t hvd_submit(const struct hvd_request *request, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error;
    hvd_error_none(&error);
    int64_t handle = hvd_engine_submit(engine, request, &error);
    if (handle < 0)
        hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return handle;
}

int hvd_check(const struct hvd_request *request, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error;
    hvd_error_none(&error);
    int code = hvd_engine_check(engine, request, &error);
    if (code < 0)
        hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_run(const struct hvd_request *like, uintptr_t input, uintptr_t output, int quiet, int64_t wait_ns,
            struct hvd_owner *owner, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    owner->handle = 0;
    if (!engine)
        return owner->code = hvd_api_state(text, text_bytes);
    struct hvd_request request = *like;
    request.input = (const void *)input;
    request.output = (void *)output;
    request.quiet = wait_ns > 0 ? HVD_QUIET : quiet;
    int64_t outcome = hvd_engine_run(engine, &request, wait_ns, text, text_bytes);
    owner->handle = outcome > 0 ? outcome : 0;
    owner->code = outcome > 0 ? HVD_AGAIN : (int)outcome;
    hvd_api_go_out();
    return owner->code;
}

int hvd_finish(struct hvd_owner *owner, int64_t wait_ns, char *text, size_t text_bytes)
{
    if (!owner->handle) {
        hvd_text_copy(text, text_bytes, HVD_TOLD_NOBODY);
        return owner->code;
    }
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_finish(engine, owner->handle, wait_ns, text, text_bytes);
    hvd_api_go_out();
    if (code != HVD_AGAIN)
        *owner = (struct hvd_owner){0, code};
    return code;
}

int hvd_kick(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return state();
    hvd_engine_kick(engine);
    hvd_api_go_out();
    return HVD_OK;
}

int hvd_poll(int64_t handle)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return state();
    int code = hvd_engine_poll(engine, handle);
    hvd_api_go_out();
    return code;
}

int hvd_wait(int64_t handle, int timeout_ms, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_wait(engine, handle, timeout_ms, text, text_bytes);
    hvd_api_go_out();
    return code;
}

int hvd_result(int64_t handle, struct hvd_output *output)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return state();
    int code = hvd_engine_result(engine, handle, output);
    hvd_api_go_out();
    return code;
}

int hvd_forget(int64_t handle)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return state();
    int code = hvd_engine_forget(engine, handle);
    hvd_api_go_out();
    return code;
}

void *hvd_alloc(size_t bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return NULL;
    void *memory = hvd_engine_alloc(engine, bytes);
    hvd_api_go_out();
    return memory;
}

void hvd_free(void *memory)
{
    /* Memory outlives engines, so no engine is asked whose it is. */
    bool known = !memory;
    for (int i = 0; !known && hvd_planes[i]; i++)
        known = hvd_planes[i]->release && hvd_planes[i]->release(memory);
    HVD_ASSERT(known); /* freed twice, or it never came from hvd_alloc */
}

const char *hvd_version(void)
{
    return VERSION;
}

int hvd_stream_version(void)
{
    return HVD_WIRE_VERSION;
}

const char *hvd_plane_used(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return NULL;
    const char *name = engine->global->planes[0].plane->name;
    hvd_api_go_out();
    return name;
}
