/* test_quiet.c - submissions that wake nobody, what sends them, and the priority that ranks must agree on. */
#include "crew.h"

#include <pthread.h>
#include <sched.h>

/* Nobody of this rank looks, and nobody is about to. */
static bool asleep(struct hvd_engine *engine)
{
    return atomic_load(&engine->host.control->seat[engine->host.rank].asleep.word) && !atomic_load(&engine->turn);
}

static int64_t submit_quietly(struct hvd_engine *engine, const char *name, float *memory, int quiet)
{
    struct hvd_error error = {0};
    struct hvd_request request = {.name = name,
                                  .kind = HVD_ALLREDUCE,
                                  .op = HVD_OP_sum,
                                  .dtype = HVD_DTYPE_float32,
                                  .prescale = 1,
                                  .postscale = 1,
                                  .input = memory,
                                  .output = memory,
                                  .quiet = quiet};
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    return handle;
}

static pthread_barrier_t all_threads;

/* While everybody sleeps, quiet submissions wake nobody; then a kick, a poll, or one that is not quiet sends them. */
static void quiet_submissions(struct hvd_engine *engine, int rank, int size)
{
    enum { KICK, POLL, LOUD, WAYS };
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < WAYS * size; step++) {
        float memory[3] = {(float)rank, 1, 2};
        int64_t handle[3];
        crew_barrier(engine);
        while (!asleep(engine))
            sched_yield();
        pthread_barrier_wait(&all_threads);
        if (step / WAYS == rank) {
            handle[0] = submit_quietly(engine, "first", &memory[0], 1);
            handle[1] = submit_quietly(engine, "second", &memory[1], 1);
            CHECK(asleep(engine) && hvd_handles_queued(&engine->handles));
            if (step % WAYS == KICK)
                hvd_engine_kick(engine);
            else if (step % WAYS == POLL)
                CHECK(hvd_engine_poll(engine, handle[0]) == HVD_AGAIN);
            handle[2] = submit_quietly(engine, "third", &memory[2], step % WAYS != LOUD);
            while (hvd_handles_queued(&engine->handles))
                if (step % WAYS == POLL)
                    hvd_engine_poll(engine, handle[2]);
                else if (step % WAYS == KICK)
                    hvd_engine_kick(engine);
        }
        pthread_barrier_wait(&all_threads);
        if (step / WAYS != rank)
            for (int i = 0; i < 3; i++)
                handle[i] = submit_quietly(engine, i == 0 ? "first" : i == 1 ? "second" : "third", &memory[i], 1);
        for (int i = 0; i < 3; i++) /* the last one's wait sends all */
            CHECK_CODE(crew_wait(engine, handle[2 - i], text), HVD_OK, text);
        CHECK(memory[0] == (float)(size * (size - 1) / 2) && memory[1] == (float)size);
    }
}

/* The same on all ranks, or an error that shows it. */
static void priorities(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float memory = 1;
    (void)size;
    struct hvd_request request = {.name = "first layer",
                                  .kind = HVD_ALLREDUCE,
                                  .op = HVD_OP_sum,
                                  .dtype = HVD_DTYPE_float32,
                                  .prescale = 1,
                                  .postscale = 1,
                                  .input = &memory,
                                  .output = &memory,
                                  .priority = rank == 1 ? -7 : INT32_MAX};
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_EMISMATCH, text);
    CHECK(strstr(text, "priority") && strstr(text, "-7") && strstr(text, "2147483647"));
    request.priority = -1;
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
}

int main(void)
{
    crew_deadline(60);
    for (int size = 2; size <= 4; size += 2) {
        pthread_barrier_init(&all_threads, NULL, (unsigned)size);
        crew_threads(size, quiet_submissions);
        crew_threads(size, priorities);
        pthread_barrier_destroy(&all_threads);
    }
    return 0;
}
