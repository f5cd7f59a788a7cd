/* submit.c - what happens on this rank alone: opening, submitting, joining, leaving.
 *
 * Nothing here touches agreed state. A request finds its tensor known (a slot with the same signature): then
 * it is one bit. Or it does not: then it is fresh and announced by descriptor until a slot takes it up. A
 * known tensor that this rank now submits with another signature is fresh too, beside its slot; the bit stays
 * 0, so the slot cannot become ready before the descriptor has been seen.
 *
 * `news` is what the engine needs in order to sleep: a round is wanted when this rank has something to say that
 * its last vote did not say. Fresh requests are always news, because decide takes up all that a vote carried;
 * a bit is news once.
 *
 * All memory is laid out by open in one block of the caller's; `mine` and `known` are written only as far as
 * they are used, so that generous limits cost address space and no memory.
 */
#include "state.h"

static uint32_t cells(uint64_t entries)
{
    uint64_t count = 16;
    while (count < 2 * entries)
        count *= 2;
    HVD_ASSERT(count <= UINT32_MAX);
    return (uint32_t)count;
}

/* Take `bytes` from the block; with base NULL only the length grows. */
static void *carve(char *base, size_t *at, size_t bytes)
{
    void *piece = base ? base + *at : NULL;
    *at += HVD_ALIGN_UP(bytes, (size_t)HVD_CACHE_LINE);
    return piece;
}

/* The block's plan, followed by both bytes() and open(). */
static size_t lay_out(struct hvd_coord *coord, char *base, const struct hvd_coord_limits *limits)
{
    size_t at = 0, bits = 8 * (size_t)hvd_words(limits->slots);
    carve(base, &at, sizeof *coord);
    coord->known = carve(base, &at, sizeof *coord->known * limits->slots);
    coord->group = carve(base, &at, sizeof *coord->group * limits->slots);
    coord->mine = carve(base, &at, sizeof *coord->mine * limits->tickets);
    coord->fresh = carve(base, &at, sizeof *coord->fresh * limits->tickets);
    coord->done = carve(base, &at, sizeof *coord->done * ((size_t)limits->slots + limits->fresh));
    coord->order = carve(base, &at, sizeof *coord->order * limits->fresh);
    coord->learn.list = carve(base, &at, sizeof *coord->learn.list * limits->slots);
    coord->learn.record = carve(base, &at, limits->rank ? 0 : sizeof *coord->learn.record * limits->slots);
    coord->listen = carve(base, &at, bits);
    coord->ready = carve(base, &at, bits);
    coord->plane = carve(base, &at, bits);
    coord->slot_of.cell = carve(base, &at, sizeof(uint32_t) * cells(limits->slots));
    coord->group_of.cell = carve(base, &at, sizeof(uint32_t) * cells(limits->slots));
    coord->fresh_of.cell = carve(base, &at, sizeof(uint32_t) * cells(limits->tickets));
    return at;
}

static void open_map(struct hvd_map *map, const void *entry, size_t stride, uint32_t entries, bool zeroed)
{
    map->entry = entry;
    map->stride = stride;
    map->mask = cells(entries) - 1;
    if (!zeroed)
        memset(map->cell, 0, sizeof *map->cell * (map->mask + 1));
}

size_t hvd_coord_bytes(const struct hvd_coord_limits *limits)
{
    struct hvd_coord unplaced;
    return lay_out(&unplaced, NULL, limits);
}

struct hvd_coord *hvd_coord_open(void *memory, const struct hvd_coord_limits *limits)
{
    HVD_ASSERT(limits->size > 0 && limits->rank >= 0 && limits->rank < limits->size && limits->names);
    HVD_ASSERT(limits->slots > 0 && limits->tickets > 0 && limits->fresh > 0);
    HVD_ASSERT(limits->slots < HVD_DONE_DIRECT && limits->fresh < HVD_DONE_DIRECT && limits->tickets < HVD_NONE);
    struct hvd_coord *coord = memory;
    memset(coord, 0, sizeof *coord);
    lay_out(coord, memory, limits);
    coord->limits = *limits;
    coord->round = 1;
    coord->vacant = coord->groups_vacant = HVD_NONE;
    coord->used = coord->details = (struct hvd_list){HVD_NONE, HVD_NONE};
    coord->left = -1;
    open_map(&coord->slot_of, coord->known, sizeof *coord->known, limits->slots, limits->zeroed);
    open_map(&coord->group_of, coord->group, sizeof *coord->group, limits->slots, limits->zeroed);
    open_map(&coord->fresh_of, coord->mine, sizeof *coord->mine, limits->tickets, limits->zeroed);
    size_t bits = 8 * (size_t)hvd_words(limits->slots);
    memset(coord->listen, 0, bits);
    memset(coord->ready, 0, bits);
    memset(coord->plane, 0, bits);
    hvd_pattern_restart(coord);
    return coord;
}

static bool has_name(const char *const *name, int names, int32_t number)
{
    return number >= 0 && number < names && name[number];
}

/* Ranks of the set where the kind names ranks, 0 elsewhere. */
static bool ranks_sane(int size, const struct hvd_signature *signature)
{
    bool send = signature->kind == HVD_SEND;
    if (signature->root < 0 || signature->peer < 0 || signature->root >= size || signature->peer >= size)
        return false;
    return send ? signature->root != signature->peer && signature->group == 0 : signature->peer == 0;
}

bool hvd_signature_sane(const struct hvd_coord_limits *limits, const struct hvd_signature *signature)
{
    const struct hvd_coord_names *names = limits->names;
    if (!has_name(names->kind, names->kinds, signature->kind) || !has_name(names->op, names->ops, signature->op) ||
        !has_name(names->dtype, names->dtypes, signature->dtype))
        return false;
    if (signature->ndim < 0 || signature->ndim > HVD_DIMS_MAX || !ranks_sane(limits->size, signature))
        return false;
    bool reduces =
        signature->kind == HVD_ALLREDUCE || signature->kind == HVD_REDUCE || signature->kind == HVD_REDUCESCATTER;
    if (signature->not_finite && !reduces)
        return false;
    int64_t count = 1;
    bool empty = false;
    for (int i = 0; i < HVD_DIMS_MAX; i++) {
        int64_t dim = signature->dims[i];
        if (dim < 0 || (dim && i >= signature->ndim))
            return false;
        if (i < signature->ndim && dim == 0)
            empty = empty || i > 0 || !hvd_kind_ragged(signature->kind);
    }
    for (int i = 0; i < signature->ndim && !empty; i++)
        if (signature->dims[i] && __builtin_mul_overflow(count, signature->dims[i], &count))
            return false;
    return true;
}

/* A ticket's entry, initialised on first use. */
static struct hvd_mine *mine_at(struct hvd_coord *coord, uint32_t ticket)
{
    HVD_ASSERT(ticket < coord->limits.tickets);
    while (coord->mine_high <= ticket)
        coord->mine[coord->mine_high++].state = HVD_MINE_IDLE;
    HVD_ASSERT(coord->mine[ticket].state == HVD_MINE_IDLE);
    return &coord->mine[ticket];
}

/* What is not used is zero. */
static void normalise(struct hvd_signature *signature)
{
    for (int i = 0; i < HVD_DIMS_MAX; i++)
        signature->dims[i] = i < signature->ndim ? signature->dims[i] : 0;
}

int hvd_coord_submit(struct hvd_coord *coord, uint32_t ticket, const char *name, const struct hvd_signature *signature,
                     uint32_t flags)
{
    if (coord->left >= 0)
        return HVD_ESTATE;
    if (signature->kind == HVD_SEND && (!name || hvd_passes_by(coord, signature)))
        return HVD_EINVAL;
    struct hvd_mine *mine = mine_at(coord, ticket);
    mine->signature = *signature;
    normalise(&mine->signature);
    mine->key = name ? hvd_key_for(coord->limits.set, name, signature) : (struct hvd_key){0, coord->unnamed};
    uint32_t slot = hvd_map_find(&coord->slot_of, mine->key);
    const struct hvd_known *known = slot == HVD_NONE ? NULL : &coord->known[slot];
    bool same = known && hvd_signature_same(&known->signature, &mine->signature); /* then it is sane */
    if (!same &&
        (!hvd_signature_sane(&coord->limits, &mine->signature) || signature->group_count > coord->limits.slots))
        return HVD_EINVAL;
    if (known && known->ticket != HVD_TICKET_NONE)
        return HVD_EDUP;
    if (coord->fresh_count && hvd_map_find(&coord->fresh_of, mine->key) != HVD_NONE)
        return HVD_EDUP;
    mine->name = name;
    mine->flags = flags & HVD_FRESH_IN_PLANE;
    mine->number = coord->number++;
    mine->order = known ? known->order : mine->number;
    coord->unnamed += !name;
    coord->outstanding++;
    coord->news = true;
    if (known && (same || known->flags & HVD_KNOWN_MISMATCH)) {
        hvd_slot_attach(coord, slot, ticket);
        hvd_pattern_record(coord, slot);
    } else {
        hvd_mine_announce(coord, ticket);
    }
    return HVD_OK;
}

void hvd_coord_join(struct hvd_coord *coord)
{
    HVD_ASSERT(!coord->joined);
    coord->joined = coord->news = true;
    coord->join_round = 0;
}

void hvd_coord_leave(struct hvd_coord *coord)
{
    coord->leave = true;
}

void hvd_coord_tune(struct hvd_coord *coord, int64_t bucket_bytes)
{
    HVD_ASSERT(bucket_bytes >= 0);
    coord->tune = (uint64_t)bucket_bytes + 1;
    coord->news = true;
}

void hvd_coord_date(struct hvd_coord *coord, uint64_t date)
{
    coord->date = date;
}

bool hvd_coord_news(const struct hvd_coord *coord)
{
    if (coord->left >= 0 || coord->leave)
        return coord->leave && !coord->said_leave;
    return coord->news || coord->fresh_count > 0 || coord->details.head != HVD_NONE ||
           (coord->joined && coord->said_busy && coord->outstanding == 0);
}

uint64_t hvd_coord_round(const struct hvd_coord *coord)
{
    return coord->round;
}

bool hvd_coord_only(const struct hvd_coord *coord, uint32_t ticket, struct hvd_key *key,
                    struct hvd_signature *signature)
{
    const struct hvd_mine *mine = &coord->mine[ticket];
    if (coord->outstanding != 1 || coord->joined || coord->left >= 0 || ticket >= coord->mine_high ||
        mine->state == HVD_MINE_IDLE)
        return false;
    *key = mine->key;
    *signature = mine->signature;
    return true;
}

bool hvd_coord_waits(const struct hvd_coord *coord, uint32_t ticket, struct hvd_key *key, uint64_t *number)
{
    bool known = ticket < coord->mine_high;
    *key = known ? coord->mine[ticket].key : (struct hvd_key){0, 0};
    *number = known ? coord->mine[ticket].number : 0;
    return known && coord->mine[ticket].state != HVD_MINE_IDLE;
}

void hvd_coord_pending(const struct hvd_coord *coord, void (*see)(void *self, uint32_t ticket), void *self)
{
    for (uint32_t ticket = 0; ticket < coord->mine_high; ticket++)
        if (coord->mine[ticket].state != HVD_MINE_IDLE)
            see(self, ticket);
}
