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

/* Slices of one device, which is where two ranks of one host have it: before 2.30 NCCL takes them for one. */
static void knows_slices(const struct hvd_plane_arg *world, void *more)
{
    static const int hosts[] = {0, 0, 1};
    struct hvd_plane_arg arg = *world;
    for (int several = 0; several < 2; several++) {
        struct gpus_seat seat;
        struct hvd_error error = {0};
        arg.host_of = several ? hosts : NULL;
        CHECK(gpus_greet(&arg, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
        for (int version = 22907; version <= 23000; version += 93)
            for (int twin = 1; twin < 3; twin++) { /* of rank 0 */
                unsigned char all[sizeof seat.all];
                struct hvd_nccl_hello hello[3];
                memcpy(all, seat.all, sizeof all);
                for (int rank = 0; rank < 3; rank++) {
                    memcpy(&hello[rank], all + (size_t)rank * HVD_HELLO_BYTES, sizeof *hello);
                    hello[rank].version = version;
                    memcpy(hello[rank].pci, hello[rank == twin ? 0 : rank].pci, sizeof hello->pci);
                    memcpy(all + (size_t)rank * HVD_HELLO_BYTES, &hello[rank], sizeof *hello);
                }
                error = (struct hvd_error){0};
                bool refused = version < 23000 && (!several || twin == 1);
                CHECK(plane->met(seat.nccl, all, &error) == (refused ? HVD_EINIT : HVD_OK), "%d, %d, %d: %s", several,
                      version, twin, error.text);
                CHECK(!refused ||
                          (strstr(error.text, twin == 1 ? "ranks 0 and 1 use slices of the same GPU (PCI 0000:01"
                                                        : "ranks 0 and 2 use slices of the same GPU") &&
                           strstr(error.text, "NCCL 2.29.7 treats slices (MIG) as one device: give each rank")),
                      "%s", error.text);
            }
        hvd_world_meet(world);
        plane->close(seat.nccl);
    }
}

/* NCCL's own variable would make every call wait. */
static void is_made_to_block(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_plane_arg arg = *world;
    arg.nccl_blocks = world->rank == 1;
    CHECK(gpus_greet(&arg, world->rank, &seat, &error) == HVD_EINIT &&
              strstr(error.text, "rank 1 cannot use NCCL: NCCL_COMM_BLOCKING=1 makes the calls") &&
              strstr(error.text, "unset it"),
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

/* NCCL since 2.22 connects ranks when a collective needs that: a network that lets nobody through shows there. What the
 * user computes on the device in front of it does not count. */
static void never_gets_through(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    void *gate = gpus_gate();
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    seat.nccl->timeout_ns = 2000000000u; /* that they are connected may take longer */
    if (world->rank == 0) {
        failures = 0;
        gpus_fail("background", 1, 1); /* of one rank; each one's second group goes on there */
    }
    hvd_world_meet(world);
    work.behind = NULL;
    work.ready = &gate;
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "start never refuses");
    uint64_t open_ns = hvd_now_ns() + 3000000000u;
    bool progress = false;
    int code;
    while ((code = plane->poll(seat.nccl, &work, &progress, &error)) == HVD_AGAIN)
        hvd_now_ns() > open_ns ? gpus_open_gate(gate) : (void)sched_yield();
    gpus_open_gate(gate);
    if (code == HVD_OK) {
        hvd_gpu_event_drop(work.behind);
    } else {
        CHECK(code == HVD_ETIMEOUT && hvd_now_ns() > open_ns &&
                  strstr(error.text, "NCCL has not connected the 2 ranks of this set for a collective "
                                     "within 2 s (rank ") &&
                  strstr(error.text, ", PCI 0000:0") && strstr(error.text, ", NCCL 2.21.5 (") &&
                  strstr(error.text, "NCCL_DEBUG=INFO"),
              "%s", error.text);
        failures++;
    }
    hvd_world_meet(world);
    CHECK(failures == 1, "one rank waits in vain, the other one for it on the stream");
    plane->part(seat.nccl, true);
    hvd_world_meet(world);
    failures = 0;
    hvd_cuda_load(&error)->EventDestroy(gate);
    plane->close(seat.nccl);
}

/* Rank 1 greets and then does nothing more. */
static void waits_for_nobody_for_ever(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    struct hvd_plane_arg arg = *world;
    arg.start_timeout_ms = 50;
    CHECK(gpus_greet(&arg, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    CHECK(world->rank ||
              (gpus_do(&seat, &work, &error) == HVD_ETIMEOUT &&
               strstr(error.text, "NCCL has not connected the 2 ranks of this set within 0 s (rank 0 of it")),
          "%s", error.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* What lies on the stream before the collective never ends: an abort waits for that, and nobody for the abort. */
static void is_left_behind(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    bool progress = false;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    void *gate = gpus_gate(), *ready[] = {gate};
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = world->rank + 1;
    work.ready = ready;
    int aborts = gpus_calls("aborts that have ended");
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "%s", error.text);
    while (!work.behind)
        CHECK(plane->poll(seat.nccl, &work, &progress, &error) >= 0, "%s", error.text);
    hvd_gpu_event_drop(work.behind);
    hvd_world_meet(world);
    uint64_t began = hvd_now_ns(), until = began + 60000000000u;
    plane->part(seat.nccl, true);
    plane->close(seat.nccl);
    CHECK(hvd_now_ns() - began > 500000000u && gpus_calls("aborts that have ended") == aborts, "it is waited for");
    CHECK(hvd_cuda_hangs(), "and then nobody waits for a device");
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_EINIT &&
              strstr(error.text, "could not be aborted: wait for the GPU (torch.cuda.synchronize()) before hvd.init()"),
          "the next job does without it: %s", error.text);
    plane->close(seat.nccl);
    hvd_world_meet(world);
    gpus_open_gate(gate);
    while (!hvd_nccl_recovered(false) && hvd_now_ns() < until)
        sched_yield();
    CHECK(gpus_calls("aborts that have ended") == aborts + world->size, "who was left behind has ended by itself");
    hvd_error_none(&error);
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "it is used again: %s", error.text);
    work = hvd_bucket_sum(&piece, &value, 1);
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    plane->close(seat.nccl);
}

static void refuses_another_device(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value = 1;
    CHECK(gpus_greet(world, 0, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = 2;
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK && gpus_finish(&seat, &work, &error) == HVD_EINTERNAL &&
              strstr(error.text, "a tensor of this rank lies on device 1, and its communicator is of device 0"),
          "%s", error.text);
    plane->close(seat.nccl);
}

int main(void)
{
    struct hvd_error error = {0};
    plane = gpus_plane();
    hvd_cuda_prefer("no-such-library.so");
    CHECK(!hvd_cuda_load(&error) && strstr(error.text, "no CUDA driver") && strstr(error.text, "no-such-library"), "%s",
          error.text);
    gpus_find();
    gpus_threads(3, knows_slices);
    gpus_threads(2, names_who_lacks_something);
    gpus_threads(1, tells_of_errors);
    gpus_threads(2, never_gets_through);
    gpus_threads(2, waits_for_nobody_for_ever);
    hvd_world_run(HVD_WORLD_PROCESSES, 1, 100, is_left_behind, NULL);
    gpus_threads(1, refuses_another_device);
    gpus_threads(2, is_made_to_block);
    ((struct hvd_nccl *)(uintptr_t)hvd_nccl_load(NULL))->version = 23003;
    CHECK(setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1) == 0, "for the stub, which refuses as NCCL does");
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, shares_a_device, NULL); /* in one they would share a stream, too */
    return 0;
}
