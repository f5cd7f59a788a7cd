/* mpi.c - the plane of whoever has an MPI: works become MPI's non-blocking calls, driven by the engine's poll.
 *
 * What does a work become here? What only moves is MPI's own collective. So is a small allreduce where MPI computes the
 * same as our kernels: sums and products of floats (in MPI's order; not in deterministic mode), sums, products, minima
 * and maxima of integers. A tensor that travels alone is worked on where it lies; several are packed into one buffer.
 * What is left of the scale is applied once, at the end.
 *
 * Everything else (large allreduces, 16-bit floats, bool, integers with a scale, minima and maxima of floats,
 * deterministic mode, every reducescatter) MPI only carries: each rank gets all contributions to its slice of a
 * segment, combines them in rank order with one rounding (hvd_reduce: the same bits as shared memory gives), and passes
 * on what came of it (ordered.c). Small buckets are gathered whole and combined by everybody.
 *
 * MPI wakes nobody, so the plane is `silent`: the engine comes again by itself. And MPI moves nothing but when it is
 * called, so it is `polled`: who waits for a work calls it all the time, as MPI's own blocking calls do. That a call is
 * over here does not mean that its bytes have left (over libfabric a small message is done when it is queued), and a
 * rank that comes to MPI no more would keep another waiting: between works it `lingers`. MPI cannot take a call back:
 * when the job ends while some are under way, the plane's memory is left to them. After a failure every later call
 * repeats it.
 */
#include "plane.h"

#include "../mpi/world.h"
#include "plane/mpi/state.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SMALL_BYTES  ((uint64_t)8 << 10)  /* of a bucket that everybody gathers whole */
#define NATIVE_BYTES ((uint64_t)16 << 10) /* for each rank: beyond that it is the bytes that cost, not the messages */

/* What was closed while MPI still had addresses of it. It stays as long as the process: nobody may reuse it, and tools
 * that look for lost memory find it here. */
static struct hvd_mpi_plane *_Atomic left_to_mpi;

static void close_plane(void *self)
{
    struct hvd_mpi_plane *plane = self;
    if (plane->posts.requests) {
        plane->left_before = atomic_load(&left_to_mpi);
        while (!atomic_compare_exchange_weak(&left_to_mpi, &plane->left_before, plane))
            ;
        return;
    }
    hvd_mpi_posts_close(&plane->posts);
    free(plane->buffer);
    free(plane->kept);
    free(plane->gives);
    free(plane);
}

static int open_plane(const struct hvd_plane_arg *arg, void **self, struct hvd_error *error)
{
    if (!arg->comm || arg->size < 2 || arg->size > HVD_RANKS_MAX)
        return hvd_fail(error, HVD_EINIT, HVD670 "plane mpi needs a job over MPI of 2 to %d ranks; this set has %d%s",
                        HVD_RANKS_MAX, arg->size, arg->comm ? "" : " and no communicator");
    struct hvd_mpi_plane *plane = calloc(1, sizeof *plane);
    uint64_t *bytes = calloc(2 * (size_t)arg->size, sizeof *bytes);
    int code = plane && bytes ? hvd_mpi_posts_open(&plane->posts, (uintptr_t)arg->comm, arg->rank, arg->size, error)
                              : hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for plane mpi", arg->rank);
    if (code != HVD_OK) {
        free(bytes);
        free(plane);
        return code;
    }
    plane->any_order = arg->any_order;
    plane->gives = bytes;
    plane->gets = bytes + arg->size;
    *self = plane;
    return HVD_OK;
}

static bool can(void *self, const struct hvd_work *work)
{
    return work->kind != HVD_BARRIER && hvd_plane_can_all(self, work);
}

static uintptr_t type_of(const struct hvd_mpi *mpi, int dtype)
{
    switch (dtype) {
    case HVD_DTYPE_uint8:
        return mpi->uint8;
    case HVD_DTYPE_int8:
        return mpi->int8;
    case HVD_DTYPE_uint16:
        return mpi->uint16;
    case HVD_DTYPE_int16:
        return mpi->int16;
    case HVD_DTYPE_int32:
        return mpi->int32;
    case HVD_DTYPE_int64:
        return mpi->int64;
    case HVD_DTYPE_float32:
        return mpi->float32;
    case HVD_DTYPE_float64:
        return mpi->float64;
    default:
        return 0; /* not every MPI has it, or what it does with it is not what we do */
    }
}

static uintptr_t op_of(const struct hvd_mpi *mpi, int op)
{
    return op == HVD_OP_sum ? mpi->sum : op == HVD_OP_product ? mpi->product : op == HVD_OP_min ? mpi->min : mpi->max;
}

/* From agreed fields only. */
static enum hvd_mpi_way way_of(const struct hvd_mpi_plane *plane, const struct hvd_work *work)
{
    const struct hvd_scale *scale = &plane->scale;
    bool floats = work->dtype == HVD_DTYPE_float32 || work->dtype == HVD_DTYPE_float64;
    bool extreme = scale->op == HVD_OP_min || scale->op == HVD_OP_max; /* of NaN: every MPI has its own idea */
    uint64_t bytes = work->count * plane->element_bytes;
    if (work->kind != HVD_ALLREDUCE)
        return HVD_MPI_MOVE;
    if (bytes < NATIVE_BYTES * (uint64_t)plane->posts.size &&
        (floats ? plane->any_order && !extreme
                : type_of(plane->posts.mpi, work->dtype) && scale->divide == 1 && scale->factor == 1.0 &&
                      scale->first == 1.0))
        return HVD_MPI_NATIVE;
    return bytes <= SMALL_BYTES ? HVD_MPI_WHOLE : HVD_MPI_SLICES;
}

/* From the values to where each tensor's result is wanted; scaled: the scale is still to be applied. */
static void unpack(const struct hvd_mpi_plane *plane, const struct hvd_work *work, bool scaled)
{
    const unsigned char *from = plane->values;
    for (uint32_t i = 0; i < work->pieces; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        size_t bytes = piece->count * plane->element_bytes;
        const void *source = from;
        if (bytes && piece->out && scaled)
            hvd_reduce(work->dtype, &plane->scale, piece->out, &source, 1, piece->count);
        else if (bytes && piece->out && piece->out != from)
            memmove(piece->out, from, bytes);
        from += bytes;
    }
}

static int start_native(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = plane->posts.mpi;
    int code = hvd_mpi_choose_values(plane, work, work->count * plane->element_bytes, error);
    if (code != HVD_OK)
        return code;
    const void *in = plane->values;
    if (work->pieces == 1 && work->piece[0].in)
        in = work->piece[0].in;
    else
        hvd_mpi_pack(plane, work, plane->values);
    return hvd_mpi_post_allreduce(&plane->posts, in, plane->values, work->count, plane->element_bytes,
                                  type_of(mpi, work->dtype), op_of(mpi, plane->scale.op), error);
}

/* Bytes of each rank over all pieces; their sum. */
static uint64_t gathered(struct hvd_mpi_plane *plane, const struct hvd_work *work)
{
    uint64_t total = 0;
    for (int rank = 0; rank < plane->posts.size; rank++) {
        plane->gets[rank] = 0;
        for (uint32_t i = 0; i < work->pieces; i++)
            plane->gets[rank] += work->count_of[(size_t)i * (size_t)plane->posts.size + (size_t)rank];
        total += plane->gets[rank] *= plane->element_bytes;
    }
    return total;
}

static int start_allgather(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t total = gathered(plane, work), before = 0;
    int code = hvd_mpi_choose_values(plane, work, total, error);
    if (code != HVD_OK)
        return code;
    for (int rank = 0; rank < plane->posts.rank; rank++)
        before += plane->gets[rank];
    hvd_mpi_pack(plane, work, plane->values + before);
    return hvd_mpi_post_allgather(&plane->posts, plane->values, plane->gets, error);
}

/* Pieces of an allgather from every rank's part, which holds its share of each one after the other. */
static void spread(const struct hvd_mpi_plane *plane, const struct hvd_work *work)
{
    const unsigned char *from = plane->values;
    if (from != plane->buffer || !from)
        return;
    for (int rank = 0; rank < plane->posts.size; rank++)
        for (uint32_t i = 0; i < work->pieces; i++) {
            const uint64_t *counts = &work->count_of[(size_t)i * (size_t)plane->posts.size];
            uint64_t before = 0, bytes = counts[rank] * plane->element_bytes;
            for (int other = 0; other < rank; other++)
                before += counts[other] * plane->element_bytes;
            if (bytes && work->piece[i].out)
                memcpy((unsigned char *)work->piece[i].out + before, from, bytes);
            from += bytes;
        }
}

static int start_broadcast(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t bytes = work->count * plane->element_bytes;
    int code = hvd_mpi_choose_values(plane, work, bytes, error);
    if (code != HVD_OK)
        return code;
    if (work->root == plane->posts.rank)
        hvd_mpi_pack(plane, work, plane->values);
    return hvd_mpi_post_broadcast(&plane->posts, plane->values, bytes, work->root, error);
}

/* Alltoall into the result itself, reducescatter into what is kept, to be combined. */
static int start_alltoall(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    size_t size = (size_t)plane->posts.size, rank = (size_t)plane->posts.rank;
    bool scatters = work->kind == HVD_REDUCESCATTER;
    uint64_t longest = 0;
    for (size_t one = 0; one < size; one++) {
        uint64_t given = 0, got = scatters ? work->count_of[one] * size : 0;
        for (size_t other = 0; other < size; other++) {
            given += scatters ? work->count_of[other] : work->count_of[one * size + other];
            got += scatters ? 0 : work->count_of[other * size + one];
        }
        longest = given > longest ? given : longest;
        longest = got > longest ? got : longest;
        plane->gives[one] = (scatters ? work->count_of[one] : work->count_of[rank * size + one]) * plane->element_bytes;
        plane->gets[one] = (scatters ? work->count_of[rank] : work->count_of[one * size + rank]) * plane->element_bytes;
    }
    if (scatters) {
        int code = hvd_mpi_reserve(plane, &plane->kept, &plane->kept_bytes, size * plane->gets[0], error);
        if (code != HVD_OK)
            return code;
    }
    return hvd_mpi_post_alltoall(&plane->posts, work->piece[0].in, plane->gives,
                                 scatters ? plane->kept : work->piece[0].out, plane->gets,
                                 longest * plane->element_bytes, error);
}

static int begin(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    switch (work->kind) {
    case HVD_ALLREDUCE:
        return plane->way == HVD_MPI_NATIVE ? start_native(plane, work, error)
                                            : hvd_mpi_ordered_begin(plane, work, error);
    case HVD_ALLGATHER:
        return start_allgather(plane, work, error);
    case HVD_BROADCAST:
        return start_broadcast(plane, work, error);
    default:
        return start_alltoall(plane, work, error);
    }
}

static int start(void *self, struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_mpi_plane *plane = self;
    if (plane->failed.code) {
        *error = plane->failed;
        return plane->failed.code;
    }
    plane->element_bytes = (size_t)hvd_dtype_bytes(work->dtype);
    if (work->kind == HVD_ALLREDUCE || work->kind == HVD_REDUCESCATTER)
        plane->scale = hvd_scale_fold(work->op, work->dtype, work->active ? work->active : plane->posts.size,
                                      work->divide_by, work->prescale, work->postscale);
    plane->way = way_of(plane, work);
    begin(plane, work, &plane->failed);
    return HVD_OK; /* others may have started: poll tells of a failure */
}

/* What has come is done with. HVD_AGAIN: the next calls are posted. */
static int go_on(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    bool scaled = plane->scale.factor != 1.0; /* floats: integers with a scale are never native */
    if (plane->way == HVD_MPI_NATIVE && (scaled || work->pieces > 1))
        unpack(plane, work, scaled);
    if (plane->way == HVD_MPI_WHOLE || plane->way == HVD_MPI_SLICES) {
        int code = hvd_mpi_ordered_go_on(plane, work, error);
        if (code != HVD_OK)
            return code;
        unpack(plane, work, false);
    }
    if (work->kind == HVD_ALLGATHER)
        spread(plane, work);
    else if (work->kind == HVD_REDUCESCATTER)
        hvd_mpi_combine(plane, work, work->piece[0].out, plane->kept, NULL, work->count_of[plane->posts.rank]);
    else if (work->kind == HVD_BROADCAST)
        unpack(plane, work, false);
    return HVD_OK;
}

static int poll_plane(void *self, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_mpi_plane *plane = self;
    int code = plane->failed.code;
    if (code == HVD_OK)
        code = hvd_mpi_settle(&plane->posts, progress, &plane->failed);
    if (code == HVD_OK) {
        *progress = true;
        code = go_on(plane, work, &plane->failed);
    }
    if (code < 0)
        *error = plane->failed;
    return code;
}

static void linger(void *self)
{
    struct hvd_mpi_plane *plane = self;
    int size = plane->posts.size, turn = plane->lingered++ % (size - 1);
    if (plane->failed.code == HVD_OK)
        hvd_mpi_linger(plane->posts.comm, (plane->posts.rank + 1 + turn) % size);
}

const struct hvd_plane hvd_plane_mpi = {
    .name = "mpi",
    .preference = 80, /* below shm and above streams of our own: a cluster's MPI knows its network */
    .order = HVD_ORDER_SET,
    .silent = true,
    .polled = true,
    .open = open_plane,
    .can = can,
    .start = start,
    .poll = poll_plane,
    .linger = linger,
    .close = close_plane,
};
