/* test_plane_nccl_hosts.c - plane nccl on two levels, over a GPU that is none (tests/stub): sums of several hosts are
 * right, NCCL stays inside each host, a rank alone on its host needs none, and a peer that is lost across is named.
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "world.h"

#include <sched.h>
#include <string.h>
#include <sys/socket.h>

static const struct hvd_plane *plane; /* nccl */
static _Atomic long works_done;

static void one(const struct gpus_seat *seat, const struct hvd_work *like, uint64_t count, enum hvd_bucket_shape shape,
                enum hvd_bucket_place place, uint64_t joined)
{
    struct hvd_bucket bucket;
    struct hvd_error error = {0};
    hvd_bucket_make(&bucket, like, count, shape, place, seat->arg.rank, seat->arg.size, joined, NULL, NULL);
    bucket.work.flags = HVD_WORK_ON_DEVICE;
    CHECK(gpus_do(seat, &bucket.work, &error) == HVD_OK, "%s", error.text);
    works_done++;
    hvd_bucket_check(&bucket);
}

/* All that it says it does, in buckets of one tensor and of many; with a rank that has joined. */
static void sums(const struct gpus_seat *seat)
{
    static const uint64_t counts[] = {0, 1, 5001};
    static const int dtypes[] = {HVD_DTYPE_bool, HVD_DTYPE_int32, HVD_DTYPE_bfloat16, HVD_DTYPE_float32};
    int size = seat->arg.size;
    for (size_t d = 0; d < HVD_COUNT_OF(dtypes); d++)
        for (int dtype = dtypes[d], i = 0; hvd_op_number(i) >= 0; i++) {
            struct hvd_work like = {.kind = HVD_ALLREDUCE,
                                    .op = hvd_op_number(i),
                                    .dtype = dtype,
                                    .flags = HVD_WORK_ON_DEVICE,
                                    .divide_by = size,
                                    .prescale = 1,
                                    .postscale = 1};
            if (!plane->can(seat->nccl, &like) || (size == 3 && like.op == HVD_OP_average))
                continue;
            for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                one(seat, &like, counts[c], (int)(c + (size_t)i) % HVD_BUCKET_SHAPES, (int)c % 2, 0);
            one(seat, &like, 300, i % 2 ? HVD_BUCKET_FEW : HVD_BUCKET_ONE, HVD_BUCKET_OUT_OF_PLACE,
                i % 2 ? 1 : UINT64_C(1) << (size - 1));
        }
}

static struct {
    int comms, scatters, gathers, reduces, broadcasts, all;
} before;

static void count(void)
{
    before.comms = gpus_calls("ncclCommInitRankConfig") - before.comms;
    before.scatters = gpus_calls("ncclReduceScatter") - before.scatters;
    before.gathers = gpus_calls("ncclAllGather") - before.gathers;
    before.reduces = gpus_calls("ncclReduce") - before.reduces;
    before.broadcasts = gpus_calls("ncclBroadcast") - before.broadcasts;
    before.all = gpus_calls("ncclAllReduce") - before.all;
}

static void does_sums(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    if (more && world->rank == 3) /* alone on its host */
        hvd_nccl_prefer("no-such-library.so");
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    CHECK(seat.nccl->levels, "asked for by name");
    CHECK(!more || world->rank != 3 || !seat.nccl->nccl, "not loaded where nobody needs it");
    struct hvd_work other = {.kind = HVD_BROADCAST, .dtype = HVD_DTYPE_float32, .flags = HVD_WORK_ON_DEVICE};
    CHECK(!plane->can(seat.nccl, &other), "that goes by way of the CPU");
    sums(&seat);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

static void on_hosts(int size, const int *host_of)
{
    long done = works_done;
    hvd_world_host_of = host_of;
    memset(&before, 0, sizeof before);
    count();
    hvd_world_run(HVD_WORLD_THREADS, size, 300, does_sums, NULL);
    count();
    CHECK(works_done - done > 50L * size && before.all == 0, "%ld works, %d across all", works_done - done, before.all);
}

/* Without kernels every rank's values are multiplied by NCCL, and by who has none himself. */
static void averages_without_kernels(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    (void)more;
    if (world->rank == 0)
        gpus_fail("cuModuleLoadData", 1, 218);
    hvd_world_meet(world);
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    CHECK(!seat.nccl->all_scale, "agreed");
    float value[3] = {4, 8, (float)(world->rank + 1)};
    struct hvd_work work = hvd_bucket_sum(&piece, value, 3);
    work.op = HVD_OP_average;
    work.divide_by = 4;
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    CHECK(value[0] == 4 && value[1] == 8 && value[2] == 2.5f, "%g", (double)value[2]);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* The last rank greets and ends its links: whoever is in its lane names it, and nobody hangs. */
static void names_who_is_lost_across(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value[300] = {0};
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(&piece, value, 300);
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = world->rank + 1;
    hvd_world_meet(world);
    if (world->rank == 3)
        for (int rank = 0; rank < 3; rank++)
            shutdown(world->link[rank]->fd, SHUT_RDWR);
    bool in_lane = world->rank == 0, progress;
    int code = HVD_AGAIN;
    CHECK(world->rank == 3 || plane->start(seat.nccl, &work, &error) == HVD_OK, "%s", error.text);
    while (in_lane && code == HVD_AGAIN) {
        code = plane->poll(seat.nccl, &work, &progress, &error);
        sched_yield();
    }
    CHECK(!in_lane || (code == HVD_EPEER && error.culprit == 3), "code %d, culprit %d: %s", code, error.culprit,
          error.text);
    CHECK(!in_lane || plane->settle(seat.nccl, &error) == HVD_OK, "what is on the stream has not failed by that");
    while (world->rank < 3 && !in_lane && !work.behind) /* its part inside, which waits for rank 0's on the device */
        CHECK(plane->poll(seat.nccl, &work, &progress, &error) >= 0, "%s", error.text);
    hvd_world_meet(world);
    if (work.behind)
        hvd_mark_drop(work.behind);
    plane->abandon(seat.nccl);
    CHECK(world->rank == 3 || plane->poll(seat.nccl, &work, &progress, &error) == HVD_EPEER, "a failure stays");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

int main(void)
{
    static const int two_two[] = {0, 0, 1, 1}, three_one[] = {0, 0, 0, 1}, two_one[] = {0, 1, 0};
    plane = gpus_plane();
    gpus_find();
    on_hosts(4, two_two);
    CHECK(before.comms == 4 && before.scatters > 0 && before.gathers == before.scatters && before.reduces == 0 &&
              before.broadcasts == 0,
          "%d communicators, %d reduce-scatters", before.comms, before.scatters);
    on_hosts(4, three_one);
    CHECK(before.comms == 3 && before.reduces > 0 && before.broadcasts == before.reduces && before.scatters == 0,
          "%d communicators, %d reduces", before.comms, before.reduces);
    on_hosts(3, two_one);
    hvd_world_host_of = three_one;
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, averages_without_kernels, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, names_who_is_lost_across, NULL);
    hvd_world_run(HVD_WORLD_PROCESSES, 4, 300, does_sums, &works_done);
    return 0;
}
