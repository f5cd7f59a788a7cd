/* test_plane_nccl_hosts.c - plane nccl on two levels, over a GPU that is none (tests/stub): sums of several hosts are
 * right, NCCL stays inside each host, a rank alone on its host needs none, and a peer that is lost across is named. All
 * of it over streams, and sums over an MPI that is none, too.
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "mpi/mpi.h"
#include "mpis.h"
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
    bucket.work.lay = HVD_LAY_UP; /* on two levels nobody asks */
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

/* Over an MPI: hosts that no stream joins. Each lane has a communicator, which the ranks outside of it lack. */
static void by_mpi(const struct hvd_plane_arg *world, struct gpus_seat *seat, struct hvd_plane_arg *arg)
{
    static intptr_t first[HVD_LOCAL_MAX];
    int lane[HVD_LOCAL_MAX], count = hvd_lane(world->host_of, world->size, world->rank, lane), here = 0;
    *arg = *world;
    arg->link = NULL;
    arg->device_hosts = HVD_HOSTS_BY_MPI;
    if (count && lane[0] == world->rank)
        first[world->rank] = mpis_comm(count);
    hvd_world_meet(world);
    while (count && lane[here] != world->rank)
        here++;
    arg->lane_comm = count ? (void *)(first[lane[0]] + here) : NULL;
    struct hvd_error error = {0};
    CHECK(gpus_greet(arg, world->rank, seat, &error) == HVD_OK, "%s", error.text);
    CHECK(seat->nccl->levels && (count > 0) == (seat->nccl->levels->across != NULL), "asked for");
}

static void sums_by_mpi(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_plane_arg arg;
    (void)more;
    by_mpi(world, &seat, &arg);
    sums(&seat);
    CHECK(!plane->polls(seat.nccl), "nothing is under way");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* A share is on its way over MPI, which cannot be called back, and the job fails: its memory stays. */
static void fails_on_the_way(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_plane_arg arg;
    struct hvd_error error = {0};
    struct hvd_piece piece;
    float value[300] = {0};
    bool progress;
    (void)more;
    by_mpi(world, &seat, &arg);
    struct hvd_work work = hvd_bucket_sum(&piece, value, 300);
    work.flags = HVD_WORK_ON_DEVICE;
    work.device = world->rank + 1;
    hvd_world_meet(world);
    mpis_hold(1);
    int freed = gpus_calls("cuMemFreeHost");
    CHECK(plane->start(seat.nccl, &work, &error) == HVD_OK, "%s", error.text);
    bool in_lane = seat.nccl->levels->across;
    while (in_lane ? !plane->polls(seat.nccl) : seat.nccl->levels->phase != HVD_NCCL_ALL)
        CHECK(plane->poll(seat.nccl, &work, &progress, &error) >= 0, "%s", error.text);
    CHECK(plane->watch(seat.nccl, NULL) == 0, "there is nothing to sleep on");
    hvd_world_meet(world);
    if (work.behind)
        hvd_mark_drop(work.behind);
    plane->part(seat.nccl, true);
    plane->close(seat.nccl);
    hvd_world_meet(world);
    CHECK(gpus_calls("cuMemFreeHost") == freed, "MPI has it");
    mpis_hold(0);
}

/* A rank without a communicator of its lane: all hear of it, and do without. */
static void lacks_a_communicator(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    (void)more;
    arg.device_hosts = HVD_HOSTS_BY_MPI;
    CHECK(gpus_greet(&arg, world->rank, &seat, &error) == HVD_EINIT && strstr(error.text, "no communicator"), "%s",
          error.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* Streams, by the option that names them; NCCL where that is named, whatever plane is asked for. */
static void is_asked_for_by_name(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    arg.device_hosts = more ? HVD_HOSTS_BY_NCCL : HVD_HOSTS_BY_STREAMS;
    arg.wanted = more ? world->wanted : NULL;
    CHECK(gpus_greet(&arg, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    CHECK(!seat.nccl->levels == !!more, "as it was asked for");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

static void lanes(void)
{
    int lane[4];
    static const int hosts[] = {0, 1, 0, 0}, apart[] = {0, 1, 2};
    CHECK(hvd_lane(hosts, 4, 0, lane) == 2 && lane[0] == 0 && lane[1] == 1, "the first of each host");
    CHECK(hvd_lane(hosts, 4, 1, lane) == 2 && lane[0] == 0 && lane[1] == 1, "from both ends");
    CHECK(hvd_lane(hosts, 4, 2, lane) == 0 && hvd_lane(apart, 3, 1, lane) == 0, "in none, and nothing inside");
    CHECK(hvd_lane((const int[]){3, 3}, 2, 1, lane) == 0, "one host");
    CHECK(hvd_lane(hosts, 4, 4, lane) == HVD_EINVAL && hvd_lane(NULL, 4, 0, lane) == HVD_EINVAL, "no rank");
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

/* A larger share needs more pinned memory while the sum before is still on its way up to the device, out of what is
 * outgrown then: that is not touched. */
static void grows_behind_a_copy(const struct hvd_plane_arg *world, void *more)
{
    enum { SMALL = 100, LARGE = 6000 };
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece[2];
    static float values[4][2][LARGE];
    float(*value)[LARGE] = values[world->rank];
    bool slow = world->rank < 2, progress;
    void *gate = slow ? gpus_gate() : NULL;
    (void)more;
    for (int k = 0; k < LARGE; k++)
        value[0][k] = value[1][k] = (float)(k + world->rank);
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work[2] = {hvd_bucket_sum(&piece[0], value[0], SMALL), hvd_bucket_sum(&piece[1], value[1], LARGE)};
    for (int i = 0; i < 2; i++) {
        work[i].flags = HVD_WORK_ON_DEVICE;
        work[i].device = world->rank + 1;
    }
    if (slow) { /* as far as it gets alone; then the device stands */
        CHECK(plane->start(seat.nccl, &work[0], &error) == HVD_OK, "%s", error.text);
        while (seat.nccl->levels->phase != HVD_NCCL_ACROSS)
            CHECK(plane->poll(seat.nccl, &work[0], &progress, &error) == HVD_AGAIN, "%s", error.text);
        CHECK(hvd_nccl_enter(seat.nccl, &error) == HVD_OK &&
                  seat.nccl->cuda->StreamWaitEvent(seat.nccl->device->stream, gate, 0) == 0,
              "%s", error.text);
        hvd_nccl_leave(seat.nccl);
    }
    hvd_world_meet(world);
    CHECK(slow || plane->start(seat.nccl, &work[0], &error) == HVD_OK, "%s", error.text);
    while (!work[0].behind)
        CHECK(plane->poll(seat.nccl, &work[0], &progress, &error) >= 0, "%s", error.text);
    uint64_t pinned = hvd_pinned_bytes();
    hvd_world_meet(world);
    CHECK(plane->start(seat.nccl, &work[1], &error) == HVD_OK, "%s", error.text);
    while (seat.nccl->levels->pinned.bytes < LARGE)
        CHECK(plane->poll(seat.nccl, &work[1], &progress, &error) >= 0, "%s", error.text);
    hvd_world_meet(world);
    CHECK(hvd_pinned_bytes() >= pinned + 4 * LARGE, "both are there, and counted");
    if (slow)
        gpus_open_gate(gate);
    CHECK(gpus_finish(&seat, &work[1], &error) == HVD_OK, "%s", error.text);
    hvd_mark_drop(work[0].behind);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < (i ? LARGE : SMALL); k++)
            CHECK(value[i][k] == (float)(4 * k + 6), "work %d, element %d: %g", i, k, (double)value[i][k]);
    hvd_world_meet(world);
    plane->close(seat.nccl);
    hvd_world_meet(world);
    CHECK(hvd_pinned_bytes() == 0, "all of it is given back");
    if (slow)
        hvd_cuda_load(&error)->EventDestroy(gate);
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
    plane->part(seat.nccl, true);
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
    hvd_world_host_of = two_two;
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, grows_behind_a_copy, NULL);
    hvd_world_host_of = three_one;
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, averages_without_kernels, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, names_who_is_lost_across, NULL);
    hvd_world_run(HVD_WORLD_PROCESSES, 4, 300, does_sums, &works_done);
    lanes();
    mpis_load(false);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, lacks_a_communicator, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, is_asked_for_by_name, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, is_asked_for_by_name, &works_done);
    hvd_world_run(HVD_WORLD_THREADS, 4, 300, sums_by_mpi, NULL);
    hvd_world_host_of = two_two;
    hvd_world_run(HVD_WORLD_THREADS, 4, 300, sums_by_mpi, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, fails_on_the_way, NULL);
    return 0;
}
