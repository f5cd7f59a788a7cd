/* nvtx.c - how does a profiler get our ranges, when nothing of it was there at compile time?
 *
 * NVTX is a header that C programs compile in; its code looks for a profiler and, without one, does nothing. NVIDIA
 * ships the same as a library for everyone else (libnvtx3interop.so.1, in the package nvidia-nvtx; before CUDA 12.9
 * libnvToolsExt.so.1), which is opened here by its name, as CUDA's driver and NCCL are. Of it two functions are wanted:
 * ranges that a thread begins and another may end, since a collective is begun by one turn and ended by another.
 *
 * The numbers of ranges are the library's; 0 means "none" here, so they are kept plus one. (Where no profiler listens
 * it may give any number, and takes it back without harm.)
 */
#include "nvtx.h"

#include <dlfcn.h>
#include <pthread.h>

_Atomic bool hvd_nvtx_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t (*begin)(const char *name);
static void (*end)(uint64_t range);

int hvd_nvtx_open(const char *library, struct hvd_error *error)
{
    int code = HVD_OK;
    pthread_mutex_lock(&lock);
    void *opened = atomic_load(&hvd_nvtx_on) ? NULL : dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (opened) {
        *(void **)(void *)&begin = dlsym(opened, "nvtxRangeStartA");
        *(void **)(void *)&end = dlsym(opened, "nvtxRangeEnd");
        if (begin && end)
            atomic_store(&hvd_nvtx_on, true);
        else
            code = hvd_fail(error, HVD_EINIT, HVD603 "%s has no nvtxRangeStartA: it is no library of NVTX", library);
    } else if (!atomic_load(&hvd_nvtx_on)) {
        code = hvd_fail(error, HVD_EINIT, HVD603 "%s", dlerror());
    }
    pthread_mutex_unlock(&lock);
    return code;
}

uint64_t hvd_nvtx_begin(const char *name)
{
    return begin(name) + 1;
}

void hvd_nvtx_end(uint64_t range)
{
    if (range)
        end(range - 1);
}
