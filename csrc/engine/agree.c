/* agree.c - votes travel over boards in shared memory; out comes the same plan on every rank.
 *
 * Each rank has two boards, for rounds of even and odd number. To enter round r a rank writes its vote on the
 * board of r's parity and then stores r in its seat (release). When all seats say r or more, everyone reads
 * all boards, merges and decides, each for itself: there is no root and no second message. Two boards are
 * enough: a rank writes r + 2 only after everyone has voted r + 1, and a rank votes r + 1 only after it has
 * read all votes of r.
 *
 * Rounds are driven by events. A rank enters the next round when it has news, or when it sees that a peer has
 * entered it; it never waits for user code to do so. While a bucket is moving and another one is already
 * agreed, own news are held back: what becomes ready meanwhile travels together in the next bucket. That is
 * all there is of a "cycle time".
 *
 * A vote read from a board was written by another process: it is copied, checked, and only then believed.
 */
#include "engine.h"

#include "../kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FRESH_MAX 256 /* descriptors in one vote; more ride in the next round */

static size_t round_up(size_t bytes)
{
    return HVD_ALIGN_UP(bytes, (size_t)HVD_CACHE_LINE);
}

/* Grow the ring so that it holds `more` further items. */
static void agenda_reserve(struct hvd_agenda *agenda, uint32_t more)
{
    uint32_t room = agenda->room ? agenda->room : 64;
    while (room < agenda->count + more)
        room *= 2;
    if (room == agenda->room)
        return;
    struct hvd_plan_item *item = malloc(sizeof *item * room);
    uint64_t *bucket = malloc(sizeof *bucket * room);
    HVD_ASSERT(item && bucket);
    for (uint32_t i = 0; i < agenda->count; i++) {
        uint32_t from = (agenda->head + i) & (agenda->room - 1);
        item[i] = agenda->item[from];
        bucket[i] = agenda->bucket[from];
    }
    free(agenda->item);
    free(agenda->bucket);
    agenda->item = item;
    agenda->bucket = bucket;
    agenda->head = 0;
    agenda->room = room;
}

/* Append the plan, bucket by bucket (fuse may have put a later item into an earlier bucket). */
static void agenda_append(struct hvd_agenda *agenda, const struct hvd_plan *plan, uint64_t number)
{
    agenda_reserve(agenda, plan->items);
    uint32_t first = agenda->head + agenda->count, placed = 0;
    for (uint32_t bucket = 0; bucket < plan->buckets; bucket++)
        for (uint32_t i = 0; i < plan->items; i++)
            if (plan->item[i].bucket == bucket) {
                uint32_t at = (first + placed++) & (agenda->room - 1);
                agenda->item[at] = plan->item[i];
                agenda->bucket[at] = number << 32 | bucket;
            }
    HVD_ASSERT(placed == plan->items);
    agenda->count += placed;
}

int hvd_agree_open(struct hvd_engine *engine, struct hvd_error *error)
{
    const struct hvd_coord_limits limits = {
        .rank = engine->options.rank,
        .size = engine->options.size,
        .slots = (uint32_t)engine->options.slots_max,
        .tickets = HVD_HANDLES_MAX,
        .fresh = FRESH_MAX,
        .set = 0,
        .names = &hvd_engine_names,
    };
    engine->vote_bytes = round_up(hvd_vote_bytes_max(&limits));
    size_t coord_bytes = round_up(hvd_coord_bytes(&limits));
    engine->plan.items_max = limits.slots + limits.fresh;
    size_t items_bytes = round_up(sizeof *engine->plan.item * engine->plan.items_max);
    char *block = hvd_memory_private(coord_bytes + 2 * engine->vote_bytes + items_bytes, error);
    if (!block)
        return HVD_ENOMEM;
    engine->coord_block = block;
    engine->coord_memory = block;
    engine->coord = hvd_coord_open(block, &limits);
    engine->agreed = (struct hvd_vote *)(block + coord_bytes);
    engine->seen = (struct hvd_vote *)(block + coord_bytes + engine->vote_bytes);
    engine->plan.item = (struct hvd_plan_item *)(block + coord_bytes + 2 * engine->vote_bytes);
    engine->join_slot = HVD_SLOT_NONE;
    return HVD_OK;
}

void hvd_agree_close(struct hvd_engine *engine)
{
    if (engine->coord_block) {
        size_t items_bytes = round_up(sizeof *engine->plan.item * engine->plan.items_max);
        size_t before = (size_t)((char *)engine->plan.item - (char *)engine->coord_block);
        hvd_memory_unmap(engine->coord_block, before + items_bytes);
    }
    engine->coord_block = NULL;
    free(engine->agenda.item);
    free(engine->agenda.bucket);
    memset(&engine->agenda, 0, sizeof engine->agenda);
}

/* Does all memory of this request lie in the plane, so that it need not be copied? */
static uint32_t in_plane(struct hvd_engine *engine, const struct hvd_request *request)
{
    const struct hvd_open_plane *first = &engine->planes[0];
    if (request->kind != HVD_ALLREDUCE || !first->plane->owns)
        return 0;
    size_t bytes = (size_t)hvd_dtype_bytes(request->dtype);
    for (int i = 0; i < request->ndim; i++)
        bytes *= (size_t)request->dims[i];
    return first->plane->owns(first->self, request->input, bytes) &&
                   first->plane->owns(first->self, request->output, bytes)
               ? HVD_FRESH_IN_PLANE
               : 0;
}

static void submit_one(struct hvd_engine *engine, uint32_t index)
{
    const struct hvd_request *request = &engine->handles.slot[index].request;
    engine->handles.slot[index].with_turn = true;
    uint32_t left = atomic_load(&engine->left);
    if (atomic_load(&engine->failed) || left) {
        char why[HVD_TEXT_MAX], text[HVD_TEXT_MAX];
        if (atomic_load(&engine->failed))
            hvd_text_copy(why, sizeof why, engine->failure.text);
        else
            hvd_abort_left_text((int)left - 1, why, sizeof why);
        hvd_abort_text(engine, index, why, text, sizeof text);
        hvd_handles_finish(&engine->handles, index, atomic_load(&engine->failed) ? engine->failure.code : HVD_EPEER,
                           text);
        return;
    }
    if (request->kind == HVD_JOIN) {
        engine->join_slot = index;
        hvd_coord_join(engine->coord);
        return;
    }
    struct hvd_signature signature;
    memset(&signature, 0, sizeof signature);
    signature.kind = request->kind;
    signature.op = request->kind == HVD_ALLREDUCE ? request->op : 0;
    signature.dtype = request->kind == HVD_BARRIER ? 0 : request->dtype;
    signature.ndim = request->ndim;
    signature.root = request->kind == HVD_BROADCAST ? request->root : 0;
    signature.group = request->group;
    signature.group_count = request->group ? (uint32_t)request->group_count : 0;
    signature.prescale = request->kind == HVD_ALLREDUCE ? request->prescale : 1.0;
    signature.postscale = request->kind == HVD_ALLREDUCE ? request->postscale : 1.0;
    memcpy(signature.dims, request->dims, sizeof signature.dims[0] * (size_t)request->ndim);
    int code = hvd_coord_submit(engine->coord, index, request->name, &signature, in_plane(engine, request));
    if (code == HVD_OK)
        return;
    char text[HVD_TEXT_MAX];
    hvd_abort_text(engine, index,
                   code == HVD_EINVAL ? "the coordinator refused it (a group with more members than the cache "
                                        "capacity, or more than 2^63 elements)"
                   : code == HVD_EDUP
                       ? "a tensor of this name is in flight already on this rank; wait for it first, or "
                         "give the second one another name"
                       : "the coordinator refused it",
                   text, sizeof text);
    hvd_handles_finish(&engine->handles, index, code, text);
}

bool hvd_agree_submit_queued(struct hvd_engine *engine)
{
    uint32_t index = hvd_handles_drain(&engine->handles), next;
    bool any = index != HVD_SLOT_NONE;
    for (; index != HVD_SLOT_NONE; index = next) {
        next = hvd_handles_next(&engine->handles, index);
        submit_one(engine, index);
    }
    return any;
}

/* Has a peer entered the round that I have not? */
static bool peer_entered(const struct hvd_engine *engine, uint64_t round)
{
    for (int rank = 0; rank < engine->host.size; rank++)
        if (atomic_load_explicit(&engine->host.control->seat[rank].round, memory_order_acquire) >= round)
            return true;
    return false;
}

static bool all_entered(const struct hvd_engine *engine, uint64_t round)
{
    for (int rank = 0; rank < engine->host.size; rank++)
        if (atomic_load_explicit(&engine->host.control->seat[rank].round, memory_order_acquire) < round)
            return false;
    return true;
}

/* Copy a peer's vote off its board and merge it; false (and an abort that names the rank) if it is not one. */
static bool merge_board(struct hvd_engine *engine, int rank, uint64_t round, bool first)
{
    const struct hvd_vote *board = hvd_host_board(&engine->host, rank, round);
    uint32_t bytes = board->bytes;
    struct hvd_vote *into = first ? engine->agreed : engine->seen;
    if (bytes >= sizeof *board && bytes <= engine->vote_bytes) {
        memcpy(into, board, bytes);
        into->bytes = bytes;
        if (hvd_vote_check(engine->coord, into, bytes) == HVD_OK && into->round == round) {
            if (!first)
                hvd_vote_merge(engine->coord, engine->agreed, engine->seen);
            return true;
        }
    }
    char text[160];
    snprintf(text, sizeof text, "rank %d wrote a vote that is not one (%u bytes in round %llu); its memory is damaged",
             rank, bytes, (unsigned long long)round);
    hvd_engine_abort(engine, rank, HVD_EINTERNAL, text);
    return false;
}

/* The plan is agreed: what fails, fails; what is to be done goes on the agenda. */
static void take_plan(struct hvd_engine *engine)
{
    struct hvd_plan *plan = &engine->plan;
    if (plan->failed_ticket != HVD_TICKET_NONE)
        hvd_handles_finish(&engine->handles, plan->failed_ticket, HVD_EMISMATCH, plan->text);
    if (plan->items) {
        uint8_t bytes_of[HVD_DTYPES_MAX];
        for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
            bytes_of[dtype] = (uint8_t)hvd_dtype_bytes(dtype);
        hvd_plan_fuse(plan, (uint64_t)engine->options.fusion_bytes, bytes_of);
        agenda_append(&engine->agenda, plan, ++engine->plans);
        hvd_trace_add(&engine->trace, HVD_TRACE_plan, plan->items, plan->buckets);
    }
    if (plan->joined >= 0 && engine->join_slot != HVD_SLOT_NONE) {
        engine->handles.slot[engine->join_slot].rows = plan->joined;
        hvd_handles_finish(&engine->handles, engine->join_slot, HVD_OK, NULL);
        engine->join_slot = HVD_SLOT_NONE;
    }
    if (plan->left >= 0)
        hvd_abort_left(engine, plan->left);
}

static void decide(struct hvd_engine *engine)
{
    hvd_coord_decide(engine->coord, engine->agreed, &engine->plan);
    engine->entered = false;
    hvd_count(engine, HVD_COUNT_rounds, 1);
    hvd_trace_add(&engine->trace, HVD_TRACE_round, (uint32_t)engine->plan.round, engine->plan.items);
    take_plan(engine);
}

/* Alone: the vote is the agreement. */
static bool agree_alone(struct hvd_engine *engine)
{
    if (!hvd_coord_news(engine->coord))
        return false;
    hvd_coord_vote(engine->coord, engine->agreed, engine->vote_bytes);
    decide(engine);
    return true;
}

bool hvd_agree_step(struct hvd_engine *engine)
{
    if (atomic_load_explicit(&engine->left, memory_order_relaxed))
        return false;
    if (engine->alone)
        return agree_alone(engine);
    uint64_t round = hvd_coord_round(engine->coord);
    bool moved = false;
    if (!engine->entered) {
        bool hold = engine->moving.busy && engine->agenda.count > engine->moving.items;
        if (!peer_entered(engine, round) && (hold || !hvd_coord_news(engine->coord)))
            return false;
        hvd_coord_vote(engine->coord, hvd_host_board(&engine->host, engine->host.rank, round), engine->vote_bytes);
        atomic_store_explicit(&engine->host.control->seat[engine->host.rank].round, round, memory_order_release);
        engine->entered = moved = true;
        hvd_bells_ring_all(&engine->host.bells);
    }
    if (!all_entered(engine, round))
        return moved;
    for (int rank = 0; rank < engine->host.size; rank++)
        if (!merge_board(engine, rank, round, rank == 0))
            return true;
    decide(engine);
    return true;
}
