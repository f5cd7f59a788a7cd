/* ranges.c - what is a bucket called in a profiler's picture?
 *
 * From its begin, when it has come to the head of the agenda, to its end, when it is done or lies on a device's stream:
 * "hvdlite allreduce grad.3 and 11 more, 1.3 MB, nccl". Sizes of ragged collectives and the greeting of devices have
 * ranges of their own, for they are what a step may wait for unseen. One range for a bucket, however many works it is.
 */
#include "engine.h"

#include "../trace/nvtx.h"

#include <stdio.h>

static const char *by_whom(const struct hvd_moving *moving)
{
    return moving->rode ? "votes" : moving->by ? moving->by->plane->name : "by way of the CPU";
}

void hvd_range_begin(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    char name[200];
    if (!atomic_load_explicit(&hvd_nvtx_on, memory_order_relaxed) || !moving->busy || moving->range)
        return;
    const struct hvd_plan_item *item = hvd_work_item(set, 0);
    const struct hvd_slot *slot = hvd_work_slot(engine, item);
    const char *tensor = slot && slot->request.name ? slot->request.name : "(unnamed)";
    double megabytes = (double)moving->work.count * hvd_dtype_bytes(moving->work.dtype) / 1e6;
    if (moving->greeting)
        snprintf(name, sizeof name, "hvdlite ranks of set %d greet each other", set->number);
    else if (moving->sizes)
        snprintf(name, sizeof name, "hvdlite sizes of %s %.100s", hvd_engine_kind(item->signature.kind), tensor);
    else if (moving->items > 1)
        snprintf(name, sizeof name, "hvdlite %s %.100s and %u more, %.1f MB, %s", hvd_engine_kind(item->signature.kind),
                 tensor, moving->items - 1, megabytes, by_whom(moving));
    else
        snprintf(name, sizeof name, "hvdlite %s %.100s, %.1f MB, %s", hvd_engine_kind(item->signature.kind), tensor,
                 megabytes, by_whom(moving));
    moving->range = hvd_nvtx_begin(name);
}

void hvd_range_end(struct hvd_set *set)
{
    uint64_t range = set->moving.range;
    set->moving.range = 0;
    if (range)
        hvd_nvtx_end(range);
}
