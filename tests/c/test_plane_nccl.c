/* test_plane_nccl.c - plane nccl over a GPU that is none (tests/stub): does it do every work as the other planes do, in
 * as few calls as it should, and not before the tensors are there? (What it says where it cannot is
 * test_plane_nccl_errors.c's.)
 *
 * Device memory is the process's own in the stub, so that the buckets of the other tests serve.
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "matrix.h"

#include <sched.h>
#include <string.h>

static const struct hvd_plane *plane; /* nccl */

static int on_device(struct hvd_seat *seat, struct hvd_work *work)
{
    return gpus_do(seat->more, work, &seat->error);
}

/* By an NCCL that can; never scaled, for NCCL would round every rank's value and the factor; nor in a fixed order. */
static void adds_float8(const struct gpus_seat *seat)
{
    struct hvd_piece none;
    struct hvd_work work = hvd_bucket_sum(&none, NULL, 0);
    work.flags = HVD_WORK_ON_DEVICE;
    work.divide_by = 3;
    static const int dtypes[] = {HVD_DTYPE_float8_e4m3fn, HVD_DTYPE_float8_e5m2};
    for (size_t i = 0; i < HVD_COUNT_OF(dtypes); i++) {
        work.dtype = dtypes[i];
        work.op = HVD_OP_sum;
        CHECK(plane->can(seat->nccl, &work), "a sum of float8");
        work.op = HVD_OP_average;
        CHECK(!plane->can(seat->nccl, &work), "an average of float8");
        work.kind = HVD_REDUCESCATTER;
        CHECK(!plane->can(seat->nccl, &work), "and its shares");
        work.kind = HVD_ALLGATHER;
        CHECK(plane->can(seat->nccl, &work), "moves it");
        work.kind = HVD_ALLREDUCE;
    }
}

static void does_every_work(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_seat asked = {.arg = seat.arg, .plane = plane, .opened = seat.nccl, .more = &seat, .run = on_device};
    hvd_matrix(&asked, ~0u, true);
    adds_float8(&seat);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

static void leaves_to_others(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    void *opened;
    struct hvd_piece none;
    struct hvd_work work = hvd_bucket_sum(&none, NULL, 0);
    work.divide_by = 2;
    arg.any_order = false;
    CHECK(plane->open(&arg, &opened, &error) == HVD_OK, "%s", error.text);
    CHECK(!plane->can(opened, &work), "tensors of the CPU");
    work.flags = HVD_WORK_ON_DEVICE;
    CHECK(!plane->can(opened, &work), "sums of floats, when their order is fixed");
    work.op = HVD_OP_max;
    CHECK(plane->can(opened, &work), "a maximum has no order");
    work.prescale = 3;
    CHECK(!plane->can(opened, &work), "a maximum with a scale");
    work.prescale = 1;
    work.dtype = HVD_DTYPE_int32;
    work.op = HVD_OP_average;
    CHECK(!plane->can(opened, &work), "an average of integers");
    work.op = HVD_OP_sum;
    CHECK(plane->can(opened, &work), "a sum of integers");
    work.dtype = HVD_DTYPE_float8_e4m3fn;
    CHECK(!plane->can(opened, &work), "a sum of float8 that not all have agreed to do");
    work.dtype = HVD_DTYPE_uint16;
    CHECK(!plane->can(opened, &work), "a dtype that NCCL lacks");
    work.kind = HVD_BROADCAST;
    CHECK(plane->can(opened, &work), "which it moves all the same");
    CHECK(gpus_calls("cuInit") == 0, "nothing is loaded by opening");
    plane->close(opened);
}

/* Nobody starts before the framework's stream has got there. */
static void waits_for_tensors(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value[3] = {1, 1, 1};
    bool progress;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, value, 3);
    work.flags = HVD_WORK_ON_DEVICE;
    void *gate = gpus_gate(), *ready[] = {gate};
    work.ready = ready;
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "%s", error.text);
    int code;
    while ((code = plane->poll(seat.nccl, &work, &progress, &error)) == HVD_AGAIN)
        ;
    CHECK(code == HVD_OK && work.behind, "%s", error.text);
    hvd_world_meet(world); /* all have put it on their streams */
    CHECK(plane->settle(seat.nccl, &error) == HVD_AGAIN && value[0] == 1, "it was not ready");
    CHECK(hvd_gpu_event_reached(work.behind, &error) == HVD_AGAIN, "so nobody is told that it is");
    hvd_world_meet(world);
    value[0] = value[1] = value[2] = 5;
    gpus_open_gate(gate);
    while ((code = plane->settle(seat.nccl, &error)) == HVD_AGAIN)
        sched_yield();
    CHECK(code == HVD_OK && value[2] == 5 * (float)world->size, "%g", (double)value[2]);
    CHECK(hvd_gpu_event_reached(work.behind, &error) == HVD_OK, "%s", error.text);
    hvd_gpu_event_drop(work.behind);
    hvd_world_meet(world);
    plane->close(seat.nccl);
    seat.nccl = NULL;
    hvd_cuda_load(&error)->EventDestroy(gate);
}

/* A rank that has joined before it ever had a tensor there knows no device, and none is guessed for it: all are told to
 * greet each other again, whatever the others have, until it knows one. It loads nothing meanwhile, for it may not have
 * been told which files to take. */
static void waits_for_a_device(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    bool joined = world->rank == 1;
    float value = (float)world->rank;
    int numbers = gpus_calls("ncclGetUniqueId"), comms = gpus_calls("ncclCommInitRankConfig");
    if (joined) {
        hvd_cuda_prefer("no-such-library.so");
        hvd_nccl_prefer("no-such-library.so");
    }
    CHECK(gpus_greet(world, joined ? -1 : world->rank, &seat, &error) == HVD_AGAIN, "%s", error.text);
    CHECK(gpus_greet_again(&seat, joined ? -1 : world->rank, &error) == HVD_AGAIN, "%s", error.text);
    CHECK(!joined || !(seat.nccl->device || seat.nccl->cuda || seat.nccl->nccl), "none is guessed, nothing is loaded");
    gpus_find();
    CHECK(gpus_greet_again(&seat, joined ? 6 : world->rank, &error) == HVD_OK, "%s", error.text);
    CHECK(gpus_calls("ncclCommInitRankConfig") == comms, "the first work begins it");
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK && value == 3, "%s", error.text);
    CHECK(gpus_calls("ncclGetUniqueId") == numbers + (world->rank == 0), "its number was asked for once");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

int main(void)
{
    setenv("STUB_NCCL_VERSION", "22403", 1); /* the first that adds float8 */
    plane = gpus_plane();
    gpus_find();
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, waits_for_a_device, NULL); /* the first, so that nothing is loaded */
    gpus_threads(2, leaves_to_others);
    static const int sizes[] = {1, 2, 3, 4};
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        long before = hvd_bucket_works;
        gpus_threads(sizes[i], does_every_work);
        printf("world of %d: %ld works\n", sizes[i], (hvd_bucket_works - before) / sizes[i]);
        CHECK(hvd_bucket_works - before > 100, "too few works for a world of %d", sizes[i]);
    }
    gpus_threads(2, waits_for_tensors);
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, does_every_work, NULL);
    return 0;
}
