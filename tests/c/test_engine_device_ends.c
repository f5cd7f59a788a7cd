/* test_engine_device_ends.c - what an engine has on devices, over a GPU that is none (tests/stub), ends in time and is
 * in nobody's way: several sets' collectives that a dead rank leaves hanging, and somebody else's CUDA graph.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 1000 };

static int64_t begin(struct hvd_engine *engine, const char *name, int set, float *value, int count, int rank,
                     void *ready)
{
    struct hvd_request request = crew_sum(name, value, count);
    request.process_set = set;
    request.device = rank + 1;
    request.ready = ready;
    return crew_begin(engine, &request);
}

static void sum(struct hvd_engine *engine, const char *name, int set, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    float value = (float)rank;
    CHECK_CODE(crew_wait(engine, begin(engine, name, set, &value, 1, rank, NULL), text), HVD_OK, text);
    CHECK(value == (float)(size * (size - 1)) / 2);
}

/* Rank 1 dies while its tensors are not ready yet. On the others' one stream lie a collective of a set and, behind it,
 * one of the global set: the abort of that, which comes first, waits for the other one. Whoever asks hears of the
 * death. */
static void one_dies_in_two_sets(struct hvd_engine *engine, int rank, int size)
{
    static const int ranks[] = {0, 1, 2};
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[2] = {1, 1};
    int set = crew_set_open(engine, ranks, 3, &error), numbers[] = {set, 0};
    CHECK_CODE(set > 0, 1, error.text);
    crew_barrier(engine);
    sum(engine, "warm", set, rank, size);
    sum(engine, "warm", 0, rank, size);
    crew_barrier(engine);
    int64_t handle[2];
    int code = HVD_OK;
    for (int i = 0; i < 2 && code == HVD_OK; i++) {
        handle[i] = begin(engine, "last", numbers[i], &value[i], 1, rank, rank == 1 ? gpus_gate() : NULL);
        code = crew_wait_only(engine, handle[i], text);
    }
    CHECK_CODE(code, HVD_OK, text);
    crew_meet(); /* all have both on their streams */
    if (rank == 1)
        kill(getpid(), SIGKILL);
    for (int i = 0; i < 400 && rank == 2 && (code == HVD_OK || code == HVD_AGAIN); i++)
        code = hvd_engine_wait_many(engine, &(struct hvd_owner){.handle = handle[1]}, 1, 50, text, sizeof text);
    void *stream = gpus_stream(rank);
    while (code == HVD_OK && (code = hvd_engine_behind(engine, handle[1], stream, &error)) == HVD_OK)
        usleep(1000); /* it is on the stream: whoever asks later hears of the death */
    CHECK_CODE(code, HVD_EPEER, text);
    uint64_t until = hvd_now_ns() + 20000000000u;
    while (gpus_calls("aborts that have ended") < 2 && hvd_now_ns() < until)
        usleep(1000);
    CHECK(gpus_calls("ncclCommAbort") == 2 && gpus_calls("aborts that have ended") == 2 && !hvd_cuda_hangs());
}

static struct {
    int (*begin)(void *stream, int mode), (*end)(void *stream, void **graph);
} capture;

/* Another stream of this process is captured in the global mode, while the engine asks for memory and for events. */
static void leaves_captures_alone(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    const struct hvd_cuda *cuda = hvd_cuda_load(&error);
    static _Thread_local float value[40][COUNT];
    char text[HVD_TEXT_MAX] = "", name[16];
    void *stream = NULL, *graph, *ctx;
    int64_t handle[40];
    sum(engine, "warm", 0, rank, size);
    if (rank == 0) {
        CHECK(cuda->DevicePrimaryCtxRetain(&ctx, 7) == 0 && cuda->CtxPushCurrent(ctx) == 0);
        CHECK(cuda->StreamCreateWithPriority(&stream, 1, -5) == 0 && capture.begin(stream, 0) == 0);
        cuda->CtxPopCurrent(&ctx);
    }
    crew_barrier(engine);
    for (int step = 1; step <= 4; step++) { /* buckets that grow; by NCCL, and averages of integers by the CPU */
        for (int i = 0; i < 10 * step; i++) {
            snprintf(name, sizeof name, "%d", i);
            handle[i] = begin(engine, name, 0, value[i], 250 * step, rank, NULL);
        }
        for (int i = 0; i < 10 * step; i++)
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        int32_t whole[10] = {0}, rows[40] = {0};
        struct hvd_request request = {.kind = HVD_ALLREDUCE, .name = "whole", .op = HVD_OP_average, .ndim = 1};
        request.dtype = HVD_DTYPE_int32;
        request.prescale = request.postscale = 1;
        request.dims[0] = 10;
        request.input = request.output = whole;
        request.device = rank + 1;
        int64_t one = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(crew_wait(engine, one, text), HVD_OK, text);
        request.kind = HVD_ALLGATHER;
        request.name = "rows";
        request.dims[0] = 10 * step;
        request.input = rows;
        request.output = NULL;
        one = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(crew_wait(engine, one, text), HVD_OK, text);
    }
    crew_barrier(engine);
    CHECK(gpus_calls("cuThreadExchangeStreamCaptureMode") > 0);
    if (rank == 0)
        CHECK(capture.end(stream, &graph) == 0 && cuda->StreamDestroy(stream) == 0);
    crew_barrier(engine);
}

int main(void)
{
    crew_deadline(500);
    gpus_find();
    *(void **)(void *)&capture.begin = gpus_symbol("cuStreamBeginCapture_v2");
    *(void **)(void *)&capture.end = gpus_symbol("cuStreamEndCapture");
    crew_threads(1, leaves_captures_alone);
    crew_threads(3, leaves_captures_alone);
    int status[3];
    crew_processes(3, one_dies_in_two_sets, NULL, status);
    CHECK(WIFSIGNALED(status[1]) && WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 0 && WEXITSTATUS(status[2]) == 0);
    return 0;
}
