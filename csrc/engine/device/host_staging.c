/* host_staging.c - how does a tensor on a device get through a plane that knows none?
 *
 * Three steps, each asked for by an event and none waited for: what this rank gives is copied into pinned memory behind
 * the events after which it is ready, the planes of the set do the work there as they do any other, and the results
 * are copied back. It is the way of
 * whatever no plane for devices computes as we do, and of hosts without one; the results are those of the CPU's planes,
 * bit by bit. An Adasum is a series of such works between the two copies.
 *
 * The memory holds one work, grows to the largest and is kept, as is what it has outgrown, for freeing waits for the
 * device (cuda/pinned.c). A stage belongs to one set and has a stream of its own on each
 * device that the set's tensors lie on; a work's tensors lie on one. A rank that gives nothing and gets nothing (it has
 * joined) copies nothing and needs no device.
 */
#include "host_staging.h"

#include "../../kernel/kernel.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DRAINING_NS 10000000000u /* copies, behind whatever wrote their tensors */

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

static void leave(const struct hvd_stage *stage)
{
    hvd_cuda_leave(stage->cuda, stage->mode);
}

static int enter(struct hvd_stage *stage, struct hvd_error *error)
{
    return check(hvd_cuda_enter(stage->cuda, stage->on->ctx, &stage->mode), "use a device", error);
}

static void end_device(struct hvd_stage *stage, struct hvd_stage_device *one)
{
    if (hvd_cuda_enter(stage->cuda, one->ctx, &stage->mode) == 0) {
        if (one->stream)
            stage->cuda->StreamDestroy(one->stream);
        if (one->done)
            stage->cuda->EventDestroy(one->done);
        leave(stage);
    }
    stage->cuda->DevicePrimaryCtxRelease(one->handle);
    free(one);
}

static int make_device(struct hvd_stage *stage, int device, struct hvd_error *error)
{
    enum { NON_BLOCKING = 1, NO_TIMING = 2 };
    const struct hvd_cuda *cuda = stage->cuda;
    int least = 0, greatest = 0;
    struct hvd_stage_device *one = calloc(1, sizeof *one);
    HVD_ASSERT(one);
    one->device = device;
    int code = check(cuda->DeviceGet(&one->handle, device - 1), "find the device of a tensor", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&one->ctx, one->handle), "use a device", error);
    if (code != HVD_OK) {
        free(one);
        return code;
    }
    code = check(hvd_cuda_enter(cuda, one->ctx, &stage->mode), "use a device", error);
    if (code == HVD_OK) {
        cuda->CtxGetStreamPriorityRange(&least, &greatest);
        code = check(cuda->StreamCreateWithPriority(&one->stream, NON_BLOCKING, greatest), "make a stream", error);
        if (code == HVD_OK)
            code = check(cuda->EventCreate(&one->done, NO_TIMING), "make an event", error);
        leave(stage);
    }
    if (code != HVD_OK) {
        end_device(stage, one);
        return code;
    }
    one->next = stage->devices;
    stage->devices = one;
    return HVD_OK;
}

static int enter_device(struct hvd_stage *stage, int device, struct hvd_error *error)
{
    if (!stage->cuda)
        stage->cuda = hvd_cuda_load(error);
    if (!stage->cuda)
        return error->code;
    for (int tries = 0; tries < 2; tries++) {
        stage->on = stage->devices;
        while (stage->on && stage->on->device != device)
            stage->on = stage->on->next;
        if (stage->on)
            return enter(stage, error);
        if (make_device(stage, device, error) != HVD_OK)
            break;
    }
    return error->code;
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
    return hvd_pinned_reserve(stage->cuda, &stage->memory, bytes, error);
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
        code = check(stage->cuda->StreamWaitEvent(stage->on->stream, work->vacant, 0), "wait for memory", error);
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        size_t gives = in_bytes(work, piece, rank), gets = out_bytes(work, piece, rank, size);
        stage->out_bytes[i] = gets;
        stage->piece[i] = *piece;
        if (piece->in)
            stage->piece[i].in = stage->memory.at + at;
        at += HVD_ALIGN_UP(gives, (size_t)HVD_CACHE_LINE);
        if (piece->out)
            stage->piece[i].out = stage->memory.at + at;
        at += HVD_ALIGN_UP(gets, (size_t)HVD_CACHE_LINE);
        if (work->ready && work->ready[i])
            code =
                check(stage->cuda->StreamWaitEvent(stage->on->stream, work->ready[i], 0), "wait for a tensor", error);
        if (gives && code == HVD_OK)
            code = check(stage->cuda->MemcpyDtoHAsync((void *)(uintptr_t)stage->piece[i].in, (uintptr_t)piece->in,
                                                      gives, stage->on->stream),
                         "copy a tensor from a device", error);
    }
    return code == HVD_OK
               ? check(stage->cuda->EventRecord(stage->on->done, stage->on->stream), "record an event", error)
               : code;
}

int hvd_stage_begin(struct hvd_stage *stage, struct hvd_work *work, int rank, int size, struct hvd_error *error)
{
    int code = HVD_OK;
    stage->away = NULL;
    stage->phase = HVD_STAGE_HERE;
    stage->pieces = work->pieces;
    if (work->device) {
        code = enter_device(stage, work->device, error);
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
    if (enter(stage, error) != HVD_OK)
        return error->code;
    int asked = stage->cuda->EventQuery(stage->on->done);
    leave(stage);
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
    int code = enter(stage, error);
    if (code != HVD_OK)
        return code;
    for (uint32_t i = 0; i < stage->pieces && code == HVD_OK; i++) {
        const void *result = stage->piece[i].out;
        if (stage->out_bytes[i] == 0)
            continue;
        code = check(
            stage->cuda->MemcpyHtoDAsync((uintptr_t)stage->away[i].out, result, stage->out_bytes[i], stage->on->stream),
            "copy a result to a device", error);
    }
    if (code == HVD_OK)
        code = check(stage->cuda->EventRecord(stage->on->done, stage->on->stream), "record an event", error);
    leave(stage);
    stage->phase = HVD_STAGE_UP;
    return code == HVD_OK ? HVD_AGAIN : code;
}

/* Copies and kernels that a failed job has left there go on, and what they touch is given back when this is closed. */
static void drain(struct hvd_stage *stage, const struct hvd_stage_device *one)
{
    uint64_t until_ns = hvd_now_ns() + DRAINING_NS;
    if (hvd_cuda_enter(stage->cuda, one->ctx, &stage->mode) != 0)
        return;
    int code = stage->cuda->EventRecord(one->done, one->stream);
    while (code == 0 && (code = stage->cuda->EventQuery(one->done)) == HVD_CUDA_NOT_READY && hvd_now_ns() < until_ns) {
        usleep(50);
        code = 0;
    }
    leave(stage);
    if (code == HVD_CUDA_NOT_READY)
        hvd_cuda_hang();
}

void hvd_stage_close(struct hvd_stage *stage)
{
    for (struct hvd_stage_device *one = stage->devices; one && !hvd_cuda_hangs(); one = one->next)
        drain(stage, one);
    if (stage->memory.at && !hvd_cuda_hangs() && hvd_cuda_enter(stage->cuda, stage->devices->ctx, &stage->mode) == 0) {
        hvd_pinned_free(stage->cuda, &stage->memory);
        leave(stage);
    }
    while (stage->devices && !hvd_cuda_hangs()) {
        struct hvd_stage_device *one = stage->devices;
        stage->devices = one->next;
        end_device(stage, one);
    }
    free(stage->piece);
    free(stage->out_bytes);
    *stage = (struct hvd_stage){.phase = HVD_STAGE_NONE};
}
