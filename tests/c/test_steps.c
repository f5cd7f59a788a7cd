/* test_steps.c - what a step has cost is counted, kept for so many steps, and read whole while others write. */
#include "crew.h"

#include <pthread.h>

enum { STEPS = 5, WRITERS = 2, MANY = 3 * HVD_STEPS_KEPT };

static int place(const char *name)
{
    char text[128];
    for (int i = 0; hvd_steps_name(i, text, sizeof text); i++)
        if (strcmp(text, name) == 0)
            return i;
    fprintf(stderr, "there is no %s\n", name);
    abort();
}

static void allreduce(struct hvd_engine *engine, const char *name, int64_t count)
{
    static _Thread_local float memory[1024];
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request request = crew_sum(name, memory, count);
    int64_t handle = crew_begin(engine, &request);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

static void counts(struct hvd_engine *engine, int rank, int size)
{
    int width = engine->steps.width, buckets = place("buckets"), exposed = place("exposed_ns");
    int64_t now[2][HVD_STEP_NUMBERS_MAX + HVD_COUNTERS_MAX + HVD_CARRIERS_MAX * HVD_PLANE_NUMBERS_MAX + HVD_SIZES];
    struct hvd_error error = {0};
    CHECK(width == place("size.larger") + 1 && place("bytes.votes") < place("size.1024"));
    CHECK(hvd_engine_look_closely(engine, -1, &error) == HVD_EINVAL && strstr(error.text, "-1"));
    CHECK_CODE(hvd_engine_look_closely(engine, 2, NULL), HVD_OK, "");
    CHECK(!hvd_engine_step_row(engine, 1, now[0]) && !hvd_engine_step_row(engine, -1, now[0]));
    for (int step = 1; step <= STEPS; step++) {
        allreduce(engine, "one", 1000);
        hvd_engine_arrived(engine);
        allreduce(engine, "two", 10);
        CHECK(hvd_engine_step(engine, 0, 7) == step);
        CHECK(hvd_engine_step(engine, 1, 7) == 0); /* a graph's, which do not count any more */
    }
    for (int step = 1; step <= STEPS; step++) {
        CHECK(hvd_engine_step_row(engine, step, now[step % 2]));
        int64_t *mine = now[step % 2], *before = now[(step + 1) % 2];
        CHECK(mine[HVD_STEP_number] == step && mine[place("optimizer_ns")] == 7 * step);
        CHECK(mine[HVD_STEP_begin_ns] <= mine[HVD_STEP_arrived_ns]);
        CHECK(mine[HVD_STEP_arrived_ns] <= mine[HVD_STEP_end_ns]);
        if (step > 1) {
            int64_t bytes = 0;
            for (int i = place("size.1024") - 1; i >= place("optimizer_ns"); i--) {
                char text[128];
                CHECK(hvd_steps_name(i, text, sizeof text));
                bytes += strncmp(text, "bytes.", 6) == 0 ? mine[i] - before[i] : 0;
            }
            CHECK(bytes == 4040 && mine[buckets] - before[buckets] == 2);
            CHECK(mine[place("size.1024")] - before[place("size.1024")] == 1);
            CHECK(mine[place("size.4096")] - before[place("size.4096")] == 1);
            CHECK(mine[HVD_STEP_begin_ns] == before[HVD_STEP_end_ns]);
            CHECK(mine[exposed] >= before[exposed] && (size > 1 || mine[exposed] == 0));
        }
    }
    struct hvd_bucket_seen seen[2 * STEPS];
    CHECK(hvd_engine_buckets(engine, 1, seen, 2 * STEPS) == 4 && hvd_engine_buckets(engine, 1, seen, 1) == 1);
    CHECK(hvd_engine_buckets(engine, 3, seen, 9) == 2 && seen[0].step == 4 && seen[0].number == 3);
    CHECK(strcmp(seen[0].name[0], "one") == 0 && seen[0].name[1][0] == 0 && seen[1].bytes == 40);
    CHECK(seen[0].begin_ns <= seen[0].end_ns && seen[0].end_ns <= seen[1].end_ns && seen[0].tensors == 1);
    crew_barrier(engine);
}

struct writer {
    struct hvd_engine *engine;
    pthread_t thread;
};

static void *write_steps(void *self)
{
    struct writer *writer = self;
    for (int i = 0; i < MANY; i++)
        CHECK(hvd_engine_step(writer->engine, 0, 3) > 0);
    return NULL;
}

/* Rows that are read are whole, however many write and however often the ring goes round. */
static void races(struct hvd_engine *engine, int rank, int size)
{
    struct writer writer[WRITERS];
    int64_t row[HVD_STEP_NUMBERS_MAX + HVD_COUNTERS_MAX + HVD_CARRIERS_MAX * HVD_PLANE_NUMBERS_MAX + HVD_SIZES];
    for (int i = 0; i < WRITERS; i++) {
        writer[i].engine = engine;
        CHECK(pthread_create(&writer[i].thread, NULL, write_steps, &writer[i]) == 0);
    }
    int64_t optimizer = place("optimizer_ns"), found = 0;
    for (int64_t last = 0; last < WRITERS * MANY;) {
        CHECK(hvd_engine_step_row(engine, 0, row));
        last = row[HVD_STEP_number];
        if (!last || !hvd_engine_step_row(engine, last, row))
            continue;
        CHECK(row[HVD_STEP_number] == last && row[HVD_STEP_begin_ns] > 0);
        CHECK(row[optimizer] % 3 == 0 && row[optimizer] >= 3 * (last - WRITERS));
        found++;
    }
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_join(writer[i].thread, NULL) == 0);
    CHECK(found > 0 && hvd_engine_step_row(engine, WRITERS * MANY, row));
    CHECK(!hvd_engine_step_row(engine, WRITERS * MANY - HVD_STEPS_KEPT, row));
    crew_barrier(engine);
}

int main(void)
{
    crew_deadline(120);
    for (int size = 1; size <= 3; size++)
        crew_threads(size, counts);
    crew_threads(2, races);
    puts("steps are counted and kept");
    return 0;
}
