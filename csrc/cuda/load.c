/* load.c - where is CUDA's driver, and where are its functions?
 *
 * libcuda.so.1 comes with the driver of the machine, never with a framework: there is one, and who has used CUDA in
 * this process has it mapped already, so that opening it costs nothing. It is opened when the first tensor on a device
 * comes and never before: a process without such tensors pays nothing, be there a GPU or not.
 *
 * Symbols are taken by their versioned names (cuMemAlloc_v2): what a name without a version means depends on the age of
 * the driver. What was found, or why nothing was, is remembered: a machine does not get a driver while a job runs.
 */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_cuda loaded;
static struct hvd_error refusal;
static char preferred[512];

void hvd_cuda_prefer(const char *path)
{
    pthread_mutex_lock(&lock);
    hvd_text_copy(preferred, sizeof preferred, path ? path : "");
    refusal.code = loaded.loaded ? refusal.code : HVD_OK;
    pthread_mutex_unlock(&lock);
}

int hvd_cuda_version(void)
{
    int version = 0, (*ask)(int *version);
    pthread_mutex_lock(&lock);
    void *library = dlopen(preferred[0] ? preferred : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library && (*(void **)(void *)&ask = dlsym(library, "cuDriverGetVersion")) && ask(&version) != 0)
        version = 0;
    pthread_mutex_unlock(&lock);
    return version;
}

static int words_of(const struct hvd_cuda *cuda, int code, const char *what, struct hvd_error *error)
{
    const char *name = NULL, *text = NULL;
    if (cuda->GetErrorName)
        cuda->GetErrorName(code, &name);
    if (cuda->GetErrorString)
        cuda->GetErrorString(code, &text);
    return hvd_fail(error, HVD_EINTERNAL, "CUDA could not %s: %s (error %d%s%s; driver %s, CUDA %d.%d)", what,
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
        return hvd_fail(error, HVD_EINIT, "this machine has no driver of CUDA that can be opened: %s", dlerror());
    hvd_text_copy(cuda->path, sizeof cuda->path, path);
#define X(name, symbol, arguments)                          \
    *(void **)(void *)&cuda->name = dlsym(library, symbol); \
    if (!cuda->name)                                        \
        return hvd_fail(error, HVD_EINIT, "%s has no %s: a driver for CUDA 11 or later is needed", path, symbol);
    HVD_CUDA_CALLS(X)
#undef X
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
        return hvd_fail(error, HVD_EINIT, "the driver of CUDA (%s) shows no device: is CUDA_VISIBLE_DEVICES empty?",
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
