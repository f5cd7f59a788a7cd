/* test_tune.c - a size of buckets that one rank proposes holds on all ranks from one plan on. */
#include "crew.h"

#include <sched.h>

#define TENSORS 8

static int64_t buckets(struct hvd_engine *engine)
{
    return atomic_load(&engine->counter[HVD_COUNT_buckets]);
}

/* One step of a model; how many buckets it made. A group is ready as a whole, so it is cut in one plan. */
static int64_t step(struct hvd_engine *engine, int set, int rank, int size)
{
    float memory[TENSORS][100];
    int64_t handle[TENSORS], before = buckets(engine);
    char name[16], text[HVD_TEXT_MAX] = "";
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < 100; k++)
            memory[i][k] = (float)(rank + i + k);
        snprintf(name, sizeof name, "w%d", i);
        struct hvd_request request = crew_sum(name, memory[i], 100);
        request.process_set = set;
        request.group = 1;
        request.group_count = TENSORS;
        handle[i] = crew_begin(engine, &request);
    }
    for (int i = 0; i < TENSORS; i++) {
        CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        for (int k = 0; k < 100; k++)
            CHECK(memory[i][k] == (float)(size * (size - 1) / 2 + size * (i + k)));
    }
    return buckets(engine) - before;
}

static void tune(struct hvd_engine *engine, int64_t bytes)
{
    struct hvd_error error = {0};
    CHECK_CODE(hvd_engine_tune(engine, bytes, &error), HVD_OK, error.text);
}

static void proposals(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    int64_t option = atomic_load(&engine->fusion_bytes);
    CHECK(option == engine->options.fusion_bytes);
    CHECK(step(engine, 0, rank, size) == 1);
    CHECK(hvd_engine_tune(engine, -1, &error) == HVD_EINVAL && strstr(error.text, "-1"));
    static const struct {
        int64_t bytes, buckets;
    } trial[] = {{800, 4}, {0, 8}, {1199, 4}, {INT64_MAX, 1}, {3200, 1}};
    for (size_t i = 0; i < HVD_COUNT_OF(trial); i++) {
        if (rank == 0)
            tune(engine, trial[i].bytes); /* before anything that the next plan needs: so it is in force there */
        CHECK(step(engine, 0, rank, size) == trial[i].buckets);
        CHECK(atomic_load(&engine->fusion_bytes) == trial[i].bytes);
        crew_barrier(engine); /* all have looked before the next proposal */
    }
    tune(engine, rank == size - 1 ? 800 : 400); /* together: perhaps in several rounds, but the same on all */
    crew_barrier(engine);
    crew_barrier(engine); /* the proposal of the slowest was in a vote of these */
    int64_t here = atomic_load(&engine->fusion_bytes);
    CHECK(here == 800 || here == 400);
    CHECK(step(engine, 0, rank, size) == 3200 / here);
    if (size > 1) { /* another set keeps the option's */
        int ranks[HVD_LOCAL_MAX];
        for (int i = 0; i < size; i++)
            ranks[i] = i;
        int set = crew_set_open(engine, ranks, size, &error);
        CHECK_CODE(set > 0, 1, error.text);
        crew_barrier(engine);
        CHECK(step(engine, set, rank, size) == 1);
        crew_barrier(engine);
        CHECK_CODE(hvd_engine_set_close(engine, set, &error), HVD_OK, error.text);
    }
    if (rank == 0) { /* an idle job hears of it, too */
        tune(engine, 12345);
    }
    while (atomic_load(&engine->fusion_bytes) != 12345)
        sched_yield();
    crew_barrier(engine);
}

int main(void)
{
    crew_deadline(60);
    char text[HVD_TEXT_MAX] = "";
    CHECK(hvd_tune(5, text, sizeof text) == HVD_ESTATE && strstr(text, "init") && hvd_fusion_bytes() == HVD_ESTATE);
    for (int size = 1; size <= 4; size++)
        crew_threads(size, proposals);
    return 0;
}
