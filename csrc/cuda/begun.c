/* begun.c - what has a device been given so far, where a framework does not tell on which stream?
 *
 * TensorFlow's kernels in C cannot ask for the stream that computes (TF_GetStream is for devices that are plugged in),
 * and its allocator gives out memory that is free for the host while kernels launched before still use it. So a
 * collective has to wait for whatever may write its input, and for whatever may still use the memory of its output. The
 * driver can say that for all streams of a context at once: cuCtxRecordEvent, since CUDA 12.5. Frameworks work in the
 * device's primary context, and so do we.
 *
 * Such a mark stands for too much rather than too little: copies of the next batch, and our own stream with the
 * collectives that lie there. Can that make ranks wait for each other in a ring? No. Let w be a collective whose tensor
 * is ready after such a mark. The mark was made before w was submitted, so what it stands for was launched before w:
 * kernels of the framework, which end by themselves, since it never lets a stream of its own wait for ours
 * (tensorflow/flight.c tells of the end when it is there), and collectives of ours that this rank began before w. Works
 * of all sets and lineups begin in ascending order on every rank (engine/order.c), so those are lesser than w. That
 * holds on each rank of w with what its own mark stands for, on whichever device. So w waits for lesser works only, and
 * the least one that has not ended waits for none: it ends. What goes by way of the CPU (engine/stage.c) puts copies
 * and kernels on streams that wait for nothing but marks and what lies before them, and counts as its work does.
 * (Another library's collectives on the framework's streams are in the mark as any kernel is: they must end without
 * ours, as they must for anybody who synchronizes a device.)
 *
 * A context in which a CUDA graph is being captured cannot be recorded: the driver refuses, and the capture is spoilt.
 *
 * Devices, streams for copies and events belong to the process and have a lock; marks come back and are used again. A
 * device that nobody holds a mark of is given back when an engine ends.
 */
#include "begun.h"

#include <pthread.h>
#include <stdlib.h>

struct place {
    const struct hvd_cuda *cuda;
    int ordinal, handle, lent;
    void *ctx, *stream;     /* stream: of copies; NULL: there was none yet */
    struct hvd_mark *marks; /* that nobody holds */
    struct place *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *places;

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

bool hvd_begun_can(void)
{
    return hvd_cuda_has("cuCtxRecordEvent") && hvd_cuda_has("cuPointerGetAttribute");
}

enum { DEVICE_ORDINAL = 9, NO_CONTEXT = 201 };

/* For a driver that wants some context to be the thread's: that of a device which is in use, and none is begun. */
static int ask_inside(const struct hvd_cuda *cuda, int *ordinal, uintptr_t memory)
{
    int count = 0, code = NO_CONTEXT;
    cuda->DeviceGetCount(&count);
    for (int i = 0; i < count && code == NO_CONTEXT; i++) {
        int device, active = 0;
        unsigned flags;
        void *ctx;
        if (cuda->DeviceGet(&device, i) != 0 || cuda->DevicePrimaryCtxGetState(device, &flags, &active) != 0 ||
            !active || cuda->DevicePrimaryCtxRetain(&ctx, device) != 0)
            continue;
        if (cuda->CtxPushCurrent(ctx) == 0) {
            code = cuda->PointerGetAttribute(ordinal, DEVICE_ORDINAL, memory);
            cuda->CtxPopCurrent(&ctx);
        }
        cuda->DevicePrimaryCtxRelease(device);
    }
    return code;
}

int hvd_begun_on(const void *memory, struct hvd_error *error)
{
    int ordinal = -1, code = NO_CONTEXT;
    const struct hvd_cuda *cuda = hvd_cuda_load(error);
    if (!cuda)
        return error->code;
    if (cuda->PointerGetAttribute)
        code = cuda->PointerGetAttribute(&ordinal, DEVICE_ORDINAL, (uintptr_t)memory);
    if (code == NO_CONTEXT && cuda->PointerGetAttribute && cuda->DevicePrimaryCtxGetState)
        code = ask_inside(cuda, &ordinal, (uintptr_t)memory);
    if (code != 0 || ordinal < 0)
        return hvd_fail(error, HVD_EINVAL, HVD675 "the memory at %p is on no GPU that CUDA's driver knows", memory);
    return ordinal;
}

/* Under the lock. */
static struct place *place_of(int ordinal, struct hvd_error *error)
{
    struct place *place = places;
    while (place && place->ordinal != ordinal)
        place = place->next;
    const struct hvd_cuda *cuda = place ? NULL : hvd_cuda_load(error);
    if (place || !cuda)
        return place;
    if (!cuda->CtxRecordEvent) {
        hvd_fail(error, HVD_EINIT, HVD674 "the driver of CUDA (%s) has no cuCtxRecordEvent", cuda->path);
        return NULL;
    }
    place = calloc(1, sizeof *place);
    HVD_ASSERT(place);
    *place = (struct place){.cuda = cuda, .ordinal = ordinal, .next = places};
    int code = check(cuda->DeviceGet(&place->handle, ordinal), "find the device of a tensor", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&place->ctx, place->handle), "use a device", error);
    if (code == HVD_OK)
        return places = place;
    free(place);
    return NULL;
}

static void take_back(struct hvd_mark *mark)
{
    struct place *place = mark->owner;
    pthread_mutex_lock(&lock);
    mark->next = place->marks;
    place->marks = mark;
    place->lent--;
    pthread_mutex_unlock(&lock);
}

/* Under the lock, in the context. Not recorded yet. */
static struct hvd_mark *take(struct place *place, struct hvd_error *error)
{
    enum { NO_TIMING = 2 };
    struct hvd_mark *mark = place->marks;
    if (mark) {
        place->marks = mark->next;
    } else {
        mark = calloc(1, sizeof *mark);
        HVD_ASSERT(mark);
        *mark = (struct hvd_mark){.cuda = place->cuda, .ctx = place->ctx, .release = take_back, .owner = place};
        if (check(place->cuda->EventCreate(&mark->event, NO_TIMING), "make an event", error) != HVD_OK) {
            free(mark);
            return NULL;
        }
    }
    place->lent++;
    atomic_store(&mark->references, 1);
    return mark;
}

struct hvd_mark *hvd_begun_mark(int ordinal, struct hvd_error *error)
{
    struct hvd_mark *mark = NULL;
    int mode, code = HVD_EINIT;
    pthread_mutex_lock(&lock);
    struct place *place = place_of(ordinal, error);
    if (place && (code = check(hvd_cuda_enter(place->cuda, place->ctx, &mode), "use a device", error)) == HVD_OK) {
        mark = take(place, error);
        code =
            mark ? check(place->cuda->CtxRecordEvent(place->ctx, mark->event),
                         "record what a device has been given (it refuses while a CUDA graph is being captured)", error)
                 : HVD_EINTERNAL;
        hvd_cuda_leave(place->cuda, mode);
    }
    pthread_mutex_unlock(&lock);
    if (code == HVD_OK || !mark)
        return mark;
    hvd_mark_drop(mark);
    return NULL;
}

/* A mark for the end of a copy, and the stream for it, which waits for `begun`. */
static struct hvd_mark *prepare(const struct hvd_mark *begun, struct hvd_error *error)
{
    enum { NON_BLOCKING = 1 };
    struct place *place = begun->owner;
    const struct hvd_cuda *cuda = place->cuda;
    struct hvd_mark *mark = NULL;
    int mode, least = 0, greatest = 0;
    pthread_mutex_lock(&lock);
    int code = check(hvd_cuda_enter(cuda, place->ctx, &mode), "use a device", error);
    if (code == HVD_OK) {
        cuda->CtxGetStreamPriorityRange(&least, &greatest);
        if (!place->stream)
            code =
                check(cuda->StreamCreateWithPriority(&place->stream, NON_BLOCKING, greatest), "make a stream", error);
        if (code == HVD_OK)
            code = check(cuda->StreamWaitEvent(place->stream, begun->event, 0), "wait for memory", error);
        if (code == HVD_OK)
            mark = take(place, error);
        hvd_cuda_leave(cuda, mode);
    }
    pthread_mutex_unlock(&lock);
    return mark;
}

struct hvd_mark *hvd_begun_fetch(struct hvd_block *block, const struct hvd_mark *behind, uintptr_t to, size_t bytes,
                                 struct hvd_error *error)
{
    struct hvd_mark *begun = hvd_begun_mark(block->ordinal, error), *mark = begun ? prepare(begun, error) : NULL;
    if (begun)
        hvd_mark_drop(begun);
    if (!mark)
        return NULL;
    struct place *place = mark->owner;
    int mode, code = hvd_block_fetch(block, behind, to, bytes, place->stream, error);
    if (code == HVD_OK)
        code = check(hvd_cuda_enter(place->cuda, place->ctx, &mode), "use a device", error);
    if (code == HVD_OK) {
        code = check(place->cuda->EventRecord(mark->event, place->stream), "record an event", error);
        hvd_cuda_leave(place->cuda, mode);
    }
    if (code == HVD_OK)
        return mark;
    hvd_mark_drop(mark);
    return hvd_begun_mark(block->ordinal, NULL); /* the copy may have been begun, and be the last of what was */
}

static void end(struct place *place)
{
    int mode;
    bool current = hvd_cuda_enter(place->cuda, place->ctx, &mode) == 0;
    while (place->marks) {
        struct hvd_mark *mark = place->marks;
        place->marks = mark->next;
        if (current)
            place->cuda->EventDestroy(mark->event);
        free(mark);
    }
    if (current && place->stream)
        place->cuda->StreamDestroy(place->stream);
    if (current)
        hvd_cuda_leave(place->cuda, mode);
    place->cuda->DevicePrimaryCtxRelease(place->handle);
    free(place);
}

void hvd_begun_free(void)
{
    pthread_mutex_lock(&lock);
    for (struct place **at = &places; *at && !hvd_cuda_hangs();) {
        struct place *place = *at;
        if (place->lent) {
            at = &place->next;
        } else {
            *at = place->next;
            end(place);
        }
    }
    pthread_mutex_unlock(&lock);
}
