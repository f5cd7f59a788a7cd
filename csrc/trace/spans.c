/* spans.c - how do events become spans in lanes?
 *
 * A rank is a process of the picture (pid), a tensor is a lane (tid). In it, as Horovod has it: NEGOTIATE_ALLREDUCE
 * from the rank's own submit, with a tick named after the rank, until all ranks have agreed; then ALLREDUCE, in it
 * QUEUE until its bucket begins, then what carries it: NCCL_ALLREDUCE and MPI_ALLREDUCE by Horovod's names,
 * SHM_ALLREDUCE, P2P_ALLREDUCE and HIER_ALLREDUCE by hvdlite's own planes, VOTES_ALLREDUCE for what travelled with the
 * agreement itself. Beside them are lanes for what threads wait for, for buckets, and for CYCLE_START, the ranks'
 * agreements. There is no MEMCPY_IN_FUSION_BUFFER: tensors of the CPU are not packed, and those of a GPU within NCCL's
 * call.
 *
 * The ring does not say which tensors a plan holds: it says how many, and those of a set are finished in the order in
 * which they were agreed. So a queue per set of when items were agreed is all that must be remembered (run_queue.c); an
 * event of a plan says how many were waiting before it, which puts the queue right when events are missing.
 *
 * A span that has begun stands in the file before it has ended: what hangs is seen. Spans of a lane nest.
 *
 * Events of a record are another process's word: whatever they say, rows are well formed, and memory grows with their
 * number only.
 */
#include "spans.h"

#include "lanes.h"
#include "run_queue.h"
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CYCLES = 1, WAITS = 2, BUCKETS = 100, WAITS_MAX = BUCKETS - WAITS, SETS = 256 };
enum { TENSORS = 1000 }; /* the first lane of a tensor; buckets have one a set */

struct set_line {
    struct hvd_queue agreed;
    uint64_t t_ns, bytes; /* of the bucket that is under way */
    int64_t left;         /* of its items; 0: there is none */
    char plane[40];
    bool has_lane;
};

struct hvd_spans {
    int rank;
    int64_t offset_ns;
    bool mark_cycles, cycles_have_lane;
    struct hvd_rows rows;
    struct hvd_lanes lanes;
    struct hvd_cells open, waits; /* by tensor */
    uint32_t in_wait_lane[WAITS_MAX];
    bool wait_has_lane[WAITS_MAX];
    struct set_line set[SETS];
    uint64_t last_ns;
};

/* ---- rows ---- */

static void begin_row(struct hvd_spans *spans, char phase, int lane, uint64_t t_ns)
{
    hvd_row_begin(&spans->rows, phase, spans->rank, lane);
    hvd_row_time(&spans->rows, (int64_t)(t_ns + (uint64_t)spans->offset_ns));
}

static void end_span(struct hvd_spans *spans, int lane, uint64_t t_ns)
{
    begin_row(spans, 'E', lane, t_ns);
    hvd_row_end(&spans->rows);
}

static void open_lane(struct hvd_spans *spans, int lane, const char *title)
{
    hvd_lane_open(&spans->rows, spans->rank, lane, title);
}

static void show_instant(struct hvd_spans *spans, int lane, uint64_t t_ns, const char *name)
{
    begin_row(spans, 'i', lane, t_ns);
    hvd_row_literal(&spans->rows, ",\"s\":\"p\"");
    hvd_row_name(&spans->rows, name);
}

/* ---- tensors on their way ---- */

static uint64_t tensor_of(const struct hvd_span_event *event)
{
    return ((uint64_t)(unsigned)event->set << 32 | event->tag) + 1;
}

/* A tensor is on its way no more. */
static void close_tensor(struct hvd_spans *spans, struct hvd_cell *tensor, uint64_t t_ns)
{
    hvd_lanes_give(&spans->lanes, tensor->lane, tensor->unnamed, t_ns);
    hvd_cells_drop(&spans->open, tensor);
}

/* ---- by event ---- */

static void submit(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    char own[16];
    struct hvd_cell *tensor = hvd_cells_find(&spans->open, tensor_of(event));
    if (tensor) { /* its end was lost */
        end_span(spans, tensor->lane, event->t_ns);
        close_tensor(spans, tensor, event->t_ns);
    }
    uint32_t unnamed;
    uint64_t free_ns;
    int lane = hvd_lanes_take(&spans->lanes, &spans->rows, spans->rank, event, &unnamed, &free_ns);
    uint64_t t_ns = event->t_ns > free_ns ? event->t_ns : free_ns;
    tensor = hvd_cells_put(&spans->open, tensor_of(event));
    if (!tensor) {
        spans->rows.failed = true;
        return;
    }
    tensor->lane = lane;
    tensor->t_ns = t_ns;
    tensor->bytes = event->value;
    tensor->unnamed = unnamed;
    begin_row(spans, 'B', lane, t_ns);
    hvd_row_activity(&spans->rows, "NEGOTIATE_", event->by);
    hvd_row_argument(&spans->rows, "bytes", (int64_t)event->value);
    hvd_row_end(&spans->rows);
    begin_row(spans, 'X', lane, t_ns);
    snprintf(own, sizeof own, "%d", spans->rank);
    hvd_row_literal(&spans->rows, ",\"dur\":0");
    hvd_row_name(&spans->rows, own);
    hvd_row_end(&spans->rows);
}

static void agree(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    struct set_line *set = &spans->set[event->set];
    if (!hvd_queue_agreed(&set->agreed, event->value, event->t_ns, event->tag))
        spans->rows.failed = true;
    if (!spans->mark_cycles)
        return;
    if (!spans->cycles_have_lane)
        open_lane(spans, CYCLES, "agreements");
    spans->cycles_have_lane = true;
    show_instant(spans, CYCLES, event->t_ns, "CYCLE_START");
    hvd_row_argument(&spans->rows, "tensors", event->tag);
    hvd_row_argument(&spans->rows, "set", event->set);
    hvd_row_end(&spans->rows);
}

static void start_bucket(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    struct set_line *set = &spans->set[event->set];
    int lane = BUCKETS + event->set;
    char title[96];
    if (!set->has_lane) {
        if (event->set)
            snprintf(title, sizeof title, "buckets of set %d", event->set);
        open_lane(spans, lane, event->set ? title : "buckets");
        set->has_lane = true;
    }
    if (set->left)
        end_span(spans, lane, event->t_ns);
    set->t_ns = event->t_ns;
    set->bytes = event->value;
    set->left = event->tag ? event->tag : 1; /* until the next one begins */
    snprintf(set->plane, sizeof set->plane, "%s", event->by);
    snprintf(title, sizeof title, "%u tensor%s, %s", event->tag, event->tag == 1 ? "" : "s", set->plane);
    begin_row(spans, 'B', lane, event->t_ns);
    hvd_row_name(&spans->rows, title);
    hvd_row_argument(&spans->rows, "bytes", (int64_t)event->value);
    hvd_row_argument_text(&spans->rows, "plane", set->plane);
    hvd_row_end(&spans->rows);
}

static void show_kind(struct hvd_spans *spans, const struct hvd_span_event *event, const struct hvd_cell *tensor,
                      uint64_t agreed_ns)
{
    begin_row(spans, 'B', tensor->lane, agreed_ns);
    hvd_row_activity(&spans->rows, "", event->by);
    hvd_row_argument(&spans->rows, "bytes", (int64_t)tensor->bytes);
    hvd_row_argument(&spans->rows, "set", event->set);
}

static void show_carried(struct hvd_spans *spans, const struct hvd_span_event *event, const struct hvd_cell *tensor,
                         uint64_t agreed_ns)
{
    const struct set_line *set = &spans->set[event->set];
    uint64_t begun_ns = set->t_ns > agreed_ns ? set->t_ns : agreed_ns;
    char carrier[64];
    show_kind(spans, event, tensor, agreed_ns);
    hvd_row_argument_text(&spans->rows, "plane", set->plane);
    hvd_row_end(&spans->rows);
    begin_row(spans, 'B', tensor->lane, agreed_ns);
    hvd_row_name(&spans->rows, "QUEUE");
    hvd_row_end(&spans->rows);
    end_span(spans, tensor->lane, begun_ns);
    begin_row(spans, 'B', tensor->lane, begun_ns);
    snprintf(carrier, sizeof carrier, "%s_", set->plane);
    hvd_row_activity(&spans->rows, carrier, strcmp(event->by, "broadcast") == 0 ? "bcast" : event->by);
    hvd_row_argument(&spans->rows, "bucket_bytes", (int64_t)set->bytes);
    hvd_row_end(&spans->rows);
    end_span(spans, tensor->lane, event->t_ns);
    end_span(spans, tensor->lane, event->t_ns);
}

static void finish(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    struct set_line *set = &spans->set[event->set];
    bool in_bucket = set->left > 0;
    uint64_t agreed_ns = hvd_queue_take(&set->agreed, event->t_ns);
    if (in_bucket && --set->left == 0)
        end_span(spans, BUCKETS + event->set, event->t_ns);
    struct hvd_cell *tensor = hvd_cells_find(&spans->open, tensor_of(event));
    if (!tensor)
        return; /* this rank had joined, or the begin was lost */
    agreed_ns = agreed_ns > tensor->t_ns ? agreed_ns : tensor->t_ns;
    end_span(spans, tensor->lane, agreed_ns);
    if (in_bucket) {
        show_carried(spans, event, tensor, agreed_ns);
    } else {
        show_kind(spans, event, tensor, agreed_ns);
        if (event->value)
            hvd_row_argument(&spans->rows, "error", (int64_t)(0 - event->value));
        hvd_row_end(&spans->rows);
        end_span(spans, tensor->lane, event->t_ns);
    }
    close_tensor(spans, tensor, event->t_ns);
}

static void end_otherwise(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    struct hvd_cell *tensor = hvd_cells_find(&spans->open, tensor_of(event));
    if (!tensor)
        return;
    begin_row(spans, 'E', tensor->lane, event->t_ns);
    if (event->value)
        hvd_row_argument(&spans->rows, "error", (int64_t)(0 - event->value));
    hvd_row_end(&spans->rows);
    close_tensor(spans, tensor, event->t_ns);
}

static void begin_wait(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    char title[24];
    int number = 0;
    if (hvd_cells_find(&spans->waits, tensor_of(event)))
        return;
    while (number < WAITS_MAX - 1 && spans->in_wait_lane[number])
        number++;
    struct hvd_cell *wait = hvd_cells_put(&spans->waits, tensor_of(event));
    if (!wait) {
        spans->rows.failed = true;
        return;
    }
    wait->lane = WAITS + number;
    spans->in_wait_lane[number]++;
    if (!spans->wait_has_lane[number]) {
        snprintf(title, sizeof title, "waits %d", number + 1);
        open_lane(spans, wait->lane, title);
        spans->wait_has_lane[number] = true;
    }
    begin_row(spans, 'B', wait->lane, event->t_ns);
    hvd_row_name(&spans->rows, event->name ? event->name : event->by);
    hvd_row_end(&spans->rows);
}

static void end_wait(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    struct hvd_cell *wait = hvd_cells_find(&spans->waits, tensor_of(event));
    if (!wait)
        return;
    spans->in_wait_lane[wait->lane - WAITS]--;
    end_span(spans, wait->lane, event->t_ns);
    hvd_cells_drop(&spans->waits, wait);
}

static void show_end_of_rank(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    bool aborted = event->what == HVD_TRACE_abort;
    show_instant(spans, 0, event->t_ns, aborted ? "ABORT" : "LEAVE");
    hvd_row_argument(&spans->rows, "rank", (int32_t)event->tag);
    if (aborted)
        hvd_row_argument(&spans->rows, "error", (int64_t)(0 - event->value));
    hvd_row_end(&spans->rows);
}

void hvd_spans_feed(struct hvd_spans *spans, const struct hvd_span_event *event)
{
    static void (*const act[])(struct hvd_spans *, const struct hvd_span_event *) = {
        [HVD_TRACE_submit] = submit,     [HVD_TRACE_wait] = begin_wait,        [HVD_TRACE_waited] = end_wait,
        [HVD_TRACE_round] = agree,       [HVD_TRACE_start] = start_bucket,     [HVD_TRACE_finish] = finish,
        [HVD_TRACE_end] = end_otherwise, [HVD_TRACE_abort] = show_end_of_rank, [HVD_TRACE_leave] = show_end_of_rank};
    if (event->what < 0 || event->what >= HVD_TRACE_COUNT || event->set < 0 || event->set >= SETS)
        return;
    spans->last_ns = event->t_ns > spans->last_ns ? event->t_ns : spans->last_ns;
    act[event->what](spans, event);
}

/* ---- begin and end ---- */

struct hvd_spans *hvd_spans_new(int rank, const char *title, int64_t offset_ns, bool mark_cycles)
{
    struct hvd_spans *spans = calloc(1, sizeof *spans);
    if (!spans)
        return NULL;
    spans->rank = rank;
    spans->offset_ns = offset_ns;
    spans->mark_cycles = mark_cycles;
    spans->lanes.next = TENSORS;
    hvd_row_begin(&spans->rows, 'M', rank, 0);
    hvd_row_name(&spans->rows, "process_name");
    hvd_row_argument_text(&spans->rows, "name", title);
    hvd_row_end(&spans->rows);
    hvd_row_begin(&spans->rows, 'M', rank, 0);
    hvd_row_name(&spans->rows, "process_sort_index");
    hvd_row_argument(&spans->rows, "sort_index", rank);
    hvd_row_end(&spans->rows);
    return spans;
}

void hvd_spans_end(struct hvd_spans *spans)
{
    for (uint32_t i = 0; i < spans->open.count; i++)
        if (spans->open.cell[i].key)
            end_span(spans, spans->open.cell[i].lane, spans->last_ns);
    for (uint32_t i = 0; i < spans->waits.count; i++)
        if (spans->waits.cell[i].key)
            end_span(spans, spans->waits.cell[i].lane, spans->last_ns);
    for (int set = 0; set < SETS; set++) {
        if (spans->set[set].left)
            end_span(spans, BUCKETS + set, spans->last_ns);
        spans->set[set].left = 0;
    }
    hvd_cells_close(&spans->open);
    hvd_cells_close(&spans->waits);
}

struct hvd_rows *hvd_spans_rows(struct hvd_spans *spans)
{
    return &spans->rows;
}

void hvd_spans_free(struct hvd_spans *spans)
{
    if (!spans)
        return;
    hvd_lanes_close(&spans->lanes);
    hvd_cells_close(&spans->open);
    hvd_cells_close(&spans->waits);
    for (int set = 0; set < SETS; set++)
        hvd_queue_close(&spans->set[set].agreed);
    free(spans->rows.text);
    free(spans);
}
