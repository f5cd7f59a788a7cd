/* bench_plane.c - how long does a collective take in the plane alone, without engine, vote and Python?
 *
 * Usage: bench_plane [ranks [words]]. Ranks are processes (world.h), two by default; the words (allreduce, float32,
 * quick, ...) and the lines it prints are explained in examples/benchmarks/harness.h, for private memory (`private`)
 * and for memory from the plane's alloc (`in-plane`). Beside its peers: examples/benchmarks/run_all.py --only plane.
 *
 * The rank polls as a waiting caller would: it pauses while every rank can have a processor of its own, and yields
 * after a while; when there are more ranks than processors it yields soon, since who it waits for may not be running.
 */
#include "../../examples/benchmarks/harness.h"
#include "kernel/kernel.h"
#include "world.h"

#include <sched.h>
#include <string.h>

#define PAUSES         4000 /* about 100 us */
#define PAUSES_CROWDED 5
#define SECONDS        300
#define ARENA_BYTES    (HARNESS_BYTES_MAX + (32u << 20))

struct bench {
    const struct hvd_plane_arg *arg;
    const struct hvd_plane *plane;
    void *opened;
    struct hvd_work work;
    int pauses;
    void *out;
};

static void finish(struct bench *bench, struct hvd_work *work)
{
    struct hvd_error error = {0};
    int idle = 0, code = bench->plane->start(bench->opened, work, &error);
    if (code == HVD_OK)
        code = HVD_AGAIN;
    while (code == HVD_AGAIN) {
        bool progress = false;
        code = bench->plane->poll(bench->opened, work, &progress, &error);
        idle = progress ? 0 : idle + 1;
        if (code == HVD_AGAIN && idle > bench->pauses)
            sched_yield();
        else if (code == HVD_AGAIN && idle > 0)
            hvd_pause();
    }
    CHECK(code == HVD_OK, "rank %d: %s", bench->arg->rank, error.text);
}

static void meet(void *self)
{
    struct hvd_work barrier = {.kind = HVD_BARRIER};
    finish(self, &barrier);
}

static void sum(void *self, void *buffer, size_t count)
{
    struct bench *bench = self;
    struct hvd_piece piece = {buffer, buffer, count};
    uint64_t count_of[HVD_LOCAL_MAX * HVD_LOCAL_MAX];
    if (bench->work.kind != HVD_ALLREDUCE) {
        piece.out = bench->out;
        for (int i = 0; i < bench->arg->size * bench->arg->size; i++)
            count_of[i] = count / (size_t)bench->arg->size;
        bench->work.count_of = count_of;
    }
    bench->work.piece = &piece;
    bench->work.count = count;
    finish(bench, &bench->work);
}

static void slowest(void *self, double *microseconds, int of)
{
    struct bench *bench = self;
    double all[HVD_LOCAL_MAX * HARNESS_BATCHES];
    struct hvd_error error = {0};
    size_t bytes = (size_t)of * sizeof *all;
    CHECK(bench->arg->allgather(bench->arg->self, microseconds, bytes, all, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < of * bench->arg->size; i++)
        if (all[i] > microseconds[i % of])
            microseconds[i % of] = all[i];
}

static void rank_main(const struct hvd_plane_arg *given, void *more)
{
    static const int kinds[] = {[HARNESS_ALLREDUCE] = HVD_ALLREDUCE,
                                [HARNESS_ALLTOALL] = HVD_ALLTOALL,
                                [HARNESS_REDUCESCATTER] = HVD_REDUCESCATTER};
    static const int dtypes[] = {[HARNESS_FLOAT32] = HVD_DTYPE_float32,
                                 [HARNESS_BFLOAT16] = HVD_DTYPE_bfloat16,
                                 [HARNESS_FLOAT16] = HVD_DTYPE_float16};
    struct harness harness = *(const struct harness *)more;
    struct hvd_plane_arg arg = *given;
    arg.arena_bytes = ARENA_BYTES;
    struct bench bench = {.arg = &arg,
                          .pauses = arg.size <= arg.cpus ? PAUSES : PAUSES_CROWDED,
                          .work = {.kind = kinds[harness.kind],
                                   .op = HVD_OP_sum,
                                   .dtype = dtypes[harness.dtype],
                                   .divide_by = arg.size,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .pieces = 1}};
    harness.rank = arg.rank;
    harness.ranks = arg.size;
    harness.self = &bench;
    harness.meet = meet;
    harness.sum = sum;
    harness.slowest = slowest;
    bench.plane = hvd_world_open(&arg, "shm", &bench.opened);

    harness.name = "private";
    void *buffer = aligned_alloc(HVD_PAGE, HARNESS_BYTES_MAX);
    bench.out = harness.out = aligned_alloc(HVD_PAGE, HARNESS_BYTES_MAX);
    CHECK(buffer && bench.out, "no memory for %zu bytes", HARNESS_BYTES_MAX);
    harness_run(&harness, buffer);
    free(buffer);
    free(bench.out);
    if (harness.kind == HARNESS_ALLREDUCE) {
        harness.name = "in-plane";
        bench.work.flags = HVD_WORK_IN_PLANE;
        buffer = bench.plane->alloc(bench.opened, HARNESS_BYTES_MAX);
        CHECK(buffer, "no plane memory for %zu bytes", HARNESS_BYTES_MAX);
        harness_run(&harness, buffer);
        bench.plane->release(buffer);
    }

    hvd_world_meet(&arg);
    bench.plane->close(bench.opened);
}

int main(int argc, char **argv)
{
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    struct harness harness = {0};
    harness_read(&harness, argc > 2 ? argc - 2 : 0, argv + 2);
    if (ranks < 2 || ranks > HVD_LOCAL_MAX) {
        fprintf(stderr, "usage: bench_plane [ranks [words]], from 2 to %d\n", HVD_LOCAL_MAX);
        return 2;
    }
    hvd_world_run(HVD_WORLD_PROCESSES, ranks, SECONDS, rank_main, &harness);
    return 0;
}
