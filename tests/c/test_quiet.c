/* test_quiet.c - submissions that wake nobody, and what sends them; the short way to submit and wait; the priority that
 * ranks must agree on. */
#include "crew.h"

#include <pthread.h>
#include <sched.h>

/* Nobody of this rank looks, and nobody is about to. */
static bool asleep(struct hvd_engine *engine)
{
    return atomic_load(&engine->host.control->seat[engine->host.rank].asleep.word) && !atomic_load(&engine->turn);
}

static struct hvd_request a_sum(const char *name, float *memory, int quiet)
{
    struct hvd_request request = crew_sum(name, memory, 1);
    request.quiet = quiet;
    return request;
}

static int64_t submit_quietly(struct hvd_engine *engine, const char *name, float *memory, int quiet)
{
    struct hvd_request request = a_sum(name, memory, quiet);
    return crew_begin(engine, &request);
}

static pthread_barrier_t all_threads;

/* Everybody sleeps, and nobody will be woken by what came before. */
static void all_asleep(struct hvd_engine *engine)
{
    crew_barrier(engine);
    while (!asleep(engine))
        sched_yield();
    pthread_barrier_wait(&all_threads);
}

/* While everybody sleeps, quiet submissions wake nobody; then a kick, a poll, or one that is not quiet sends them. An
 * engine looks up by itself now and then, and a crowded machine lets that be just here: not each time. */
static void quiet_submissions(struct hvd_engine *engine, int rank, int size)
{
    enum { KICK, POLL, LOUD, WAYS, TIMES = 4 };
    char text[HVD_TEXT_MAX] = "";
    int slept = 0;
    for (int step = 0; step < TIMES * WAYS * size; step++) {
        float memory[3] = {(float)rank, 1, 2};
        int64_t handle[3];
        all_asleep(engine);
        if (step / WAYS % size == rank) {
            handle[0] = submit_quietly(engine, "first", &memory[0], HVD_QUIET);
            handle[1] = submit_quietly(engine, "second", &memory[1], HVD_QUIET);
            slept += asleep(engine) && hvd_handles_queued(&engine->handles);
            if (step % WAYS == KICK)
                hvd_engine_kick(engine);
            else if (step % WAYS == POLL)
                CHECK(hvd_engine_poll(engine, handle[0]) == HVD_AGAIN);
            handle[2] = submit_quietly(engine, "third", &memory[2], step % WAYS == LOUD ? HVD_NOW : HVD_QUIET);
            while (hvd_handles_queued(&engine->handles))
                if (step % WAYS == POLL)
                    hvd_engine_poll(engine, handle[2]);
                else if (step % WAYS == KICK)
                    hvd_engine_kick(engine);
        }
        pthread_barrier_wait(&all_threads);
        if (step / WAYS % size != rank)
            for (int i = 0; i < 3; i++)
                handle[i] = submit_quietly(engine,
                                           i == 0   ? "first"
                                           : i == 1 ? "second"
                                                    : "third",
                                           &memory[i], HVD_QUIET);
        for (int i = 0; i < 3; i++) /* the last one's wait sends all */
            CHECK_CODE(crew_wait(engine, handle[2 - i], text), HVD_OK, text);
        CHECK(memory[0] == (float)(size * (size - 1) / 2) && memory[1] == (float)size);
    }
    CHECK(slept > TIMES); /* else they have woken somebody */
}

static bool done(struct hvd_engine *engine, int64_t handle)
{
    return hvd_slot_state(hvd_handles_find(&engine->handles, handle)) == HVD_SLOT_DONE; /* a poll would send it */
}

/* Sent within a millisecond by itself, when nobody waits, polls or kicks; a waiter turns the alarm off. */
static void soon_submissions(struct hvd_engine *engine, int rank, int size)
{
    enum { LARGE = 300000 };
    char text[HVD_TEXT_MAX] = "";
    float memory = (float)rank, *large = calloc(LARGE, sizeof *large);
    for (int step = 0; step < 3; step++) {
        memory = (float)rank;
        all_asleep(engine);
        int64_t handle = submit_quietly(engine, "soon", &memory, HVD_SOON);
        while (!done(engine, handle))
            sched_yield();
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        CHECK(memory == (float)(size * (size - 1) / 2));
        all_asleep(engine);
        if (step == rank) { /* the others are silent, so the alarm is all there is */
            handle = submit_quietly(engine, "soon", &memory, HVD_SOON);
            CHECK(hvd_engine_wait(engine, handle, 0, text, sizeof text) == HVD_AGAIN);
        }
        pthread_barrier_wait(&all_threads);
        if (step != rank)
            handle = submit_quietly(engine, "soon", &memory, HVD_QUIET);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    }
    all_asleep(engine);
    struct hvd_request request = a_sum("large", large, HVD_SOON);
    request.ndim = 1;
    request.dims[0] = LARGE;
    int64_t handle = crew_begin(engine, &request);
    CHECK(!atomic_load(&engine->soon.armed)); /* it is on its way */
    while (!done(engine, handle))
        sched_yield();
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    free(large);
}

/* One call submits and waits. Who is late makes it a handle; what fails is forgotten. */
static void run_at_once(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 20; step++) {
        float memory = (float)(rank + step);
        struct hvd_request request = a_sum("ran", &memory, HVD_QUIET);
        if (step % 5 == 4 && rank == 0) { /* nobody else is there */
            int64_t handle = hvd_engine_run(engine, &request, 1000000, text, sizeof text);
            CHECK(handle > 0);
            CHECK(hvd_engine_finish(engine, handle, 1000000, text, sizeof text) == HVD_AGAIN);
            CHECK(hvd_engine_forget(engine, handle) == HVD_AGAIN); /* it waits for nobody */
            pthread_barrier_wait(&all_threads);
            CHECK_CODE(hvd_engine_finish(engine, handle, 20000000000, text, sizeof text), HVD_OK, text);
            CHECK(hvd_engine_poll(engine, handle) == HVD_EHANDLE);
            CHECK(hvd_engine_finish(engine, handle, 1000000, text, sizeof text) == HVD_EHANDLE);
        } else {
            if (step % 5 == 4)
                pthread_barrier_wait(&all_threads);
            CHECK_CODE(hvd_engine_run(engine, &request, 20000000000, text, sizeof text), HVD_OK, text);
        }
        CHECK(memory == (float)(size * (size - 1) / 2 + size * step));
    }
    float memory = 0;
    struct hvd_request request = a_sum("ran", &memory, HVD_QUIET);
    request.op = rank ? HVD_OP_max : HVD_OP_min;
    CHECK(hvd_engine_run(engine, &request, 20000000000, text, sizeof text) == HVD_EMISMATCH &&
          strstr(text, "reduce op"));
    request.dtype = 99;
    CHECK(hvd_engine_run(engine, &request, 20000000000, text, sizeof text) == HVD_ETYPE && strstr(text, "'ran'"));
    request.kind = HVD_ALLTOALL;
    CHECK(hvd_engine_run(engine, &request, 1000000, text, sizeof text) == HVD_EINVAL && strstr(text, "has a result"));
    for (uint32_t i = 0; i < atomic_load(&engine->handles.high); i++)
        CHECK(hvd_slot_state(&engine->handles.slot[i]) == HVD_SLOT_FREE);
}

/* The same on all ranks, or an error that shows it. */
static void priorities(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float memory = 1;
    struct hvd_request request = a_sum("first layer", &memory, HVD_NOW);
    request.priority = rank == 1 ? -7 : INT32_MAX;
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
        crew_threads(size, soon_submissions);
        crew_threads(size, run_at_once);
        crew_threads(size, priorities);
        pthread_barrier_destroy(&all_threads);
    }
    return 0;
}
