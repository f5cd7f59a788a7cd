/* stage.c - how does a tensor on a device get through a plane that knows none?
 *
 * Three steps, each asked for by an event and none waited for: what this rank gives is copied into pinned memory behind
 * the events after which it is ready, the planes of the set do the work there as they do any other, and the results
 * are copied back. It is the way of whatever no plane for devices computes as we do, and of hosts without one; the
 * results are those of the CPU's planes, bit by bit. An Adasum is a series of such works between the two copies.
 *
 * The memory holds one work, grows to the largest and is kept. A stage belongs to one set and has a stream of its own
 * on the device that the set's tensors lie on. A rank that gives nothing and gets nothing (it has joined) copies
 * nothing and needs no device.
 */
#include "stage.h"

#include <stdlib.h>
#include <string.h>

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

static void leave(const struct hvd_stage *stage)
{
    void *ctx;
    stage->cuda->CtxPopCurrent(&ctx);
}

/* The device is this thread's current one afterwards, also where the rest fails. */
static int open_device(struct hvd_stage *stage, int device, struct hvd_error *error)
{
    enum { NON_BLOCKING = 1, NO_TIMING = 2 };
    int least = 0, greatest = 0;
    if (stage->device == device)
        return check(stage->cuda->CtxPushCurrent(stage->ctx), "use a device", error);
    if (stage->device)
        return hvd_fail(error, HVD_EINVAL,
                        "a tensor lies on device %d, and others of its process set on device %d: a set uses one "
                        "device of each rank; move the tensor there",
                        device - 1, stage->device - 1);
    const struct hvd_cuda *cuda = hvd_cuda_load(error);
    if (!cuda)
        return error->code;
    int code = check(cuda->DeviceGet(&stage->handle, device - 1), "find the device of a tensor", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&stage->ctx, stage->handle), "use a device", error);
    if (code != HVD_OK)
        return code;
    stage->cuda = cuda;
    stage->device = device;
    code = check(cuda->CtxPushCurrent(stage->ctx), "use a device", error);
    if (code != HVD_OK)
        return code;
    cuda->CtxGetStreamPriorityRange(&least, &greatest);
    code = check(cuda->StreamCreateWithPriority(&stage->stream, NON_BLOCKING, greatest), "make a stream", error);
    if (code == HVD_OK)
        code = check(cuda->EventCreate(&stage->done, NO_TIMING), "make an event", error);
    if (code != HVD_OK)
        leave(stage);
    return code;
}

static size_t out_bytes(const struct hvd_work *work, const struct hvd_piece *piece, int rank, int size)
{
    uint64_t count = piece->count;
    if (work->kind == HVD_REDUCESCATTER)
        count = work->count_of[rank];
    else if (work->kind == HVD_ALLGATHER) /* one piece */
        for (int from = count = 0; from < size; from++)
            count += work->count_of[from];
    else if (work->kind == HVD_ALLTOALL)
        for (int from = count = 0; from < size; from++)
            count += work->count_of[from * size + rank];
    return piece->out ? count * (size_t)hvd_dtype_bytes(work->dtype) : 0;
}

static size_t in_bytes(const struct hvd_work *work, const struct hvd_piece *piece, int rank)
{
    bool gives = piece->in && (work->kind != HVD_BROADCAST || work->root == rank);
    return gives ? piece->count * (size_t)hvd_dtype_bytes(work->dtype) : 0;
}

static int reserve(struct hvd_stage *stage, uint32_t pieces, size_t bytes, struct hvd_error *error)
{
    if (pieces > stage->room) {
        free(stage->piece);
        free(stage->out_bytes);
        stage->piece = malloc(sizeof *stage->piece * pieces);
        stage->out_bytes = malloc(sizeof *stage->out_bytes * pieces);
        HVD_ASSERT(stage->piece && stage->out_bytes);
        stage->room = pieces;
    }
    if (bytes <= stage->bytes)
        return HVD_OK;
    void *memory = NULL;
    if (stage->memory)
        stage->cuda->MemFreeHost(stage->memory);
    stage->memory = NULL;
    stage->bytes = 0;
    int code = check(stage->cuda->MemAllocHost(&memory, bytes), "give pinned memory for a bucket", error);
    stage->memory = memory;
    stage->bytes = code == HVD_OK ? bytes : 0;
    return code;
}

/* A place here for each tensor, and the copies of what this rank gives. */
static int copy_down(struct hvd_stage *stage, const struct hvd_work *work, int rank, int size, struct hvd_error *error)
{
    size_t total = 0, at = 0;
    for (uint32_t i = 0; i < work->pieces; i++)
        total += HVD_ALIGN_UP(in_bytes(work, &work->piece[i], rank), (size_t)HVD_CACHE_LINE) +
                 HVD_ALIGN_UP(out_bytes(work, &work->piece[i], rank, size), (size_t)HVD_CACHE_LINE);
    int code = reserve(stage, work->pieces, total ? total : HVD_CACHE_LINE, error);
    if (work->vacant && code == HVD_OK)
        code = check(stage->cuda->StreamWaitEvent(stage->stream, work->vacant, 0), "wait for memory", error);
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        size_t gives = in_bytes(work, piece, rank), gets = out_bytes(work, piece, rank, size);
        stage->out_bytes[i] = gets;
        stage->piece[i] = *piece;
        if (piece->in)
            stage->piece[i].in = stage->memory + at;
        at += HVD_ALIGN_UP(gives, (size_t)HVD_CACHE_LINE);
        if (piece->out)
            stage->piece[i].out = stage->memory + at;
        at += HVD_ALIGN_UP(gets, (size_t)HVD_CACHE_LINE);
        if (work->ready && work->ready[i])
            code = check(stage->cuda->StreamWaitEvent(stage->stream, work->ready[i], 0), "wait for a tensor", error);
        if (gives && code == HVD_OK)
            code = check(stage->cuda->MemcpyDtoHAsync((void *)(uintptr_t)stage->piece[i].in, (uintptr_t)piece->in,
                                                      gives, stage->stream),
                         "copy a tensor from a device", error);
    }
    return code == HVD_OK ? check(stage->cuda->EventRecord(stage->done, stage->stream), "record an event", error)
                          : code;
}

int hvd_stage_begin(struct hvd_stage *stage, struct hvd_work *work, int rank, int size, struct hvd_error *error)
{
    int code = HVD_OK;
    stage->away = NULL;
    stage->phase = HVD_STAGE_HERE;
    stage->pieces = work->pieces;
    if (work->device) {
        code = open_device(stage, work->device, error);
        if (code == HVD_OK) {
            code = copy_down(stage, work, rank, size, error);
            leave(stage);
        }
        stage->away = work->piece;
        stage->phase = HVD_STAGE_DOWN;
        work->piece = stage->piece;
    }
    if (code != HVD_OK)
        stage->phase = HVD_STAGE_NONE;
    work->flags &= ~HVD_WORK_ON_DEVICE;
    work->ready = NULL;
    return code;
}

int hvd_stage_poll(struct hvd_stage *stage, bool *progress, struct hvd_error *error)
{
    if (stage->phase == HVD_STAGE_HERE)
        return HVD_OK;
    int asked = stage->cuda->EventQuery(stage->done);
    if (asked == HVD_CUDA_NOT_READY)
        return HVD_AGAIN;
    *progress = true;
    stage->phase = stage->phase == HVD_STAGE_DOWN ? HVD_STAGE_HERE : HVD_STAGE_NONE;
    return check(asked, "copy a tensor", error);
}

int hvd_stage_return(struct hvd_stage *stage, struct hvd_error *error)
{
    stage->phase = HVD_STAGE_NONE;
    if (!stage->away)
        return HVD_OK;
    int code = open_device(stage, stage->device, error);
    if (code != HVD_OK)
        return code;
    for (uint32_t i = 0; i < stage->pieces && code == HVD_OK; i++)
        if (stage->out_bytes[i])
            code = check(stage->cuda->MemcpyHtoDAsync((uintptr_t)stage->away[i].out, stage->piece[i].out,
                                                      stage->out_bytes[i], stage->stream),
                         "copy a result to a device", error);
    if (code == HVD_OK)
        code = check(stage->cuda->EventRecord(stage->done, stage->stream), "record an event", error);
    leave(stage);
    stage->phase = HVD_STAGE_UP;
    return code == HVD_OK ? HVD_AGAIN : code;
}

void hvd_stage_close(struct hvd_stage *stage)
{
    if (stage->cuda) {
        if (stage->cuda->CtxPushCurrent(stage->ctx) == 0) {
            if (stage->stream)
                stage->cuda->StreamDestroy(stage->stream);
            if (stage->done)
                stage->cuda->EventDestroy(stage->done);
            if (stage->memory)
                stage->cuda->MemFreeHost(stage->memory);
            leave(stage);
        }
        stage->cuda->DevicePrimaryCtxRelease(stage->handle);
    }
    free(stage->piece);
    free(stage->out_bytes);
    *stage = (struct hvd_stage){.phase = HVD_STAGE_NONE};
}
