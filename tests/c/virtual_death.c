/* virtual_death.c - a rank is frozen, or its process ends, at any switch: do all others name it, and in time?
 *
 * Ranks make sums until one fails. A process that ends closes its descriptors, and its pidfd speaks. A frozen one says
 * nothing: ranks of other hosts know after the limit of silence; ranks of one host alone have none (stall_check.c tells
 * of it), so there only ends are tried. Who has failed leaves, as a job does: so the others see its streams end, too.
 * In a few runs no store tells them who has ended, as every real job has it: there they may name who has left before.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <unistd.h>

enum {
    BYTES = 1 << 16,
    WAIT_MS = 100000,
    START_MS = 22000,
    CLOSE_MS = 2500,
    END_MS = 300,
    SWITCHES = 30000,
    SETTLED = 8000,
    SWITCHES_MS = 20,
    DELAY_MS = 50,
    MESSAGES = 4
};
static uint64_t chosen, at, delay_ms;
static int victim;
static bool ends;

/* The text names the victim and says why (HVD456: somebody ended the job), and the time is right. */
static void check(int rank, int code, const char *text, int silence_ms)
{
    char name[16];
    uint64_t late_ms = (virtual_now() - virtual_stopped_ns()) / VIRTUAL_MS;
    uint64_t limit_ms = END_MS + MESSAGES * delay_ms + (ends ? 0 : (uint64_t)silence_ms);
    uint64_t switches = virtual_switches() - at;
    snprintf(name, sizeof name, "rank %d", victim);
    if (switches > SWITCHES + SWITCHES_MS * late_ms) {
        fprintf(stderr, "rank %d: %llu switches in %llu ms: somebody waits without sleeping\n", rank,
                (unsigned long long)switches, (unsigned long long)late_ms);
        abort();
    }
    bool named = strstr(text, name) || virtual_store == VIRTUAL_NO_STORE;
    if (virtual_stopped_ns() && code == (strstr(text, "HVD113") ? HVD_ETIMEOUT : HVD_EPEER) && named &&
        !strstr(text, "HVD456") && late_ms <= limit_ms)
        return;
    fprintf(stderr, "rank %d: code %d after %llu ms (limit %llu), where %s %s: %s\n", rank, code,
            (unsigned long long)late_ms, (unsigned long long)limit_ms, name, ends ? "ended" : "was frozen", text);
    abort();
}

static void sums(struct hvd_engine *engine, int rank, int size, float *memory)
{
    uint64_t common = chosen, own = chosen + (uint64_t)rank;
    for (;;) {
        int64_t count = virtual_below(&common, 3) ? 3 : BYTES / 4;
        char text[HVD_TEXT_MAX] = "", name[16];
        struct hvd_error error = {0};
        snprintf(name, sizeof name, "t%d", virtual_below(&common, 3));
        for (int64_t i = 0; i < count; i++)
            memory[i] = (float)(rank + i % 7);
        if (virtual_below(&own, 3) == 0)
            usleep(virtual_below(&own, 3000));
        struct hvd_request request = crew_sum(name, memory, count);
        int64_t handle = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(handle > 0, 1, error.text);
        int code = hvd_engine_wait(engine, handle, WAIT_MS, text, sizeof text);
        CHECK(hvd_engine_forget(engine, handle) == (code == HVD_AGAIN ? HVD_AGAIN : HVD_OK));
        if (code != HVD_OK) {
            check(rank, code, text, crew_peer_timeout_ms * 3 / 2);
            CHECK_CODE(virtual_store == VIRTUAL_NO_STORE || engine->failure.culprit == victim, 1, text);
            return;
        }
        for (int64_t i = 0; i < count; i++)
            CHECK(memory[i] == (float)(size * (size - 1) / 2) + (float)size * (float)(i % 7));
    }
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    int code = virtual_open(rank, size, 0, false, &engine, &error);
    if (code != HVD_OK) {
        check(rank, code, error.text, START_MS);
        return;
    }
    float *memory = virtual_memory(BYTES);
    sums(engine, rank, size, memory);
    uint64_t since_ns = virtual_now();
    virtual_close(engine);
    CHECK(virtual_now() < since_ns + (uint64_t)CLOSE_MS * VIRTUAL_MS);
    virtual_poison(memory, BYTES);
}

void virtual_death(uint64_t seed, bool weak)
{
    static const int timeouts[] = {500, 2000, 8000, 30000};
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    size += world == 3 && size < 3;
    crew_peer_timeout_ms = timeouts[virtual_below(&chosen, 4)];
    victim = (int)virtual_below(&chosen, (unsigned)size);
    ends = world < CREW_HOSTS || virtual_below(&chosen, 2);
    virtual_store = ends || virtual_below(&chosen, 2) ? VIRTUAL_STORE : VIRTUAL_STORE_IN_RANK_0;
    if (ends && world >= CREW_HOSTS && virtual_below(&chosen, 4) == 0)
        virtual_store = VIRTUAL_NO_STORE;
    at = 1 + virtual_below(&chosen, SWITCHES) + (virtual_below(&chosen, 4) ? SETTLED : 0);
    plan.delay_ns = virtual_below(&chosen, 3) ? 0 : virtual_below(&chosen, DELAY_MS * VIRTUAL_MS);
    delay_ms = plan.delay_ns / VIRTUAL_MS;
    virtual_describe("rank %d %s at switch %llu, limit %d ms, store %d", victim, ends ? "ends" : "is frozen",
                     (unsigned long long)at, crew_peer_timeout_ms, virtual_store);
    virtual_begin(&plan);
    virtual_stop(victim, at, ends);
    virtual_run(size, body);
}
