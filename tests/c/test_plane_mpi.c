/* test_plane_mpi.c - plane mpi over an MPI that is none: every kind of work, every way that it takes for a sum, dtypes
 * and scales, pieces; and that a call that fails fails the work, and every later one, with the same words. (That bytes
 * are cut where MPI's counts end is test_mpi_post.c's; MPIs that are some, tests/py/test_mpi_plane.py's.)
 */
#define _GNU_SOURCE
#include "bucket.h"
#include "kernel/kernel.h"
#include "mpis.h"
#include "world.h"

#include <sched.h>
#include <string.h>

static intptr_t first; /* communicator, of rank 0 */
static _Atomic int works;

static int finish(const struct hvd_plane *plane, void *opened, struct hvd_work *work, struct hvd_error *error)
{
    for (;;) {
        bool progress = false;
        int code = plane->poll(opened, work, &progress, error);
        if (code != HVD_AGAIN)
            return code;
        sched_yield();
    }
}

static int run(const struct hvd_plane *plane, void *opened, struct hvd_work *work, struct hvd_error *error)
{
    int code = plane->start(opened, work, error);
    atomic_fetch_add(&works, 1);
    return code ? code : finish(plane, opened, work, error);
}

static const struct hvd_plane *open_mpi(const struct hvd_plane_arg *world, bool any_order, struct hvd_plane_arg *arg,
                                        void **opened)
{
    *arg = *world;
    arg->comm = (void *)(first + world->rank);
    arg->any_order = any_order;
    return hvd_world_open(arg, "mpi", opened);
}

/* Small, of a size that MPI sums itself, and large enough for several segments; in order or in MPI's own. */
static void sums_and_what_only_moves(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    static const int kinds[] = {HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER};
    static const int ops[] = {HVD_OP_sum, HVD_OP_max, HVD_OP_min, HVD_OP_product, HVD_OP_average};
    static const uint64_t counts[] = {0, 1, 1000, 5000, 300000};
    for (int any_order = 0; any_order < 2; any_order++) {
        struct hvd_plane_arg arg;
        void *opened;
        const struct hvd_plane *plane = open_mpi(world, any_order, &arg, &opened);
        CHECK(!plane->can(opened, &(struct hvd_work){.kind = HVD_BARRIER}), "a barrier needs no plane");
        for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++)
            for (int dtype = 0; hvd_dtype_name(dtype); dtype++)
                for (size_t c = 0; c < HVD_COUNT_OF(counts); c++) {
                    struct hvd_work like = {.kind = kinds[k],
                                            .op = ops[((size_t)dtype + c + k) % HVD_COUNT_OF(ops)],
                                            .dtype = dtype,
                                            .divide_by = arg.size,
                                            .prescale = 1,
                                            .postscale = c == 2 && dtype == HVD_DTYPE_float32 ? 2 : 1,
                                            .root = arg.size - 1};
                    struct hvd_bucket bucket;
                    struct hvd_error error = {0};
                    if (!plane->can(opened, &like) || (counts[c] > 100000 && dtype % 3))
                        continue;
                    hvd_bucket_make(&bucket, &like, counts[c], (int)((c + (size_t)dtype) % HVD_BUCKET_SHAPES),
                                    (int)(c % 2), arg.rank, arg.size, 0, NULL, NULL);
                    CHECK(run(plane, opened, &bucket.work, &error) == HVD_OK, "%s of %llu: %s", hvd_dtype_name(dtype),
                          (unsigned long long)counts[c], error.text);
                    hvd_bucket_check(&bucket);
                }
        hvd_world_meet(&arg);
        plane->close(opened);
    }
}

/* Of a rank whose tensor is not there: it has joined. */
static void who_has_joined_gives_nothing(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    static const uint64_t counts[] = {7, 1000, 200000};
    for (int any_order = 0; any_order < 2; any_order++) {
        struct hvd_plane_arg arg;
        void *opened;
        const struct hvd_plane *plane = open_mpi(world, any_order, &arg, &opened);
        for (size_t c = 0; c < HVD_COUNT_OF(counts); c++) {
            struct hvd_work like = {.kind = HVD_ALLREDUCE,
                                    .op = HVD_OP_sum,
                                    .dtype = HVD_DTYPE_float32,
                                    .divide_by = arg.size,
                                    .active = arg.size - 1,
                                    .prescale = 1,
                                    .postscale = 1};
            struct hvd_bucket bucket;
            struct hvd_error error = {0};
            hvd_bucket_make(&bucket, &like, counts[c], HVD_BUCKET_FEW, 1, arg.rank, arg.size, 1, NULL, NULL);
            CHECK(run(plane, opened, &bucket.work, &error) == HVD_OK, "%s", error.text);
            hvd_bucket_check(&bucket);
        }
        hvd_world_meet(&arg);
        plane->close(opened);
    }
}

enum { SIZE_MOST = 4, EACH = 3001 };

/* From `from` to `to` go so many, all of them 10 * from + to. */
static uint64_t cell(int from, int to, uint64_t each)
{
    return (from + to) % 3 ? each + (uint64_t)to : 0;
}

static void exchanges(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    struct hvd_plane_arg arg;
    void *opened;
    const struct hvd_plane *plane = open_mpi(world, true, &arg, &opened);
    static const uint64_t sizes[] = {1, EACH};
    for (size_t s = 0; s < HVD_COUNT_OF(sizes); s++) {
        static _Thread_local int32_t in[SIZE_MOST * (EACH + 8)], out[SIZE_MOST * (EACH + 8)];
        uint64_t count_of[SIZE_MOST * SIZE_MOST], given = 0;
        for (int from = 0; from < arg.size; from++)
            for (int to = 0; to < arg.size; to++)
                count_of[from * arg.size + to] = cell(from, to, sizes[s]);
        for (int to = 0; to < arg.size; to++)
            for (uint64_t i = 0; i < cell(arg.rank, to, sizes[s]); i++)
                in[given++] = 10 * arg.rank + to;
        struct hvd_piece piece = {in, out, given};
        struct hvd_work work = {.kind = HVD_ALLTOALL,
                                .dtype = HVD_DTYPE_int32,
                                .piece = &piece,
                                .pieces = 1,
                                .count = given,
                                .count_of = count_of};
        struct hvd_error error = {0};
        CHECK(run(plane, opened, &work, &error) == HVD_OK, "%s", error.text);
        uint64_t at = 0;
        for (int from = 0; from < arg.size; from++)
            for (uint64_t i = 0; i < cell(from, arg.rank, sizes[s]); i++, at++)
                CHECK(out[at] == 10 * from + arg.rank, "element %llu is %d", (unsigned long long)at, out[at]);
        uint64_t shares[SIZE_MOST], before = 0, total = 0;
        for (int rank = 0; rank < arg.size; rank++) {
            shares[rank] = rank == 1 ? 0 : sizes[s] + (uint64_t)rank;
            before += rank < arg.rank ? shares[rank] : 0;
            total += shares[rank];
        }
        for (uint64_t i = 0; i < total; i++)
            in[i] = (int32_t)i % 50 + arg.rank;
        piece.count = work.count = total;
        work.kind = HVD_REDUCESCATTER;
        work.op = HVD_OP_sum;
        work.divide_by = arg.size;
        work.prescale = work.postscale = 1;
        work.count_of = shares;
        CHECK(run(plane, opened, &work, &error) == HVD_OK, "%s", error.text);
        for (uint64_t i = 0; i < shares[arg.rank]; i++)
            CHECK(out[i] == arg.size * ((int32_t)(before + i) % 50) + arg.size * (arg.size - 1) / 2, "share %llu is %d",
                  (unsigned long long)i, out[i]);
    }
    hvd_world_meet(&arg);
    plane->close(opened);
}

/* A work that is over for a rank may owe others what leaves only when it calls MPI again. */
static void what_a_rank_owes_leaves_while_it_lingers(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    struct hvd_plane_arg arg;
    void *opened;
    const struct hvd_plane *plane = open_mpi(world, true, &arg, &opened);
    float values[10] = {0};
    struct hvd_error error = {0};
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, values, HVD_COUNT_OF(values));
    work.kind = HVD_BROADCAST;
    work.root = 1;
    if (arg.rank == 1)
        values[9] = 7;
    bool progress = false;
    CHECK(plane->start(opened, &work, &error) == HVD_OK, "%s", error.text);
    hvd_world_meet(&arg); /* all have come */
    if (arg.rank == 1)
        CHECK(finish(plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    hvd_world_meet(&arg);
    if (arg.rank != 1)
        CHECK(plane->poll(opened, &work, &progress, &error) == HVD_AGAIN, "it came by itself");
    hvd_world_meet(&arg);
    plane->linger(opened); /* all of them, as their engines do */
    hvd_world_meet(&arg);
    if (arg.rank != 1)
        CHECK(finish(plane, opened, &work, &error) == HVD_OK && values[9] == 7, "%s", error.text);
    hvd_world_meet(&arg);
    plane->close(opened);
}

static const char *failing;

/* One rank's call fails; the others' would be waited for for ever, so they make none. */
static void a_call_that_fails_fails_all_later_ones(const struct hvd_plane_arg *world, void *kind)
{
    struct hvd_plane_arg arg;
    void *opened;
    static float values[200000];
    const struct hvd_plane *plane = open_mpi(world, failing && strcmp(failing, "Isend") != 0, &arg, &opened);
    struct hvd_piece piece;
    struct hvd_error error = {0}, again = {0};
    struct hvd_work work = hvd_bucket_sum(&piece, values, strcmp(failing, "Isend") ? 10 : 200000);
    work.kind = *(int *)kind;
    uint64_t count_of[] = {10, 10, 10, 10};
    work.count_of = count_of;
    if (arg.rank == 0) {
        mpis_fail(failing);
        CHECK(run(plane, opened, &work, &error) < 0 && strstr(error.text, "error 5"), "%s: %s", failing, error.text);
        CHECK(plane->start(opened, &work, &again) == error.code && !strcmp(again.text, error.text), "%s", again.text);
    }
    hvd_world_meet(&arg);
    plane->close(opened);
}

static void a_job_without_mpi_is_refused(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    struct hvd_error error = {0};
    void *opened;
    for (int i = 0; hvd_planes[i]; i++)
        CHECK(strcmp(hvd_planes[i]->name, "mpi") ||
                  (hvd_planes[i]->open(world, &opened, &error) == HVD_EINIT && strstr(error.text, "no communicator")),
              "%s", error.text);
}

static void as(int size, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
    first = mpis_comm(size);
    hvd_world_run(HVD_WORLD_THREADS, size, 120, body, more);
}

int main(void)
{
    mpis_load(true);
    for (int size = 2; size <= SIZE_MOST; size++) {
        as(size, sums_and_what_only_moves, NULL);
        as(size, who_has_joined_gives_nothing, NULL);
        as(size, exchanges, NULL);
        mpis_lazy(1);
        as(size, what_a_rank_owes_leaves_while_it_lingers, NULL);
        mpis_lazy(0);
    }
    static const struct {
        const char *name;
        int kind;
    } calls[] = {{"Iallreduce", HVD_ALLREDUCE},
                 {"Isend", HVD_ALLREDUCE},
                 {"Ibcast", HVD_BROADCAST},
                 {"Iallgatherv", HVD_ALLGATHER}};
    for (size_t i = 0; i < HVD_COUNT_OF(calls); i++) {
        failing = calls[i].name;
        as(2, a_call_that_fails_fails_all_later_ones, (void *)&calls[i].kind);
    }
    as(2, a_job_without_mpi_is_refused, NULL);
    CHECK(works > 1000, "%d works only", works);
    return 0;
}
