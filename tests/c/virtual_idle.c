/* virtual_idle.c - how often does an engine thread wake up while nothing is asked of it for a quarter of an hour, or a
 * day?
 *
 * Never, on one host; with several, once for each tick of silence.c, and where collectives are watched (warnings, a
 * limit), once for each tick of stall_check.c. So it is after collectives, after a set was closed, after all ranks have
 * joined, and where quiet work was left. Where a rank waits for others, hosts ask each other who is there with each
 * tick: that is bounded, too. What was left is done when the others come.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <unistd.h>

enum {
    SHORT_S = 900,
    DAY_S = 86400,
    PART_S = 450,
    SETTLE_US = 25000,
    STEPS = 6,
    WAIT_MS = 1000,
    LATE_NS = 6 * VIRTUAL_MS
};
/* What lies there while the ranks do nothing. The last two: rank 0 waits for all others. */
static enum { NOTHING, CLOSED_SET, ALL_JOINED, QUIET_WORK, ONE_JOINED, ONE_SUBMITTED, CASES } what;
static const char *const called[] = {"nothing",    "a closed set",   "a join of all",
                                     "quiet work", "one has joined", "one has submitted"};
static uint64_t chosen, last_ns[2];
static unsigned idle_s;
static int measured;

static int64_t sleeps(struct hvd_engine *engine)
{
    return atomic_load(&engine->counter[HVD_COUNT_sleeps]);
}

static int64_t begin(struct hvd_engine *engine, float *memory, int quiet)
{
    struct hvd_request request = crew_sum("late", memory, 1);
    *memory = (float)engine->options.rank;
    request.quiet = quiet;
    return crew_begin(engine, &request);
}

static int64_t join(struct hvd_engine *engine)
{
    return crew_begin(engine, &(struct hvd_request){.kind = HVD_JOIN});
}

static void wait_for(struct hvd_engine *engine, int64_t handle, int round)
{
    char text[HVD_TEXT_MAX] = "";
    last_ns[round] = virtual_now();
    CHECK_CODE(hvd_engine_finish(engine, handle, WAIT_MS * (int64_t)1000000, text, sizeof text), HVD_OK, text);
    virtual_waited(virtual_now() - last_ns[round]);
    CHECK(virtual_now() < last_ns[round] + LATE_NS);
}

/* Two ticks within a millisecond are one wake-up, and one may be just before the end, or after it. Where a rank waits,
 * each tick brings a round: the votes of others come up, and what was decided comes down. */
static void check_times(const struct hvd_engine *engine, int64_t times, int64_t passed_ms)
{
    bool watched = engine->options.stall_warn_ms || engine->options.collective_timeout_ms;
    int64_t stall_ms = ((int64_t)engine->stall.tick_ns + VIRTUAL_MS - 1) / VIRTUAL_MS;
    int64_t silence = engine->hosts > 1 ? passed_ms / hvd_silence_tick_ms(engine) : 0;
    int64_t stall = watched ? passed_ms / stall_ms : 0, right = silence + stall;
    int64_t slack = 2 + (silence && stall ? right / 100 : 0);
    char text[128];
    snprintf(text, sizeof text, "%lld wake-ups, for %lld ticks of silence and %lld of stalls", (long long)times,
             (long long)silence, (long long)stall);
    CHECK_CODE(times >= right - slack, 1, text);
    CHECK_CODE(times <= (what >= ONE_JOINED ? 3 : 1) * right + slack, 1, text);
}

static bool all_have_measured(void *size)
{
    return measured == *(int *)size;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    char text[HVD_TEXT_MAX] = "";
    float memory = 1;
    int64_t handle = 0;
    uint64_t own = chosen + (uint64_t)rank;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &engine, &error), HVD_OK, error.text);
    if (what == CLOSED_SET) {
        CHECK_CODE(crew_set_open(engine, (const int[]){0, 1}, 2, &error), 1, error.text);
        crew_barrier(engine);
        struct hvd_request request = {.kind = HVD_BARRIER, .process_set = 1};
        if (rank < 2)
            CHECK_CODE(crew_wait(engine, crew_begin(engine, &request), text), HVD_OK, text);
        crew_barrier(engine);
        CHECK_CODE(hvd_engine_set_close(engine, 1, &error), HVD_OK, error.text);
    }
    for (int i = 0; i < STEPS; i++) {
        struct hvd_request request = crew_sum("a", &memory, 1);
        usleep(virtual_below(&own, 2) ? 0 : virtual_below(&own, 3000));
        CHECK_CODE(crew_wait(engine, crew_begin(engine, &request), text), HVD_OK, text);
    }
    if (what == ALL_JOINED)
        wait_for(engine, join(engine), 0);
    crew_barrier(engine);
    if (what == ONE_JOINED && rank == 0)
        handle = join(engine);
    if (what == QUIET_WORK || (what == ONE_SUBMITTED && rank == 0))
        handle = begin(engine, &memory, what == QUIET_WORK ? HVD_QUIET : HVD_NOW);
    if (what == ONE_SUBMITTED && rank == 0)
        CHECK(hvd_engine_wait(engine, handle, 5, text, sizeof text) == HVD_AGAIN);
    usleep(SETTLE_US);
    int64_t before = sleeps(engine);
    uint64_t since_ns = virtual_now();
    for (unsigned slept = 0; slept < idle_s; slept += PART_S)
        usleep(PART_S * 1000000u);
    int64_t times = sleeps(engine) - before, passed_ms = (int64_t)((virtual_now() - since_ns) / VIRTUAL_MS);
    check_times(engine, times, passed_ms);
    measured++;
    virtual_news();
    virtual_wait(all_have_measured, &size, "the end of the day");
    if (!handle)
        handle = what == ONE_JOINED ? join(engine) : begin(engine, &memory, HVD_NOW);
    wait_for(engine, handle, 1);
    CHECK(what == ONE_JOINED || memory == (float)(size * (size - 1) / 2));
    crew_barrier(engine);
    virtual_close(engine);
}

void virtual_idle(uint64_t seed, bool weak)
{
    static const int warn_ms[] = {0, 8888, 5004}, limit_ms[] = {0, 0, 39992}, timeout_ms[] = {0, 0, 77000};
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    what = virtual_below(&chosen, CASES);
    idle_s = virtual_below(&chosen, 50) ? SHORT_S : DAY_S;
    crew_peer_timeout_ms = timeout_ms[virtual_below(&chosen, HVD_COUNT_OF(timeout_ms))];
    if (what < QUIET_WORK) { /* what waits for so long would be told, or end the job */
        crew_warn_ms = warn_ms[virtual_below(&chosen, HVD_COUNT_OF(warn_ms))];
        crew_limit_ms = limit_ms[virtual_below(&chosen, HVD_COUNT_OF(limit_ms))];
    }
    virtual_describe("%s for %u s, timeout %d, warnings %d, limit %d", called[what], idle_s, crew_peer_timeout_ms,
                     crew_warn_ms, crew_limit_ms);
    virtual_begin(&plan);
    virtual_run(size, body);
}
