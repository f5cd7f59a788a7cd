/* pack.c - how do the tensors of a bucket come into one memory on the device, and out again?
 *
 * NCCL does one call faster than many small ones of a group, so a bucket of small tensors is packed: each begins at a
 * multiple of 16 bytes, in plan order. That is agreed, and so is when it is done (hvd_nccl_packs: more than one tensor,
 * small on average, more than one rank), for all ranks must make the same calls. How a rank packs is its own business:
 * by a kernel (cuda/pack.cu), whose table of copies is its argument, so that a bucket of 128 tensors is one launch; or,
 * where the driver did not take the kernels, by a copy for each.
 *
 * Nothing is copied where tensors lie so already, one after the other, as views of one memory do: NCCL works there.
 * That ends where the bucket's memory is registered, since NCCL allows that on all ranks of a call or on none
 * (memory.c), and a rank does not know how the others' tensors lie.
 *
 * Where all ranks have the kernels, a sum's factor is multiplied on the way in, by every rank, and NCCL's call is a
 * plain sum, for which it has its fastest ways. Who has joined gives a bucket full of what changes nothing.
 */
#include "state.h"

#include "../../cuda/pack.h"

#define SMALL ((uint64_t)2 << 20) /* bytes of a tensor, on average: above, a launch costs less than two copies */

void hvd_nccl_pack_load(const struct hvd_cuda *cuda, struct hvd_nccl_device *device)
{
    if (cuda->ModuleLoadData(&device->module, hvd_pack_ptx) != 0)
        device->module = NULL;
    if (device->module && (cuda->ModuleGetFunction(&device->copies, device->module, HVD_PACK_COPY) != 0 ||
                           cuda->ModuleGetFunction(&device->scales, device->module, HVD_PACK_SCALE) != 0)) {
        cuda->ModuleUnload(device->module);
        device->module = NULL;
    }
}

bool hvd_nccl_packs(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    uint64_t bytes = work->count * (uint64_t)hvd_dtype_bytes(work->dtype);
    if (plane->levels) /* shares of it cross */
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
    return plane->all_scale && hvd_nccl_packs(plane, work);
}

static size_t bytes_of(const struct hvd_work *work, uint32_t i)
{
    return work->piece[i].count * (size_t)hvd_dtype_bytes(work->dtype);
}

/* Do all tensors lie as in a bucket, with nothing between? 0: no; else where it begins. */
static uintptr_t lies_packed(const struct hvd_work *work, bool in)
{
    uintptr_t begin = (uintptr_t)(in ? work->piece[0].in : work->piece[0].out), at = begin;
    for (uint32_t i = 0; i < work->pieces; i++) {
        if (at != (uintptr_t)(in ? work->piece[i].in : work->piece[i].out) ||
            (i + 1 < work->pieces && bytes_of(work, i) % 16 != 0))
            return 0;
        at += bytes_of(work, i);
    }
    return begin;
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

/* All tensors into the bucket at `base`, or its results out of it. */
static int move(struct hvd_nccl_plane *plane, const struct hvd_work *work, uintptr_t base, bool into, double factor,
                struct hvd_error *error)
{
    const struct hvd_nccl_device *device = plane->device;
    struct batch batch;
    batch.plane = plane;
    batch.kernel = factor != 1.0 ? device->scales : device->copies;
    batch.table.rows = 0;
    batch.table.kind = (uint32_t)kind_of(work->dtype);
    batch.table.factor = factor;
    int code = HVD_OK;
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; i++) {
        uintptr_t mine = (uintptr_t)(into ? work->piece[i].in : work->piece[i].out);
        if (mine)
            code = add(&batch, into ? mine : base, into ? base : mine, bytes_of(work, i), error);
        base += HVD_ALIGN_UP(bytes_of(work, i), (size_t)16);
    }
    return code == HVD_OK ? flush(&batch, error) : code;
}

int hvd_nccl_pack(struct hvd_nccl_plane *plane, const struct hvd_work *work, double factor, struct hvd_error *error)
{
    struct hvd_nccl_bucket *bucket = &plane->bucket;
    size_t bytes = 0;
    bool lacks = false, own = plane->levels || plane->nccl->CommRegister;
    for (uint32_t i = 0; i < work->pieces; i++) {
        bytes += i + 1 < work->pieces ? HVD_ALIGN_UP(bytes_of(work, i), (size_t)16) : bytes_of(work, i);
        lacks |= !work->piece[i].in;
    }
    bucket->count = bytes / (size_t)hvd_dtype_bytes(work->dtype);
    bucket->out = own ? 0 : lies_packed(work, false);
    bucket->in = own ? 0 : lies_packed(work, true);
    bucket->unpacks = !bucket->out;
    factor = hvd_nccl_packs_scaled(plane, work) ? factor : 1.0;
    if (bucket->out && bucket->in && factor == 1.0)
        return HVD_OK;
    int code = bucket->out
                   ? HVD_OK
                   : hvd_nccl_reserve(plane, &plane->fusion,
                                      bytes + hvd_nccl_levels_padding(plane, work->dtype, bucket->count), true, error);
    if (code != HVD_OK)
        return code;
    bucket->out = bucket->out ? bucket->out : plane->fusion.at;
    if (bucket->in && factor == 1.0)
        return HVD_OK;
    bucket->in = bucket->out;
    if (lacks)
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
