/* test_polled.c - a plane that moves nothing unless it is polled: who waits for its work polls it, and nobody naps. */
#include "crew.h"

#include <pthread.h>
#include <sched.h>

#define LOOKS    1000
#define COUNT    4096 /* more than travels with votes */
#define LOOK_NS  5000u
#define SPIN_NS  500000u /* the patience of a waiter with any other work: some hundred looks */
#define ATTEMPTS 50      /* a busy machine may take a waiter off its processor for longer than its patience */

/* One rank's: its work ends at the LOOKS-th look, and each look takes a while. */
struct slow {
    int looks, by_waiter;
    pthread_t waiter;
};

static bool slow_can(void *self, const struct hvd_work *work)
{
    return work->kind == HVD_ALLREDUCE;
}

static int slow_start(void *self, struct hvd_work *work, struct hvd_error *error)
{
    struct slow *slow = self;
    slow->looks = slow->by_waiter = 0;
    return HVD_OK;
}

static int slow_poll(void *self, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct slow *slow = self;
    for (uint64_t until = hvd_now_ns() + LOOK_NS; hvd_now_ns() < until;)
        ;
    slow->by_waiter += pthread_equal(slow->waiter, pthread_self()) != 0;
    return ++slow->looks == LOOKS ? HVD_OK : HVD_AGAIN;
}

static void slow_close(void *self) {}

static const struct hvd_plane polled = {.name = "slow",
                                        .preference = 1000,
                                        .silent = true,
                                        .polled = true,
                                        .can = slow_can,
                                        .start = slow_start,
                                        .poll = slow_poll,
                                        .close = slow_close};

static void who_waits_polls(struct hvd_engine *engine, int rank, int size)
{
    struct slow slow = {.waiter = pthread_self()};
    static float many[2][COUNT];
    crew_barrier(engine);
    while (!hvd_turn_take(engine))
        sched_yield();
    engine->spin_ns = SPIN_NS;
    hvd_set_insert_plane(engine, engine->global, (struct hvd_open_plane){.plane = &polled, .self = &slow});
    atomic_store(&engine->turn, 0);
    crew_meet();
    int alone = 0;
    for (int i = 0; i < ATTEMPTS; i++) { /* all ranks make as many */
        struct hvd_request request = crew_sum("x", many[rank], COUNT);
        struct hvd_error error = {0};
        char text[HVD_TEXT_MAX] = "";
        request.quiet = HVD_QUIET;
        CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
        CHECK(slow.looks == LOOKS);
        alone += slow.by_waiter == LOOKS;
    }
    CHECK(alone > 0);
}

int main(void)
{
    crew_deadline(300);
    crew_threads(2, who_waits_polls);
    return 0;
}
