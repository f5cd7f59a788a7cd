/* test_api_batch.c - the ways into the core that look at it, or hand over much at once: before init, in a life of one
 * rank, and with what cannot be. (test_api.c has life itself; what the calls do in a job of several is their own
 * test's.)
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <unistd.h>

static char text[HVD_TEXT_MAX];

static struct hvd_request sum_of(const char *name, float *values, int64_t count)
{
    struct hvd_request request = crew_sum(name, values, count);
    return request;
}

static void nothing_before_init(void)
{
    float value = 1;
    int64_t counts[4];
    struct hvd_owner owner = {1, 0};
    uint64_t alpha, beta;
    struct hvd_event event;
    struct hvd_output output;
    struct hvd_request one = sum_of("x", &value, 1);
    const struct hvd_request *many[] = {&one};
    CHECK(hvd_submit_many(many, 1, &owner, text, sizeof text) == HVD_ESTATE && strstr(text, "use hvd.init()"));
    CHECK(hvd_wait_many(&owner, 1, 0, text, sizeof text) == HVD_ESTATE && hvd_usage_bytes(0) == HVD_ESTATE);
    CHECK(hvd_tune(1 << 20, text, sizeof text) == HVD_ESTATE && hvd_fusion_bytes() == HVD_ESTATE);
    CHECK(hvd_link_cost(&alpha, &beta) == HVD_ESTATE && hvd_trace(&event, 1) == HVD_ESTATE);
    CHECK(hvd_timeline_follow(NULL, NULL) == HVD_ESTATE && hvd_counter(0) == HVD_ESTATE);
    CHECK(hvd_link_counts(0, 0, (uint64_t *)counts) == HVD_ESTATE && hvd_left() == HVD_ESTATE);
    CHECK(hvd_behind(1, 0, text, sizeof text) == HVD_ESTATE && hvd_fetch(1, 0, 0, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_notice(text, sizeof text) == 0 && hvd_result(1, &output) == HVD_ESTATE);
    CHECK(hvd_check(&one, text, sizeof text) == HVD_ESTATE && hvd_cross_rank() == HVD_ESTATE);
    CHECK(hvd_set_open(1, 1, (const int[]){0}, 1, NULL, NULL, NULL, NULL, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_set_close(1, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_step(0, 0) == HVD_ESTATE && hvd_step_row(0, counts) == HVD_ESTATE);
    CHECK(hvd_look_closely(1, text, sizeof text) == HVD_ESTATE && hvd_buckets(1, NULL, 0) == HVD_ESTATE);
    CHECK(hvd_guarded(text, sizeof text) == 0);
    CHECK(hvd_clock(counts, counts, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_dump(NULL, HVD_WHY_ASKED, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_missing(1, 0, &(uint64_t){0}, text, sizeof text) == HVD_ESTATE &&
          hvd_finish(&(struct hvd_owner){.handle = 1}, 0, text, sizeof text) == HVD_ESTATE);
    hvd_data_waited(1); /* nobody counts */
    hvd_arrived();
}

static void what_needs_no_life(void)
{
    CHECK(hvd_version()[0] && hvd_stream_version() > 0 && hvd_plane_name(0)[0]);
    CHECK(hvd_usage_name(0)[0] && !hvd_usage_name(-1) && !hvd_usage_name(1000));
    CHECK(hvd_counter_name(0)[0] && !hvd_counter_name(-1) && !hvd_counter_name(1000));
    CHECK_CODE(hvd_named("p2p", "ring", text, sizeof text), HVD_OK, text);
    CHECK(hvd_named("pigeon", NULL, text, sizeof text) < 0 && strstr(text, "pigeon"));
    CHECK(hvd_named(NULL, "detour", text, sizeof text) < 0 && strstr(text, "detour"));
    hvd_gpu_libraries("/nowhere/libcuda.so", "/nowhere/libnccl.so");
    CHECK(hvd_gpu_version(0) == 0 && hvd_gpu_version(1) == 0);
    int peers[3];
    CHECK(hvd_vote_peers((const int[]){0, 1, 1}, 3, 0, peers) == 1);
}

static void many_in_one_call(void)
{
    enum { MANY = 40 };
    static float values[MANY];
    struct hvd_request requests[MANY];
    const struct hvd_request *of[MANY];
    struct hvd_owner handles[MANY];
    char names[MANY][8];
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "m%d", i);
        values[i] = (float)i;
        requests[i] = sum_of(names[i], &values[i], 1);
        of[i] = &requests[i];
    }
    CHECK_CODE(hvd_check(of[0], text, sizeof text), HVD_OK, text);
    CHECK_CODE(hvd_submit_many(of, MANY, handles, text, sizeof text), MANY, text);
    int code;
    while ((code = hvd_wait_many(handles, MANY, 50, text, sizeof text)) == HVD_AGAIN)
        ;
    CHECK_CODE(code, HVD_OK, text);
    CHECK(values[MANY - 1] == MANY - 1);
    requests[1].dtype = 99;
    CHECK(hvd_submit_many(of, 2, handles, text, sizeof text) == 1 && strstr(text, "m1"));
    CHECK(hvd_check(of[1], text, sizeof text) < 0 && strstr(text, "m1"));
    struct hvd_owner same = handles[0];
    while ((code = hvd_wait_many(handles, 1, 50, text, sizeof text)) == HVD_AGAIN)
        ;
    CHECK_CODE(code, HVD_OK, text);
    CHECK(handles[0].handle == 0 && handles[1].handle == 0 && handles[1].code == HVD_ETYPE);
    CHECK_CODE(hvd_wait_many(handles, 1, 50, text, sizeof text), HVD_OK, "it is not under way, and was well");
    CHECK_CODE(hvd_wait_many(handles, 2, 50, text, sizeof text), HVD_ETYPE, "the second was never taken");
    CHECK(hvd_wait_many(&same, 1, 50, text, sizeof text) == HVD_EHANDLE);
}

static void a_look_inside(void)
{
    uint64_t alpha = 0, beta = 0, counts[4];
    struct hvd_event events[512];
    CHECK_CODE(hvd_tune(1 << 20, text, sizeof text), HVD_OK, text);
    CHECK(hvd_tune(-1, text, sizeof text) < 0 && text[0] && hvd_fusion_bytes() > 0);
    CHECK(hvd_link_cost(&alpha, &beta) == HVD_OK && hvd_left() < 0 && hvd_counter(0) > 0 && hvd_counter(1000) == 0);
    CHECK(hvd_usage_bytes(0) >= 0 && hvd_usage_bytes(1000) == 0 && hvd_cross_size() == 1 && hvd_local_rank() == 0);
    CHECK(hvd_link_counts(0, 0, counts) < 0 || counts[0] == 0);
    CHECK(hvd_trace(events, 512) > 0);
    CHECK(hvd_notice(text, sizeof text) == 0);
    CHECK(hvd_behind(1 << 20, 0, text, sizeof text) < 0 && hvd_fetch(1 << 20, 0, 0, text, sizeof text) < 0);
}

/* The number in this step's row that has this name. */
static int64_t row_of(int64_t step, const char *wanted)
{
    int64_t values[512];
    char name[64];
    for (int i = 0; hvd_step_name(i, name, sizeof name); i++)
        if (strcmp(name, wanted) == 0) {
            CHECK(i < 512 && hvd_step_row(step, values) == 1);
            return values[i];
        }
    CHECK(!"this number is in a row");
    return 0;
}

static void one_sum(const char *name)
{
    float value = 3;
    struct hvd_request one = sum_of(name, &value, 1);
    int64_t handle = hvd_submit(&one, text, sizeof text);
    CHECK_CODE(handle > 0, 1, text);
    CHECK_CODE(hvd_finish(&(struct hvd_owner){.handle = handle}, 10000000000, text, sizeof text), HVD_OK, text);
    CHECK(value == 3);
}

static void steps_are_counted(void)
{
    struct hvd_bucket_seen seen[4];
    int64_t before = hvd_step(0, 0), submits = row_of(before, "submits"), none[1];
    CHECK(before > 0 && hvd_step_row(before + 1, none) == 0 && hvd_step_row(-1, none) == 0);
    CHECK(hvd_look_closely(-1, text, sizeof text) == HVD_EINVAL && strstr(text, "-1"));
    CHECK_CODE(hvd_look_closely(1, text, sizeof text), HVD_OK, text);
    one_sum("seen closely");
    hvd_arrived();
    hvd_arrived(); /* the first time it is said counts */
    hvd_data_waited(1000);
    CHECK(hvd_step(0, 2000) == before + 1);
    CHECK(row_of(before + 1, "number") == before + 1 && row_of(before + 1, "submits") == submits + 1);
    CHECK(row_of(before + 1, "arrived_ns") >= row_of(before + 1, "begin_ns"));
    CHECK(row_of(0, "data_ns") == row_of(before, "data_ns") + 1000);
    CHECK(row_of(0, "optimizer_ns") == row_of(before, "optimizer_ns") + 2000);
    CHECK(hvd_buckets(1, seen, 4) == 1 && !strcmp(seen[0].name[0], "seen closely") && seen[0].bytes == sizeof(float));
    CHECK(hvd_buckets(2, seen, 4) == 0);
    CHECK_CODE(hvd_look_closely(0, text, sizeof text), HVD_OK, text);
    CHECK(hvd_step(1, 0) == 0); /* the script tells its steps, so those that a graph finds are none */
}

static void what_has_happened_can_be_told(void)
{
    struct hvd_event events[512];
    int64_t offset = -1, error = -1;
    char folder[] = "api-more-XXXXXX", name[64];
    one_sum("told");
    CHECK(hvd_trace(events, 512) > 2 && events[0].time_ns <= events[1].time_ns);
    struct hvd_spans *spans = hvd_timeline_open(0, "me", 0, 0);
    struct hvd_follower follower = {0};
    size_t bytes;
    CHECK(spans && hvd_timeline_follow(spans, &follower) == 0 && follower.room >= 16);
    one_sum("drawn");
    CHECK(hvd_timeline_follow(spans, &follower) > 2 && follower.lost == 0);
    hvd_timeline_feed(spans, 1, HVD_TRACE_submit, 9, 2, 8, "alltoall", "of a record");
    const char *rows = hvd_timeline_take(spans, "]", &bytes);
    CHECK(rows && rows[bytes] == ']' && strstr(rows, "\"drawn\"") && strstr(rows, "of a record (set 2)"));
    CHECK(!strstr(rows, "\"told\""));
    hvd_timeline_end(spans);
    CHECK(hvd_timeline_take(spans, "", &bytes) && bytes > 0 && bytes < 200);
    hvd_timeline_close(spans);
    CHECK(hvd_clock(&offset, &error, name, sizeof name) == HVD_OK && offset == 0 && name[0]);
    CHECK(hvd_dump(NULL, HVD_WHY_ASKED, text, sizeof text) == HVD_EINVAL && strstr(text, "HVDLITE_TRACE_DIR"));
    CHECK(hvd_dump("/dev/null/in", HVD_WHY_ASKED, text, sizeof text) < 0 && strstr(text, "/dev/null/in"));
    CHECK(mkdtemp(folder));
    CHECK_CODE(hvd_dump(folder, HVD_WHY_ASKED, text, sizeof text), HVD_OK, text);
    CHECK(access(text, R_OK) == 0 && unlink(text) == 0 && rmdir(folder) == 0); /* it says where it is */
    CHECK(hvd_guarded(text, sizeof text) == 0 &&
          hvd_missing(1 << 20, 0, &(uint64_t){0}, text, sizeof text) == HVD_EHANDLE);
}

static void a_set_and_rows(void)
{
    float rows[6] = {1, 2, 3, 4, 5, 6};
    struct hvd_output output = {0};
    const int set = 1;
    CHECK(hvd_set_open(set, 1, (const int[]){0}, 1, NULL, NULL, NULL, NULL, text, sizeof text) == HVD_OK);
    CHECK(hvd_set_open(2, 2, (const int[]){5}, 1, NULL, NULL, NULL, NULL, text, sizeof text) < 0 && strstr(text, "5"));
    struct hvd_request gather = {.kind = HVD_ALLGATHER,
                                 .name = "rows",
                                 .dtype = HVD_DTYPE_float32,
                                 .ndim = 2,
                                 .dims = {2, 3},
                                 .prescale = 1,
                                 .postscale = 1,
                                 .input = rows,
                                 .process_set = set};
    int64_t handle = hvd_submit(&gather, text, sizeof text);
    CHECK_CODE(handle > 0, 1, text);
    CHECK_CODE(hvd_wait(handle, 10000, text, sizeof text), HVD_OK, text);
    CHECK(hvd_result(handle, &output) == HVD_OK && !memcmp(output.data, rows, sizeof rows));
    CHECK(hvd_forget(handle) == HVD_OK && hvd_result(handle, &output) == HVD_EHANDLE);
    CHECK_CODE(hvd_set_close(set, text, sizeof text), HVD_OK, text);
    CHECK(hvd_set_close(set, text, sizeof text) < 0 && hvd_set_close(0, text, sizeof text) < 0);
    void *memory = hvd_alloc(1000); /* a rank alone may have none of a plane's */
    if (memory)
        hvd_free(memory);
}

static void an_end_that_is_asked_for(void)
{
    int culprit = 0, code = 0;
    float value = 1;
    struct hvd_request one = sum_of("late", &value, 1);
    CHECK(hvd_abort(0, HVD_EPEER, "rank 0 raised ValueError: boom") == HVD_OK);
    int64_t handle = hvd_submit(&one, text, sizeof text);
    if (handle > 0) /* it was taken before the engine saw that */
        CHECK(hvd_wait(handle, 10000, text, sizeof text) < 0 && hvd_forget(handle) == HVD_OK);
    CHECK(strstr(text, "boom"));
    CHECK(hvd_failure(&culprit, &code, text, sizeof text) == 1 && culprit == 0 && code == HVD_EPEER);
}

int main(void)
{
    crew_deadline(60);
    nothing_before_init();
    what_needs_no_life();
    for (int life = 0; life < 2; life++) {
        struct hvd_options options = crew_options(0, 1);
        CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
        many_in_one_call();
        a_look_inside();
        steps_are_counted();
        what_has_happened_can_be_told();
        a_set_and_rows();
        if (life)
            an_end_that_is_asked_for();
        CHECK(hvd_shutdown(-1) == HVD_OK);
    }
    nothing_before_init();
    return 0;
}
