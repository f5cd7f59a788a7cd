/* virtual_stall.c - a rank keeps the others waiting: is that told when it should be, and of the right rank?
 *
 * One rank is late, or never comes, or is frozen in the midst of collectives. What is reported names it and the tensor
 * soon after the time of warning, and nothing is reported before. Who is late and comes in time loses nothing. After
 * the limit all others fail, at the latest when the design says, and name that rank. Where the frozen one leads a host,
 * and there is no launcher to ask, ranks that only it led to may hear nothing but the ends of others, and name those.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include "virtual_parts.h"

#include <sys/mman.h>
#include <unistd.h>

enum { LATE, NEVER, FROZEN, KINDS };
enum { REPORT = 8192, STEPS = 1000, WAIT_MS = 60000, SELF_MS = 6000 };
enum { SOON_NS = 100 * VIRTUAL_MS, EACH_NS = 1000 * VIRTUAL_MS };
/* When the first of the others submitted a step, and when the last of them submitted anything. */
static uint64_t chosen, first_ns[STEPS], last_ns;
static int victim, kind, late_ms, told, named, hosts;
static bool cut_off; /* a leader is frozen: whom it led to is not heard, and may not hear */

/* What is seen of a process that is stopped by a signal. */
WRAP(void, hvd_account_other, (const struct hvd_engine *engine, int local, struct hvd_account *account))
{
    __real_hvd_account_other(engine, local, account);
    if (virtual_stopped(engine->host.member[local]))
        account->state = HVD_RANK_STOPPED;
}

static uint64_t ms(int of)
{
    return (uint64_t)of * VIRTUAL_MS;
}

/* Between looks at what waits, at most; the first one only notes that it does. */
static uint64_t tick_ns(void)
{
    int least = crew_warn_ms && (crew_warn_ms < crew_limit_ms || !crew_limit_ms) ? crew_warn_ms : crew_limit_ms;
    return ms(least) / 8 + 10 * VIRTUAL_MS;
}

/* When it is reported at the latest: who is stopped does not answer, and of other hosts it takes twice as long. */
static uint64_t warned_ns(void)
{
    return last_ns + ms(crew_warn_ms) + 3 * tick_ns() + SOON_NS + (kind == FROZEN) * (hosts > 1 ? 2 : 1) * EACH_NS;
}

/* How many reports there are so far; each names the rank. */
static int reports(const char *tensor)
{
    char report[REPORT] = "", rank[32];
    int count = 0;
    CHECK(pread(crew_report_fd, report, sizeof report - 1, 0) >= 0);
    snprintf(rank, sizeof rank, "\n  rank %d (", victim);
    for (const char *at = report; (at = strstr(at, "hvdlite: stall: ")); at++, count++)
        CHECK_CODE(strstr(at, rank) && (strstr(at, tensor) || cut_off), 1, report);
    return count;
}

static int wait_until(struct hvd_engine *engine, int64_t handle, uint64_t until_ns, char *text)
{
    int64_t left_ns = (int64_t)(until_ns - virtual_now());
    return hvd_engine_wait(engine, handle, left_ns > 0 ? (int)(left_ns / VIRTUAL_MS) : 0, text, HVD_TEXT_MAX);
}

static int sum(struct hvd_engine *engine, int rank, int size, int step, char *text)
{
    char name[16];
    float memory = (float)rank + 1;
    struct hvd_error error = {0};
    snprintf(name, sizeof name, "step %d", step);
    struct hvd_request request = crew_sum(name, &memory, 1);
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    snprintf(text, HVD_TEXT_MAX, "%s", error.text);
    if (handle < 0)
        return error.code;
    bool looks = rank != victim && crew_warn_ms && (kind == FROZEN || step == 0);
    if (rank != victim) {
        last_ns = virtual_now();
        first_ns[step] = first_ns[step] ? first_ns[step] : last_ns;
    }
    int code = HVD_AGAIN;
    if (looks) { /* a millisecond before it may be told */
        code = wait_until(engine, handle, first_ns[step] + ms(crew_warn_ms) - VIRTUAL_MS, text);
        CHECK_CODE(code != HVD_AGAIN || reports(name) == 0, 1, name);
    }
    if (looks && code == HVD_AGAIN) { /* when it must be */
        code = wait_until(engine, handle, warned_ns(), text);
        CHECK_CODE(code != HVD_AGAIN || reports(name) > 0 || (kind == FROZEN && victim == 0), 1, name);
    }
    if (code == HVD_AGAIN)
        code = hvd_engine_wait(engine, handle, WAIT_MS, text, HVD_TEXT_MAX);
    CHECK_CODE(code != HVD_AGAIN && hvd_engine_forget(engine, handle) == HVD_OK, 1, name);
    CHECK(code != HVD_OK || memory == (float)(size * (size + 1) / 2));
    return code;
}

static void right_end(const struct hvd_engine *engine, int code, int step, const char *text)
{
    char words[32];
    uint64_t limit_ns = ms(crew_limit_ms), took_ns = virtual_now() - last_ns;
    snprintf(words, sizeof words, "rank %d ", victim);
    CHECK_CODE(virtual_now() >= first_ns[step] + limit_ns, 1, text);
    CHECK_CODE(took_ns < limit_ns + limit_ns / 8 + 3 * tick_ns() + SOON_NS + ms(kind == FROZEN ? SELF_MS : 0), 1, text);
    virtual_waited(took_ns > limit_ns ? took_ns - limit_ns : 0);
    bool knows = code == HVD_ETIMEOUT && engine->failure.culprit == victim && strstr(text, words);
    CHECK_CODE(knows || cut_off, 1, text);
    named += knows;
    told++;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    uint64_t own = chosen * 7 + (uint64_t)rank;
    char text[HVD_TEXT_MAX] = "";
    int code = HVD_OK, step = 0;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &engine, &error), HVD_OK, error.text);
    hosts = engine->hosts;
    cut_off = kind == FROZEN && hosts > 1 && engine->who[victim].local == 0;
    crew_barrier(engine);
    if (kind == FROZEN && rank == victim)
        virtual_stop(rank, virtual_switches() + 1 + virtual_below(&own, 4000), false);
    while (kind == FROZEN && (code = sum(engine, rank, size, step, text)) == HVD_OK && ++step < STEPS)
        usleep(virtual_below(&own, 2) ? virtual_below(&own, 300) : 0);
    if (kind == LATE && rank == victim)
        for (uint64_t until_ns = virtual_now() + ms(late_ms); virtual_now() < until_ns;)
            usleep((unsigned)((until_ns - virtual_now()) / 1000) + 1);
    while (kind == NEVER && rank == victim && told < size - 1)
        usleep(100000);
    if (kind != FROZEN) {
        usleep(rank == victim ? 0 : virtual_below(&own, 30000));
        code = sum(engine, rank, size, step, text);
    }
    if (kind == LATE) {
        CHECK_CODE(code, HVD_OK, text);
        CHECK_CODE(sum(engine, rank, size, 1, text), HVD_OK, text);
        CHECK_CODE(reports("'step 0'") <= late_ms / (crew_warn_ms ? crew_warn_ms : late_ms + 1), 1, text);
    } else if (rank == victim) {
        CHECK_CODE(code, HVD_ETIMEOUT, text);
    } else {
        right_end(engine, code, step, text);
    }
    virtual_close(engine);
}

void virtual_stall(uint64_t seed, bool weak)
{
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    static const int warns[] = {0, 200, 400, 1000};
    plan.cpus = virtual_below(&chosen, 16) ? 1 : plan.cpus; /* waiters that spin for seconds take long */
    kind = (int)virtual_below(&chosen, KINDS);
    victim = (int)virtual_below(&chosen, (unsigned)size);
    crew_warn_ms = warns[virtual_below(&chosen, HVD_COUNT_OF(warns))];
    crew_limit_ms = crew_warn_ms + (kind == FROZEN ? 3000 : 800) + (int)virtual_below(&chosen, 2000);
    late_ms = 1 + (int)virtual_below(&chosen, (unsigned)crew_limit_ms - 50);
    if (kind == LATE && virtual_below(&chosen, 3) == 0)
        crew_limit_ms = 0;
    crew_report_fd = memfd_create("report", MFD_CLOEXEC);
    CHECK(crew_report_fd >= 0);
    virtual_describe("rank %d is %s %d, warning %d ms, limit %d ms", victim,
                     (const char *[]){"late", "away", "frozen"}[kind], kind == LATE ? late_ms : 0, crew_warn_ms,
                     crew_limit_ms);
    virtual_begin(&plan);
    virtual_run(size, body);
    CHECK(kind == LATE || named > 0);
    CHECK(crew_warn_ms || reports("") == 0);
}
