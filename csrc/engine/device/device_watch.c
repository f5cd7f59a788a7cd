/* device_watch.c - what has been launched on a device, and does not end there: since when, and what is it?
 *
 * A work on a device is finished when it lies on the device's stream (plane/nccl.c); no request waits for it any more,
 * and no bucket moves. If a peer is stopped or cut off then, or the network is lost, it never ends there, and whoever
 * asks the device for the result waits for ever. So the clock of stall_check.c looks here, too.
 *
 * Of each set what was launched and has not ended, as far as is known, stands in a queue, for it ends in that order.
 * The first is watched. Time counts from when the device has come to the mark that lies behind what this work waited
 * for (gpu_event.h, `before`), as far as the ticks of the clock can tell: then the work is all that keeps the stream.
 * What the user computes on the device before it is no stall, however long that takes; nor is another set's work in
 * front of it, which that set watches.
 *
 * The queue is emptied when the plane finds that all is done, and looked through when it is long; so it holds what is
 * under way and not much more.
 */
#include "../engine.h"

#include <stdlib.h>
#include <string.h>

#define LONG 64 /* so many may wait unasked */

const struct hvd_watched *hvd_watch_first(const struct hvd_set *set)
{
    return set->watch.count ? &set->watch.work[set->watch.head] : NULL;
}

/* The first is done with. */
static void pop(struct hvd_watch *watch)
{
    hvd_gpu_event_drop(watch->work[watch->head].behind);
    watch->head++;
    watch->count--;
    watch->stands_ns = 0;
}

static bool has_ended(const struct hvd_gpu_event *mark)
{
    struct hvd_error ignored = {0};
    return hvd_gpu_event_reached(mark, &ignored) != HVD_AGAIN; /* of a failure the plane tells */
}

static struct hvd_watched *push(struct hvd_watch *watch)
{
    while (watch->count >= LONG && has_ended(watch->work[watch->head].behind))
        pop(watch);
    bool full = watch->head + watch->count == watch->room;
    if (full && watch->head > watch->room / 2) { /* so it is moved once in many times */
        memmove(watch->work, watch->work + watch->head, sizeof *watch->work * watch->count);
        watch->head = 0;
    } else if (full) {
        watch->room = watch->room ? 2 * watch->room : 8;
        watch->work = realloc(watch->work, sizeof *watch->work * watch->room);
        HVD_ASSERT(watch->work);
    }
    return &watch->work[watch->head + watch->count++];
}

void hvd_watch_launched(struct hvd_engine *engine, struct hvd_set *set)
{
    const struct hvd_moving *moving = &set->moving;
    if (!moving->work.behind)
        return;
    set->on_stream = true;
    const struct hvd_plan_item *item = hvd_work_item(set, 0);
    const struct hvd_slot *slot = hvd_work_slot(engine, item);
    struct hvd_watched *watched = push(&set->watch);
    hvd_gpu_event_keep(moving->work.behind);
    watched->behind = moving->work.behind;
    watched->by = moving->by;
    watched->key = item->key;
    watched->kind = item->signature.kind;
    watched->root = slot ? slot->request.root : item->signature.root;
    watched->peer = slot ? slot->request.peer : 0;
    watched->name[0] = '\0'; /* of who has joined: the others know it */
    if (slot && slot->request.name)
        hvd_text_copy(watched->name, sizeof watched->name, slot->request.name);
}

void hvd_watch_look(struct hvd_set *set, uint64_t now_ns)
{
    struct hvd_watch *watch = &set->watch;
    while (watch->count && has_ended(watch->work[watch->head].behind))
        pop(watch);
    if (!watch->count || watch->stands_ns)
        return;
    const struct hvd_gpu_event *before = watch->work[watch->head].behind->before;
    if (!before || has_ended(before))
        watch->stands_ns = now_ns;
}

void hvd_watch_clear(struct hvd_set *set)
{
    while (set->watch.count)
        pop(&set->watch);
    set->watch.head = 0;
}

void hvd_watch_close(struct hvd_set *set)
{
    hvd_watch_clear(set);
    free(set->watch.work);
    set->watch = (struct hvd_watch){0};
}

void hvd_watch_where(const struct hvd_set *set, char *text, size_t text_bytes)
{
    const struct hvd_open_plane *by = hvd_watch_first(set)->by;
    text[0] = '\0';
    if (by->plane->where)
        by->plane->where(by->self, text, text_bytes);
}
