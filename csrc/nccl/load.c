/* load.c - which NCCL does this process use, and where are its functions?
 *
 * Frameworks bring an NCCL of their own, and a process must not hold two. So in this order: the one that is mapped
 * already, by its name; the file that Python names (it knows where the framework's packages lie); if it names none,
 * whatever the dynamic linker finds by that name, or by the one that comes with NCCL's headers. NCCL is a library of
 * some hundred megabytes: it is opened when a communicator is about to be made, not before.
 *
 * Symbols that a version may lack (GetLastError, MemAlloc) are NULL in the table; without one of the others that
 * version is refused, naming it, the file and the symbol. What was found, or why nothing was, is remembered.
 */
#define _GNU_SOURCE /* dladdr */
#include "nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static const char *const NAME = "libnccl.so.2", *const OTHER_NAME = "libnccl.so";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_nccl loaded;
static struct hvd_error refusal;
static char preferred[512];

void hvd_nccl_prefer(const char *path)
{
    pthread_mutex_lock(&lock);
    hvd_text_copy(preferred, sizeof preferred, path ? path : "");
    refusal.code = loaded.loaded ? refusal.code : HVD_OK;
    pthread_mutex_unlock(&lock);
}

void hvd_nccl_version(int version, char *text, size_t text_bytes)
{
    int major = version < 10000 ? version / 1000 : version / 10000;
    int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
    snprintf(text, text_bytes, "%d.%d.%d", major, minor, version % 100);
}

static int fill(struct hvd_nccl *nccl, struct hvd_error *error)
{
    const char *path = NAME;
    char version[32];
    void *library = dlopen(NAME, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
    if (!library && preferred[0])
        library = dlopen(path = preferred, RTLD_NOW | RTLD_LOCAL);
    if (!library && !preferred[0])
        library = dlopen(NAME, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        hvd_fail(error, HVD_EINIT,
                 HVD656
                 "no NCCL can be opened: %.300s. Install the one that belongs to the framework (nvidia-nccl-cu12 for "
                 "PyTorch), or name its file in HVDLITE_NCCL_LIBRARY",
                 dlerror());
        library = preferred[0] ? NULL : dlopen(OTHER_NAME, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library)
        return error->code;
    error->code = HVD_OK; /* of the other name nobody asks why not */
    *(void **)(void *)&nccl->GetVersion = dlsym(library, "ncclGetVersion");
    Dl_info found = {.dli_fname = NULL};
    if (nccl->GetVersion && dladdr(*(void **)(void *)&nccl->GetVersion, &found) && found.dli_fname)
        path = found.dli_fname;
    hvd_text_copy(nccl->path, sizeof nccl->path, path);
    if (!nccl->GetVersion || nccl->GetVersion(&nccl->version) != HVD_NCCL_SUCCESS)
        return hvd_fail(error, HVD_EINIT, HVD656 "%s is not an NCCL library: it does not report its version",
                        nccl->path);
    hvd_nccl_version(nccl->version, version, sizeof version);
    *(void **)(void *)&nccl->GetErrorString = dlsym(library, "ncclGetErrorString");
    *(void **)(void *)&nccl->GetLastError = dlsym(library, "ncclGetLastError");
#define X(name, arguments)                                                                                          \
    *(void **)(void *)&nccl->name = dlsym(library, "nccl" #name);                                                   \
    if (!nccl->name)                                                                                                \
        return hvd_fail(error, HVD_EINIT, HVD656 "NCCL %s (%s) has no nccl" #name ": NCCL 2.14 or later is needed", \
                        version, nccl->path);
    HVD_NCCL_CALLS(X)
#undef X
    return HVD_OK;
}

const struct hvd_nccl *hvd_nccl_load(struct hvd_error *error)
{
    pthread_mutex_lock(&lock);
    if (!loaded.loaded && refusal.code == HVD_OK) {
        struct hvd_nccl nccl = {.loaded = true};
        if (fill(&nccl, &refusal) == HVD_OK)
            loaded = nccl;
    }
    bool ready = loaded.loaded;
    if (!ready)
        hvd_fail(error, refusal.code, "%s", refusal.text);
    pthread_mutex_unlock(&lock);
    return ready ? &loaded : NULL;
}

int hvd_nccl_failed(int result, void *comm, const char *what, struct hvd_error *error)
{
    char version[32];
    const char *last = loaded.GetLastError ? loaded.GetLastError(comm) : NULL;
    hvd_nccl_version(loaded.version, version, sizeof version);
    return hvd_fail(error, HVD_EINTERNAL, HVD657 "NCCL %s (%.200s) could not %s: %s%s%.400s", version, loaded.path,
                    what, loaded.GetErrorString ? loaded.GetErrorString(result) : "unknown error",
                    last && *last ? ": " : "", last ? last : "");
}
