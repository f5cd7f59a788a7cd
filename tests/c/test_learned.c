/* test_learned.c - with real engines: a plan is learned within some steps, another graph costs one deviation and
 * neither an error nor a wrong sum, and a graph that changes all the time is left alone.
 *
 * A step is a backward pass: tensors are submitted quietly, and the last of each run wakes the engine. Ranks work on
 * their own for a while between tensors, each at its own pace. */
#include "crew.h"

#include <sched.h>

enum { TENSORS = 40, RUNS = 4, COUNT = 700 };

static int64_t counted(struct hvd_engine *engine, int which)
{
    return atomic_load(&engine->counter[which]);
}

/* Every tensor once but `left_out` (-1: none), in order; the sums are right. */
static void step(struct hvd_engine *engine, int rank, int size, int left_out, unsigned pace)
{
    static _Thread_local float memory[TENSORS][COUNT];
    int64_t handle[TENSORS];
    char name[16], text[HVD_TEXT_MAX] = "";
    const int run = TENSORS / RUNS;
    for (int i = 0; i < TENSORS; i++) {
        if (i == left_out)
            continue;
        for (int k = 0; k < COUNT; k++)
            memory[i][k] = (float)(rank + i + k);
        for (unsigned k = (pace = pace * 1103515245u + 12345u) >> 29; k > 0; k--)
            sched_yield();
        snprintf(name, sizeof name, "w%d", i);
        struct hvd_request request = crew_sum(name, memory[i], COUNT);
        request.quiet = (i + 1) % run != 0;
        handle[i] = crew_begin(engine, &request);
    }
    for (int i = TENSORS - 1; i >= 0; i--) {
        if (i == left_out)
            continue;
        CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        for (int k = 0; k < COUNT; k++)
            CHECK(memory[i][k] == (float)(size * (size - 1) / 2 + size * (i + k)));
    }
}

/* How often a plan was learned and deviated from so far. Who looked early waits: the others' next steps count, too. */
static void expect(struct hvd_engine *engine, int64_t learned, int64_t deviations)
{
    int64_t learned_now = counted(engine, HVD_COUNT_learned), deviations_now = counted(engine, HVD_COUNT_deviations);
    if (learned_now < learned || deviations_now != deviations)
        fprintf(stderr, "learned %lld times, deviated %lld times\n", (long long)learned_now, (long long)deviations_now);
    CHECK(learned_now >= learned && deviations_now == deviations);
    crew_barrier(engine);
}

static void steps(struct hvd_engine *engine, int rank, int size)
{
    for (int i = 0; i < 10; i++)
        step(engine, rank, size, -1, (unsigned)(rank + 10 * i));
    expect(engine, 1, 0);
    step(engine, rank, size, 7, 1); /* another graph: no error, no hang, and the right sums */
    step(engine, rank, size, -1, 2);
    expect(engine, 1, 1);
    for (int i = 0; i < 30; i++) /* a proposal can be adopted in some rounds only */
        step(engine, rank, size, -1, 3);
    expect(engine, 2, 1);
    for (int i = 0; i < 30; i++) /* one that changes all the time is left alone */
        step(engine, rank, size, i % 3 ? -1 : i % TENSORS, (unsigned)(rank + i));
    CHECK(counted(engine, HVD_COUNT_deviations) <= 8);
}

int main(void)
{
    crew_deadline(200);
    for (int i = 0; crew_world(i); i++)
        for (int size = 1; size <= 4; size++)
            crew_threads(size, steps);
    return 0;
}
