/* memory.c - what memory on a device is the plane's own?
 *
 * Two pieces of each set: one for the tensors of a bucket, one that stands in for tensors that a joined rank does not
 * have. Each is as large as was needed so far; a larger one takes its place, by half at least, and the old one is kept
 * until the plane closes: freeing waits for all that runs on the device, whoever's it is, and that perhaps for a peer
 * (cuda/pinned.c). All that was outgrown is at most twice the last one.
 *
 * The bucket's memory comes from NCCL and is registered with the communicator where NCCL can do that (2.19), so that
 * it need not copy on the way. NCCL wants a call's memory registered on all ranks or on none: the bucket grows in the
 * same work on all of them, by agreed counts, and a failure to register is an error and not another way (its text names
 * the variable by which NCCL registers nothing, on all ranks). The stand-in is never registered, for the tensors it
 * stands beside are not.
 */
#include "state.h"

#include <stdatomic.h>

#define NCCL_GRAIN ((size_t)2 << 20) /* it hands out no less */

static _Atomic uint64_t bytes_in_use;

uint64_t hvd_nccl_memory_bytes(void)
{
    return atomic_load(&bytes_in_use);
}

static void release(const struct hvd_nccl_plane *plane, struct hvd_nccl_memory *memory)
{
    if (memory->at && memory->by_nccl)
        plane->nccl->MemFree((void *)memory->at);
    else if (memory->at)
        plane->cuda->MemFree(memory->at);
    atomic_fetch_sub(&bytes_in_use, memory->bytes);
    *memory = (struct hvd_nccl_memory){0};
}

static void deregister(const struct hvd_nccl_plane *plane, struct hvd_nccl_memory *memory)
{
    if (memory->registered)
        plane->nccl->CommDeregister(plane->comm, memory->registered);
    memory->registered = NULL;
}

void hvd_nccl_deregister(struct hvd_nccl_plane *plane)
{
    for (int i = 0; i < plane->retired_count; i++)
        deregister(plane, &plane->retired[i]);
    deregister(plane, &plane->fusion);
}

void hvd_nccl_free_memory(struct hvd_nccl_plane *plane)
{
    for (int i = 0; i < plane->retired_count; i++)
        release(plane, &plane->retired[i]);
    plane->retired_count = 0;
    release(plane, &plane->scratch);
    release(plane, &plane->fusion);
}

int hvd_nccl_reserve(struct hvd_nccl_plane *plane, struct hvd_nccl_memory *memory, size_t bytes, bool shared,
                     struct hvd_error *error)
{
    const struct hvd_nccl *nccl = plane->nccl;
    if (bytes <= memory->bytes)
        return HVD_OK;
    bool by_nccl =
        shared && plane->comm && nccl->MemAlloc && nccl->MemFree && nccl->CommRegister && nccl->CommDeregister;
    size_t room = bytes > memory->bytes * 3 / 2 ? bytes : memory->bytes * 3 / 2;
    room = HVD_ALIGN_UP(room, by_nccl ? NCCL_GRAIN : (size_t)512);
    HVD_ASSERT(plane->retired_count < HVD_NCCL_RETIRED_MAX);
    if (memory->at)
        plane->retired[plane->retired_count++] = *memory;
    *memory = (struct hvd_nccl_memory){.by_nccl = by_nccl};
    int code = HVD_OK;
    if (by_nccl) {
        void *made = NULL;
        int result = nccl->MemAlloc(&made, room);
        if (!hvd_nccl_going(result))
            return hvd_nccl_refused(plane, result, "give memory for a bucket (NCCL_CUMEM_ENABLE=0 takes other)", error);
        memory->at = (uintptr_t)made;
    } else {
        int failed = plane->cuda->MemAlloc(&memory->at, room);
        if (failed)
            return hvd_cuda_failed(failed, "give memory for tensors", error);
    }
    memory->bytes = room;
    atomic_fetch_add(&bytes_in_use, room);
    if (by_nccl) {
        int result = nccl->CommRegister(plane->comm, (void *)memory->at, room, &memory->registered);
        if (!hvd_nccl_going(result))
            code = hvd_nccl_refused(plane, result, "register memory for a bucket (NCCL_LOCAL_REGISTER=0 does without)",
                                    error);
    }
    return code;
}

int hvd_nccl_fill(struct hvd_nccl_plane *plane, const struct hvd_work *work, uintptr_t at, uint64_t count,
                  struct hvd_error *error)
{
    const struct hvd_cuda *cuda = plane->cuda;
    int dtype = hvd_nccl_dtype(plane, work);
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
