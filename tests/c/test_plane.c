/* test_plane.c - the conformance test: does every plane do what plane.h promises, for every cell of the matrix?
 *
 * planes x kinds x dtypes x ops x world sizes x counts x scatter lists x in and out of place, and joined ranks. A
 * plane that does not open in a world of threads, or says it cannot do a work, is left out; `self` and `shm` must
 * not be, but where links are all there is. All works of a world run on one opened plane, one after the other, as in an
 * engine.
 */
#include "bucket.h"
#include "kernel/kernel.h"
#include "sizes.h"

#include <string.h>

#define SEGMENT_BYTES (256u << 10) /* the largest of any plane: one element more needs two */

static const int kinds[] = {HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER};
static _Atomic long works_done;

struct turn {
    const struct hvd_plane_arg *arg;
    const struct hvd_plane *plane, *rest; /* rest: for what plane leaves to others; may be NULL */
    void *opened, *rest_opened;
};

static void one(const struct turn *turn, const struct hvd_work *like, uint64_t count, enum hvd_bucket_shape shape,
                enum hvd_bucket_place place, uint64_t joined)
{
    struct hvd_bucket bucket;
    struct hvd_error error = {0};
    hvd_bucket_make(&bucket, like, count, shape, place, turn->arg->rank, turn->arg->size, joined, NULL, NULL);
    if (turn->plane->can(turn->opened, &bucket.work)) {
        int code = hvd_world_do(turn->arg, turn->plane, turn->opened, &bucket.work, &error);
        CHECK(code == HVD_OK, "rank %d: %d %s", turn->arg->rank, code, error.text);
        works_done++;
    } else if (turn->rest) {
        int code = hvd_world_do(turn->arg, turn->rest, turn->rest_opened, &bucket.work, &error);
        CHECK(code == HVD_OK, "rank %d: %d %s", turn->arg->rank, code, error.text);
    }
    hvd_bucket_check(&bucket);
}

static bool reducible(const struct hvd_work *like)
{
    return like->kind != HVD_ALLREDUCE || !hvd_reduce_check(like->op, like->dtype, like->prescale, like->postscale);
}

/* Every count and list of one kind, dtype and op. */
static void cell(const struct turn *turn, const struct hvd_work *like, bool thorough)
{
    int size = turn->arg->size;
    uint64_t above = SEGMENT_BYTES / (uint64_t)hvd_dtype_bytes(like->dtype) + 1;
    uint64_t counts[] = {0, 1, (uint64_t)size - 1, (uint64_t)size + 1, 7, 1000, above};
    for (size_t i = 0; i < HVD_COUNT_OF(counts) - !thorough; i++)
        for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++)
            for (int place = 0; place < HVD_BUCKET_PLACES; place++) {
                /* Short of time, each list in one of the places; both places are met either way. */
                int others = (int)i + like->dtype + like->op + size;
                if (thorough || (((int)i + shape) % 2 == place && hvd_picked(shape, HVD_BUCKET_SHAPES, others)))
                    one(turn, like, counts[i], shape, place, 0);
            }
}

static void joined_ranks(const struct turn *turn, struct hvd_work like)
{
    int size = turn->arg->size;
    like.op = HVD_OP_product;
    like.prescale = 2;
    uint64_t counts[] = {1, 1000, 70001}, without_last = UINT64_C(1) << (size - 1);
    for (size_t i = 0; i < HVD_COUNT_OF(counts) && size > 1; i++)
        for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++) {
            one(turn, &like, counts[i], shape, HVD_BUCKET_IN_PLACE, without_last);
            one(turn, &like, counts[i], shape, HVD_BUCKET_OUT_OF_PLACE, 1 | without_last >> 1);
            one(turn, &like, counts[i], shape, HVD_BUCKET_OUT_OF_PLACE, without_last * 2 - 2); /* only rank 0 is left */
        }
}

/* Several times around any ring, after works that leave different words behind. */
static void many_segments(const struct turn *turn, struct hvd_work like)
{
    for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++)
        for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++) {
            like.kind = kinds[k];
            like.op = HVD_OP_sum;
            like.root = turn->arg->size - 1;
            one(turn, &like, 9 * SEGMENT_BYTES / sizeof(double) + 5, shape, (int)k % 2, 0);
            one(turn, &like, 3, shape, (int)k % 2, 0);
            like.kind = HVD_BROADCAST;
            like.root = 0;
            one(turn, &like, 9 * SEGMENT_BYTES / sizeof(double) + 5, shape, (int)k % 2, 0);
        }
}

static void barriers(const struct turn *turn)
{
    struct hvd_work work = {.kind = HVD_BARRIER};
    struct hvd_error error = {0};
    for (int times = 0; times < 20 && turn->plane->can(turn->opened, &work); times++)
        CHECK(hvd_world_do(turn->arg, turn->plane, turn->opened, &work, &error) == HVD_OK, "%s", error.text);
}

static void matrix(const struct turn *turn)
{
    int size = turn->arg->size;
    for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++)
        for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
            for (int i = 0; hvd_op_number(i) >= 0; i++) {
                struct hvd_work like = {.kind = kinds[k],
                                        .op = hvd_op_number(i),
                                        .dtype = dtype,
                                        .divide_by = size,
                                        .prescale = 1,
                                        .postscale = 1,
                                        .root = (dtype + i) % size};
                if (!hvd_dtype_asked(dtype))
                    continue;
                bool usual = dtype == HVD_DTYPE_float32 && like.op == HVD_OP_average;
                bool first_op = like.op == hvd_op_number(0) || kinds[k] == HVD_ALLREDUCE;
                if (reducible(&like) && first_op && (size < 64 || like.op == HVD_OP_sum || usual))
                    cell(turn, &like, size < 64 && (usual || (like.op == HVD_OP_sum && size == 3)));
                like.prescale = 2;
                like.postscale = 0.25;
                if (kinds[k] == HVD_ALLREDUCE && reducible(&like) && (size < 64 || like.op != HVD_OP_product))
                    one(turn, &like, 100, HVD_BUCKET_FEW, HVD_BUCKET_IN_PLACE, 0);
            }
}

static void every_plane(const struct hvd_plane_arg *arg, void *more)
{
    (void)more;
    bool found = false;
    const char *must = arg->wanted ? arg->wanted->name : arg->size == 1 ? "self" : arg->one_host ? "shm" : "p2p";
    for (int i = 0; hvd_planes[i]; i++) {
        struct turn turn = {.arg = arg, .plane = hvd_planes[i]};
        struct hvd_error error = {0};
        if (turn.plane->device || (arg->wanted && arg->wanted != turn.plane)) /* devices: test_plane_nccl.c */
            continue;
        if (turn.plane->open(arg, &turn.opened, &error) != HVD_OK) {
            CHECK(arg->wanted ? arg->wanted != turn.plane : !arg->one_host || strcmp(turn.plane->name, "shm") != 0,
                  "%s", error.text);
            continue;
        }
        found = found || strcmp(turn.plane->name, must) == 0;
        if (arg->wanted) /* over the same links, works of the one and the other follow each other */
            turn.rest = hvd_world_open(arg, "p2p", &turn.rest_opened);
        matrix(&turn);
        const struct hvd_work like = {
            .kind = HVD_ALLREDUCE, .dtype = HVD_DTYPE_float64, .divide_by = arg->size, .prescale = 1, .postscale = 1};
        joined_ranks(&turn, like);
        if (arg->size < 64)
            many_segments(&turn, like);
        barriers(&turn);
        hvd_world_meet(arg);
        turn.plane->close(turn.opened);
        if (turn.rest)
            turn.rest->close(turn.rest_opened);
    }
    CHECK(found, "no plane for a world of %d", arg->size);
}

/* On hosts the plane for them, once more; in deterministic mode it leaves floats to others. */
static void on_hosts(const struct hvd_plane_arg *arg, void *any_order)
{
    struct hvd_plane_arg mine = *arg;
    mine.any_order = *(const bool *)any_order;
    every_plane(&mine, NULL);
}

int main(void)
{
    hvd_every_size(every_plane, &works_done);
    hvd_world_processes(3, 200, every_plane, NULL);
    bool any_order = true;
    static const struct layout {
        int size, host_of[8];
    } layouts[] = {{3, {0, 0, 1}}, {7, {0, 0, 0, 1, 2, 2, 2}}, {4, {0, 1, 0, 1}}};
    for (size_t i = 0; i < HVD_COUNT_OF(layouts); i++) {
        long before = works_done;
        hvd_world_host_of = layouts[i].host_of;
        hvd_world_run(HVD_WORLD_THREADS, layouts[i].size, 400, on_hosts, &any_order);
        printf("%d ranks on hosts: %ld works\n", layouts[i].size, (works_done - before) / layouts[i].size);
        CHECK(works_done - before > 100, "too few works for %d ranks on hosts", layouts[i].size);
    }
    any_order = false;
    hvd_world_run(HVD_WORLD_THREADS, 4, 400, on_hosts, &any_order);
    any_order = true;
    hvd_world_host_of = layouts[0].host_of;
    hvd_world_processes(3, 200, on_hosts, &any_order);
    return 0;
}
