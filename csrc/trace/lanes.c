/* lanes.c - lanes of tensors.
 *
 * A lane with a name is found by a hash of set and name, 64 bits wide: two names of a job that share one would share a
 * lane, and nothing worse. Lanes of what has no name are stacks by kind and set, the last one given back on top, linked
 * through the table itself: a lane's number leads to the lane below it, and to when it was given back. Threads write
 * into the ring a little later than they look at the clock, so what comes next may have begun before.
 */
#include "lanes.h"

#include "names.h"

#include <stdio.h>

#define A_KIND 0x80000000u /* in a key: no lane's number */

static uint64_t hash_of(int set, const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u ^ (uint64_t)(unsigned)set; /* FNV-1a */
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    hash ^= hash >> 31;
    return hash ? hash : 1;
}

void hvd_lane_open(struct hvd_rows *rows, int rank, int lane, const char *title)
{
    hvd_row_begin(rows, 'M', rank, lane);
    hvd_row_name(rows, "thread_name");
    hvd_row_argument_text(rows, "name", title);
    hvd_row_end(rows);
    hvd_row_begin(rows, 'M', rank, lane);
    hvd_row_name(rows, "thread_sort_index");
    hvd_row_argument(rows, "sort_index", lane);
    hvd_row_end(rows);
}

static int take_idle(struct hvd_lanes *lanes, uint32_t kind, uint64_t *free_ns)
{
    struct hvd_cell *top = hvd_cells_find(&lanes->idle, kind);
    int lane = top ? top->lane : 0;
    struct hvd_cell *idle = lane ? hvd_cells_find(&lanes->idle, (uint64_t)lane) : NULL;
    if (!idle)
        return -1;
    top->lane = idle->lane;
    *free_ns = idle->t_ns;
    hvd_cells_drop(&lanes->idle, idle);
    return lane;
}

int hvd_lanes_take(struct hvd_lanes *lanes, struct hvd_rows *rows, int rank, const struct hvd_span_event *event,
                   uint32_t *unnamed, uint64_t *free_ns)
{
    char title[HVD_NAME_MAX + 32], where[24] = "";
    struct hvd_cell *named = NULL;
    *unnamed = 0;
    *free_ns = 0;
    if (!event->name || event->tag >= HVD_TRACE_UNNAMED) {
        *unnamed = (uint32_t)hash_of(event->set, event->by) | A_KIND;
        int idle = take_idle(lanes, *unnamed, free_ns);
        if (idle >= 0)
            return idle;
    } else if (!(named = hvd_cells_put(&lanes->named, hash_of(event->set, event->name)))) {
        rows->failed = true;
        return 0;
    } else if (named->lane) {
        return named->lane;
    }
    int lane = lanes->next++;
    if (named)
        named->lane = lane;
    if (event->set)
        snprintf(where, sizeof where, " (set %d)", event->set);
    if (named)
        snprintf(title, sizeof title, "%.*s%s", HVD_NAME_MAX, event->name, where);
    else
        snprintf(title, sizeof title, "%.60s without a name%s", event->by, where);
    hvd_lane_open(rows, rank, lane, title);
    return lane;
}

void hvd_lanes_give(struct hvd_lanes *lanes, int lane, uint32_t unnamed, uint64_t t_ns)
{
    struct hvd_cell *idle = unnamed ? hvd_cells_put(&lanes->idle, (uint64_t)lane) : NULL;
    if (!idle)
        return; /* without memory it is not used again */
    *idle = (struct hvd_cell){.key = (uint64_t)lane, .t_ns = t_ns};
    struct hvd_cell *top = hvd_cells_put(&lanes->idle, unnamed);
    if (!top)
        return;
    int below = top->lane;
    top->lane = lane;
    hvd_cells_find(&lanes->idle, (uint64_t)lane)->lane = below; /* it may have moved */
}

void hvd_lanes_close(struct hvd_lanes *lanes)
{
    hvd_cells_close(&lanes->named);
    hvd_cells_close(&lanes->idle);
}
