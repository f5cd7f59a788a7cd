/* gpu_event.c - has a device reached an event, and how does another stream wait for it?
 *
 * Both ask CUDA's driver, in the context of the mark's own device, which is this thread's current one for as long as
 * that takes. A framework's stream that waits for a mark does so on the device: the thread that says so goes on; where
 * that stream is being captured, the driver shall see it, so that is not hidden from it as our own calls are.
 */
#include "gpu_event.h"

int hvd_gpu_event_reached(const struct hvd_gpu_event *mark, struct hvd_error *error)
{
    int mode, code = hvd_cuda_enter(mark->cuda, mark->ctx, &mode);
    if (code != 0)
        return hvd_cuda_failed(code, "use a device", error);
    code = mark->cuda->EventQuery(mark->event);
    hvd_cuda_leave(mark->cuda, mode);
    if (code == HVD_CUDA_NOT_READY)
        return HVD_AGAIN;
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, "do a collective", error);
}

int hvd_gpu_event_follow(const struct hvd_gpu_event *mark, void *stream, struct hvd_error *error)
{
    void *ctx;
    int code = mark->cuda->CtxPushCurrent(mark->ctx);
    if (code != 0)
        return hvd_cuda_failed(code, "use a device", error);
    code = mark->cuda->StreamWaitEvent(stream, mark->event, 0);
    mark->cuda->CtxPopCurrent(&ctx);
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, "let a stream wait for a collective", error);
}
