/* pinned.c - through which memory do tensors go from a device to the CPU and back, and what becomes of what is too
 * small?
 *
 * It grows to the largest need, by half at least. To free memory, of a device's or pinned, waits for all that runs on
 * the device, also for a kernel of somebody else's that waits for a peer (torch.distributed's, say), who may wait for
 * this process's engine. So nothing is freed while a job runs: what is outgrown is kept until the owner closes, and is
 * a geometric series, at most twice the last size in all. It is not written either, not even a link to the next one:
 * a copy out of it may still be on its way to the device.
 */
#include "pinned.h"

#include <stdatomic.h>

#define LEAST_BYTES ((size_t)4096)

static _Atomic uint64_t bytes_in_use;

uint64_t hvd_pinned_bytes(void)
{
    return atomic_load(&bytes_in_use);
}

int hvd_pinned_reserve(const struct hvd_cuda *cuda, struct hvd_pinned *pinned, size_t bytes, struct hvd_error *error)
{
    if (bytes <= pinned->bytes)
        return HVD_OK;
    size_t room = bytes > pinned->bytes * 3 / 2 ? bytes : pinned->bytes * 3 / 2;
    room = room > LEAST_BYTES ? room : LEAST_BYTES;
    void *memory = NULL;
    int code = cuda->MemAllocHost(&memory, room);
    if (code)
        return hvd_cuda_failed(code, "give pinned memory for a bucket", error);
    if (pinned->at) {
        HVD_ASSERT(pinned->outgrown_count < HVD_PINNED_OUTGROWN_MAX);
        pinned->outgrown[pinned->outgrown_count].at = pinned->at;
        pinned->outgrown[pinned->outgrown_count++].bytes = pinned->bytes;
    }
    pinned->at = memory;
    pinned->bytes = room;
    atomic_fetch_add(&bytes_in_use, room);
    return HVD_OK;
}

static void end(const struct hvd_cuda *cuda, void *memory, size_t bytes)
{
    if (!memory)
        return;
    cuda->MemFreeHost(memory);
    atomic_fetch_sub(&bytes_in_use, bytes);
}

void hvd_pinned_free(const struct hvd_cuda *cuda, struct hvd_pinned *pinned)
{
    for (int i = 0; i < pinned->outgrown_count; i++)
        end(cuda, pinned->outgrown[i].at, pinned->outgrown[i].bytes);
    end(cuda, pinned->at, pinned->bytes);
    *pinned = (struct hvd_pinned){.at = NULL};
}
