/* api_more.c - the public C API, continued: many requests in one call, and looking into the engine from outside.
 *
 * See api.c for the rules, which hold here, too: every call counts itself in and out, and a failure writes one
 * sentence. These are only ways in: engine/many.c does the work of the first two; then come tuning, the trace,
 * counters, and what memory is used for (engine/measure.c). Nothing is remembered here.
 */
#include "api.h"
#include "cuda/cuda.h"
#include "nccl/nccl.h"
#include "trace/nvtx.h"

int hvd_submit_many(const struct hvd_request *const *requests, int count, int64_t *handles, char *text,
                    size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int taken = hvd_engine_submit_many(engine, requests, count, handles, &error);
    if (taken < count)
        hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return taken;
}

int hvd_wait_many(const int64_t *handles, int count, int timeout_ms, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_wait_many(engine, handles, count, timeout_ms, text, text_bytes);
    hvd_api_go_out();
    return code;
}

const char *hvd_usage_name(int i)
{
    static const char *const names[] = {
#define X(name) #name,
        HVD_USAGES(X)
#undef X
    };
    return i >= 0 && i < HVD_USAGES_MAX ? names[i] : NULL;
}

int64_t hvd_usage_bytes(int i)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int64_t bytes = i >= 0 && i < HVD_USAGES_MAX ? hvd_engine_usage(engine, i) : 0;
    hvd_api_go_out();
    return bytes;
}

int hvd_tune(int64_t fusion_bytes, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_tune(engine, fusion_bytes, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int64_t hvd_fusion_bytes(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int64_t answer = atomic_load(&engine->fusion_bytes);
    hvd_api_go_out();
    return answer;
}

int hvd_link_cost(uint64_t *alpha_ns, uint64_t *beta_ps)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    *alpha_ns = engine->link_cost.alpha_ns;
    *beta_ps = engine->link_cost.beta_ps;
    hvd_api_go_out();
    return HVD_OK;
}

int hvd_trace(struct hvd_event *events, int count)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int copied = hvd_trace_copy(&engine->trace, events, count);
    hvd_api_go_out();
    return copied;
}

const char *hvd_counter_name(int i)
{
    static const char *const names[] = {
#define X(name) #name,
        HVD_COUNTERS(X)
#undef X
    };
    return i >= 0 && i < HVD_COUNTERS_MAX ? names[i] : NULL;
}

int64_t hvd_counter(int i)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int64_t value = i >= 0 && i < HVD_COUNTERS_MAX ? atomic_load(&engine->counter[i]) : 0;
    hvd_api_go_out();
    return value;
}

int hvd_link_counts(int process_set, int peer, uint64_t *counts)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    struct hvd_link_counts found;
    int code = hvd_wire_counts(engine, process_set, peer, &found);
    counts[0] = found.bytes_out;
    counts[1] = found.bytes_in;
    counts[2] = found.messages_out;
    counts[3] = found.messages_in;
    hvd_api_go_out();
    return code;
}

int hvd_named(const char *plane, const char *algo, char *text, size_t text_bytes)
{
    struct hvd_error error = {0};
    const struct hvd_plane *wanted;
    const struct hvd_algo *forced;
    int code = hvd_engine_find_named(plane, algo, &wanted, &forced, &error);
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}

void hvd_gpu_libraries(const char *cuda, const char *nccl)
{
    hvd_cuda_prefer(cuda);
    hvd_nccl_prefer(nccl);
}

int hvd_ranges(const char *library, char *text, size_t text_bytes)
{
    struct hvd_error error = {0};
    int code = hvd_nvtx_open(library, &error);
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}

int hvd_gpu_version(int which)
{
    if (which == 0)
        return hvd_cuda_version();
    const struct hvd_nccl *nccl = hvd_nccl_load(NULL);
    return nccl ? nccl->version : 0;
}

int hvd_behind(int64_t handle, uintptr_t stream, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_behind(engine, handle, (void *)stream, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_fetch(int64_t handle, uintptr_t to, uintptr_t stream, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_fetch(engine, handle, to, (void *)stream, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_notice(char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return 0;
    int fresh = hvd_engine_notice(engine, text, text_bytes);
    hvd_api_go_out();
    return fresh;
}
