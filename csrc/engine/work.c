/* work.c - the agenda becomes buckets, a plane moves them, results go to handles.
 *
 * One bucket moves at a time, in agenda order: that is the order of the plan, the same on all ranks, which is
 * all a plane may rely on. A bucket is a scatter list over the tensors of consecutive agenda items with one
 * bucket number; nothing is packed.
 *
 * Ragged results (allgather): ranks may differ in their first dimension, which the signature leaves out. Before
 * the first allgather of a plan one small exchange on the plane tells everybody the first dimensions of all the
 * allgathers of that plan that follow each other; then each result is allocated here and handed over by
 * hvd_result. What the peers said is checked before it sizes an allocation.
 *
 * A plane that fails after it started cannot be undone on the others: the job ends, naming this rank.
 */
#include "engine.h"

#include "../kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct hvd_plan_item *item_at(struct hvd_engine *engine, uint32_t i)
{
    return &engine->agenda.item[(engine->agenda.head + i) & (engine->agenda.room - 1)];
}

static uint64_t bucket_at(const struct hvd_engine *engine, uint32_t i)
{
    return engine->agenda.bucket[(engine->agenda.head + i) & (engine->agenda.room - 1)];
}

static void pop(struct hvd_engine *engine, uint32_t items)
{
    engine->agenda.head = (engine->agenda.head + items) & (engine->agenda.room - 1);
    engine->agenda.count -= items;
}

static struct hvd_slot *slot_of(struct hvd_engine *engine, const struct hvd_plan_item *item)
{
    return item->ticket == HVD_TICKET_NONE ? NULL : &engine->handles.slot[item->ticket];
}

static void finish(struct hvd_engine *engine, const struct hvd_plan_item *item, int code, const char *text)
{
    if (item->ticket == HVD_TICKET_NONE)
        return;
    hvd_trace_add(&engine->trace, HVD_TRACE_finish, item->ticket, (uint64_t)(int64_t)code);
    hvd_handles_finish(&engine->handles, item->ticket, code, text);
}

/* The items at the head that need no plane: refused ones, barriers (the agreement itself was the barrier). */
static bool finish_without_plane(struct hvd_engine *engine)
{
    bool any = false;
    while (engine->agenda.count) {
        struct hvd_plan_item *item = item_at(engine, 0);
        if (item->code == HVD_OK && item->signature.kind != HVD_BARRIER)
            break;
        char text[HVD_TEXT_MAX];
        if (item->code != HVD_OK && item->ticket != HVD_TICKET_NONE)
            hvd_abort_text(engine, item->ticket,
                           "it is not possible while another rank has joined: only allreduce and barrier are; call it "
                           "before any rank joins",
                           text, sizeof text);
        finish(engine, item, item->code, text);
        pop(engine, 1);
        any = true;
    }
    return any;
}

static void reserve_pieces(struct hvd_moving *moving, uint32_t pieces)
{
    if (moving->piece_room >= pieces)
        return;
    uint32_t room = moving->piece_room ? moving->piece_room : 64;
    while (room < pieces)
        room *= 2;
    free(moving->piece);
    moving->piece = malloc(sizeof *moving->piece * room);
    HVD_ASSERT(moving->piece);
    moving->piece_room = room;
}

/* Choose the plane and start; a refusal by all ends the job (it cannot happen: some plane can do everything). */
static void start(struct hvd_engine *engine)
{
    struct hvd_moving *moving = &engine->moving;
    struct hvd_error error = {0};
    for (int i = 0; i < engine->planes_count; i++) {
        const struct hvd_open_plane *open = &engine->planes[i];
        if (!open->plane->can(open->self, &moving->work))
            continue;
        moving->by = open;
        moving->busy = true;
        hvd_count(engine, HVD_COUNT_buckets, 1);
        hvd_count(engine, HVD_COUNT_elements, (int64_t)moving->work.count);
        hvd_trace_add(&engine->trace, HVD_TRACE_start, moving->items, moving->work.count);
        if (open->plane->start(open->self, &moving->work, &error) == HVD_OK)
            return;
        moving->busy = false;
        break;
    }
    if (error.code == HVD_OK)
        hvd_fail(&error, HVD_EINTERNAL, "no plane can do this");
    hvd_engine_abort(engine, engine->options.rank, error.code, error.text);
}

static void work_of(struct hvd_engine *engine, const struct hvd_plan_item *item, struct hvd_work *work)
{
    memset(work, 0, sizeof *work);
    work->kind = item->signature.kind;
    work->op = item->signature.op;
    work->dtype = item->signature.dtype;
    work->root = item->signature.root;
    work->flags = item->flags & HVD_FRESH_IN_PLANE ? HVD_WORK_IN_PLANE : 0;
    work->divide_by = engine->options.size;
    work->prescale = item->signature.prescale;
    work->postscale = item->signature.postscale;
    work->piece = engine->moving.piece;
}

/* Allreduce and broadcast: all consecutive items of the head's bucket. */
static void start_bucket(struct hvd_engine *engine)
{
    static const uint64_t nothing; /* stands in for the memory of an empty tensor: NULL means "joined" */
    struct hvd_moving *moving = &engine->moving;
    uint32_t items = 1;
    while (items < engine->agenda.count && bucket_at(engine, items) == bucket_at(engine, 0))
        items++;
    reserve_pieces(moving, items);
    work_of(engine, item_at(engine, 0), &moving->work);
    for (uint32_t i = 0; i < items; i++) {
        const struct hvd_plan_item *item = item_at(engine, i);
        const struct hvd_slot *slot = slot_of(engine, item);
        struct hvd_piece *piece = &moving->piece[i];
        piece->count = item->count;
        piece->in = slot ? slot->request.input : NULL;
        piece->out = slot ? slot->request.output : NULL;
        if (slot && !piece->in)
            piece->in = &nothing;
        if (slot && !piece->out)
            piece->out = (void *)&nothing;
        moving->work.count += piece->count;
    }
    moving->work.pieces = moving->items = items;
    moving->sizes = false;
    start(engine);
}

/* Ask everyone for the first dimensions of the allgathers at the head that belong to one plan. */
static void start_sizes(struct hvd_engine *engine)
{
    struct hvd_moving *moving = &engine->moving;
    uint32_t size = (uint32_t)engine->options.size, sized = 0;
    while (sized < engine->agenda.count && item_at(engine, sized)->signature.kind == HVD_ALLGATHER &&
           item_at(engine, sized)->code == HVD_OK && bucket_at(engine, sized) >> 32 == bucket_at(engine, 0) >> 32)
        sized++;
    if (moving->rows_room < sized) {
        free(moving->rows);
        free(moving->rows_mine);
        free(moving->count_of);
        moving->rows = malloc(sizeof *moving->rows * sized * size);
        moving->rows_mine = malloc(sizeof *moving->rows_mine * sized);
        moving->count_of = malloc(sizeof *moving->count_of * size);
        HVD_ASSERT(moving->rows && moving->rows_mine && moving->count_of);
        moving->rows_room = sized;
    }
    for (uint32_t i = 0; i < sized; i++)
        moving->rows_mine[i] = slot_of(engine, item_at(engine, i))->request.dims[0];
    for (uint32_t rank = 0; rank < size; rank++)
        moving->count_of[rank] = sized;
    reserve_pieces(moving, 1);
    memset(&moving->work, 0, sizeof moving->work);
    moving->work.kind = HVD_ALLGATHER;
    moving->work.dtype = HVD_DTYPE_int64;
    moving->work.piece = moving->piece;
    moving->work.pieces = 1;
    moving->work.count = sized;
    moving->work.count_of = moving->count_of;
    moving->piece[0] = (struct hvd_piece){moving->rows_mine, moving->rows, sized};
    moving->items = 0;
    moving->sizes = true;
    moving->sized = sized;
    moving->sized_used = 0;
    start(engine);
}

/* Allocate the result of the allgather at the head from what all ranks said. */
static int result_for(struct hvd_engine *engine, const struct hvd_plan_item *item, struct hvd_slot *slot,
                      struct hvd_error *error)
{
    struct hvd_moving *moving = &engine->moving;
    uint32_t size = (uint32_t)engine->options.size;
    uint64_t row_bytes = item->count * (uint64_t)hvd_dtype_bytes(item->signature.dtype), total = 0;
    slot->rows_of = malloc(sizeof *slot->rows_of * size);
    HVD_ASSERT(slot->rows_of);
    for (uint32_t rank = 0; rank < size; rank++) {
        int64_t rows = moving->rows[rank * moving->sized + moving->sized_used];
        if (rows < 0 || (row_bytes && (uint64_t)rows > ((uint64_t)1 << 62) / row_bytes - total))
            return hvd_fail_rank(error, HVD_EINTERNAL, (int)rank,
                                 "rank %u said that it gathers %lld rows of %llu bytes", rank, (long long)rows,
                                 (unsigned long long)row_bytes);
        slot->rows_of[rank] = rows;
        slot->rows += rows;
        total += (uint64_t)rows;
        moving->count_of[rank] = (uint64_t)rows * item->count;
    }
    slot->bytes = (int64_t)(total * row_bytes);
    void *memory = NULL;
    if (posix_memalign(&memory, HVD_CACHE_LINE, slot->bytes ? (size_t)slot->bytes : 1) != 0)
        return hvd_fail_rank(error, HVD_ENOMEM, engine->options.rank,
                             "rank %d has no %.1f MB for the result of allgather '%.200s'", engine->options.rank,
                             (double)slot->bytes / 1e6, slot->request.name ? slot->request.name : "(unnamed)");
    slot->data = memory;
    return HVD_OK;
}

static void start_allgather(struct hvd_engine *engine)
{
    struct hvd_moving *moving = &engine->moving;
    const struct hvd_plan_item *item = item_at(engine, 0);
    struct hvd_slot *slot = slot_of(engine, item);
    struct hvd_error error = {0};
    if (result_for(engine, item, slot, &error) != HVD_OK) {
        hvd_engine_abort(engine, error.culprit, error.code, error.text);
        return;
    }
    moving->sized_used++;
    work_of(engine, item, &moving->work);
    moving->work.pieces = 1;
    moving->work.count_of = moving->count_of;
    moving->work.count = moving->count_of[engine->options.rank];
    moving->piece[0] =
        (struct hvd_piece){slot->request.input ? slot->request.input : slot->data, slot->data, moving->work.count};
    moving->items = 1;
    moving->sizes = false;
    start(engine);
}

static void start_next(struct hvd_engine *engine)
{
    const struct hvd_plan_item *item = item_at(engine, 0);
    if (item->signature.kind != HVD_ALLGATHER)
        start_bucket(engine);
    else if (engine->moving.sized_used == engine->moving.sized)
        start_sizes(engine);
    else
        start_allgather(engine);
}

bool hvd_work_empty(const struct hvd_engine *engine)
{
    return !engine->moving.busy && engine->agenda.count == 0;
}

bool hvd_work_step(struct hvd_engine *engine)
{
    struct hvd_moving *moving = &engine->moving;
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed))
        return false; /* what the plane holds is not touched any more; close waits for nobody */
    bool progress = false;
    if (!moving->busy) {
        progress = finish_without_plane(engine);
        if (engine->agenda.count == 0)
            return progress;
        start_next(engine);
        progress = true;
    }
    if (!moving->busy)
        return progress;
    struct hvd_error error = {0};
    int code = moving->by->plane->poll(moving->by->self, &moving->work, &progress, &error);
    if (code == HVD_AGAIN)
        return progress;
    moving->busy = false;
    if (code != HVD_OK) {
        hvd_engine_abort(engine, error.culprit >= 0 ? error.culprit : engine->options.rank, code, error.text);
        return true;
    }
    for (uint32_t i = 0; i < moving->items; i++)
        finish(engine, item_at(engine, i), HVD_OK, NULL);
    pop(engine, moving->items);
    return true;
}

void hvd_work_close(struct hvd_engine *engine)
{
    free(engine->moving.piece);
    free(engine->moving.count_of);
    free(engine->moving.rows);
    free(engine->moving.rows_mine);
    memset(&engine->moving, 0, sizeof engine->moving);
}
