/* test_engine_devices.c - ranks that use several devices each, over a GPU that is none (tests/stub): every work goes by
 * the communicator of the devices that its tensors lie on, whatever each rank thinks is usual, in one order everywhere;
 * no thread waits for a device; and memory that was outgrown is kept, so that nobody waits for what others run there.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <dlfcn.h>

enum { MANY = 24, STEPS = 6, COUNT = 40 };

static bool crowded;  /* ranks share their devices: by way of the CPU */
static bool lopsided; /* only rank 0 has two */

/* Which of its devices rank `rank` has the i-th tensor on, in this step. */
static int device_of(int rank, int i, int step)
{
    int which = lopsided && rank ? 0 : (i + step / 3) % 2;
    return 1 + (crowded ? which : 2 * rank + which);
}

static struct hvd_request request_of(int kind, const char *name, void *in, void *out, int64_t count, int device)
{
    struct hvd_request request = crew_sum(name, in, count);
    request.kind = kind;
    request.op = kind == HVD_ALLREDUCE ? HVD_OP_sum : 0;
    request.output = out;
    request.device = device;
    return request;
}

static void end(struct hvd_engine *engine, int64_t handle)
{
    char text[HVD_TEXT_MAX] = "";
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

/* Many at once, alternately on one and the other, each rank in an order of its own. */
static void sums(struct hvd_engine *engine, int rank, int size, int step)
{
    static _Thread_local float value[MANY][COUNT];
    int64_t handle[MANY];
    char name[16];
    for (int k = 0; k < MANY; k++) {
        int i = rank % 2 ? MANY - 1 - k : k;
        for (int at = 0; at < COUNT; at++)
            value[i][at] = (float)(rank + i + at);
        snprintf(name, sizeof name, "t%d", i);
        struct hvd_request request =
            request_of(HVD_ALLREDUCE, name, value[i], value[i], COUNT, device_of(rank, i, step));
        handle[i] = crew_begin(engine, &request);
    }
    for (int i = 0; i < MANY; i++) {
        end(engine, handle[i]);
        for (int at = 0; at < COUNT; at++)
            CHECK(value[i][at] == (float)(size * (i + at) + size * (size - 1) / 2));
    }
}

static void other_kinds(struct hvd_engine *engine, int rank, int size, int step)
{
    float mine[8] = {(float)rank, 1, 2}, sent[2] = {5, 6}, got[2] = {0};
    struct hvd_request request = request_of(HVD_BROADCAST, "cast", mine, mine, 3, device_of(rank, step, 0));
    request.root = size - 1;
    end(engine, crew_begin(engine, &request));
    CHECK(mine[0] == (float)(size - 1));
    int64_t handle[2];
    for (int i = 0; i < 2; i++) { /* results come to the device of what was given */
        request = request_of(HVD_ALLGATHER, i ? "rows" : "more", mine, NULL, 1 + rank, device_of(rank, i, step));
        handle[i] = crew_begin(engine, &request);
    }
    for (int i = 0; i < 2; i++)
        end(engine, handle[i]);
    if (size > 1 && (rank == 0 || rank == size - 1)) {
        request = request_of(HVD_SEND, "sent", sent, got, 2, device_of(rank, 1, step));
        request.peer = size - 1;
        end(engine, crew_begin(engine, &request));
        CHECK(rank == 0 || got[1] == 6);
    }
    crew_barrier(engine);
}

static void alternates(struct hvd_engine *engine, int rank, int size)
{
    char text[512] = "";
    for (int step = 0; step < STEPS; step++) {
        sums(engine, rank, size, step);
        other_kinds(engine, rank, size, step);
    }
    CHECK(hvd_engine_notice(engine, text, sizeof text) == (crowded && size > 1 && rank == 0));
    CHECK(!crowded || size == 1 || rank || strstr(text, "use the same GPU"));
}

/* Two sets that overlap, and each uses both devices; the last rank joins in the end. */
static void in_two_sets(struct hvd_engine *engine, int rank, int size)
{
    static const int ranks[] = {0, 1};
    struct hvd_error error = {0};
    float value[STEPS][2][MANY];
    int64_t handle[STEPS][2][MANY];
    int set = crew_set_open(engine, ranks, 2, &error), sets[] = {0, set};
    CHECK_CODE(set > 0, 1, error.text);
    crew_barrier(engine);
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < 2 * MANY; k++) {
            int which = rank % 2 ? k / MANY : k % 2, i = rank % 2 ? k % MANY : k / 2;
            char name[16];
            snprintf(name, sizeof name, "%d.%d", step, i);
            value[step][which][i] = (float)(rank + i);
            struct hvd_request request = request_of(HVD_ALLREDUCE, name, &value[step][which][i], &value[step][which][i],
                                                    1, device_of(rank, i, step));
            request.process_set = sets[which];
            handle[step][which][i] = which && rank > 1 ? 0 : crew_begin(engine, &request);
        }
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < 2 * MANY; k++)
            if (handle[step][k / MANY][k % MANY]) {
                int members = k / MANY ? 2 : size;
                end(engine, handle[step][k / MANY][k % MANY]);
                CHECK(value[step][k / MANY][k % MANY] == (float)(members * (k % MANY) + members * (members - 1) / 2));
            }
    if (rank < size - 1) /* who has joined takes part on whatever device */
        for (int i = 0; i < 2; i++) {
            float one = 1;
            struct hvd_request request = request_of(HVD_ALLREDUCE, i ? "b" : "a", &one, &one, 1, device_of(rank, i, 0));
            end(engine, crew_begin(engine, &request));
            CHECK(one == (float)(size - 1));
        }
    end(engine, crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error));
    crew_barrier(engine);
    CHECK_CODE(hvd_engine_set_close(engine, set, &error), HVD_OK, error.text);
}

/* By way of the CPU a larger work needs more pinned memory: what there was before is kept, for freeing it would wait
 * for the device, and all of it is counted. It goes with the engine. */
static void pins_and_keeps(struct hvd_engine *engine, int rank, int size)
{
    static _Thread_local float value[3000];
    int freed = gpus_calls("cuMemFreeHost");
    int64_t before = hvd_engine_usage(engine, HVD_USAGE_pinned), sum = 0;
    crew_meet();
    for (int64_t count = 500; count <= 3000; count += 500) {
        for (int i = 0; i < count; i++)
            value[i] = (float)(rank + i);
        struct hvd_request request = request_of(HVD_ALLREDUCE, "grows", value, value, count, 1);
        request.op = HVD_OP_max;
        end(engine, crew_begin(engine, &request));
        for (int i = 0; i < count; i++)
            CHECK(value[i] == (float)(size - 1 + i));
    }
    crew_barrier(engine);
    sum = hvd_engine_usage(engine, HVD_USAGE_pinned) - before;
    int64_t most = 2 * 3000 * (int64_t)sizeof(float); /* what goes down and what comes up */
    CHECK(sum >= size * (most + 2 * 500 * (int64_t)sizeof(float)) && sum <= size * 3 * most * 3 / 2);
    CHECK(gpus_calls("cuMemFreeHost") == freed);
    crew_meet();
}

/* Sets that overlap, and one of each rank alone, have their first works at once: their communicators are begun one
 * after the other, for the stub refuses a thread's second thing in the background. */
static void begins_one_by_one(struct hvd_engine *engine, int rank, int size)
{
    static const int ranks[][2] = {{0, 1}, {0, 2}, {1, 2}, {0}, {1}, {2}};
    enum { SETS = 6, ROUNDS = 6 };
    static _Thread_local float value[ROUNDS][SETS];
    int64_t handle[ROUNDS][SETS] = {{0}};
    struct hvd_error error = {0};
    int set[SETS];
    for (int i = 0; i < SETS; i++) {
        set[i] = crew_set_open(engine, ranks[i], i < 3 ? 2 : 1, &error);
        CHECK_CODE(set[i] > 0, 1, error.text);
    }
    crew_barrier(engine);
    for (int round = 0; round < ROUNDS; round++)
        for (int k = 0; k < SETS; k++) {
            int i = (k + rank + round) % SETS;
            struct hvd_request request =
                request_of(HVD_ALLREDUCE, round % 2 ? "odd" : "even", &value[round][i], &value[round][i], 1, rank + 1);
            request.process_set = set[i];
            value[round][i] = (float)(rank + round);
            if (round > 1 && handle[round - 2][i])
                end(engine, handle[round - 2][i]);
            if (ranks[i][0] == rank || (i < 3 && ranks[i][1] == rank))
                handle[round][i] = crew_begin(engine, &request);
        }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < SETS; i++) {
            if (round >= ROUNDS - 2 && handle[round][i])
                end(engine, handle[round][i]);
            float due = i < 3 ? (float)(ranks[i][0] + ranks[i][1] + 2 * round) : (float)(rank + round);
            CHECK(!handle[round][i] || value[round][i] == due);
        }
    CHECK(size == 3);
    crew_barrier(engine);
}

/* Rank 1 joins before it had a tensor on a device, and then uses one that nobody could guess: device 2 * rank + 1,
 * while rank 0 uses that with the number of rank 1. */
static void joins_first(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[512] = "";
    int copies = gpus_calls("cuMemcpyDtoH");
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int i = 0; i < 3; i++) {
            float value[2] = {1, 2};
            struct hvd_request request = request_of(HVD_ALLREDUCE, "sum", value, value, 2, 2 + 2 * rank);
            if (epoch == 0 && rank)
                continue;
            end(engine, crew_begin(engine, &request));
            CHECK(value[1] == (float)(2 * (epoch ? size : 1)));
        }
        CHECK(rank || gpus_calls("cuMemcpyDtoH") == copies + 3); /* of the first epoch */
        end(engine, crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error));
    }
    CHECK(hvd_engine_notice(engine, text, sizeof text) == 0);
    crew_barrier(engine);
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
        struct hvd_request request = request_of(HVD_ALLREDUCE, i ? "b" : "a", &value[i], &value[i], 1, rank + 1);
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

static void refused_at_once(struct hvd_engine *engine, int rank, int size)
{
    float value = 1;
    struct hvd_error error = {0};
    struct hvd_request request = request_of(HVD_ALLREDUCE, "a", &value, &value, 1, -1);
    CHECK(hvd_engine_submit(engine, &request, &error) == HVD_EINVAL && strstr(error.text, "-2 is no device"));
}

int main(void)
{
    crew_deadline(500);
    crew_threads(2, refused_at_once); /* no library is loaded for that */
    CHECK(!dlopen("libgpu.so", RTLD_NOLOAD | RTLD_NOW));
    gpus_find();
    crew_threads(1, nobody_waits_for_a_device);
    crew_threads(3, nobody_waits_for_a_device);
    int copies = gpus_calls("cuMemcpyDtoH"), comms = gpus_calls("ncclCommInitRankConfig");
    crew_threads(1, alternates);
    crew_threads(2, alternates);
    CHECK(gpus_calls("cuMemcpyDtoH") == copies);
    CHECK(gpus_calls("ncclCommInitRankConfig") - comms <= 2 + 2 * 4);
    crew_threads(4, alternates);
    lopsided = true;
    crew_threads(2, alternates);
    CHECK(gpus_calls("cuMemcpyDtoH") == copies);
    lopsided = false;
    crew_threads(3, in_two_sets);
    CHECK(hvd_nccl_memory_bytes() == 0);
    crew_threads(3, begins_one_by_one);
    crew_threads(2, joins_first);
    crew_threads(3, joins_first);
    crowded = true;
    int freed = gpus_calls("cuMemFreeHost"), pinned = gpus_calls("cuMemAllocHost");
    uint64_t bytes = hvd_pinned_bytes();
    crew_threads(2, pins_and_keeps);
    CHECK(gpus_calls("cuMemFreeHost") - freed == gpus_calls("cuMemAllocHost") - pinned && hvd_pinned_bytes() == bytes);
    crew_threads(2, alternates);
    CHECK(gpus_calls("cuMemcpyDtoH") > copies);
    return 0;
}
