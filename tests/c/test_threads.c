/* test_threads.c - many threads of each rank call at once: names in another order on every rank, barriers, sets.
 *
 * Every thread waits for its own collective before it goes on, as a synchronous call does. As long as a rank has as
 * many threads as there are names under way, no order of them can deadlock.
 */
#include "crew.h"
#include "ranks.h"

#include <pthread.h>
#include <sched.h>

enum { THREADS = 6, STEPS = 60 };

struct worker {
    struct hvd_engine *engine;
    int rank, size, number;
    pthread_barrier_t *meet; /* of this rank's threads */
    int *name_of;            /* what each thread works on in this step */
    uint64_t *seed;
};

static void shuffle(struct worker *worker)
{
    for (int i = THREADS - 1; i > 0; i--) {
        int j = (int)ranks_below(worker->seed, (uint32_t)i + 1), swap = worker->name_of[i];
        worker->name_of[i] = worker->name_of[j];
        worker->name_of[j] = swap;
    }
}

static void call(struct worker *worker, struct hvd_request request)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    request.quiet = 1;
    request.prescale = request.postscale = 1.0;
    int64_t handle = hvd_engine_submit(worker->engine, &request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK_CODE(crew_wait(worker->engine, handle, text), HVD_OK, text);
}

/* Every step: each thread reduces one of the names, whichever this rank has dealt it; then all wait in a barrier each.
 */
static void *work(void *self)
{
    struct worker *worker = self;
    for (int step = 0; step < STEPS; step++) {
        if (pthread_barrier_wait(worker->meet) == PTHREAD_BARRIER_SERIAL_THREAD)
            shuffle(worker);
        pthread_barrier_wait(worker->meet);
        int number = worker->name_of[worker->number];
        char name[32];
        snprintf(name, sizeof name, "thread.%d", number);
        int64_t memory[3] = {worker->rank + number, step, 1};
        call(worker, (struct hvd_request){.name = name,
                                          .kind = HVD_ALLREDUCE,
                                          .op = HVD_OP_sum,
                                          .dtype = HVD_DTYPE_int64,
                                          .ndim = 1,
                                          .dims = {3},
                                          .input = memory,
                                          .output = memory});
        int size = worker->size;
        CHECK(memory[0] == size * (size - 1) / 2 + size * number && memory[1] == step * size && memory[2] == size);
        pthread_barrier_wait(worker->meet); /* unnamed calls match by order, so they may not mix with others */
        call(worker, (struct hvd_request){.kind = HVD_BARRIER});
    }
    return NULL;
}

static void names_in_any_order_and_barriers_at_once(struct hvd_engine *engine, int rank, int size)
{
    pthread_t thread[THREADS];
    pthread_barrier_t meet;
    struct worker worker[THREADS];
    int name_of[THREADS];
    uint64_t seed = (uint64_t)rank * 7919 + 3;
    pthread_barrier_init(&meet, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        name_of[i] = i;
        worker[i] = (struct worker){engine, rank, size, i, &meet, name_of, &seed};
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&thread[i], NULL, work, &worker[i]) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&meet);
}

/* Barriers in flight together: none is over on any rank before all have come to it. */
static void barriers_several_at_once(struct hvd_engine *engine, int rank, int size)
{
    enum { AT_ONCE = 5 };
    static _Atomic int arrived[AT_ONCE];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    if (rank == 0)
        for (int i = 0; i < AT_ONCE; i++)
            atomic_store(&arrived[i], 0);
    crew_barrier(engine);
    int64_t handle[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        atomic_fetch_add(&arrived[i], 1);
        struct hvd_request request = {.kind = HVD_BARRIER};
        CHECK((handle[i] = hvd_engine_submit(engine, &request, &error)) > 0);
    }
    for (int i = AT_ONCE - 1; i >= 0; i--) {
        CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        CHECK(atomic_load(&arrived[i]) == size);
    }
    crew_barrier(engine); /* rank 0 of the next size begins anew */
}

/* Each thread has a process set of its own, all of the same ranks, and runs free of the others. */
static void *work_in_set(void *self)
{
    struct worker *worker = self;
    for (int step = 0; step < STEPS; step++) {
        float value = (float)(worker->rank + worker->number);
        call(worker, (struct hvd_request){.name = step % 2 ? "same" : NULL,
                                          .kind = HVD_ALLREDUCE,
                                          .op = HVD_OP_sum,
                                          .dtype = HVD_DTYPE_float32,
                                          .input = &value,
                                          .output = &value,
                                          .process_set = worker->number});
        CHECK(value == (float)(worker->size * (worker->size - 1) / 2 + worker->size * worker->number));
    }
    return NULL;
}

static void a_set_for_each_thread(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    pthread_t thread[THREADS];
    struct worker worker[THREADS];
    int all[HVD_LOCAL_MAX];
    for (int r = 0; r < size; r++)
        all[r] = r;
    for (int i = 1; i < THREADS; i++)
        CHECK_CODE(crew_set_open(engine, all, size, &error), i, error.text);
    crew_barrier(engine);
    for (int i = 0; i < THREADS; i++) {
        worker[i] = (struct worker){.engine = engine, .rank = rank, .size = size, .number = i};
        CHECK(pthread_create(&thread[i], NULL, work_in_set, &worker[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    crew_barrier(engine);
    for (int i = 1; i < THREADS; i++)
        CHECK(hvd_engine_set_close(engine, i, &error) == HVD_OK);
}

#ifndef __SANITIZE_THREAD__
struct landing {
    struct hvd_engine *engine;
    int64_t handle;
    int code;
};

static void *finish(void *self)
{
    struct landing *landing = self;
    char text[HVD_TEXT_MAX] = "";
    landing->code = hvd_engine_finish(landing->engine, landing->handle, 60000000000, text, sizeof text);
    return NULL;
}

/* Nobody should, and the thread sanitizer says so. But one of them gets the result, and the other one is told at once,
 * also if he is late to wake up and the slot is free by then, or serves another request. */
static void two_threads_wait_for_one_landing(struct hvd_engine *engine, int rank, int size)
{
    static struct hvd_engine *of_rank_0;
    for (int step = 0; step < 200; step++) {
        float value = 1;
        struct hvd_error error = {0};
        char text[HVD_TEXT_MAX] = "";
        struct hvd_request request = crew_sum("landing", &value, 1);
        if (rank == 0)
            of_rank_0 = engine;
        crew_meet();
        while (rank > 0 && atomic_load(&of_rank_0->waiters) < 2)
            sched_yield();
        struct landing mine = {engine, hvd_engine_submit(engine, &request, &error), 0}, other = mine;
        CHECK_CODE(mine.handle > 0, 1, error.text);
        if (rank > 0) {
            CHECK_CODE(crew_wait(engine, mine.handle, text), HVD_OK, text);
        } else {
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, finish, &other) == 0);
            finish(&mine);
            pthread_join(thread, NULL);
            CHECK(mine.code == HVD_OK || mine.code == HVD_EHANDLE);
            CHECK(other.code == HVD_OK || other.code == HVD_EHANDLE);
            CHECK((mine.code == HVD_OK || other.code == HVD_OK) && value == (float)size);
        }
        crew_meet();
    }
}
#endif

int main(void)
{
    static const int sizes[] = {1, 2, 3};
    crew_deadline(240);
    for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++) {
        uint64_t begun = hvd_now_ns();
        crew_threads(sizes[k], names_in_any_order_and_barriers_at_once);
        crew_threads(sizes[k], barriers_several_at_once);
        crew_threads(sizes[k], a_set_for_each_thread);
#ifndef __SANITIZE_THREAD__
        if (sizes[k] > 1)
            crew_threads(sizes[k], two_threads_wait_for_one_landing);
#endif
        printf("%d ranks of %d threads: %.0f ms\n", sizes[k], THREADS, (double)(hvd_now_ns() - begun) / 1e6);
        fflush(stdout);
    }
    return 0;
}
