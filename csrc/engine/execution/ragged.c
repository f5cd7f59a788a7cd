/* ragged.c - collectives whose counts differ between ranks: allgather, alltoall, and send, which is one cell of it.
 *
 * The signature leaves the first dimension out, so a changing number of rows keeps its slot. Before the first ragged
 * item of a plan one small allgather on the plane tells everybody the numbers of all ragged items of that plan
 * that follow each other: an allgather has one (my rows), an alltoall one for each rank (the rows that go there). Then
 * each result lands in the caller's memory, if it gave some of just that size; else it is allocated here, on a device
 * as a block of its memory (cuda/block.c). hvd_result says where it lies. No other size is refused, since peers go on
 * with the work. What the peers said is checked before it sizes anything.
 *
 * Even items need no such exchange: all ranks have agreed on the first dimension with the signature.
 *
 * A send needs none either, since sender and receiver have agreed on the shape. All ranks of the set run the
 * plane's alltoall with it, those between the two with nothing to give or to get.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t nothing; /* stands in for the memory of an empty tensor */

static uint32_t numbers_of(const struct hvd_set *set, const struct hvd_plan_item *item)
{
    return item->signature.kind == HVD_ALLTOALL ? (uint32_t)set->size : 1;
}

void hvd_ragged_counts(struct hvd_set *set)
{
    if (set->moving.count_of)
        return;
    set->moving.count_of = malloc(sizeof *set->moving.count_of * (size_t)set->size * (size_t)set->size);
    HVD_ASSERT(set->moving.count_of);
}

/* What this rank says of one item: its rows, or how many go to each rank. Returns how many numbers. */
static uint32_t say_rows(const struct hvd_set *set, const struct hvd_plan_item *item, const struct hvd_request *request,
                         int64_t *into)
{
    uint32_t numbers = numbers_of(set, item);
    if (item->signature.kind == HVD_ALLGATHER)
        into[0] = request->dims[0];
    else if (request->splits)
        memcpy(into, request->splits, sizeof *into * numbers);
    else
        for (uint32_t rank = 0; rank < numbers; rank++)
            into[rank] = request->dims[0] / set->size;
    return numbers;
}

static void reserve_rows(struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    size_t need = (size_t)moving->width * (size_t)(set->size + 1);
    if (moving->rows_room >= need)
        return;
    free(moving->rows);
    free(moving->rows_mine);
    moving->rows = malloc(sizeof *moving->rows * need);
    moving->rows_mine = malloc(sizeof *moving->rows_mine * need);
    HVD_ASSERT(moving->rows && moving->rows_mine);
    moving->rows_room = need;
}

/* Ask everyone for the numbers of the ragged items at the head that belong to one plan. */
static void start_sizes(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    uint32_t sized = 0, said = 0;
    moving->width = 0;
    while (sized < set->agenda.count) {
        const struct hvd_plan_item *item = hvd_work_item(set, sized);
        if ((item->signature.kind != HVD_ALLGATHER && item->signature.kind != HVD_ALLTOALL) || item->code != HVD_OK ||
            item->signature.dims[0] > 0 || hvd_work_bucket(set, sized) >> 32 != hvd_work_bucket(set, 0) >> 32)
            break;
        moving->width += numbers_of(set, item);
        sized++;
    }
    reserve_rows(set);
    hvd_ragged_counts(set);
    for (uint32_t i = 0; i < sized; i++) {
        const struct hvd_plan_item *item = hvd_work_item(set, i);
        said += say_rows(set, item, &hvd_work_slot(engine, item)->request, moving->rows_mine + said);
    }
    for (int rank = 0; rank < set->size; rank++)
        moving->count_of[rank] = moving->width;
    hvd_work_pieces(moving, 1);
    memset(&moving->work, 0, sizeof moving->work);
    moving->work.kind = HVD_ALLGATHER;
    moving->work.dtype = HVD_DTYPE_int64;
    moving->work.piece = moving->piece;
    moving->work.pieces = 1;
    moving->work.count = moving->width;
    moving->work.count_of = moving->count_of;
    moving->piece[0] = (struct hvd_piece){moving->rows_mine, moving->rows, moving->width};
    moving->items = 0;
    moving->sizes = true;
    moving->sized = sized;
    moving->place = 0;
    hvd_work_start(engine, set);
}

/* An even item at the head: what everybody would say of it. */
static void know_sizes(struct hvd_set *set, const struct hvd_plan_item *item)
{
    struct hvd_moving *moving = &set->moving;
    int64_t rows = item->signature.dims[0];
    moving->width = numbers_of(set, item);
    reserve_rows(set);
    hvd_ragged_counts(set);
    for (size_t i = 0; i < (size_t)moving->width * (size_t)set->size; i++)
        moving->rows[i] = item->signature.kind == HVD_ALLTOALL ? rows / set->size : rows;
    moving->sized = 1;
    moving->place = 0;
}

/* Is `rows` a number of rows, and does `total` not grow out of bounds by it? */
static int add_rows(const struct hvd_set *set, int from, int64_t rows, uint64_t row_bytes, uint64_t *total,
                    struct hvd_error *error)
{
    uint64_t most = ((uint64_t)1 << 62) / (row_bytes ? row_bytes : 1);
    if (rows < 0 || (uint64_t)rows > most - *total)
        return hvd_fail_rank(error, HVD_EINTERNAL, set->member[from],
                             HVD901 "rank %d said that it gives %lld rows of %llu bytes", set->member[from],
                             (long long)rows, (unsigned long long)row_bytes);
    *total += (uint64_t)rows;
    return HVD_OK;
}

/* What everybody said of the item at the head, as the plane wants it; and what this rank gets from each. */
static int count_rows(struct hvd_set *set, const struct hvd_plan_item *item, int64_t *rows_of, uint64_t *given,
                      uint64_t *total, struct hvd_error *error)
{
    struct hvd_moving *moving = &set->moving;
    uint64_t row_bytes = item->count * (uint64_t)hvd_dtype_bytes(hvd_item_dtype(item));
    uint32_t numbers = numbers_of(set, item);
    *given = *total = 0;
    for (int from = 0; from < set->size; from++) {
        const int64_t *said = moving->rows + (size_t)from * moving->width + moving->place;
        uint64_t gives = 0;
        for (uint32_t i = 0; i < numbers; i++) {
            if (add_rows(set, from, said[i], row_bytes, &gives, error) != HVD_OK)
                return error->code;
            moving->count_of[(size_t)from * numbers + i] = (uint64_t)said[i] * item->count;
        }
        rows_of[from] = said[numbers > 1 ? set->rank : 0];
        if (add_rows(set, from, rows_of[from], row_bytes, total, error) != HVD_OK)
            return error->code;
        if (from == set->rank)
            *given = gives;
    }
    return HVD_OK;
}

static int block_for(struct hvd_engine *engine, const struct hvd_plan_item *item, struct hvd_slot *slot,
                     struct hvd_error *error)
{
    struct hvd_error why = {0};
    if (slot->bytes)
        slot->block = hvd_block_take(slot->request.device - 1, (size_t)slot->bytes, &why);
    if (!slot->bytes || slot->block)
        return HVD_OK;
    hvd_text_bare(why.text);
    const char *kind = hvd_engine_kind(item->signature.kind);
    const char *name = HVD_SHOWN(slot->request.name ? slot->request.name : "(unnamed)");
    int rank = engine->options.rank;
    if (why.code != HVD_OK && why.code != HVD_ENOMEM) /* the device has failed, whatever is asked of it */
        return hvd_fail_rank(error, why.code, rank,
                             HVD654 "device %d of rank %d cannot allocate memory for the result of %s '%.200s': "
                                    "%.300s",
                             slot->request.device - 1, rank, kind, name, why.text);
    return hvd_fail_rank(error, HVD_ENOMEM, rank,
                         HVD669
                         "rank %d cannot allocate %.3f MB on device %d for the result of %s '%.200s': %.300s. If "
                         "PyTorch holds memory that it does not use, call torch.cuda.empty_cache()",
                         rank, (double)slot->bytes / 1e6, slot->request.device - 1, kind, name, why.text);
}

/* Can the result lie where the caller wants it? It must not be written over what this rank gives. An allgather's input
 * may be its own place in the result, though: planes write nothing else there. */
static bool lands(const struct hvd_set *set, const struct hvd_plan_item *item, const struct hvd_slot *slot,
                  uint64_t given)
{
    const struct hvd_request *request = &slot->request;
    uint64_t row_bytes = item->count * (uint64_t)hvd_dtype_bytes(hvd_item_dtype(item)), before = 0;
    uintptr_t in = (uintptr_t)request->input, out = (uintptr_t)request->output;
    if (!out || request->output_bytes != slot->bytes)
        return false;
    for (int rank = 0; rank < set->rank; rank++)
        before += (uint64_t)slot->rows_of[rank] * row_bytes;
    if (item->signature.kind == HVD_ALLGATHER && in == out + before)
        return true;
    return given == 0 || in + given * row_bytes <= out || out + (uint64_t)slot->bytes <= in;
}

static int result_for(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_plan_item *item,
                      struct hvd_slot *slot, uint64_t *given, struct hvd_error *error)
{
    uint64_t total;
    slot->rows_of = malloc(sizeof *slot->rows_of * (size_t)set->size);
    HVD_ASSERT(slot->rows_of);
    int code = count_rows(set, item, slot->rows_of, given, &total, error);
    if (code != HVD_OK)
        return code;
    slot->rows = (int64_t)total;
    slot->bytes = (int64_t)(total * item->count * (uint64_t)hvd_dtype_bytes(hvd_item_dtype(item)));
    if (hvd_item_on_device(item))
        return block_for(engine, item, slot, error);
    if (lands(set, item, slot, *given)) {
        slot->data = slot->request.output;
        return HVD_OK;
    }
    void *memory = NULL;
    if (posix_memalign(&memory, HVD_CACHE_LINE, slot->bytes ? (size_t)slot->bytes : 1) != 0)
        return hvd_fail_rank(error, HVD_ENOMEM, engine->options.rank,
                             HVD951 "rank %d cannot allocate %.1f MB for the result of %s '%.200s'",
                             engine->options.rank, (double)slot->bytes / 1e6, hvd_engine_kind(item->signature.kind),
                             HVD_SHOWN(slot->request.name ? slot->request.name : "(unnamed)"));
    slot->data = memory;
    atomic_fetch_add_explicit(&engine->handles.result_bytes, slot->bytes, memory_order_relaxed);
    return HVD_OK;
}

/* One piece, with counts: the head alone. */
static void start_one(struct hvd_engine *engine, struct hvd_set *set, struct hvd_piece piece,
                      const struct hvd_block *block)
{
    struct hvd_moving *moving = &set->moving;
    hvd_work_pieces(moving, 1);
    hvd_work_describe(set, hvd_work_item(set, 0));
    if (moving->work.kind == HVD_SEND)
        moving->work.kind = HVD_ALLTOALL;
    moving->piece[0] = piece;
    hvd_work_place(set, 0, hvd_work_slot(engine, hvd_work_item(set, 0)));
    moving->work.pieces = moving->items = 1;
    moving->work.count = piece.count;
    moving->work.count_of = moving->count_of;
    moving->work.vacant = block ? hvd_block_vacant(block) : NULL;
    moving->sizes = false;
    hvd_work_start(engine, set);
}

void hvd_ragged_start(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    const struct hvd_plan_item *item = hvd_work_item(set, 0);
    if (moving->sized == 0 && item->signature.dims[0] > 0) {
        know_sizes(set, item);
    } else if (moving->sized == 0) {
        start_sizes(engine, set);
        return;
    }
    struct hvd_slot *slot = hvd_work_slot(engine, item);
    struct hvd_error error;
    uint64_t given;
    hvd_error_none(&error);
    if (result_for(engine, set, item, slot, &given, &error) != HVD_OK) {
        hvd_engine_abort(engine, error.culprit, error.code, error.text);
        return;
    }
    moving->sized--;
    moving->place += numbers_of(set, item);
    struct hvd_piece piece = {slot->request.input ? slot->request.input : &nothing, slot->data, given * item->count};
    if (hvd_item_on_device(item))
        piece.out = slot->block ? (void *)slot->block->at : (void *)(uintptr_t)&nothing;
    start_one(engine, set, piece, slot->block);
}

void hvd_ragged_send(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_plan_item *item = hvd_work_item(set, 0);
    const struct hvd_slot *slot = hvd_work_slot(engine, item);
    int from = item->signature.root, to = item->signature.peer;
    struct hvd_piece piece = {&nothing, (void *)(uintptr_t)&nothing, 0};
    hvd_ragged_counts(set);
    memset(set->moving.count_of, 0, sizeof *set->moving.count_of * (size_t)set->size * (size_t)set->size);
    set->moving.count_of[from * set->size + to] = item->count;
    if (slot && set->rank == from && item->count)
        piece = (struct hvd_piece){slot->request.input, piece.out, item->count};
    else if (slot && set->rank == to && item->count)
        piece.out = slot->request.output;
    start_one(engine, set, piece, NULL);
}
