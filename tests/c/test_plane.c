/* test_plane.c - the conformance test: does every plane do what plane.h promises, for every cell of the matrix?
 *
 * planes x kinds x dtypes x ops x world sizes x counts x scatter lists x in and out of place, rooted, and joined ranks.
 * A plane that does not open in a world of threads is left out; `self` and `shm` must not be, but where links are all
 * there is. All works of a world run on one opened plane, one after the other, as in an engine. (alltoall and
 * reducescatter: test_plane_exchange.c)
 */
#include "kernel/kernel.h"
#include "matrix.h"

static const int kinds[] = {HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER};

static void joined_ranks(struct hvd_seat *seat, struct hvd_work like)
{
    int size = seat->arg.size;
    like.op = HVD_OP_product;
    like.prescale = 2;
    uint64_t counts[] = {1, 1000, 70001}, without_last = UINT64_C(1) << (size - 1);
    for (size_t i = 0; i < HVD_COUNT_OF(counts) && size > 1; i++)
        for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++) {
            if (!hvd_picked(shape, HVD_BUCKET_SHAPES, (int)i))
                continue;
            hvd_bucket_do(seat, &like, counts[i], shape, HVD_BUCKET_IN_PLACE, without_last);
            hvd_bucket_do(seat, &like, counts[i], shape, HVD_BUCKET_OUT_OF_PLACE, 1 | without_last >> 1);
            /* only rank 0 is left */
            hvd_bucket_do(seat, &like, counts[i], shape, HVD_BUCKET_OUT_OF_PLACE, without_last * 2 - 2);
        }
}

/* Several times around any ring, after works that leave different words behind. */
static void many_segments(struct hvd_seat *seat, struct hvd_work like)
{
    uint64_t many = 9 * HVD_MATRIX_ABOVE / sizeof(double) + 5;
    for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++)
        for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++) {
            if (!hvd_picked(shape, HVD_BUCKET_SHAPES, (int)k))
                continue;
            like.kind = kinds[k];
            like.op = HVD_OP_sum;
            like.root = seat->arg.size - 1;
            hvd_bucket_do(seat, &like, many, shape, (int)k % 2, 0);
            hvd_bucket_do(seat, &like, 3, shape, (int)k % 2, 0);
            like.kind = HVD_ALLREDUCE;
            like.root = (int)k % seat->arg.size;
            hvd_bucket_do(seat, &like, many, shape, (int)k % 2 | HVD_BUCKET_ROOTED, 0);
            like.kind = HVD_BROADCAST;
            like.root = 0;
            hvd_bucket_do(seat, &like, many, shape, (int)k % 2, 0);
        }
}

static void works(struct hvd_seat *seat)
{
    struct hvd_work barrier = {.kind = HVD_BARRIER};
    const struct hvd_work like = {
        .kind = HVD_ALLREDUCE, .dtype = HVD_DTYPE_float64, .divide_by = seat->arg.size, .prescale = 1, .postscale = 1};
    hvd_matrix(seat, 1u << HVD_ALLREDUCE | 1u << HVD_BROADCAST | 1u << HVD_ALLGATHER, false);
    joined_ranks(seat, like);
    if (seat->arg.size < 64)
        many_segments(seat, like);
    for (int times = 0; times < 20 && seat->plane->can(seat->opened, &barrier); times++)
        hvd_seat_done(seat, &barrier);
}

/* On hosts the plane for them, once more; in deterministic mode it leaves floats to others. */
static void every_plane(const struct hvd_plane_arg *arg, void *any_order)
{
    struct hvd_plane_arg mine = *arg;
    mine.any_order = any_order != NULL;
    hvd_every_plane(&mine, works);
}

int main(void)
{
    hvd_every_size(every_plane);
    hvd_world_processes(3, 200, every_plane, NULL);
    bool any_order = true;
    static const struct layout {
        int size, host_of[8];
    } layouts[] = {{3, {0, 0, 1}}, {7, {0, 0, 0, 1, 2, 2, 2}}, {4, {0, 1, 0, 1}}};
    for (size_t i = 0; i < HVD_COUNT_OF(layouts); i++) {
        long before = hvd_bucket_works;
        hvd_world_host_of = layouts[i].host_of;
        hvd_world_run(HVD_WORLD_THREADS, layouts[i].size, 400, every_plane, &any_order);
        printf("%d ranks on hosts: %ld works\n", layouts[i].size, (hvd_bucket_works - before) / layouts[i].size);
        CHECK(hvd_bucket_works - before > 100, "too few works for %d ranks on hosts", layouts[i].size);
    }
    hvd_world_run(HVD_WORLD_THREADS, 4, 400, every_plane, NULL);
#ifndef HVD_SANITIZED /* processes, and hosts, were there above */
    hvd_world_host_of = layouts[0].host_of;
    hvd_world_processes(3, 200, every_plane, &any_order);
#endif
    return 0;
}
