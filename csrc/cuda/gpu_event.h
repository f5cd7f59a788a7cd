/* gpu_event.h - a point on a device's stream that whoever touches a collective's memory waits for.
 *
 * A plane for devices says that a work is done when it lies on the device's stream: no thread waits for the device. The
 * mark behind it is an event, counted: the plane holds one reference, every handle of the work another. Whoever made it
 * gets it back with the last one, for the next work. Any thread may call what is here.
 */
#ifndef HVD_CUDA_MARK_H
#define HVD_CUDA_MARK_H

#include "cuda.h"

#include <stdatomic.h>

struct hvd_gpu_event {
    const struct hvd_cuda *cuda;
    void *ctx, *event;
    _Atomic uint32_t references;
    void (*release)(struct hvd_gpu_event *mark); /* set by who made it; called by hvd_gpu_event_drop */
    void *owner;                                 /* its own */
    struct hvd_gpu_event *before; /* reached when the device has come to the work that this one lies behind; NULL: not
                                known. A reference of this one's own */
    struct hvd_gpu_event *next;
};

static inline void hvd_gpu_event_keep(struct hvd_gpu_event *mark)
{
    atomic_fetch_add(&mark->references, 1);
}
static inline void hvd_gpu_event_drop(struct hvd_gpu_event *mark)
{
    if (atomic_fetch_sub(&mark->references, 1) == 1)
        mark->release(mark);
}

/* HVD_OK: the device has got there. HVD_AGAIN: not yet. */
int hvd_gpu_event_reached(const struct hvd_gpu_event *mark, struct hvd_error *error);
/* What is put on this stream from now on comes after it; the caller waits for nothing. */
int hvd_gpu_event_follow(const struct hvd_gpu_event *mark, void *stream, struct hvd_error *error);

#endif
