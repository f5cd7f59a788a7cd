/* count_engine.c - instructions of one 4 KB allreduce, from submit to forget, on one of two ranks.
 *
 * Two engines in this process; this thread holds the turn of both and lets each pass in turn until both handles are
 * finished, so nobody spins, sleeps or rings, and the count is the same in every run. It is what the path costs if
 * nobody has to be waited for: check, queue, vote, merge, decide, bucket, sum, finish. The ordinary case is counted:
 * the tensor is known, and the caller waits at once.
 */
#include "count.h"
#include "crew.h"

#include <pthread.h>

enum { KNOWN_AFTER = 100, TIMES = 20, ELEMENTS = 1024 };

static struct hvd_engine *both[2];
static pthread_barrier_t meeting;

static int64_t submit(struct hvd_engine *engine, float *memory, const char *name)
{
    struct hvd_error error = {0};
    struct hvd_request request = crew_sum(name, memory, ELEMENTS);
    request.quiet = 1;
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    return handle;
}

static void once(float *memory)
{
    char text[HVD_TEXT_MAX];
    int64_t handle[2];
    bool done = false;
    for (int rank = 0; rank < 2; rank++)
        handle[rank] = submit(both[rank], memory + rank * ELEMENTS, "one.4KB");
    while (!done) {
        done = true;
        for (int rank = 0; rank < 2; rank++) {
            hvd_turn_once(both[rank]);
            done &= hvd_engine_poll(both[rank], handle[rank]) == HVD_OK;
        }
    }
    for (int rank = 0; rank < 2; rank++) {
        CHECK_CODE(hvd_engine_wait(both[rank], handle[rank], 0, text, sizeof text), HVD_OK, text);
        CHECK_CODE(hvd_engine_forget(both[rank], handle[rank]), HVD_OK, "forget");
    }
}

static bool at_once(void *self)
{
    return true;
}

static void body(struct hvd_engine *engine, int rank, int size)
{
    static float memory[2 * ELEMENTS];
    both[rank] = engine;
    pthread_barrier_wait(&meeting);
    if (rank == 0) {
        for (int i = 0; i < size; i++)
            while (!hvd_turn_take(both[i])) /* the engine thread has it only while it falls asleep */
                ;
        for (int i = 0; i < KNOWN_AFTER; i++)
            once(memory);
        count_begin();
        for (int i = 0; i < TIMES; i++)
            once(memory);
        count_end("submit-to-wait-of-4KB", size * TIMES);
        for (int i = 0; i < size; i++)
            hvd_turn_drive(both[i], at_once, NULL, 0); /* gives the turn back */
    }
    pthread_barrier_wait(&meeting);
}

int main(void)
{
    crew_deadline(120);
    CHECK(hvd_kernel_use("avx2") == HVD_OK || hvd_kernel_use("portable") == HVD_OK);
    pthread_barrier_init(&meeting, NULL, 2);
    crew_threads(2, body);
    pthread_barrier_destroy(&meeting);
    return 0;
}
