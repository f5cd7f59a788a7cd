/* matrix.c - which works prove a plane, and in which worlds?
 *
 * Sizes: 1 to 8 as far as they differ (a power of two and not, one rank, two), and as many as fit. Under a sanitizer a
 * few stand for all, and between ranks that run one at a time there are no races to be seen: worlds on simulated links
 * belong to the long form, and to test_p2p_sim.c.
 */
#include "matrix.h"

#include "kernel/kernel.h"

#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__)
static const int sizes[] = {3, 64};
#elif defined(HVD_SANITIZED)
static const int sizes[] = {1, 3, 7};
#else
static const int sizes[] = {1, 2, 3, 4, 7, 8, 64};
#endif

static bool is_simulated(int size)
{
#if defined(__SANITIZE_THREAD__)
    return size == 0;
#elif defined(HVD_SANITIZED)
    return size == 3 && getenv("TESTS_EVERYTHING");
#else
    return size <= 8;
#endif
}

/* Fast to simulate: few pieces. What is rough, test_p2p_sim.c asks. */
static const struct hvd_sim_line line = {
    .delay_ns = 1000, .jitter_ns = 5000, .byte_ps = 10, .room = 1 << 18, .piece = 1 << 16, .ragged = true};

void hvd_every_size(void (*body)(const struct hvd_plane_arg *arg, void *more))
{
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        long before = hvd_bucket_works;
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 400, body, NULL);
        printf("world of %d: %ld works\n", sizes[i], (hvd_bucket_works - before) / sizes[i]);
        CHECK(hvd_bucket_works - before > 100, "too few works for a world of %d", sizes[i]);
    }
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
        if (is_simulated(sizes[i]))
            hvd_world_sim(sizes[i], i, &line, 400, body, NULL);
}

bool hvd_picked(int choice, int choices, int others)
{
    return getenv("TESTS_EVERYTHING") || choice == others % choices;
}

bool hvd_dtype_asked(int dtype)
{
#if defined(__SANITIZE_THREAD__)
    return dtype == HVD_DTYPE_float32 || dtype == HVD_DTYPE_int8;
#else
    return dtype != HVD_DTYPE_float8_e5m2;
#endif
}

void hvd_world_processes(int size, int seconds, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
#if !defined(__SANITIZE_THREAD__)
    hvd_world_run(HVD_WORLD_PROCESSES, size, seconds, body, more);
#else
#endif
}

void hvd_every_plane(const struct hvd_plane_arg *arg, void (*body)(struct hvd_seat *seat))
{
    bool found = false;
    const char *must = arg->wanted ? arg->wanted->name : arg->size == 1 ? "self" : arg->one_host ? "shm" : "p2p";
    for (int i = 0; hvd_planes[i]; i++) {
        struct hvd_seat seat = {.arg = *arg, .plane = hvd_planes[i]}, rest;
        if (seat.plane->device || (arg->wanted && arg->wanted != seat.plane)) /* devices: test_plane_nccl.c */
            continue;
        bool due = strcmp(seat.plane->name, must) == 0;
        if (seat.plane->open(arg, &seat.opened, &seat.error) != HVD_OK) {
            CHECK(!due, "%s", seat.error.text);
            continue;
        }
        found |= due;
        if (arg->wanted) {
            hvd_seat_open(&rest, arg, "p2p");
            seat.rest = &rest;
        }
        body(&seat);
        hvd_seat_close(&seat);
        if (seat.rest)
            hvd_seat_close(&rest);
    }
    CHECK(found, "no plane for a world of %d", arg->size);
}

static bool reduces(int kind)
{
    return kind == HVD_ALLREDUCE || kind == HVD_REDUCESCATTER;
}

/* Every count of one kind, dtype and op; float32 in every shape and place. Short of time, others take one in turn. */
static void cell(struct hvd_seat *seat, const struct hvd_work *like, bool thorough)
{
    int size = seat->arg.size, shapes = hvd_bucket_shapes(like->kind);
    uint64_t above = HVD_MATRIX_ABOVE / (uint64_t)hvd_dtype_bytes(like->dtype) + 1;
    uint64_t counts[] = {0, 1, (uint64_t)size - 1, (uint64_t)size + 1, 7, 1000, above};
    bool is_first = like->dtype == HVD_DTYPE_float32 || getenv("TESTS_EVERYTHING");
    bool everything = thorough && is_first && shapes == HVD_BUCKET_SHAPES;
    for (int i = 0; i < (int)HVD_COUNT_OF(counts) - !thorough; i++) {
        int others = i + like->dtype + like->op + size;
        for (int shape = 0; shape < shapes; shape++)
            for (int place = 0; place < HVD_BUCKET_PLACES; place++)
                if (everything || ((i + shape) % 2 == place && hvd_picked(shape, shapes, others)))
                    hvd_bucket_do(seat, like, counts[i], shape, place, 0);
        if (like->kind == HVD_ALLREDUCE)
            hvd_bucket_do(seat, like, counts[i], others % shapes, i % 2 | HVD_BUCKET_ROOTED, 0);
    }
}

static void thin_cell(struct hvd_seat *seat, const struct hvd_work *like)
{
    static const uint64_t counts[] = {0, 1, 7, 5000, 70001};
    int shapes = hvd_bucket_shapes(like->kind), last = seat->arg.size - 1;
    for (int c = 0; c < (int)HVD_COUNT_OF(counts) - (like->dtype % 3 > 0); c++)
        hvd_bucket_do(seat, like, counts[c], (c + like->op + like->dtype) % shapes, c % 2, 0);
    if (like->kind == HVD_ALLREDUCE && last > 0)
        hvd_bucket_do(seat, like, 1000, HVD_BUCKET_FEW, HVD_BUCKET_OUT_OF_PLACE, UINT64_C(1) << last);
}

void hvd_matrix(struct hvd_seat *seat, uint32_t kinds, bool thin)
{
    int size = seat->arg.size;
    for (int k = 0; k < 32 * HVD_DTYPES_MAX; k++)
        for (int i = 0; hvd_op_number(i) >= 0; i++) {
            struct hvd_work like = {.kind = k / HVD_DTYPES_MAX,
                                    .op = hvd_op_number(i),
                                    .dtype = k % HVD_DTYPES_MAX,
                                    .flags = seat->plane->device ? HVD_WORK_ON_DEVICE : 0,
                                    .divide_by = size,
                                    .prescale = 1,
                                    .postscale = 1,
                                    .root = (k + i) % size};
            bool reduced = reduces(like.kind), sum = like.op == HVD_OP_sum;
            bool usual = like.dtype == HVD_DTYPE_float32 && (like.op == HVD_OP_average || !reduced);
            if (!(kinds >> like.kind & 1) || !hvd_dtype_asked(like.dtype) || (i > 0 && !reduced) ||
                (reduced && hvd_reduce_check(like.op, like.dtype, 1, 1)) ||
                (thin && !seat->plane->can(seat->opened, &like)) ||
                /* where it rounds a third and a byte's sum is NCCL's affair */
                (seat->plane->device && size == 3 && (hvd_is_narrow(like.dtype) || like.op == HVD_OP_average)))
                continue;
            if (thin)
                thin_cell(seat, &like);
            else if (size < 64 || usual || (sum && like.kind == HVD_ALLREDUCE))
                cell(seat, &like, size < 64 && (usual || ((sum || !reduced) && size == 3)));
            like.prescale = 2;
            like.postscale = 0.25;
            if (reduced && !hvd_reduce_check(like.op, like.dtype, 2, 0.25) &&
                (size < 64 || like.op != HVD_OP_product) && (!thin || seat->plane->can(seat->opened, &like)))
                hvd_bucket_do(seat, &like, 100, HVD_BUCKET_FEW, HVD_BUCKET_IN_PLACE, 0);
        }
}
