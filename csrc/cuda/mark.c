/* mark.c - has a device got to a mark, and how does another stream wait for it?
 *
 * Both ask CUDA's driver, in the context of the mark's own device, which is this thread's current one for as long as
 * that takes. A framework's stream that waits for a mark does so on the device: the thread that says so goes on.
 */
#include "mark.h"

static int done(const struct hvd_mark *mark, int code, const char *what, struct hvd_error *error)
{
    void *ctx;
    mark->cuda->CtxPopCurrent(&ctx);
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

int hvd_mark_reached(const struct hvd_mark *mark, struct hvd_error *error)
{
    int code = mark->cuda->CtxPushCurrent(mark->ctx);
    if (code != 0)
        return hvd_cuda_failed(code, "use a device", error);
    code = mark->cuda->EventQuery(mark->event);
    return code == HVD_CUDA_NOT_READY ? done(mark, 0, "", error),
           HVD_AGAIN                  : done(mark, code, "do a collective", error);
}

int hvd_mark_follow(const struct hvd_mark *mark, void *stream, struct hvd_error *error)
{
    int code = mark->cuda->CtxPushCurrent(mark->ctx);
    if (code != 0)
        return hvd_cuda_failed(code, "use a device", error);
    return done(mark, mark->cuda->StreamWaitEvent(stream, mark->event, 0), "let a stream wait for a collective", error);
}
