/* device.c - the ranks of a set that have tensors on devices greet each other, once, and know who does their works.
 *
 * A plane for devices is open everywhere and has loaded nothing. When the first work on a device of a set has come to
 * the head of the agenda, at the same place in the order of all its ranks, each says hello: an allgather of some
 * bytes over the planes that move the CPU's memory. From what all have said the plane decides, the same on all ranks,
 * whether it is for this set. If it is not, the set's works on devices go by way of the CPU (stage.c) from then on, and
 * a notice says why; it is for whoever asks, since the core prints nothing.
 *
 * When a job fails, what runs on devices is ended at once: a collective that waits there for a lost rank would keep the
 * user's own work on that device waiting, too.
 */
#include "engine.h"

#include "../kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct hvd_open_plane *for_devices(struct hvd_set *set)
{
    for (int i = 0; i < set->planes_count; i++)
        if (set->planes[i].plane->device)
            return &set->planes[i];
    return NULL;
}

static void start_exchange(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    hvd_ragged_counts(set);
    hvd_work_pieces(moving, 1);
    for (int rank = 0; rank < set->size; rank++)
        moving->count_of[rank] = HVD_HELLO_BYTES;
    memset(&moving->work, 0, sizeof moving->work);
    moving->work.kind = HVD_ALLGATHER;
    moving->work.dtype = HVD_DTYPE_uint8;
    moving->work.piece = moving->piece;
    moving->work.pieces = 1;
    moving->work.count = HVD_HELLO_BYTES;
    moving->work.count_of = moving->count_of;
    moving->piece[0] =
        (struct hvd_piece){set->hello + (size_t)set->size * HVD_HELLO_BYTES, set->hello, HVD_HELLO_BYTES};
    moving->items = 0;
    moving->sizes = false;
    moving->greeting = true;
    hvd_work_start(engine, set);
}

static void notice(struct hvd_engine *engine, const struct hvd_set *set, const char *why)
{
    if (atomic_load(&engine->noticed))
        return;
    snprintf(engine->notice, sizeof engine->notice,
             "tensors on GPUs go by way of the CPU in process set %d, which is slow: %.400s", set->number, why);
    atomic_store(&engine->noticed, 1);
}

bool hvd_device_greets(struct hvd_engine *engine, struct hvd_set *set)
{
    if (set->greeted || !hvd_item_on_device(hvd_work_item(set, 0)))
        return false;
    struct hvd_open_plane *open = for_devices(set);
    struct hvd_work first = {.kind = HVD_BARRIER};
    for (uint32_t i = 0; i < set->agenda.count && !first.device; i++) {
        const struct hvd_slot *slot = hvd_work_slot(engine, hvd_work_item(set, i));
        first.device = slot ? slot->request.device : 0;
    }
    HVD_ASSERT(open);
    atomic_store(&engine->silent, true);
    set->hello = calloc((size_t)set->size + 1, HVD_HELLO_BYTES);
    HVD_ASSERT(set->hello);
    if (set->alone) {
        open->plane->hello(open->self, &first, set->hello);
        hvd_device_met(engine, set);
        return false;
    }
    open->plane->hello(open->self, &first, set->hello + (size_t)set->size * HVD_HELLO_BYTES);
    start_exchange(engine, set);
    return true;
}

void hvd_device_met(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_open_plane *open = for_devices(set);
    struct hvd_error error = {0};
    set->moving.greeting = false;
    set->greeted = true;
    open->refused = open->plane->met(open->self, set->hello, &error) != HVD_OK;
    free(set->hello);
    set->hello = NULL;
    if (open->refused)
        notice(engine, set, error.text);
}

bool hvd_device_settle(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_open_plane *open = for_devices(set);
    struct hvd_error error = {0};
    int code = open->plane->settle(open->self, &error);
    if (code == HVD_AGAIN)
        return false;
    set->on_stream = false;
    if (code != HVD_OK)
        hvd_engine_abort(engine, engine->options.rank, code, error.text);
    bool under_way = false;
    for (int i = 0; i < engine->sets; i++)
        under_way |= engine->set[i]->on_stream;
    if (!under_way && code == HVD_OK)
        hvd_block_free(false);
    return true;
}

void hvd_device_abandon(struct hvd_set *set)
{
    struct hvd_open_plane *open = set->greeted ? for_devices(set) : NULL;
    if (open)
        open->plane->abandon(open->self);
}

int hvd_engine_notice(struct hvd_engine *engine, char *text, size_t text_bytes)
{
    uint32_t fresh = 1;
    if (!atomic_compare_exchange_strong(&engine->noticed, &fresh, 2))
        return 0;
    hvd_text_copy(text, text_bytes, engine->notice);
    return 1;
}
