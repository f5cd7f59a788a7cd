/* api_gpu.c - the public C API, continued: tensors on GPUs.
 *
 * What a framework's thread asks about memory on a device: which libraries are taken, when the device has got to where
 * a tensor is ready or a result lies, and how a result comes into the framework's memory. Ways in, as those of api.c.
 */
#include "api.h"
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
    if (which == 2) /* what a failed job has left on a device could not be ended: memory may be touched for ever */
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
