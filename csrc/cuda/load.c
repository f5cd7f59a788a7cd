/* load.c - where is CUDA's driver, and where are its functions?
 *
 * libcuda.so.1 comes with the driver of the machine, never with a framework: there is one, and who has used CUDA in
 * this process has it mapped already, so that opening it costs nothing. It is opened when the first tensor on a device
 * comes and never before: a process without such tensors pays nothing, be there a GPU or not.
 *
 * Symbols are taken by their versioned names (cuMemAlloc_v2): what a name without a version means depends on the age of
 * the driver. What was found, or why nothing was, is remembered: a machine does not get a driver while a job runs.
 *
 * A CUDA graph that a framework captures in the global mode, which is the usual one, is spoilt by whatever thread asks
 * for memory or for an event meanwhile: the driver cannot know that this has nothing to do with the graph. It can be
 * told, for a thread and a time. Our own calls say so (hvd_cuda_enter), wherever they come from; what is done on a
 * stream of the framework's does not, for that may belong to the graph.
 */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_cuda loaded;
static struct hvd_error refusal;
static char preferred[512];
static _Atomic int hangs;

void hvd_cuda_prefer(const char *path)
{
    pthread_mutex_lock(&lock);
    hvd_text_copy(preferred, sizeof preferred, path ? path : "");
    refusal.code = loaded.loaded ? refusal.code : HVD_OK;
    pthread_mutex_unlock(&lock);
}

static void *look_up(const char *symbol)
{
    pthread_mutex_lock(&lock);
    void *library = dlopen(preferred[0] ? preferred : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    pthread_mutex_unlock(&lock);
    return library ? dlsym(library, symbol) : NULL;
}

int hvd_cuda_version(void)
{
    int version = 0, (*ask)(int *version);
    if ((*(void **)(void *)&ask = look_up("cuDriverGetVersion")) && ask(&version) != 0)
        version = 0;
    return version;
}

void hvd_cuda_hang(void)
{
    atomic_fetch_add(&hangs, 1);
}

void hvd_cuda_recover(void)
{
    atomic_fetch_sub(&hangs, 1);
}

bool hvd_cuda_hangs(void)
{
    return atomic_load(&hangs) > 0;
}

int hvd_cuda_enter(const struct hvd_cuda *cuda, void *ctx, int *mode)
{
    enum { RELAXED = 2 };
    int code = cuda->CtxPushCurrent(ctx);
    *mode = RELAXED;
    if (code != 0 || !cuda->ThreadExchangeStreamCaptureMode || cuda->ThreadExchangeStreamCaptureMode(mode) != 0)
        *mode = -1;
    return code;
}

void hvd_cuda_leave(const struct hvd_cuda *cuda, int mode)
{
    void *ctx;
    if (mode >= 0)
        cuda->ThreadExchangeStreamCaptureMode(&mode);
    cuda->CtxPopCurrent(&ctx);
}

static int words_of(const struct hvd_cuda *cuda, int code, const char *what, struct hvd_error *error)
{
    const char *name = NULL, *text = NULL;
    if (cuda->GetErrorName)
        cuda->GetErrorName(code, &name);
    if (cuda->GetErrorString)
        cuda->GetErrorString(code, &text);
    return hvd_fail(error, HVD_EINTERNAL, HVD654 "CUDA could not %s: %s (error %d%s%s; driver %s, CUDA %d.%d)", what,
                    text ? text : "unknown error", code, name ? ", " : "", name ? name : "", cuda->path,
                    cuda->version / 1000, cuda->version % 1000 / 10);
}

int hvd_cuda_failed(int code, const char *what, struct hvd_error *error)
{
    return words_of(&loaded, code, what, error);
}

static int fill(struct hvd_cuda *cuda, struct hvd_error *error)
{
    const char *path = preferred[0] ? preferred : "libcuda.so.1";
    int devices = 0, code;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return hvd_fail(error, HVD_EINIT, HVD653 "this machine has no CUDA driver that can be opened: %s", dlerror());
    hvd_text_copy(cuda->path, sizeof cuda->path, path);
#define X(name, symbol, arguments)                          \
    *(void **)(void *)&cuda->name = dlsym(library, symbol); \
    if (!cuda->name)                                        \
        return hvd_fail(error, HVD_EINIT, HVD653 "%s has no %s: a driver for CUDA 11 or later is needed", path, symbol);
    HVD_CUDA_CALLS(X)
#undef X
#define Y(name, symbol, arguments) *(void **)(void *)&cuda->name = dlsym(library, symbol);
    HVD_CUDA_NEWER_CALLS(Y)
#undef Y
    void *of_slice = dlsym(library, "cuDeviceGetUuid_v2"); /* CUDA 11.4: tells slices of one GPU apart */
    if (of_slice)
        *(void **)(void *)&cuda->DeviceGetUuid = of_slice;
    code = cuda->Init(0);
    if (code == 0)
        code = cuda->DriverGetVersion(&cuda->version);
    if (code == 0)
        code = cuda->DeviceGetCount(&devices);
    if (code != 0)
        return words_of(cuda, code, "begin", error);
    if (devices == 0)
        return hvd_fail(error, HVD_EINIT, HVD653 "the CUDA driver (%s) shows no device: is CUDA_VISIBLE_DEVICES empty?",
                        path);
    return HVD_OK;
}

const struct hvd_cuda *hvd_cuda_load(struct hvd_error *error)
{
    pthread_mutex_lock(&lock);
    if (!loaded.loaded && refusal.code == HVD_OK) {
        struct hvd_cuda cuda = {.loaded = true};
        if (fill(&cuda, &refusal) == HVD_OK)
            loaded = cuda;
    }
    bool ready = loaded.loaded;
    if (!ready)
        hvd_fail(error, refusal.code, "%s", refusal.text);
    pthread_mutex_unlock(&lock);
    return ready ? &loaded : NULL;
}
