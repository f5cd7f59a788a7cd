/* run_queue.c - a queue of runs in an array.
 *
 * New runs go behind the last, the oldest is taken from the front, and what was taken there makes room again when the
 * end is reached. A bucket's items are agreed at once, so there are few runs, however many tensors a step has. An item
 * whose time nobody knows counts as agreed now: its span is short then, and not wrong.
 */
#include "run_queue.h"

#include <stdlib.h>
#include <string.h>

#define RUNS_FIRST 64

static bool make_room(struct hvd_queue *queue)
{
    if (queue->first + queue->count < queue->room)
        return true;
    if (queue->count < queue->room / 2) {
        memmove(queue->run, queue->run + queue->first, queue->count * sizeof *queue->run);
        queue->first = 0;
        return true;
    }
    uint32_t room = queue->room ? 2 * queue->room : RUNS_FIRST;
    struct hvd_agreed_run *run = realloc(queue->run, room * sizeof *run);
    if (!run)
        return false;
    queue->run = run;
    queue->room = room;
    return true;
}

/* In front of the first: as much as there is, so that who pushes there again and again moves little. */
static bool make_front(struct hvd_queue *queue)
{
    uint32_t gap = queue->count + RUNS_FIRST / 2, room = gap + queue->count + RUNS_FIRST / 2;
    if (queue->first)
        return true;
    if (room > queue->room) {
        struct hvd_agreed_run *run = realloc(queue->run, room * sizeof *run);
        if (!run)
            return false;
        queue->run = run;
        queue->room = room;
    }
    memmove(queue->run + gap, queue->run, queue->count * sizeof *queue->run);
    queue->first = gap;
    return true;
}

static void forget_oldest(struct hvd_queue *queue, uint64_t items)
{
    queue->items -= items;
    while (items) {
        struct hvd_agreed_run *oldest = &queue->run[queue->first];
        uint64_t some = oldest->items < items ? oldest->items : items;
        items -= some;
        oldest->items -= some;
        if (oldest->items == 0) {
            queue->first++;
            queue->count--;
        }
    }
}

bool hvd_queue_agreed(struct hvd_queue *queue, uint64_t before, uint64_t t_ns, uint64_t items)
{
    if (queue->items > before)
        forget_oldest(queue, queue->items - before);
    if (queue->items < before) { /* nobody knows when those were */
        uint64_t missing = before - queue->items;
        if (!make_front(queue))
            return false;
        queue->run[--queue->first] = (struct hvd_agreed_run){t_ns, missing};
        queue->count++;
        queue->items += missing;
    }
    if (items == 0)
        return true;
    if (!make_room(queue))
        return false;
    queue->run[queue->first + queue->count++] = (struct hvd_agreed_run){t_ns, items};
    queue->items += items;
    return true;
}

uint64_t hvd_queue_take(struct hvd_queue *queue, uint64_t otherwise)
{
    if (queue->items == 0)
        return otherwise;
    uint64_t t_ns = queue->run[queue->first].t_ns;
    forget_oldest(queue, 1);
    return t_ns;
}

void hvd_queue_close(struct hvd_queue *queue)
{
    free(queue->run);
    *queue = (struct hvd_queue){0};
}
