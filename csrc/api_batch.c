/* api_batch.c - the public C API, continued: many requests in one call, and looking into the engine from outside.
 *
 * See api.c for the rules, which hold here, too: every call counts itself in and out, and a failure writes one
 * sentence. These are only ways in: engine/submit_batch.c does the work of the first two; then come the end of the
 * script, tuning, the trace and the timeline made of it, counters, and what memory is used for (engine/memory_use.c).
 * Nothing is remembered here.
 */
#include "api.h"
#include "trace/spans.h"

static const int *_Atomic told_place; /* see hvd_tell_place */

void hvd_tell_place(const int *place)
{
    atomic_store(&told_place, place);
}

int hvd_place(int what)
{
    int (*const asked[])(void) = {hvd_rank, hvd_size, hvd_local_rank, hvd_local_size};
    const int *told = atomic_load(&told_place);
    if (what < 0 || what >= (int)(sizeof asked / sizeof asked[0]))
        return HVD_EINVAL;
    return told ? told[what] : asked[what]();
}

int hvd_submit_many(const struct hvd_request *const *requests, int count, struct hvd_owner *owners, char *text,
                    size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int taken = hvd_engine_submit_many(engine, requests, count, owners, &error);
    if (taken < count)
        hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return taken;
}

int hvd_wait_many(struct hvd_owner *owners, int count, int timeout_ms, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_wait_many(engine, owners, count, timeout_ms, text, text_bytes);
    hvd_api_go_out();
    return code;
}

int hvd_script_ended(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    hvd_engine_script_ended(engine);
    hvd_api_go_out();
    return HVD_OK;
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

struct hvd_spans *hvd_timeline_open(int rank, const char *title, int64_t offset_ns, int mark_cycles)
{
    return hvd_spans_new(rank, title, offset_ns, mark_cycles != 0);
}

int hvd_timeline_follow(struct hvd_spans *spans, struct hvd_follower *follower)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int count = hvd_engine_follow(engine, follower, spans);
    hvd_api_go_out();
    return count;
}

void hvd_timeline_feed(struct hvd_spans *spans, uint64_t t_ns, int what, uint32_t tag, int set, uint64_t value,
                       const char *by, const char *name)
{
    hvd_spans_feed(spans, &(struct hvd_span_event){t_ns, what, tag, set, value, by, name});
}

void hvd_timeline_end(struct hvd_spans *spans)
{
    hvd_spans_end(spans);
}

const char *hvd_timeline_take(struct hvd_spans *spans, const char *ending, size_t *bytes)
{
    return hvd_rows_take(hvd_spans_rows(spans), ending, bytes);
}

void hvd_timeline_close(struct hvd_spans *spans)
{
    hvd_spans_free(spans);
}

int hvd_clock(int64_t *offset_ns, int64_t *error_ns, char *host, size_t host_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    *offset_ns = engine->options.clock_offset_ns;
    *error_ns = engine->options.clock_error_ns;
    hvd_text_copy(host, host_bytes, engine->flight.host);
    hvd_api_go_out();
    return HVD_OK;
}

int hvd_rotate(const char *path, uint64_t *job, uint64_t *epoch)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int code = hvd_engine_keep(engine, path, job, epoch);
    hvd_api_go_out();
    return code;
}

int hvd_dump(const char *folder, int why, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_dump(engine, folder, why, text, text_bytes);
    hvd_api_go_out();
    return code;
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

int hvd_missing(int64_t handle, int wait_ms, uint64_t *asked, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    int code = hvd_engine_missing(engine, handle, wait_ms, asked, text, text_bytes);
    hvd_api_go_out();
    return code;
}

int hvd_left(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int rank = (int)atomic_load(&engine->leaver) - 1;
    hvd_api_go_out();
    return rank;
}

int64_t hvd_step(int found, int64_t optimizer_ns)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int64_t number = hvd_engine_step(engine, found, optimizer_ns);
    hvd_api_go_out();
    return number;
}

void hvd_data_waited(int64_t ns)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return;
    hvd_count(engine, HVD_COUNT_data_ns, ns);
    hvd_api_go_out();
}

void hvd_arrived(void)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return;
    hvd_engine_arrived(engine);
    hvd_api_go_out();
}

int hvd_step_name(int i, char *text, size_t text_bytes)
{
    return hvd_steps_name(i, text, text_bytes);
}

int hvd_step_row(int64_t number, int64_t *values)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int found = hvd_engine_step_row(engine, number, values);
    hvd_api_go_out();
    return found;
}

int hvd_look_closely(int64_t every, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_look_closely(engine, every, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_buckets(int64_t first, struct hvd_bucket_seen *buckets, int count)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    int copied = hvd_engine_buckets(engine, first, buckets, count);
    hvd_api_go_out();
    return copied;
}

int hvd_link_counts(int process_set, int peer, uint64_t *counts)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    struct hvd_link_counts found;
    int code = hvd_stream_counts(engine, process_set, peer, &found);
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

int hvd_guarded(char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return 0;
    int tensors = hvd_engine_guarded(engine, text, text_bytes);
    hvd_api_go_out();
    return tensors;
}
