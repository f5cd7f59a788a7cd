/* test_plane_mpi.c - plane mpi over an MPI that is none: every kind of work, every way that it takes for a sum, dtypes
 * and scales, pieces; and that a call that fails fails the work, and every later one, with the same words. (That bytes
 * are cut where MPI's counts end is test_mpi_post.c's; MPIs that are some, tests/mpi/test_mpi_plane.py's.)
 */
#define _GNU_SOURCE
#include "bucket.h"
#include "kernel/kernel.h"
#include "matrix.h"
#include "mpis.h"

#include <string.h>

/* Small, of a size that MPI sums itself, and large enough for several segments; in order or in MPI's own. */
static void does_every_work(struct hvd_seat *seat)
{
    CHECK(!seat->plane->can(seat->opened, &(struct hvd_work){.kind = HVD_BARRIER}), "a barrier needs no plane");
    hvd_matrix(seat, ~0u, true);
    struct hvd_piece none;
    struct hvd_work like = hvd_bucket_sum(&none, NULL, 0);
    hvd_bucket_do(seat, &like, 300000, HVD_BUCKET_FEW, HVD_BUCKET_OUT_OF_PLACE, 0);
    hvd_bucket_do(seat, &like, 300000, HVD_BUCKET_FEW, HVD_BUCKET_OUT_OF_PLACE, 1); /* rank 0 has joined */
}

/* A work that is over for a rank may owe others what leaves only when it calls MPI again. */
static void what_a_rank_owes_leaves_while_it_lingers(struct hvd_seat *seat)
{
    float values[10] = {0};
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, values, HVD_COUNT_OF(values));
    struct hvd_error *error = &seat->error;
    bool progress = false, root = seat->arg.rank == 1;
    work.kind = HVD_BROADCAST;
    work.root = 1;
    if (root)
        values[9] = 7;
    CHECK(seat->plane->start(seat->opened, &work, error) == HVD_OK, "%s", error->text);
    hvd_world_meet(&seat->arg); /* all have come */
    if (root)
        CHECK(hvd_world_finish(&seat->arg, seat->plane, seat->opened, &work, error) == HVD_OK, "%s", error->text);
    hvd_world_meet(&seat->arg);
    if (!root)
        CHECK(seat->plane->poll(seat->opened, &work, &progress, error) == HVD_AGAIN, "it came by itself");
    hvd_world_meet(&seat->arg);
    seat->plane->linger(seat->opened); /* all of them, as their engines do */
    hvd_world_meet(&seat->arg);
    if (!root)
        CHECK(hvd_world_finish(&seat->arg, seat->plane, seat->opened, &work, error) == HVD_OK && values[9] == 7, "%s",
              error->text);
}

static const struct call {
    const char *name;
    int kind;
} calls[] = {
    {"Iallreduce", HVD_ALLREDUCE}, {"Isend", HVD_ALLREDUCE}, {"Ibcast", HVD_BROADCAST}, {"Iallgatherv", HVD_ALLGATHER}};

/* One rank's call fails; the others' would be waited for for ever, so they make none. */
static void a_call_that_fails_fails_all_later_ones(struct hvd_seat *seat)
{
    static float values[200000];
    const struct call *call = seat->more;
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, values, call == &calls[1] ? HVD_COUNT_OF(values) : 10);
    struct hvd_error again = {0};
    uint64_t count_of[] = {10, 10};
    work.kind = call->kind;
    work.count_of = count_of;
    if (seat->arg.rank != 0)
        return;
    mpis_fail(call->name);
    int code = hvd_seat_do(seat, &work);
    CHECK(code < 0 && strstr(seat->error.text, "error 5"), "%s: %s", call->name, seat->error.text);
    CHECK(seat->plane->start(seat->opened, &work, &again) == code && !strcmp(again.text, seat->error.text), "%s",
          again.text);
}

static void a_job_without_mpi_is_refused(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_error error = {0};
    void *opened;
    for (int i = 0; hvd_planes[i]; i++)
        CHECK(strcmp(hvd_planes[i]->name, "mpi") ||
                  (hvd_planes[i]->open(world, &opened, &error) == HVD_EINIT && strstr(error.text, "no communicator")),
              "%s", error.text);
}

static void as(int size, bool any_order, void (*body)(struct hvd_seat *seat), const void *more)
{
    struct hvd_plane_arg how = {.any_order = any_order, .comm = (void *)mpis_comm(size)};
    hvd_world_seats(HVD_WORLD_THREADS, size, "mpi", &how, body, (void *)(uintptr_t)more);
}

int main(void)
{
    mpis_load(true);
    for (int size = 2; size <= 4; size++) {
        as(size, false, does_every_work, NULL);
        as(size, true, does_every_work, NULL);
        mpis_lazy(1);
        as(size, true, what_a_rank_owes_leaves_while_it_lingers, NULL);
        mpis_lazy(0);
    }
    for (size_t i = 0; i < HVD_COUNT_OF(calls); i++)
        as(2, i != 1, a_call_that_fails_fails_all_later_ones, &calls[i]);
    hvd_world_run(HVD_WORLD_THREADS, 2, 60, a_job_without_mpi_is_refused, NULL);
    CHECK(hvd_bucket_works > 1000, "%ld works only", hvd_bucket_works);
    return 0;
}
