/* device.c - which devices does this process use, and on which stream?
 *
 * All sets of a process that use a device share one stream of it, of high priority: what is put there runs in the order
 * in which it was put, whichever set it belongs to. The context is the device's primary one, which is that of every
 * framework, so that addresses and events of theirs mean the same here.
 *
 * Marks (cuda/gpu_event.h) are made when they are needed and come back when nobody holds them; a handle may hold one
 * longer than its set lives, so a device lives as long as its marks are held.
 *
 * A device is taken by the first set that has a tensor there and given back with the last; the table has a lock,
 * because sets are opened and closed by threads of the caller. To use a device its context is made current, for as
 * long as the calls take: the framework's threads never see it, and no CUDA graph that they capture (cuda/load.c).
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
    int least = 0, greatest = 0, mode;
    int code = check(cuda->DeviceGet(&device->handle, device->ordinal), "find the device of this tensor", error);
    if (code == HVD_OK)
        code = check(cuda->DeviceGetUuid(&device->uuid, device->handle), "name a device", error);
    if (code == HVD_OK)
        code = check(cuda->DeviceGetPCIBusId(device->pci, sizeof device->pci, device->handle), "place a device", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&device->ctx, device->handle), "use a device", error);
    if (code != HVD_OK)
        return code;
    code = check(hvd_cuda_enter(cuda, device->ctx, &mode), "use a device", error);
    if (code == HVD_OK) {
        enum { NON_BLOCKING = 1 };
        cuda->CtxGetStreamPriorityRange(&least, &greatest);
        code = check(cuda->StreamCreateWithPriority(&device->stream, NON_BLOCKING, greatest), "make a stream", error);
        hvd_cuda_leave(cuda, mode);
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
    if (hvd_cuda_hangs() && !hvd_nccl_recovered(true)) { /* what is put on its stream now would wait for ever */
        hvd_fail(error, HVD_EINIT,
                 HVD663
                 "a GPU of this process still runs work of an earlier job, which failed, and that work could not be "
                 "aborted: wait for the GPU (torch.cuda.synchronize()) before hvd.init(), or restart the process");
        return NULL;
    }
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

static void end(const struct hvd_cuda *cuda, struct hvd_nccl_device *device)
{
    int mode;
    struct hvd_nccl_device **at = &devices;
    while (*at != device)
        at = &(*at)->next;
    *at = device->next;
    bool current = hvd_cuda_enter(cuda, device->ctx, &mode) == 0;
    while (device->marks) {
        struct hvd_gpu_event *mark = device->marks;
        device->marks = mark->next;
        if (current)
            cuda->EventDestroy(mark->event);
        free(mark);
    }
    if (current) {
        cuda->StreamDestroy(device->stream);
        hvd_cuda_leave(cuda, mode);
    }
    cuda->DevicePrimaryCtxRelease(device->handle);
    free(device);
}

void hvd_nccl_device_drop(struct hvd_nccl_device *device)
{
    pthread_mutex_lock(&lock);
    if (--device->users == 0)
        end(hvd_cuda_load(NULL), device);
    pthread_mutex_unlock(&lock);
}

static void take_back(struct hvd_gpu_event *mark)
{
    struct hvd_nccl_device *device = mark->owner;
    if (mark->before)
        hvd_gpu_event_drop(mark->before);
    mark->before = NULL;
    pthread_mutex_lock(&lock);
    mark->next = device->marks;
    device->marks = mark;
    pthread_mutex_unlock(&lock);
    hvd_nccl_device_drop(device);
}

/* One that nobody holds, or NULL. Whoever holds it holds the device. */
static struct hvd_gpu_event *used_mark(struct hvd_nccl_device *device)
{
    pthread_mutex_lock(&lock);
    struct hvd_gpu_event *mark = device->marks;
    if (mark)
        device->marks = mark->next;
    device->users++;
    pthread_mutex_unlock(&lock);
    return mark;
}

struct hvd_gpu_event *hvd_nccl_device_mark(struct hvd_nccl_device *device, struct hvd_error *error)
{
    enum { NO_TIMING = 2 };
    const struct hvd_cuda *cuda = hvd_cuda_load(error);
    struct hvd_gpu_event *mark = used_mark(device);
    int code = HVD_OK;
    if (!mark) {
        mark = calloc(1, sizeof *mark);
        HVD_ASSERT(mark);
        *mark = (struct hvd_gpu_event){.cuda = cuda, .ctx = device->ctx, .release = take_back, .owner = device};
        code = check(cuda->EventCreate(&mark->event, NO_TIMING), "make an event", error);
        if (code != HVD_OK) {
            free(mark);
            hvd_nccl_device_drop(device);
            return NULL;
        }
    }
    atomic_store(&mark->references, 1);
    code = check(cuda->EventRecord(mark->event, device->stream), "record an event", error);
    if (code == HVD_OK)
        return mark;
    hvd_gpu_event_drop(mark);
    return NULL;
}

int hvd_nccl_enter(struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    return check(hvd_cuda_enter(plane->cuda, plane->device->ctx, &plane->mode), "use a device", error);
}

void hvd_nccl_leave(struct hvd_nccl_plane *plane)
{
    hvd_cuda_leave(plane->cuda, plane->mode);
}
