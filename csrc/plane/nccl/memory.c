/* memory.c - what memory on a device is the plane's own?
 *
 * One piece of each set, which stands in for tensors that a joined rank does not have. It is as large as was needed so
 * far; a larger one takes its place, by half at least, and the old one is kept until the plane closes: freeing waits
 * for all that runs on the device, whoever's it is, and that perhaps for a peer (cuda/pinned.c). All that was outgrown
 * is at most twice the last one.
 */
#include "state.h"

#include <stdatomic.h>

static _Atomic uint64_t bytes_in_use;

uint64_t hvd_nccl_memory_bytes(void)
{
    return atomic_load(&bytes_in_use);
}

static void release(const struct hvd_nccl_plane *plane, struct hvd_nccl_memory *memory)
{
    if (memory->at)
        plane->cuda->MemFree(memory->at);
    atomic_fetch_sub(&bytes_in_use, memory->bytes);
    *memory = (struct hvd_nccl_memory){0};
}

void hvd_nccl_free_memory(struct hvd_nccl_plane *plane)
{
    for (int i = 0; i < plane->retired_count; i++)
        release(plane, &plane->retired[i]);
    plane->retired_count = 0;
    release(plane, &plane->scratch);
}

int hvd_nccl_reserve(struct hvd_nccl_plane *plane, size_t bytes, struct hvd_error *error)
{
    struct hvd_nccl_memory *memory = &plane->scratch;
    if (bytes <= memory->bytes)
        return HVD_OK;
    size_t room = bytes > memory->bytes * 3 / 2 ? bytes : memory->bytes * 3 / 2;
    room = HVD_ALIGN_UP(room, (size_t)512);
    HVD_ASSERT(plane->retired_count < HVD_NCCL_RETIRED_MAX);
    if (memory->at)
        plane->retired[plane->retired_count++] = *memory;
    *memory = (struct hvd_nccl_memory){0};
    int failed = plane->cuda->MemAlloc(&memory->at, room);
    if (failed)
        return hvd_cuda_failed(failed, "give memory for tensors", error);
    memory->bytes = room;
    atomic_fetch_add(&bytes_in_use, room);
    return HVD_OK;
}

int hvd_nccl_fill(struct hvd_nccl_plane *plane, const struct hvd_work *work, uintptr_t at, uint64_t count,
                  struct hvd_error *error)
{
    const struct hvd_cuda *cuda = plane->cuda;
    int dtype = work->dtype;
    size_t bytes = (size_t)hvd_dtype_bytes(dtype);
    void *stream = plane->device->stream;
    uint64_t element = 0;
    struct hvd_scale scale = hvd_scale_fold(work->op, work->dtype, work->active ? work->active : plane->size,
                                            work->divide_by, work->prescale, work->postscale);
    hvd_op_identity(scale.op, dtype, &element);
    uint32_t low = (uint32_t)element, high = (uint32_t)(element >> 32);
    int code = bytes == 1   ? cuda->MemsetD8Async(at, (unsigned char)low, count, stream)
               : bytes == 2 ? cuda->MemsetD16Async(at, (unsigned short)low, count, stream)
               : bytes == 4 ? cuda->MemsetD32Async(at, low, count, stream)
                            : cuda->MemsetD2D32Async(at, 8, low, 1, count, stream);
    if (code == 0 && bytes == 8)
        code = cuda->MemsetD2D32Async(at + 4, 8, high, 1, count, stream);
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, "fill memory", error);
}
