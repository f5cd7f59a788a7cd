/* spans.h - events of one rank become rows of a timeline: spans in lanes, under the names that Horovod gave them.
 *
 * Events are fed one by one, oldest first, by one thread; whether they come from the ring of this process or from a
 * record of another one is all the same. A caller takes the rows of some events, and forgets them.
 */
#ifndef HVD_TRACE_SPANS_H
#define HVD_TRACE_SPANS_H

#include "json_rows.h"

struct hvd_span_event {
    uint64_t t_ns;
    int what; /* HVD_TRACE_* */
    uint32_t tag;
    int set;          /* 0 to 255 */
    uint64_t value;   /* submit, start: bytes; round: items that waited before; finish, end, abort: -code */
    const char *by;   /* the kind of collective; of a start the plane */
    const char *name; /* of the tensor; NULL: not known. Of one without a name, what stands for it */
};

struct hvd_spans;

/* title: of the rank. offset_ns: added to all times. mark_cycles: agreements are shown. NULL: no memory. The first rows
 * are there then. */
struct hvd_spans *hvd_spans_new(int rank, const char *title, int64_t offset_ns, bool mark_cycles);
void hvd_spans_free(struct hvd_spans *spans); /* NULL is none */
void hvd_spans_feed(struct hvd_spans *spans, const struct hvd_span_event *event);
/* What is open ends with the last event: the recording ends here. */
void hvd_spans_end(struct hvd_spans *spans);
struct hvd_rows *hvd_spans_rows(struct hvd_spans *spans);

#endif
