/* execute.c - the agenda becomes buckets, a plane moves them, results go to handles.
 *
 * One bucket of a set moves at a time, in agenda order: that is the order of the plan, the same on all ranks, which
 * is all a plane may rely on. A bucket is a scatter list over the tensors of consecutive agenda items with one
 * bucket number; nothing is packed. Sets have agendas of their own: theirs move side by side.
 *
 * What a collective is to the engine may be something simpler to a plane: a reduce is an allreduce that all but the
 * root give no place for the result; a barrier is nothing, since the agreement itself was the barrier; a send is an
 * alltoall with one cell that is not zero (ragged.c, which also does allgather and alltoall). An Adasum is a series
 * of works (adasum.c), and its bucket is done with the last of them.
 *
 * A plane that fails after it started cannot be undone on the others: the job ends, naming this rank.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void pop(struct hvd_set *set, uint32_t items)
{
    set->agenda.head = (set->agenda.head + items) & (set->agenda.room - 1);
    set->agenda.count -= items;
}

/* behind: of a work that lies on a device's stream. */
static void finish(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_plan_item *item,
                   struct hvd_gpu_event *behind, int code, const char *text, uint64_t now_ns)
{
    const struct hvd_slot *slot = hvd_work_slot(engine, item);
    if (hvd_steps_aside(slot))
        set->aside--;
    else
        hvd_trace_add_at(&engine->trace, now_ns, HVD_TRACE_finish, slot ? atomic_load(&slot->tensor) : 0,
                         hvd_trace_value(item->signature.kind, set->number, (uint64_t)-code));
    if (!slot)
        return;
    if (behind) {
        hvd_gpu_event_keep(behind);
        engine->handles.slot[item->ticket].behind = behind;
    }
    hvd_handles_finish(&engine->handles, item->ticket, code, text);
}

/* The items at the head that need no plane: refused ones, barriers. */
static bool finish_without_plane(struct hvd_engine *engine, struct hvd_set *set)
{
    bool any = false;
    while (set->agenda.count) {
        struct hvd_plan_item *item = hvd_work_item(set, 0);
        if (item->code == HVD_OK && item->signature.kind != HVD_BARRIER)
            break;
        char text[HVD_TEXT_MAX];
        if (item->code != HVD_OK && item->ticket != HVD_TICKET_NONE)
            hvd_abort_text(engine, item->ticket,
                           "it is not possible while another rank has joined: only allreduce, reduce and barrier are; "
                           "call it before any rank joins" HVD_ENDS(351),
                           text, sizeof text);
        finish(engine, set, item, NULL, item->code, text, hvd_now_ns());
        pop(set, 1);
        any = true;
    }
    if (any && hvd_set_spans_hosts(set))
        set->served_ns = hvd_now_ns();
    return any;
}

/* A tensor of this rank; with no slot this rank has joined. An empty tensor has no memory, but NULL says "joined". */
static struct hvd_piece piece_of(const struct hvd_set *set, const struct hvd_plan_item *item,
                                 const struct hvd_slot *slot)
{
    static const uint64_t nothing;
    struct hvd_piece piece = {NULL, NULL, item->count};
    if (!slot)
        return piece;
    piece.in = slot->request.input ? slot->request.input : &nothing;
    piece.out = slot->request.output ? slot->request.output : (void *)(uintptr_t)&nothing;
    if (item->signature.kind == HVD_REDUCE && item->signature.root != set->rank)
        piece.out = NULL;
    return piece;
}

/* The next plane work of an Adasum. False: that was the last. */
static bool compose(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    moving->composed = hvd_adasum_next(&moving->adasum, &moving->work) == HVD_AGAIN;
    if (moving->composed)
        hvd_work_start(engine, set);
    return moving->composed;
}

static bool is_adasum(const struct hvd_work *work)
{
    return work->kind == HVD_ALLREDUCE && work->op == HVD_OP_adasum;
}

static void start_adasum(struct hvd_engine *engine, struct hvd_set *set)
{
    hvd_adasum_open(&set->moving.adasum, &set->moving.work, set->rank, set->size);
    bool more = compose(engine, set);
    HVD_ASSERT(more);
}

/* True: the votes that agreed on this work have done it. */
static bool rode(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    int code = hvd_eager_take(set, &moving->work);
    if (code == HVD_AGAIN)
        return false;
    moving->busy = moving->rode = code == HVD_OK;
    if (code != HVD_OK)
        hvd_engine_abort(engine, engine->options.rank, code,
                         "a tensor came twice with the votes of other ranks; please report this" HVD_ENDS(901));
    if (!hvd_set_spans_hosts(set)) { /* for counters: the plane that would have done it, in the same memory */
        int first = 0;
        while (first < set->planes_count - 1 && set->planes[first].plane->device)
            first++;
        moving->by = &set->planes[first];
    }
    hvd_count(engine, HVD_COUNT_rides, 1);
    hvd_steps_begun(engine, set);
    return true;
}

/* Allreduce, reduce and broadcast: all consecutive items of the head's bucket. */
static void start_bucket(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    uint32_t items = 1;
    while (items < set->agenda.count && hvd_work_bucket(set, items) == hvd_work_bucket(set, 0))
        items++;
    items = hvd_device_together(set, items);
    hvd_work_pieces(moving, items);
    hvd_work_describe(set, hvd_work_item(set, 0));
    for (uint32_t i = 0; i < items; i++) {
        const struct hvd_plan_item *item = hvd_work_item(set, i);
        moving->piece[i] = piece_of(set, item, hvd_work_slot(engine, item));
        hvd_work_place(set, i, hvd_work_slot(engine, item));
        moving->work.count += item->count;
        if (set->wires || (set->riders && set->riders->waits_for))
            moving->work.tag = hvd_speculate_tag(moving->work.tag, item->key, hvd_work_bucket(set, i));
    }
    moving->work.pieces = moving->items = items;
    moving->sizes = false;
    if (is_adasum(&moving->work) && hvd_item_on_device(hvd_work_item(set, 0))) {
        hvd_work_by_the_cpu(engine, set, &(struct hvd_error){0});
    } else if (is_adasum(&moving->work)) {
        start_adasum(engine, set);
    } else if (!rode(engine, set)) {
        hvd_work_start(engine, set);
    }
}

/* Rows of a reducescatter that are rank's: the first ranks have one more where they do not divide evenly. */
static uint64_t share_of(uint64_t rows, int size, int rank)
{
    return rows / (uint64_t)size + ((uint64_t)rank < rows % (uint64_t)size);
}

static void start_reducescatter(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    const struct hvd_plan_item *item = hvd_work_item(set, 0);
    uint64_t rows = (uint64_t)item->signature.dims[0];
    hvd_work_pieces(moving, 1);
    hvd_ragged_counts(set);
    for (int rank = 0; rank < set->size; rank++)
        moving->count_of[rank] = rows ? share_of(rows, set->size, rank) * (item->count / rows) : 0;
    hvd_work_describe(set, item);
    moving->piece[0] = piece_of(set, item, hvd_work_slot(engine, item));
    hvd_work_place(set, 0, hvd_work_slot(engine, item));
    moving->work.pieces = moving->items = 1;
    moving->work.count = item->count;
    moving->work.count_of = moving->count_of;
    moving->sizes = false;
    hvd_work_start(engine, set);
}

static void start_next(struct hvd_engine *engine, struct hvd_set *set)
{
    if (hvd_device_greets(engine, set))
        return;
    switch (hvd_work_item(set, 0)->signature.kind) {
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
        hvd_ragged_start(engine, set);
        break;
    case HVD_SEND:
        hvd_ragged_send(engine, set);
        break;
    case HVD_REDUCESCATTER:
        start_reducescatter(engine, set);
        break;
    default:
        start_bucket(engine, set);
    }
}

/* Of a work that the CPU does for devices. */
static int step_stage(struct hvd_engine *engine, struct hvd_set *set, bool *progress, struct hvd_error *error)
{
    struct hvd_moving *moving = &set->moving;
    int code = hvd_stage_poll(&moving->stage, progress, error);
    if (code != HVD_OK || moving->stage.phase != HVD_STAGE_HERE)
        return code;
    if (!moving->by) { /* its pieces lie here now */
        (is_adasum(&moving->work) ? start_adasum : hvd_work_start)(engine, set);
        if (!moving->busy)
            return HVD_AGAIN;
    }
    code = moving->by->plane->poll(moving->by->self, &moving->work, progress, error);
    if (code == HVD_OK && moving->composed && compose(engine, set))
        return HVD_AGAIN;
    if (code == HVD_OK && (code = hvd_stage_return(&moving->stage, error)) == HVD_AGAIN)
        *progress = true;
    return code;
}

bool hvd_work_step(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed))
        return false; /* what the plane holds is not touched any more; close waits for nobody */
    bool progress = set->on_stream && hvd_device_settle(engine, set);
    if (!moving->busy) {
        progress |= finish_without_plane(engine, set);
        if (set->agenda.count == 0)
            return progress;
        start_next(engine, set);
        hvd_flight_start(engine, set);
        progress = true;
    }
    if (!moving->busy)
        return progress;
    if (moving->waits) {
        if (!hvd_order_turn(engine, set))
            return progress;
        moving->waits = false;
    }
    struct hvd_error error;
    hvd_error_none(&error);
    int code = moving->rode ? HVD_OK
               : moving->stage.phase == HVD_STAGE_NONE
                   ? moving->by->plane->poll(moving->by->self, &moving->work, &progress, &error)
                   : step_stage(engine, set, &progress, &error);
    if (code == HVD_AGAIN)
        return progress;
    int culprit = error.culprit >= 0 && error.culprit < set->size ? set->member[error.culprit] : engine->options.rank;
    if (code == HVD_EPEER) { /* once somebody has left, planes tell only of what is missing (plane.h, leaving) */
        hvd_abort_suspect(engine, set, culprit, set->left, error.text);
        return progress;
    }
    moving->busy = false;
    engine->linger.owes |= moving->by && moving->by->plane->linger;
    if (code != HVD_OK) {
        hvd_engine_abort(engine, culprit, code, error.text);
        return true;
    }
    uint64_t now_ns = hvd_now_ns();
    hvd_steps_moved(engine, set, now_ns);
    moving->rode = false;
    if (moving->greeting)
        hvd_device_met(engine, set);
    if (moving->composed && compose(engine, set))
        return true;
    if (set->wires)
        hvd_stream_count(engine, set);
    hvd_watch_launched(engine, set);
    for (uint32_t i = 0; i < moving->items; i++)
        finish(engine, set, hvd_work_item(set, i), moving->work.behind, HVD_OK, NULL, now_ns);
    if (moving->work.behind)
        hvd_gpu_event_drop(moving->work.behind);
    moving->work.behind = NULL;
    if (moving->lineup && moving->lineup->device)
        moving->asked_for -= moving->items;
    pop(set, moving->items);
    set->served_ns = now_ns;
    return true;
}

void hvd_work_close(struct hvd_set *set)
{
    hvd_adasum_close(&set->moving.adasum);
    hvd_stage_close(&set->moving.stage);
    free(set->hello);
    free(set->moving.piece);
    free(set->moving.ready);
    free(set->moving.count_of);
    free(set->moving.rows);
    free(set->moving.rows_mine);
    free(set->moving.devices);
    memset(&set->moving, 0, sizeof set->moving);
}
