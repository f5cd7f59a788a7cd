/* test_plane_nccl.c - plane nccl over a GPU that is none (tests/stub): does it do every work as the other planes do, in
 * as few calls as it should, and not before the tensors are there? (What it says where it cannot is
 * test_plane_nccl_errors.c's.)
 *
 * Device memory is the process's own in the stub, so that the buckets of the other tests serve.
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "world.h"

#include <sched.h>
#include <string.h>

static const struct hvd_plane *plane; /* nccl */
static _Atomic long works_done;

static void one(const struct gpus_seat *seat, const struct hvd_work *like, uint64_t count, enum hvd_bucket_shape shape,
                enum hvd_bucket_place place, uint64_t joined)
{
    struct hvd_bucket bucket;
    struct hvd_error error = {0};
    hvd_bucket_make(&bucket, like, count, shape, place, seat->arg.rank, seat->arg.size, joined, NULL, NULL);
    bucket.work.flags = HVD_WORK_ON_DEVICE;
    CHECK(plane->can(seat->nccl, &bucket.work), "op %d of dtype %d", like->op, like->dtype);
    CHECK(gpus_do(seat, &bucket.work, &error) == HVD_OK, "%s", error.text);
    works_done++;
    hvd_bucket_check(&bucket);
}

/* Of each kind, dtype and op that it says it does, some counts. */
static void matrix(const struct gpus_seat *seat)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER};
    static const uint64_t counts[] = {0, 1, 7, 20001};
    int size = seat->arg.size;
    for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++)
        for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
            for (int i = 0; hvd_op_number(i) >= 0; i++) {
                struct hvd_work like = {.kind = kinds[k],
                                        .op = hvd_op_number(i),
                                        .dtype = dtype,
                                        .flags = HVD_WORK_ON_DEVICE,
                                        .divide_by = size,
                                        .prescale = 1,
                                        .postscale = 1,
                                        .root = (dtype + i) % size};
                like.postscale = like.op == HVD_OP_average && size == 2 ? 0.5 : 1;
                if ((i > 0 && kinds[k] != HVD_ALLREDUCE) || !plane->can(seat->nccl, &like) ||
                    (size == 3 && (hvd_is_narrow(dtype) || like.op == HVD_OP_average))) /* a third is rounded */
                    continue;
                for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                    one(seat, &like, counts[c], (int)(c + (size_t)i) % HVD_BUCKET_SHAPES, (int)c % 2, 0);
                if (kinds[k] == HVD_ALLREDUCE && size > 1)
                    one(seat, &like, 1000, HVD_BUCKET_FEW, HVD_BUCKET_OUT_OF_PLACE, UINT64_C(1) << (size - 1));
            }
}

static void shares(const struct gpus_seat *seat, uint64_t rows, bool uneven)
{
    struct hvd_error error = {0};
    int size = seat->arg.size, rank = seat->arg.rank;
    uint64_t count_of[HVD_LOCAL_MAX], before = 0, count = 0;
    float in[4096], out[4096];
    for (int other = 0; other < size; other++) {
        count_of[other] = rows + (uneven ? (uint64_t)other : 0);
        before += other < rank ? count_of[other] : 0;
        count += count_of[other];
    }
    for (uint64_t i = 0; i < count; i++)
        in[i] = (float)(i * (uint64_t)(rank + 1));
    struct hvd_piece piece = {.in = in, .out = out, .count = count};
    struct hvd_work work = {.kind = HVD_REDUCESCATTER,
                            .op = HVD_OP_sum,
                            .dtype = HVD_DTYPE_float32,
                            .divide_by = size,
                            .prescale = 2,
                            .postscale = 1,
                            .piece = &piece,
                            .pieces = 1,
                            .count = count,
                            .count_of = count_of};
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    for (uint64_t i = 0; i < count_of[rank]; i++)
        CHECK(out[i] == (float)((before + i) * (uint64_t)(size * (size + 1))), "row %d is %g", (int)i, (double)out[i]);
}

/* From rank a to rank b go 100 a + 7 b elements; of some nothing. */
static void everyone_to_everyone(const struct gpus_seat *seat)
{
    struct hvd_error error = {0};
    int size = seat->arg.size, rank = seat->arg.rank;
    uint64_t count_of[HVD_LOCAL_MAX], given = 0;
    int64_t in[4096], out[4096], *at = in;
    for (int from = 0; from < size; from++)
        for (int to = 0; to < size; to++)
            count_of[from * size + to] = from == 1 && to == 0 ? 0 : (uint64_t)(100 * from + 7 * to);
    for (int to = 0; to < size; to++)
        for (uint64_t i = 0; i < count_of[rank * size + to]; i++, given++)
            *at++ = rank * 1000000 + to * 10000 + (int64_t)i;
    struct hvd_piece piece = {.in = in, .out = out, .count = given};
    struct hvd_work work = {.kind = HVD_ALLTOALL,
                            .dtype = HVD_DTYPE_int64,
                            .piece = &piece,
                            .pieces = 1,
                            .count = given,
                            .count_of = count_of};
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    at = out;
    for (int from = 0; from < size; from++)
        for (uint64_t i = 0; i < count_of[from * size + rank]; i++)
            CHECK(*at++ == from * 1000000 + rank * 10000 + (int64_t)i, "from %d, element %d", from, (int)i);
}

/* By an NCCL that can; never scaled, for NCCL would round every rank's value and the factor; nor in a fixed order. */
static void adds_float8(const struct gpus_seat *seat)
{
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_sum,
                            .flags = HVD_WORK_ON_DEVICE,
                            .divide_by = 3,
                            .prescale = 1,
                            .postscale = 1};
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
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    matrix(&seat);
    adds_float8(&seat);
    shares(&seat, 60, false);
    shares(&seat, 60, true);
    everyone_to_everyone(&seat);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

static void leaves_to_others(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    void *opened;
    (void)more;
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_sum,
                            .dtype = HVD_DTYPE_float32,
                            .divide_by = 2,
                            .prescale = 1,
                            .postscale = 1};
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
    (void)more;
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
    CHECK(hvd_mark_reached(work.behind, &error) == HVD_AGAIN, "so nobody is told that it is");
    hvd_world_meet(world);
    value[0] = value[1] = value[2] = 5;
    gpus_open_gate(gate);
    while ((code = plane->settle(seat.nccl, &error)) == HVD_AGAIN)
        sched_yield();
    CHECK(code == HVD_OK && value[2] == 5 * (float)world->size, "%g", (double)value[2]);
    CHECK(hvd_mark_reached(work.behind, &error) == HVD_OK, "%s", error.text);
    hvd_mark_drop(work.behind);
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
    (void)more;
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
        long before = works_done;
        gpus_threads(sizes[i], does_every_work);
        printf("world of %d: %ld works\n", sizes[i], (works_done - before) / sizes[i]);
        CHECK(works_done - before > 100, "too few works for a world of %d", sizes[i]);
    }
    gpus_threads(2, waits_for_tensors);
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, does_every_work, NULL);
    return 0;
}
