/* test_plane_nccl_errors.c - what plane nccl says where it cannot, who is named, and that nothing hangs where a peer is
 * missing; over a GPU that is none (tests/stub).
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "world.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

static const struct hvd_plane *plane; /* nccl */
static _Atomic int failures;

static void names_two_ranks_on_one_device(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    (void)more;
    CHECK(gpus_greet(world, world->rank == 2 ? 1 : world->rank, &seat, &error) == HVD_EINIT, "two ranks on one device");
    CHECK(strstr(error.text, "ranks 1 and 2 use the same GPU (device 1, uuid ababababababababababababababab01, PCI "
                             "0000:02:00.0), which NCCL 2.21.5 does not support: give each its own, with "
                             "torch.cuda.set_device(hvd.local_rank())"),
          "%s", error.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* From NCCL 2.30 on they may share it, if all of them were told so. */
static void shares_a_device(const struct hvd_plane_arg *world, void *more)
{
    for (int told = 0; told < 2; told++) {
        struct gpus_seat seat;
        struct hvd_error error = {0};
        struct hvd_piece piece;
        struct hvd_plane_arg arg = *world;
        float value = (float)(world->rank + 1);
        (void)more;
        arg.shares_gpus = told || world->rank != 1;
        int code = gpus_greet(&arg, world->rank / 2, &seat, &error);
        struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
        if (told)
            CHECK(code == HVD_OK && gpus_do(&seat, &work, &error) == HVD_OK && value == 6, "%s", error.text);
        else
            CHECK(code == HVD_EINIT && strstr(error.text, "ranks 0 and 1 use the same GPU (device 0") &&
                      strstr(error.text, "NCCL 2.30.3 does not support unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set for "
                                         "all ranks: give each its own"),
                  "%s", error.text);
        hvd_world_meet(world);
        plane->close(seat.nccl);
    }
}

static void names_who_lacks_something(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0}, other = {0};
    (void)more;
    int code = gpus_greet(world, world->rank ? 99 : 0, &seat, &error);
    CHECK(code == HVD_EINIT && strstr(error.text, "rank 1 cannot use NCCL: CUDA could not find the device of this "
                                                  "tensor: the stub was told to fail (error 101"),
          "%s", error.text);
    struct hvd_nccl_hello hello;
    memcpy(&hello, seat.all, sizeof hello);
    hello.version = 22900;
    hello.uuid.bytes[0] = 1;
    memcpy(seat.all + HVD_HELLO_BYTES, &hello, sizeof hello);
    CHECK(plane->met(seat.nccl, seat.all, &other) == HVD_EINIT &&
              strstr(other.text, "rank 0 has NCCL 2.21.5 and rank 1 has NCCL 2.29.0"),
          "%s", other.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* What fails on one rank when a bucket is packed is told there, and does not come back. */
static void tells_of_failed_packing(const struct hvd_plane_arg *world, void *more)
{
    static const struct {
        const char *call, *text;
        int code;
    } cases[] = {{"ncclMemAlloc", "NCCL 2.21.5 (", 2},
                 {"ncclCommRegister", "could not register memory for a bucket", 2},
                 {"cuLaunchKernel", "CUDA could not pack a bucket", 700}};
    (void)more;
    for (size_t i = 0; i < HVD_COUNT_OF(cases); i++) {
        struct gpus_seat seat;
        struct hvd_error error = {0};
        struct hvd_piece piece[2];
        float value[2] = {0};
        CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
        if (world->rank == 0)
            gpus_fail(cases[i].call, 1, cases[i].code);
        hvd_world_meet(world);
        struct hvd_work work = hvd_bucket_sum(piece, value, 1);
        piece[1] = (struct hvd_piece){.in = &value[1], .out = &value[1], .count = 1};
        work.pieces = work.count = 2;
        work.device = world->rank + 1;
        work.flags |= HVD_WORK_ON_DEVICE;
        CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "start never refuses");
        bool progress, failed = false;
        int code;
        while ((code = plane->poll(seat.nccl, &work, &progress, &error)) == HVD_AGAIN)
            sched_yield();
        if (code == HVD_OK)
            hvd_mark_drop(work.behind);
        else
            failed = strstr(error.text, cases[i].text) != NULL;
        CHECK(code == HVD_OK || failed, "%s: %s", cases[i].call, error.text);
        failures += failed;
        hvd_world_meet(world);
        CHECK(failures == (int)i + 1, "one rank of two, for %s", cases[i].call);
        plane->abandon(seat.nccl); /* as an engine does: the other one waits on its device */
        hvd_world_meet(world);
        plane->close(seat.nccl);
    }
}

/* Where a call fails, or an error comes later, it is told with all that is known. */
static void tells_of_errors(const struct hvd_plane_arg *world, void *more)
{
    static const struct {
        const char *call, *text;
        int nth;
    } cases[] = {{"ncclCommInitRankConfig", "could not begin a communicator: invalid usage: the stub was told so", 1},
                 {"ncclAllReduce", "could not start a collective: invalid usage", 2},
                 {"ncclGroupEnd", "could not start a collective: invalid usage", 1},
                 {"async", "could not connect the ranks: invalid usage", 1},
                 {"async", "could not do a collective: invalid usage", 2}};
    (void)more;
    for (size_t i = 0; i < HVD_COUNT_OF(cases); i++) {
        struct gpus_seat seat;
        struct hvd_error error = {0};
        struct hvd_piece piece[2];
        float value[2] = {0};
        gpus_fail(cases[i].call, cases[i].nth, 5);
        CHECK(gpus_greet(world, 3, &seat, &error) == HVD_OK || i == 0, "what one rank meets, its first work tells");
        error.code = HVD_OK;
        struct hvd_work work = hvd_bucket_sum(piece, value, 1);
        piece[1] = piece[0];
        work.pieces = work.count = 2;
        CHECK(gpus_do(&seat, &work, &error) == HVD_EINTERNAL && strstr(error.text, cases[i].text) &&
                  strstr(error.text, "NCCL 2.21.5 (") && strstr(error.text, "libgpu.so") &&
                  strstr(error.text, "device 3, uuid abababababababababababababababab") == NULL &&
                  strstr(error.text, "PCI 0000:04:00.0"),
              "%s: %s", cases[i].call, error.text);
        CHECK(error.culprit == 0, "this rank");
        error.code = HVD_OK;
        CHECK(gpus_do(&seat, &work, &error) == HVD_EINTERNAL, "a failure stays");
        plane->close(seat.nccl);
    }
}

/* Rank 1 greets and then does nothing more. */
static void waits_for_nobody_for_ever(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    (void)more;
    gpus_fail("ncclCommInitRankConfig", 100000, 5);
    struct hvd_plane_arg arg = *world;
    arg.start_timeout_ms = 50;
    unsigned char mine[HVD_HELLO_BYTES];
    if (world->rank == 1) {
        struct hvd_work first = {.device = 2};
        void *opened;
        CHECK(plane->open(&arg, &opened, &error) == HVD_OK, "%s", error.text);
        plane->hello(opened, &first, mine);
        CHECK(world->allgather(world->self, mine, sizeof mine, seat.all, &error) == HVD_OK, "%s", error.text);
        hvd_world_meet(world);
        plane->close(opened);
        return;
    }
    CHECK(gpus_greet(&arg, 0, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    CHECK(gpus_do(&seat, &work, &error) == HVD_ETIMEOUT &&
              strstr(error.text, "NCCL has not connected the 2 ranks of this set within 0 s (rank 0 of it waits"),
          "%s", error.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* Rank 1 never starts the collective: who has put it on his stream gets it off by abandoning it. */
static void is_abandoned(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    bool progress;
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = world->rank + 1;
    if (world->rank == 0) {
        CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "%s", error.text);
        while (!work.behind)
            CHECK(plane->poll(seat.nccl, &work, &progress, &error) >= 0, "%s", error.text);
        hvd_mark_drop(work.behind);
        CHECK(plane->settle(seat.nccl, &error) == HVD_AGAIN, "it waits on the stream");
        uint64_t before = hvd_now_ns();
        int aborts = gpus_calls("ncclCommAbort");
        plane->abandon(seat.nccl); /* gives the device back, whose stream ends when it is empty */
        CHECK(gpus_calls("ncclCommAbort") == aborts + 1 && hvd_now_ns() - before < 1000000000u, "an abort in time");
        CHECK(plane->poll(seat.nccl, &work, &progress, &error) == HVD_EPEER, "%s", error.text);
    }
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

static void refuses_another_device(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    (void)more;
    CHECK(gpus_greet(world, 0, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = 2;
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK && gpus_finish(&seat, &work, &error) == HVD_EINVAL &&
              strstr(error.text, "a tensor of this rank lies on device 1, and this process set works on device 0"),
          "%s", error.text);
    plane->close(seat.nccl);
}

static void threads(int size, void (*body)(const struct hvd_plane_arg *arg, void *more))
{
    hvd_world_run(HVD_WORLD_THREADS, size, 300, body, NULL);
}

int main(void)
{
    struct hvd_error error = {0};
    plane = gpus_plane();
    hvd_cuda_prefer("no-such-library.so");
    CHECK(!hvd_cuda_load(&error) && strstr(error.text, "no driver of CUDA") && strstr(error.text, "no-such-library"),
          "%s", error.text);
    gpus_find();
    threads(3, names_two_ranks_on_one_device);
    threads(2, names_who_lacks_something);
    threads(1, tells_of_errors);
    threads(2, waits_for_nobody_for_ever);
    threads(2, is_abandoned);
    threads(1, refuses_another_device);
    threads(2, tells_of_failed_packing);
    ((struct hvd_nccl *)(uintptr_t)hvd_nccl_load(NULL))->version = 23003;
    CHECK(setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1) == 0, "for the stub, which refuses as NCCL does");
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, shares_a_device, NULL); /* in one they would share a stream, too */
    return 0;
}
