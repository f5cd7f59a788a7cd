/* pack.c - how do the tensors of a bucket come into one memory on the device, and out again?
 *
 * NCCL does one call faster than many small ones of a group, so a bucket of small tensors is packed: each begins at a
 * multiple of 16 bytes, in plan order. That is agreed, and so is when it is done (hvd_nccl_packs: more than one tensor,
 * small on average, more than one rank), for all ranks must make the same calls. How a rank packs is its own business:
 * by a kernel (cuda/pack.cu), whose table of copies is its argument, so that a bucket of 128 tensors is one launch; or,
 * where the driver did not take the kernels, by a copy for each.
 *
 * Nothing is copied where tensors lie so already, one after the other, as views of one memory do: NCCL works there. But
 * a bucket's memory is registered, which NCCL allows on all ranks of a call or on none (memory.c), and a rank does not
 * know how the others' tensors lie. So that is agreed, as a guess: with its votes a rank says how its latest bucket
 * lay, and if all say the same (work->lay), the next ones are expected to lie so again. Then no rank gives registered
 * memory, the bucket has nothing between its tensors, and it begins with the first of them or with the last: gradients
 * of one flat memory become ready from its end. A rank whose tensors lie otherwise packs them for itself, in that
 * order, into memory that is not registered. So a wrong guess costs a copy, and never a wrong sum; the first bucket
 * costs one, too. Some buckets of a step may well lie apart, with tensors of its ends in their neighbours: a rank takes
 * its word back after a few in a row (DOUBTS).
 *
 * Where all ranks have the kernels, a sum's factor is multiplied on the way in, by every rank, and NCCL's call is a
 * plain sum, for which it has its fastest ways; not where views are left, since nothing is on its way there (values of
 * 16 bits are not left if the factor is no power of two). Who has joined gives a bucket full of what changes nothing.
 *
 * There, too, values that may travel in 16 bits (hvd_work.wire) do so: the kernel that packs them casts them on the
 * way, after it has multiplied them, and the one that unpacks brings them back. Then a bucket is packed whatever it
 * holds, also one large tensor, and views, for it is another memory than theirs in any case.
 */
#include "state.h"

#include "../../cuda/pack.h"

#include <string.h>

#define SMALL  ((uint64_t)2 << 20) /* bytes of a tensor, on average: above, a launch costs less than two copies */
#define DOUBTS 4

void hvd_nccl_pack_load(const struct hvd_cuda *cuda, struct hvd_nccl_device *device)
{
    if (cuda->ModuleLoadData(&device->module, hvd_pack_ptx) != 0)
        device->module = NULL;
    if (device->module && (cuda->ModuleGetFunction(&device->copies, device->module, HVD_PACK_COPY) != 0 ||
                           cuda->ModuleGetFunction(&device->scales, device->module, HVD_PACK_SCALE) != 0 ||
                           cuda->ModuleGetFunction(&device->narrows, device->module, HVD_PACK_NARROW) != 0 ||
                           cuda->ModuleGetFunction(&device->widens, device->module, HVD_PACK_WIDEN) != 0)) {
        cuda->ModuleUnload(device->module);
        device->module = NULL;
        device->copies = device->scales = device->narrows = device->widens = NULL;
    }
}

int hvd_nccl_dtype(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    return work->wire && plane->all_scale && plane->size > 1 ? work->wire - 1 : work->dtype;
}

static bool casts(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    return hvd_nccl_dtype(plane, work) != work->dtype;
}

bool hvd_nccl_packs(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    uint64_t bytes = work->count * (uint64_t)hvd_dtype_bytes(work->dtype);
    if (casts(plane, work))
        return work->kind == HVD_ALLREDUCE;
    return work->kind == HVD_ALLREDUCE && work->pieces > 1 && plane->size > 1 && bytes <= work->pieces * SMALL;
}

static int kind_of(int dtype)
{
    return dtype == HVD_DTYPE_float16    ? HVD_PACK_FLOAT16
           : dtype == HVD_DTYPE_bfloat16 ? HVD_PACK_BFLOAT16
           : dtype == HVD_DTYPE_float32  ? HVD_PACK_FLOAT32
                                         : HVD_PACK_FLOAT64;
}

bool hvd_nccl_packs_scaled(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    return plane->all_scale && hvd_nccl_packs(plane, work) && !hvd_nccl_leaves_views(plane, work);
}

/* Would NCCL, whose factor is one of the values' dtype, do worse than our kernel? A third is 0.334 as a bfloat16. */
static bool spoils(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    double factor = hvd_scale_fold(work->op, work->dtype, work->active ? work->active : plane->size, work->divide_by,
                                   work->prescale, work->postscale)
                        .factor;
    uint64_t bits;
    memcpy(&bits, &factor, sizeof bits);
    bool power_of_two = (bits & ((UINT64_C(1) << 52) - 1)) == 0;
    return plane->all_scale && hvd_is_float(work->dtype) && hvd_dtype_bytes(work->dtype) == 2 && !power_of_two;
}

bool hvd_nccl_leaves_views(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    bool agreed = work->lay == HVD_LAY_UP || work->lay == HVD_LAY_DOWN;
    return agreed && !casts(plane, work) && !spoils(plane, work);
}

static size_t bytes_of(const struct hvd_work *work, uint32_t i)
{
    return work->piece[i].count * (size_t)hvd_dtype_bytes(work->dtype);
}

/* Of a tensor in the bucket. */
static size_t packed_bytes(const struct hvd_nccl_plane *plane, const struct hvd_work *work, uint32_t i)
{
    return work->piece[i].count * (size_t)hvd_dtype_bytes(hvd_nccl_dtype(plane, work));
}

/* The k-th tensor in a bucket's memory. */
static uint32_t tensor_at(const struct hvd_work *work, uint32_t k, bool down)
{
    return down ? work->pieces - 1 - k : k;
}

/* Do all tensors lie one right behind the other, up or down? 0: no; else where the lowest begins. */
static uintptr_t lies(const struct hvd_work *work, bool in, bool down)
{
    uintptr_t begin = 0, at = 0;
    for (uint32_t k = 0; k < work->pieces; k++) {
        uint32_t i = tensor_at(work, k, down);
        uintptr_t mine = (uintptr_t)(in ? work->piece[i].in : work->piece[i].out);
        if (!mine || (begin && at != mine && bytes_of(work, i)))
            return 0;
        if (!bytes_of(work, i)) /* it has no memory */
            continue;
        begin = begin ? begin : mine;
        at = mine + bytes_of(work, i);
    }
    return begin;
}

/* HVD_LAY_*. One tensor and empty ones lie both ways: that says nothing, and is 0. */
static uint32_t how_it_lies(const struct hvd_work *work)
{
    bool up = lies(work, true, false) && lies(work, false, false);
    bool down = lies(work, true, true) && lies(work, false, true);
    return (up ? 0 : HVD_LAY_DOWN) | (down ? 0 : HVD_LAY_UP);
}

/* What the others are to hear of this bucket. */
static uint32_t heard(struct hvd_nccl_bucket *bucket, const struct hvd_work *work, bool views)
{
    uint32_t now = how_it_lies(work);
    bucket->doubts = views && now && now != work->lay ? bucket->doubts + 1 : 0;
    return bucket->doubts && bucket->doubts < DOUBTS ? 0 : now;
}

/* What is to be copied, until the table is full or `flush` says that there is no more. */
struct batch {
    struct hvd_nccl_plane *plane;
    void *kernel; /* NULL: by copies */
    struct hvd_pack_table table;
};

static int flush(struct batch *batch, struct hvd_error *error)
{
    uint32_t rows = batch->table.rows;
    void *arguments[] = {&batch->table};
    if (rows == 0)
        return HVD_OK;
    int code = batch->plane->cuda->LaunchKernel(batch->kernel, batch->table.end[rows - 1], 1, 1, HVD_PACK_THREADS, 1, 1,
                                                0, batch->plane->device->stream, arguments, NULL);
    batch->table.rows = 0;
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, "pack a bucket", error);
}

static int add(struct batch *batch, uintptr_t from, uintptr_t to, size_t bytes, struct hvd_error *error)
{
    struct hvd_pack_table *table = &batch->table;
    if (bytes == 0)
        return HVD_OK;
    if (!batch->kernel) {
        int code = batch->plane->cuda->MemcpyDtoDAsync(to, from, bytes, batch->plane->device->stream);
        return code == 0 ? HVD_OK : hvd_cuda_failed(code, "pack a bucket", error);
    }
    uint32_t before = table->rows ? table->end[table->rows - 1] : 0;
    table->row[table->rows] = (struct hvd_pack_row){from, to, bytes};
    table->end[table->rows++] = before + (uint32_t)((bytes + HVD_PACK_CHUNK - 1) / HVD_PACK_CHUNK);
    return table->rows == HVD_PACK_ROWS ? flush(batch, error) : HVD_OK;
}

/* How they are moved: what is put into the table, and the kernel that reads it. */
static void choose_kernel(struct batch *batch, const struct hvd_work *work, bool into, double factor)
{
    const struct hvd_nccl_device *device = batch->plane->device;
    batch->table.rows = 0;
    batch->table.factor = factor;
    if (casts(batch->plane, work)) {
        batch->kernel = into ? device->narrows : device->widens;
        batch->table.kind = (uint32_t)kind_of(hvd_nccl_dtype(batch->plane, work)) |
                            (work->dtype == HVD_DTYPE_float64 ? HVD_PACK_OF_FLOAT64 : 0);
    } else {
        batch->kernel = factor != 1.0 ? device->scales : device->copies;
        batch->table.kind = (uint32_t)kind_of(work->dtype);
    }
}

/* All tensors into the bucket at `base`, or its results out of it. */
static int move(struct hvd_nccl_plane *plane, const struct hvd_work *work, uintptr_t base, bool into, double factor,
                struct hvd_error *error)
{
    struct batch batch;
    batch.plane = plane;
    choose_kernel(&batch, work, into, factor);
    int code = HVD_OK;
    bool close = hvd_nccl_leaves_views(plane, work); /* then nothing is between them */
    for (uint32_t k = 0; k < work->pieces && code == HVD_OK; k++) {
        uint32_t i = tensor_at(work, k, close && work->lay == HVD_LAY_DOWN);
        uintptr_t mine = (uintptr_t)(into ? work->piece[i].in : work->piece[i].out);
        if (mine)
            code = add(&batch, into ? mine : base, into ? base : mine, bytes_of(work, i), error);
        base += HVD_ALIGN_UP(packed_bytes(plane, work, i), (size_t)(close ? 1 : 16));
    }
    return code == HVD_OK ? flush(&batch, error) : code;
}

int hvd_nccl_pack(struct hvd_nccl_plane *plane, const struct hvd_work *work, double factor, struct hvd_error *error)
{
    struct hvd_nccl_bucket *bucket = &plane->bucket;
    size_t bytes = 0, alone = 0;
    int dtype = hvd_nccl_dtype(plane, work);
    bool lacks = false, views = hvd_nccl_leaves_views(plane, work), down = views && work->lay == HVD_LAY_DOWN;
    struct hvd_nccl_memory *memory = views ? &plane->scratch : &plane->fusion;
    for (uint32_t i = 0; i < work->pieces; i++) {
        size_t mine = packed_bytes(plane, work, i);
        bytes += i + 1 < work->pieces && !views ? HVD_ALIGN_UP(mine, (size_t)16) : mine;
        alone += bytes_of(work, i);
        lacks |= !work->piece[i].in;
    }
    bool cast = casts(plane, work);
    bool own = cast || (plane->nccl->CommRegister && !views) || bytes != alone;
    bucket->count = bytes / (size_t)hvd_dtype_bytes(dtype);
    bucket->lies = lacks || bytes == 0 || cast ? 0 : heard(bucket, work, views);
    bucket->out = own ? 0 : lies(work, false, down);
    bucket->in = own ? 0 : lies(work, true, down);
    bucket->unpacks = !bucket->out;
    factor = hvd_nccl_packs_scaled(plane, work) ? factor : 1.0;
    if (bucket->out && bucket->in && factor == 1.0)
        return HVD_OK;
    int code = bucket->out ? HVD_OK : hvd_nccl_reserve(plane, memory, bytes, !views, error);
    if (code != HVD_OK)
        return code;
    bucket->out = bucket->out ? bucket->out : memory->at;
    if (bucket->in && factor == 1.0)
        return HVD_OK;
    bucket->in = bucket->out;
    if (lacks && bytes)
        code = hvd_nccl_fill(plane, work, bucket->in, bucket->count, error);
    return code == HVD_OK ? move(plane, work, bucket->in, true, factor, error) : code;
}

int hvd_nccl_unpack(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    if (!plane->bucket.unpacks)
        return HVD_OK;
    plane->bucket.unpacks = false;
    return move(plane, work, plane->bucket.out, false, 1.0, error);
}
