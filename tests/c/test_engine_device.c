/* test_engine_device.c - tensors on devices as an engine sees them, over a GPU that is none (tests/stub): which way
 * they go, that the CPU's way gives the same, what is told where ranks disagree, and that a death ends what runs there.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static int shared_device = -1; /* that all ranks use; -1: each its own */

static struct hvd_request on_device(int kind, const char *name, int op, int dtype, void *in, void *out, int64_t count,
                                    int rank)
{
    return (struct hvd_request){.kind = kind,
                                .name = name,
                                .op = op,
                                .dtype = dtype,
                                .ndim = 1,
                                .dims = {count},
                                .prescale = 1,
                                .postscale = 1,
                                .input = in,
                                .output = out,
                                .device = (shared_device < 0 ? rank : shared_device) + 1};
}

static void done(struct hvd_engine *engine, const struct hvd_request *request)
{
    char text[HVD_TEXT_MAX] = "";
    int64_t handle = crew_begin(engine, request);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

/* Some of every kind, twice; what NCCL does not compute as the CPU does, too. */
static void every_kind(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 2; step++) {
        float sum[500], part[64], sent[3] = {1, 2, 3}, got[3] = {0};
        int32_t whole[10];
        for (int i = 0; i < 500; i++)
            sum[i] = (float)(rank + i);
        struct hvd_request request =
            on_device(HVD_ALLREDUCE, "sum", HVD_OP_sum, HVD_DTYPE_float32, sum, sum, 500, rank);
        request.prescale = 2;
        done(engine, &request);
        for (int i = 0; i < 500; i++)
            CHECK(sum[i] == (float)(size * (size - 1) + 2 * size * i));
        for (int i = 0; i < 10; i++)
            whole[i] = 10 * rank + i;
        request = on_device(HVD_ALLREDUCE, "whole", HVD_OP_average, HVD_DTYPE_int32, whole, whole, 10, rank);
        done(engine, &request);
        for (int i = 0; i < 10; i++)
            CHECK(whole[i] == (5 * size * (size - 1) + size * i) / size);
        request = on_device(HVD_BROADCAST, "cast", 0, HVD_DTYPE_int32, whole, whole, 10, rank);
        request.root = size - 1;
        whole[3] = rank;
        done(engine, &request);
        CHECK(whole[3] == size - 1);
        for (int i = 0; i < 80; i++)
            sum[i] = (float)i;
        request = on_device(HVD_REDUCESCATTER, "part", HVD_OP_sum, HVD_DTYPE_float32, sum, part, 16 * size + 1, rank);
        done(engine, &request);
        for (int i = 0; i < 16; i++)
            CHECK(part[i] == (float)(size * (16 * rank + (rank > 0) + i)));
        request = on_device(HVD_REDUCE, "root", HVD_OP_max, HVD_DTYPE_float32, sum, rank ? NULL : part, 16, rank);
        sum[2] = (float)(100 + rank);
        done(engine, &request);
        CHECK(rank > 0 || part[2] == (float)(99 + size));
        if (size > 1 && (rank == 0 || rank == size - 1)) {
            request = on_device(HVD_SEND, "sent", 0, HVD_DTYPE_float32, sent, got, 3, rank);
            request.peer = size - 1;
            done(engine, &request);
            CHECK(rank == 0 || got[2] == 3);
        }
        crew_barrier(engine); /* who has no part in it must not leave before it is agreed */
    }
}

static void by_nccl(struct hvd_engine *engine, int rank, int size)
{
    char text[512];
    every_kind(engine, rank, size);
    CHECK(hvd_engine_notice(engine, text, sizeof text) == 0);
}

/* Tensors here and there at the same time, many of them. */
static void side_by_side(struct hvd_engine *engine, int rank, int size)
{
    enum { MANY = 40 };
    static _Thread_local float memory[MANY][100];
    for (int step = 0; step < 4; step++) {
        int64_t handle[MANY];
        for (int k = 0; k < MANY; k++) {
            int i = rank % 2 ? MANY - 1 - k : k;
            char name[16];
            snprintf(name, sizeof name, "t%d", i);
            for (int at = 0; at < 100; at++)
                memory[i][at] = (float)(i + rank);
            struct hvd_request request =
                on_device(HVD_ALLREDUCE, name, HVD_OP_sum, HVD_DTYPE_float32, memory[i], memory[i], 100, rank);
            request.device = i % 3 ? request.device : 0;
            handle[i] = crew_begin(engine, &request);
        }
        for (int i = 0; i < MANY; i++) {
            char text[HVD_TEXT_MAX] = "";
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
            CHECK(memory[i][99] == (float)(size * i + size * (size - 1) / 2));
        }
    }
}

static void by_the_cpu(struct hvd_engine *engine, int rank, int size)
{
    char text[512] = "";
    every_kind(engine, rank, size);
    CHECK(hvd_engine_notice(engine, text, sizeof text) == (rank == 0)); /* the first tells */
    CHECK(rank || (strstr(text, "go by way of the CPU in process set 0") && strstr(text, "0 and 1 use the same GPU")));
    CHECK(hvd_engine_notice(engine, text, sizeof text) == 0);
}

enum { OVERLAP_STEPS = 40, OVERLAP_FEW = 4, OVERLAP_MANY = 300 }; /* whole 16 bytes: a bucket has no gaps */

/* Sets that overlap in every way, and the global one: each rank gives what it has to give in an order and at times of
 * its own, several of each set, small and large, on the device and not. A device works off one after the other, so two
 * orders would end in a deadlock, here as on a GPU. */
static void sets_overlap(struct hvd_engine *engine, int rank, int size)
{
    enum { SETS = 4, EACH = 3, MANY = SETS * EACH, COUNT = OVERLAP_MANY };
    static const int ranks[SETS][4] = {{0, 1, 2, 3}, {0, 1, 3, -1}, {1, 2, -1, -1}, {0, 2, 3, -1}};
    static const int members[SETS] = {4, 3, 2, 3}, sum_of[SETS] = {6, 4, 3, 5};
    static _Thread_local float value[MANY][COUNT];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "", name[16];
    int number[SETS] = {0}, order[MANY];
    unsigned seed = (unsigned)rank * 77 + 1;
    for (int i = 1; i < SETS; i++)
        number[i] = crew_set_open(engine, ranks[i], members[i], &error);
    CHECK_CODE(number[3] > 0, 1, error.text);
    crew_barrier(engine);
    for (int step = 0; step < OVERLAP_STEPS; step++) {
        int64_t handle[MANY] = {0};
        for (int k = 0; k < MANY; k++) {
            int other = rand_r(&seed) % (k + 1);
            order[k] = order[other];
            order[other] = k;
        }
        for (int k = 0; k < MANY; k++) {
            int i = order[k], set = i / EACH;
            bool member = false;
            for (int at = 0; at < members[set]; at++)
                member |= ranks[set][at] == rank;
            for (int at = 0; at < COUNT; at++)
                value[i][at] = (float)(rank + i);
            snprintf(name, sizeof name, "t%d", i);
            struct hvd_request request = on_device(HVD_ALLREDUCE, name, HVD_OP_sum, HVD_DTYPE_float32, value[i],
                                                   value[i], i % 2 ? OVERLAP_FEW : COUNT, rank);
            request.process_set = number[set];
            request.device = i % EACH == 1 ? 0 : request.device;
            if (member)
                handle[i] = hvd_engine_submit(engine, &request, &error);
            CHECK_CODE(handle[i] >= 0, 1, error.text);
            if (rand_r(&seed) % 4 == 0)
                usleep(rand_r(&seed) % 300);
        }
        for (int k = 0; k < MANY; k++) {
            int i = order[(k + step) % MANY];
            if (!handle[i])
                continue;
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
            CHECK(value[i][0] == (float)(sum_of[i / EACH] + members[i / EACH] * i));
        }
    }
    CHECK(size == 4 && hvd_engine_notice(engine, text, sizeof text) == 0);
    crew_barrier(engine);
    for (int i = 1; i < SETS; i++)
        CHECK_CODE(hvd_engine_set_close(engine, number[i], &error), HVD_OK, error.text);
}

/* All of them by NCCL, and each element once. How many calls that are hangs on timing: two tensors of a set that were
 * agreed in one round travel in one bucket, which is one call since buckets are packed. So elements are counted: in
 * sets of 4, 3, 2 and 3 ranks, two tensors each on devices; the 1st and 3rd set's are the long ones. */
static void by_nccl_in_overlapping_sets(void)
{
    enum { LONG = 2 * OVERLAP_STEPS * (4 + 2), SHORT = 2 * OVERLAP_STEPS * (3 + 3) };
    int calls = gpus_calls("ncclAllReduce"), elements = gpus_calls("elements of ncclAllReduce"),
        copies = gpus_calls("cuMemcpyDtoH");
    crew_threads(4, sets_overlap);
    calls = gpus_calls("ncclAllReduce") - calls;
    elements = gpus_calls("elements of ncclAllReduce") - elements;
    CHECK(elements == LONG * OVERLAP_MANY + SHORT * OVERLAP_FEW);
    CHECK(calls <= LONG + SHORT && calls >= (LONG + SHORT) / 2 && gpus_calls("cuMemcpyDtoH") == copies);
}

/* A wait is over when the collective lies on the stream; another stream waits for it, and no thread does. */
static void nobody_waits_for_a_device(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[2] = {1, 1}, copy[2] = {0};
    void *gate = gpus_gate();
    int64_t handle[2];
    crew_barrier(engine);
    for (int i = 0; i < 2; i++) { /* the second is launched behind the first, that is not ready yet */
        struct hvd_request request =
            on_device(HVD_ALLREDUCE, i ? "b" : "a", HVD_OP_sum, HVD_DTYPE_float32, &value[i], &value[i], 1, rank);
        request.ready = i ? NULL : gate;
        handle[i] = crew_begin(engine, &request);
        CHECK_CODE(crew_wait_only(engine, handle[i], text), HVD_OK, text);
    }
    for (int i = 0; i < 2; i++)
        CHECK(hvd_engine_poll(engine, handle[i]) == HVD_AGAIN && value[i] == 1);
    const struct hvd_cuda *cuda = hvd_cuda_load(&error);
    void *stream = gpus_stream(rank);
    for (int i = 0; i < 2; i++) {
        CHECK_CODE(hvd_engine_behind(engine, handle[i], stream, &error), HVD_OK, error.text);
        CHECK(hvd_engine_forget(engine, handle[i]) == HVD_OK); /* at once */
    }
    CHECK(cuda->MemcpyDtoHAsync(copy, (uintptr_t)value, sizeof copy, stream) == 0);
    CHECK(copy[0] == 0 && hvd_engine_behind(engine, handle[0], stream, &error) == HVD_EHANDLE);
    crew_meet();
    gpus_open_gate(gate);
    gpus_stream_end(stream);
    CHECK(copy[0] == (float)size && copy[1] == (float)size);
    cuda->EventDestroy(gate);
}

static void ranks_disagree(struct hvd_engine *engine, int rank, int size)
{
    float value = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request request =
        on_device(HVD_ALLREDUCE, "mixed", HVD_OP_sum, HVD_DTYPE_float32, &value, &value, 1, rank);
    request.device = rank == 1 ? 0 : request.device;
    int64_t handle = crew_begin(engine, &request);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EMISMATCH, text);
    CHECK(strstr(text, "tensor 'mixed': ranks disagree on the device: rank") && strstr(text, "or .cpu()"));
    every_kind(engine, rank, size);
}

static void refused_at_once(struct hvd_engine *engine, int rank, int size)
{
    float value = 1;
    struct hvd_error error = {0};
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, &value, &value, 1, rank);
    request.device = -1;
    CHECK(hvd_engine_submit(engine, &request, &error) == HVD_EINVAL && strstr(error.text, "-2 is no device"));
}

/* An Adasum on devices goes by way of the CPU, with the bits that it has there; also beside a rank that has joined. */
static void adasums_go_by_the_cpu(struct hvd_engine *engine, int rank, int size)
{
    enum { COUNT = 700, MANY = 3 };
    static _Thread_local float here[MANY][COUNT], there[MANY][COUNT];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "", name[16];
    int64_t handle[2 * MANY];
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 2 * MANY; i++) {
            float *value = i < MANY ? here[i] : there[i - MANY];
            for (int k = 0; k < COUNT; k++)
                value[k] = (float)((k * (rank + 3) + i % MANY) % 17 - 8);
            snprintf(name, sizeof name, "%d", i);
            struct hvd_request request =
                on_device(HVD_ALLREDUCE, name, HVD_OP_adasum, HVD_DTYPE_float32, value, value, COUNT - i % MANY, rank);
            request.device = i < MANY ? 0 : request.device;
            handle[i] = step && rank == 0 && size > 1 ? 0 : hvd_engine_submit(engine, &request, &error);
            CHECK_CODE(handle[i] >= 0, 1, error.text);
        }
        if (step) {
            int64_t join = crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error);
            CHECK_CODE(crew_wait(engine, join, text), HVD_OK, text);
        }
        for (int i = 0; i < 2 * MANY; i++)
            if (handle[i])
                CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        for (int i = 0; i < MANY && handle[i]; i++)
            CHECK(memcmp(here[i], there[i], sizeof(float) * COUNT) == 0);
    }
}

/* A rank that has joined has no device, and the others go on. */
static void one_has_joined(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value = (float)(rank + 1);
    if (rank > 0) {
        struct hvd_request request =
            on_device(HVD_ALLREDUCE, "sum", HVD_OP_sum, HVD_DTYPE_float32, &value, &value, 1, rank);
        done(engine, &request);
        CHECK(value == (float)(size * (size + 1) / 2 - 1));
    }
    int64_t handle = crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

/* Rank 1 dies while its tensor is not ready yet: its peers' collective is on their streams, and waits for it. */
static void one_dies(struct hvd_engine *engine, int rank, int size)
{
    float value = 1;
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    every_kind(engine, rank, size);
    int before = gpus_calls("ncclGroupEnd"), aborts = gpus_calls("ncclCommAbort");
    struct hvd_request request =
        on_device(HVD_ALLREDUCE, "sum", HVD_OP_sum, HVD_DTYPE_float32, &value, &value, 1, rank);
    request.ready = rank == 1 ? gpus_gate() : NULL;
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    while (rank == 1)
        if (gpus_calls("ncclGroupEnd") > before)
            kill(getpid(), SIGKILL);
        else
            usleep(1000);
    int code = handle < 0 ? (int)handle : HVD_AGAIN;
    for (int i = 0; i < 400 && code == HVD_AGAIN; i++)
        code = hvd_engine_wait(engine, handle, 50, text, sizeof text);
    void *stream = gpus_stream(rank);
    for (int i = 0; i < 400 && rank == 2 && (code == HVD_OK || code == HVD_AGAIN); i++)
        code = hvd_engine_wait_many(engine, &(struct hvd_owner){.handle = handle}, 1, 50, text, sizeof text);
    while (code == HVD_OK && (code = hvd_engine_behind(engine, handle, stream, &error)) == HVD_OK)
        usleep(1000); /* it is on the stream: whoever asks later hears of the death */
    CHECK_CODE(code, HVD_EPEER, text);
    uint64_t until = hvd_now_ns() + 10000000000u;
    while (gpus_calls("ncclCommAbort") == aborts && hvd_now_ns() < until)
        usleep(1000);
    CHECK(gpus_calls("ncclCommAbort") == aborts + 1);
}

int main(void)
{
    crew_deadline(500);
    crew_threads(2, refused_at_once); /* no library is loaded for that */
    CHECK(!dlopen("libgpu.so", RTLD_NOLOAD | RTLD_NOW));
    gpus_find();
    crew_threads(1, by_nccl);
    crew_threads(2, by_nccl);
    CHECK(gpus_calls("ncclReduce") == 2 + 4 + 8); /* in each step a reduce is one, and uneven shares are one each */
    CHECK(gpus_calls("ncclAllReduce") > 0 && gpus_calls("cuMemcpyDtoH") > 0); /* averages of integers go by the CPU */
    crew_threads(3, by_nccl);
    crew_threads(2, side_by_side);
    by_nccl_in_overlapping_sets();
    crew_threads(1, nobody_waits_for_a_device);
    crew_threads(3, nobody_waits_for_a_device);
    crew_threads(3, ranks_disagree);
    crew_threads(3, one_has_joined);
    crew_threads(1, adasums_go_by_the_cpu);
    int copies = gpus_calls("cuMemcpyDtoH");
    crew_threads(3, adasums_go_by_the_cpu);
    CHECK(gpus_calls("cuMemcpyDtoH") - copies == 3 * (3 + 2)); /* once each */
    shared_device = 2;
    int before = gpus_calls("ncclAllReduce");
    crew_threads(3, by_the_cpu);
    CHECK(gpus_calls("ncclAllReduce") == before);
    shared_device = -1;
    int status[3];
    crew_processes(3, one_dies, NULL, status);
    CHECK(WIFSIGNALED(status[1]) && WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 0 && WEXITSTATUS(status[2]) == 0);
    return 0;
}
