/* eager.c - a small tensor travels with the vote.
 *
 * What does a small allreduce between hosts cost at least? One message each way; and votes are one. So what a rank
 * guesses to be agreed next (speculation.c), its one tensor in flight, lies behind its vote on its board. The leader
 * takes it along to the other hosts, as one part if values may be added up in any order, as one part for every rank if
 * not, and when all have voted, everyone has all parts, too, and combines them in the same order. If what is agreed is
 * what was guessed, nothing is left to be done: no plane is asked, nobody is rung for it.
 *
 * RIGHT OR WRONG is agreed, because it follows from what all ranks read: a ride is whole if every rank gave the same
 * mark, which names the work, its tensor and its plan; else it is spoilt, whoever gave what. A whole ride whose work
 * does not come next served nothing, either. All ranks count how often in a row that was so and sit out ever more
 * rounds together; else those that do and those that do not might miss each other for ever. A ride that is spoilt while
 * nothing was agreed is no error of theirs: some ranks were earlier than others, and the next round has it again.
 *
 * Whoever takes part has nothing agreed and unfinished when it votes, so what is agreed by that vote is what starts
 * next, on all ranks.
 *
 * ON ONE HOST the same holds without a leader and parts: all ranks read all votes, and what came with each, where it
 * lies. A collective is one exchange then, of one cache line of each rank if it has at most HVD_LINE_BYTES, where vote
 * and plane are two. Ranks are taken in order, as the shared-memory plane takes them (shm/allreduce.c, flat), so the
 * bits are the same.
 *
 * The parts of ranks of one host are combined by the leader where p2p would combine on the way, too: see plane/p2p.c
 * for which values may be. No more is sent then than between hosts of one rank.
 */
#include "../engine.h"

#include <stdlib.h>
#include <string.h>

#define PARTS_MAX   64
#define RESTING_MAX 255u

static size_t part_room(size_t bytes)
{
    return sizeof(uint64_t) + HVD_ALIGN_UP(bytes, sizeof(uint64_t));
}

size_t hvd_eager_bytes(const struct hvd_eager *ride)
{
    return sizeof *ride + ride->parts * part_room(ride->part_bytes);
}

int hvd_eager_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    if (set->alone)
        return HVD_OK;
    struct hvd_eager_room *riders = calloc(1, sizeof *riders);
    set->riders = riders;
    if (riders) {
        riders->agreed = calloc(1, hvd_set_spans_hosts(set) ? HVD_EAGER_ROOM : sizeof *riders->agreed);
        riders->source = calloc((size_t)set->size, sizeof *riders->source);
    }
    if (!riders || !riders->agreed || !riders->source)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for votes", engine->options.rank);
    for (int rank = 0; rank < set->size; rank++) {
        bool first = true;
        for (int before = 0; before < rank && first; before++)
            first = set->host_of[before] != set->host_of[rank];
        riders->hosts += first;
    }
    return HVD_OK;
}

void hvd_eager_close(struct hvd_set *set)
{
    if (!set->riders)
        return;
    free(set->riders->agreed);
    free(set->riders->source);
    free(set->riders);
    set->riders = NULL;
}

/* May values be added up as they come, and scaled at the end? */
static bool in_any_order(const struct hvd_engine *engine, int dtype, const struct hvd_scale *scale)
{
    switch (dtype) {
    case HVD_DTYPE_float32:
    case HVD_DTYPE_float64:
        return !engine->options.deterministic;
    case HVD_DTYPE_float16:
    case HVD_DTYPE_bfloat16:
    case HVD_DTYPE_float8_e4m3fn:
    case HVD_DTYPE_float8_e5m2:
        return false;
    default:
        return scale->divide == 1 && scale->factor == 1.0 && scale->first == 1.0;
    }
}

static uint64_t mark_of(const struct hvd_work *work, bool by_host)
{
    const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t what[] = {(uint64_t)work->op, (uint64_t)work->dtype, work->count, work->tag, by_host}, mark = odd;
    for (size_t i = 0; i < HVD_COUNT_OF(what); i++)
        mark = (mark ^ what[i]) * odd;
    return mark < HVD_EAGER_MATCHES ? HVD_EAGER_MATCHES : mark;
}

bool hvd_eager_offer(struct hvd_engine *engine, struct hvd_set *set, struct hvd_eager *ride)
{
    struct hvd_eager_room *riders = set->riders;
    struct hvd_work work;
    struct hvd_piece piece;
    *ride = (struct hvd_eager){0};
    riders->offered = 0;
    if (riders->resting || engine->wanted || engine->algo || !hvd_speculate_work(engine, set, &work, &piece) ||
        !hvd_speculate_plane(set, &work))
        return false;
    size_t bytes = piece.count * (size_t)hvd_dtype_bytes(work.dtype);
    struct hvd_scale scale =
        hvd_scale_fold(work.op, work.dtype, set->size, work.divide_by, work.prescale, work.postscale);
    bool by_host = in_any_order(engine, work.dtype, &scale);
    uint32_t expected = (uint32_t)(by_host ? riders->hosts : set->size);
    if (bytes == 0 || bytes > HVD_EAGER_BYTES || expected > PARTS_MAX || !piece.in ||
        sizeof *ride + expected * part_room(bytes) > HVD_EAGER_ROOM)
        return false;
    riders->scale = scale;
    riders->dtype = work.dtype;
    riders->by_host = by_host;
    riders->expected = expected;
    riders->offered = mark_of(&work, by_host);
    riders->offered_tag = work.tag;
    uint64_t who = (uint64_t)set->rank;
    *ride = (struct hvd_eager){riders->offered, (uint32_t)bytes, 1};
    memcpy(ride->part, &who, sizeof who);
    memcpy(ride->part + sizeof who, piece.in, bytes);
    return true;
}

void hvd_eager_offer_local(struct hvd_engine *engine, struct hvd_set *set, struct hvd_round_line *line, void *room)
{
    struct hvd_eager_room *riders = set->riders;
    struct hvd_work work;
    struct hvd_piece piece;
    riders->offered = 0;
    size_t bytes = 0;
    if (!riders->resting && !engine->wanted && !engine->algo && hvd_speculate_work(engine, set, &work, &piece))
        bytes = piece.count * (size_t)hvd_dtype_bytes(work.dtype);
    if (bytes > 0 && bytes <= HVD_EAGER_BYTES && piece.in) {
        riders->scale = hvd_scale_fold(work.op, work.dtype, set->size, work.divide_by, work.prescale, work.postscale);
        riders->dtype = work.dtype;
        riders->expected = (uint32_t)set->size;
        riders->offered = mark_of(&work, false);
        riders->offered_tag = work.tag;
        riders->bytes = bytes;
        memcpy(bytes <= sizeof line->tensor ? line->tensor : room, piece.in, bytes);
    }
    atomic_store_explicit(&line->mark, riders->offered, memory_order_relaxed);
}

void hvd_eager_merge_local(struct hvd_set *set, struct hvd_round_line *const *line, void *const *room)
{
    struct hvd_eager_room *riders = set->riders;
    bool any = false, same = true;
    for (int i = 0; i < set->size; i++) {
        uint64_t mark = atomic_load_explicit(&line[i]->mark, memory_order_relaxed);
        any |= mark != 0;
        same &= mark == riders->offered;
        riders->source[i] = riders->bytes <= sizeof line[i]->tensor ? (const void *)line[i]->tensor : room[i];
    }
    riders->agreed->mark = !any ? 0 : same ? riders->offered : HVD_EAGER_SPOILT;
    riders->agreed->parts = (uint32_t)set->size;
}

static void spoil(struct hvd_eager *ride)
{
    *ride = (struct hvd_eager){.mark = HVD_EAGER_SPOILT};
}

void hvd_eager_join(struct hvd_eager *into, const struct hvd_eager *from)
{
    size_t has = hvd_eager_bytes(into), more = hvd_eager_bytes(from) - sizeof *from;
    if (into->mark != from->mark || into->part_bytes != from->part_bytes || has + more > HVD_EAGER_ROOM) {
        spoil(into);
        return;
    }
    memcpy((char *)into + has, from->part, more);
    into->parts += from->parts;
}

/* One part, the sum of those that this host's ranks gave. */
static void add_up(const struct hvd_set *set, struct hvd_eager *const *ride, struct hvd_eager *into)
{
    const struct hvd_eager_room *riders = set->riders;
    struct hvd_scale hop = {.op = riders->scale.op, .divide = 1, .factor = 1.0, .first = 1.0};
    uint64_t who = (uint64_t)set->rank;
    for (int i = 0; i < set->locals; i++)
        riders->source[i] = ride[i]->part + sizeof who;
    *into = (struct hvd_eager){ride[0]->mark, ride[0]->part_bytes, 1};
    memcpy(into->part, &who, sizeof who);
    hvd_reduce(riders->dtype, &hop, into->part + sizeof who, riders->source, set->locals,
               into->part_bytes / (size_t)hvd_dtype_bytes(riders->dtype));
}

void hvd_eager_of_host(const struct hvd_set *set, struct hvd_eager *const *ride, struct hvd_eager *into)
{
    const struct hvd_eager_room *riders = set->riders;
    bool all = riders->offered != 0;
    for (int i = 0; i < set->locals; i++)
        all &= ride[i]->mark == riders->offered && ride[i]->part_bytes == ride[0]->part_bytes && ride[i]->parts == 1;
    if (all && riders->by_host && set->locals > 1) {
        add_up(set, ride, into);
        return;
    }
    *into = *ride[0];
    if (hvd_eager_check(ride[0], HVD_EAGER_ROOM, set->size))
        hvd_eager_copy(into, ride[0]);
    else
        spoil(into);
    for (int i = 1; i < set->locals; i++)
        if (hvd_eager_check(ride[i], HVD_EAGER_ROOM, set->size))
            hvd_eager_join(into, ride[i]);
        else
            spoil(into);
}

bool hvd_eager_check(const struct hvd_eager *ride, size_t bytes, int size)
{
    if (bytes < sizeof *ride || bytes > HVD_EAGER_ROOM)
        return false;
    if (ride->mark < HVD_EAGER_MATCHES)
        return ride->parts == 0 && ride->part_bytes == 0;
    if (ride->part_bytes == 0 || ride->part_bytes > HVD_EAGER_BYTES || ride->parts == 0 || ride->parts > PARTS_MAX ||
        hvd_eager_bytes(ride) > bytes)
        return false;
    for (uint32_t i = 0; i < ride->parts; i++) {
        uint64_t who;
        memcpy(&who, ride->part + i * part_room(ride->part_bytes), sizeof who);
        if (who >= (uint64_t)size)
            return false;
    }
    return true;
}

void hvd_eager_agreed(struct hvd_set *set)
{
    struct hvd_eager_room *riders = set->riders;
    const struct hvd_eager *agreed = riders->agreed;
    bool whole = agreed->mark >= HVD_EAGER_MATCHES, spoilt = agreed->mark == HVD_EAGER_SPOILT && set->plan.items;
    bool wrong = riders->waits_for || spoilt;
    riders->resting -= riders->resting > 0;
    if (wrong) {
        uint32_t rest = (UINT32_C(1) << (riders->wrong < 8 ? riders->wrong : 8)) - 1; /* none for the first */
        riders->resting = rest < RESTING_MAX ? rest : RESTING_MAX;
        riders->wrong += riders->wrong < 8;
    }
    riders->waits_for =
        whole && agreed->mark == riders->offered && agreed->parts == riders->expected ? riders->offered_tag : 0;
}

/* The parts that have come, by rank of the set, into riders->source; how many. */
static uint32_t sort_parts(struct hvd_eager_room *riders, int size)
{
    const struct hvd_eager *ride = riders->agreed;
    uint32_t found = 0;
    memset(riders->source, 0, (size_t)size * sizeof *riders->source);
    for (uint32_t i = 0; i < ride->parts; i++) {
        const unsigned char *part = ride->part + i * part_room(ride->part_bytes);
        uint64_t who;
        memcpy(&who, part, sizeof who);
        riders->source[who] = part + sizeof who;
    }
    for (int rank = 0; rank < size; rank++)
        if (riders->source[rank])
            riders->source[found++] = riders->source[rank];
    return found;
}

int hvd_eager_take(struct hvd_set *set, const struct hvd_work *work)
{
    struct hvd_eager_room *riders = set->riders;
    if (!riders || riders->waits_for == 0 || work->tag != riders->waits_for)
        return HVD_AGAIN;
    if (hvd_set_spans_hosts(set) && sort_parts(riders, set->size) != riders->expected)
        return HVD_EINTERNAL;
    hvd_reduce(riders->dtype, &riders->scale, work->piece[0].out, riders->source, (int)riders->expected, work->count);
    riders->waits_for = 0;
    riders->wrong = 0;
    return HVD_OK;
}
