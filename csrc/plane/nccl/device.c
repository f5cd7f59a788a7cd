/* device.c - which devices does this process use, and on which stream?
 *
 * All sets of a process that use a device share one stream of it, of high priority: what is put there runs in the order
 * in which it was put, whichever set it belongs to. The context is the device's primary one, which is that of every
 * framework, so that addresses and events of theirs mean the same here.
 *
 * A device is taken by the first set that has a tensor there and given back with the last; the table has a lock,
 * because sets are opened and closed by threads of the caller. To use a device its context is made current, for as
 * long as the calls take: the framework's threads never see it.
 */
#include "state.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_nccl_device *devices;

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

static int begin(const struct hvd_cuda *cuda, struct hvd_nccl_device *device, struct hvd_error *error)
{
    int least = 0, greatest = 0;
    void *ctx;
    int code = check(cuda->DeviceGet(&device->handle, device->ordinal), "find the device of this tensor", error);
    if (code == HVD_OK)
        code = check(cuda->DeviceGetUuid(&device->uuid, device->handle), "name a device", error);
    if (code == HVD_OK)
        code = check(cuda->DeviceGetPCIBusId(device->pci, sizeof device->pci, device->handle), "place a device", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&device->ctx, device->handle), "use a device", error);
    if (code != HVD_OK)
        return code;
    code = check(cuda->CtxPushCurrent(device->ctx), "use a device", error);
    if (code == HVD_OK) {
        enum { NON_BLOCKING = 1 };
        cuda->CtxGetStreamPriorityRange(&least, &greatest);
        code = check(cuda->StreamCreateWithPriority(&device->stream, NON_BLOCKING, greatest), "make a stream", error);
        cuda->CtxPopCurrent(&ctx);
    }
    if (code != HVD_OK)
        cuda->DevicePrimaryCtxRelease(device->handle);
    return code;
}

struct hvd_nccl_device *hvd_nccl_device_take(int ordinal, struct hvd_error *error)
{
    const struct hvd_cuda *cuda = hvd_cuda_load(error);
    if (!cuda)
        return NULL;
    pthread_mutex_lock(&lock);
    struct hvd_nccl_device *device = devices;
    while (device && device->ordinal != ordinal)
        device = device->next;
    if (!device) {
        device = calloc(1, sizeof *device);
        HVD_ASSERT(device);
        device->ordinal = ordinal;
        if (begin(cuda, device, error) == HVD_OK) {
            device->next = devices;
            devices = device;
        } else {
            free(device);
            device = NULL;
        }
    }
    if (device)
        device->users++;
    pthread_mutex_unlock(&lock);
    return device;
}

void hvd_nccl_device_drop(struct hvd_nccl_device *device)
{
    const struct hvd_cuda *cuda = hvd_cuda_load(NULL);
    void *ctx;
    pthread_mutex_lock(&lock);
    if (--device->users == 0) {
        struct hvd_nccl_device **at = &devices;
        while (*at != device)
            at = &(*at)->next;
        *at = device->next;
        if (cuda->CtxPushCurrent(device->ctx) == 0) {
            cuda->StreamDestroy(device->stream);
            cuda->CtxPopCurrent(&ctx);
        }
        cuda->DevicePrimaryCtxRelease(device->handle);
        free(device);
    }
    pthread_mutex_unlock(&lock);
}

int hvd_nccl_enter(const struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    return check(plane->cuda->CtxPushCurrent(plane->device->ctx), "use a device", error);
}

void hvd_nccl_leave(const struct hvd_nccl_plane *plane)
{
    void *ctx;
    plane->cuda->CtxPopCurrent(&ctx);
}
