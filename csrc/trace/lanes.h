/* lanes.h - which lane of the picture is a tensor's?
 *
 * One with a name keeps its lane for as long as the timeline lasts, so that its steps stand in a row. Those without
 * share some: as many as were ever on their way at once, of each kind and process set. One thread.
 */
#ifndef HVD_TRACE_LANES_H
#define HVD_TRACE_LANES_H

#include "hash_table.h"
#include "json_rows.h"
#include "spans.h"

struct hvd_lanes {
    struct hvd_cells named; /* by hash of set and name */
    struct hvd_cells idle;  /* without a name, to be used again: by kind and set the first one, by lane the next */
    int next;
};

/* Says of a lane, in rows, what it is. */
void hvd_lane_open(struct hvd_rows *rows, int rank, int lane, const char *title);
/* The lane of a tensor that is submitted; says what it is, if it is new. What is given back: *unnamed, if not 0.
 * *free_ns: until when it was another tensor's. */
int hvd_lanes_take(struct hvd_lanes *lanes, struct hvd_rows *rows, int rank, const struct hvd_span_event *event,
                   uint32_t *unnamed, uint64_t *free_ns);
void hvd_lanes_give(struct hvd_lanes *lanes, int lane, uint32_t unnamed, uint64_t t_ns);
void hvd_lanes_close(struct hvd_lanes *lanes);

#endif
