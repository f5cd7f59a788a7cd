/* api_gpu.c - the public C API, continued: tensors on GPUs.
 *
 * What a framework's thread asks about memory on a device: which libraries are taken, when the device has got to where
 * a tensor is ready or a result lies, and how a result comes into the framework's memory. Ways in, as those of api.c;
 * points (cuda/begun.h) belong to the process and not to an engine, so they can be asked for, and given back, at any
 * time.
 */
#include "api.h"
#include "cuda/begun.h"
#include "nccl/nccl.h"
#include "plane/nccl/state.h"

void hvd_gpu_libraries(const char *cuda, const char *nccl)
{
    hvd_cuda_prefer(cuda);
    hvd_nccl_prefer(nccl);
}

int hvd_gpu_version(int which)
{
    if (which == 0)
        return hvd_cuda_version();
    if (which == 2)
        return hvd_begun_can();
    if (which == 3) /* what a failed job has left on a device could not be ended: memory may be touched for ever */
        return hvd_cuda_hangs() && !hvd_nccl_recovered(false);
    const struct hvd_nccl *nccl = hvd_nccl_load(NULL);
    return nccl ? nccl->version : 0;
}

int hvd_notice(char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return 0;
    int fresh = hvd_engine_notice(engine, text, text_bytes);
    hvd_api_go_out();
    return fresh;
}

int hvd_behind(int64_t handle, uintptr_t stream, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_behind(engine, handle, (void *)stream, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_fetch(int64_t handle, uintptr_t to, uintptr_t stream, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_fetch(engine, handle, to, (void *)stream, &error);
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

int hvd_point(const void *memory, void **point, char *text, size_t text_bytes)
{
    struct hvd_error error;
    hvd_error_none(&error);
    *point = NULL;
    if (hvd_forked())
        return hvd_api_state(text, text_bytes);
    int ordinal = hvd_begun_on(memory, &error);
    if (ordinal >= 0)
        *point = hvd_begun_mark(ordinal, &error);
    if (*point)
        return ordinal + 1;
    hvd_text_copy(text, text_bytes, error.text);
    return error.code;
}

int hvd_point_fetch(int64_t handle, uintptr_t to, void **point, char *text, size_t text_bytes)
{
    struct hvd_engine *engine = hvd_api_enter();
    struct hvd_mark *there = NULL;
    *point = NULL;
    if (!engine)
        return hvd_api_state(text, text_bytes);
    struct hvd_error error = {0};
    int code = hvd_engine_bring(engine, handle, to, &there, &error);
    *point = there;
    hvd_text_copy(text, text_bytes, error.text);
    hvd_api_go_out();
    return code;
}

void *hvd_point_event(const void *point)
{
    return ((const struct hvd_mark *)point)->event;
}

int hvd_point_reached(const void *point)
{
    return hvd_mark_reached(point, NULL);
}

void hvd_point_drop(void *point)
{
    if (point)
        hvd_mark_drop(point);
}
