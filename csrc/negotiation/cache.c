/* cache.c - the table of known tensors, the same on every rank.
 *
 * A slot is handed out and taken back only inside decide, in an order that follows from the agreed vote, so
 * its number means the same everywhere and one bit can stand for a tensor. Three lists partition the table:
 *
 *     vacant    given back; a stack, so that low numbers are used again and votes stay short
 *     used      oldest use first: the head is what a full table evicts
 *     details   mismatches that wait for their detail round; never evicted, one leaves per round
 *
 * Forgetting a slot is always safe, because nothing is lost by it: a request of this rank behind it becomes
 * fresh again and is announced in the next round, by every rank that has one. What may not be forgotten is a slot that
 * this decide has just created or planned: the plan would point to it.
 */
#include "state.h"

static void list_push(struct hvd_coord *coord, struct hvd_list *list, uint32_t slot)
{
    struct hvd_known *known = &coord->known[slot];
    known->previous = list->tail;
    known->next = HVD_NONE;
    if (list->tail == HVD_NONE)
        list->head = slot;
    else
        coord->known[list->tail].next = slot;
    list->tail = slot;
}

static void list_remove(struct hvd_coord *coord, struct hvd_list *list, uint32_t slot)
{
    struct hvd_known *known = &coord->known[slot];
    if (known->previous == HVD_NONE)
        list->head = known->next;
    else
        coord->known[known->previous].next = known->next;
    if (known->next == HVD_NONE)
        list->tail = known->previous;
    else
        coord->known[known->next].previous = known->previous;
}

void hvd_slot_touch(struct hvd_coord *coord, uint32_t slot, uint64_t round)
{
    coord->known[slot].used = round;
    if (coord->used.tail != slot) {
        list_remove(coord, &coord->used, slot);
        list_push(coord, &coord->used, slot);
    }
}

void hvd_slot_queue(struct hvd_coord *coord, uint32_t slot)
{
    list_remove(coord, &coord->used, slot);
    list_push(coord, &coord->details, slot);
    coord->known[slot].flags |= HVD_KNOWN_QUEUED;
    hvd_bit_set(coord->listen, slot, false);
}

/* The bits of a slot without a request of mine. */
static void say_ready(struct hvd_coord *coord, uint32_t slot, bool ready)
{
    hvd_bit_set(coord->ready, slot, ready);
    hvd_bit_set(coord->plane, slot, ready);
}

void hvd_slot_attach(struct hvd_coord *coord, uint32_t slot, uint32_t ticket)
{
    struct hvd_mine *mine = &coord->mine[ticket];
    mine->state = HVD_MINE_SLOTTED;
    mine->slot = slot;
    coord->known[slot].ticket = ticket;
    if (coord->known[slot].place != HVD_NONE) {
        hvd_pattern_submit(coord, slot);
        return;
    }
    hvd_bit_set(coord->ready, slot, true);
    hvd_bit_set(coord->plane, slot, mine->flags & HVD_FRESH_IN_PLANE);
}

uint32_t hvd_slot_detach(struct hvd_coord *coord, uint32_t slot)
{
    uint32_t ticket = coord->known[slot].ticket;
    if (ticket == HVD_TICKET_NONE)
        return ticket;
    coord->known[slot].ticket = HVD_TICKET_NONE;
    coord->known[slot].plane = coord->mine[ticket].flags & HVD_FRESH_IN_PLANE;
    coord->mine[ticket].state = HVD_MINE_IDLE;
    coord->outstanding--;
    say_ready(coord, slot, false);
    return ticket;
}

void hvd_slot_forget(struct hvd_coord *coord, uint32_t slot)
{
    struct hvd_known *known = &coord->known[slot];
    if (known->place != HVD_NONE)
        hvd_pattern_forget(coord);
    if (known->seen == coord->learn.number)
        hvd_pattern_restart(coord);
    uint32_t ticket = hvd_slot_detach(coord, slot);
    if (ticket != HVD_TICKET_NONE) {
        coord->outstanding++;
        hvd_mine_announce(coord, ticket);
    }
    if (known->flags & HVD_KNOWN_HELD)
        hvd_group_leave(coord, slot);
    say_ready(coord, slot, false);
    list_remove(coord, known->flags & HVD_KNOWN_QUEUED ? &coord->details : &coord->used, slot);
    hvd_map_drop(&coord->slot_of, slot);
    hvd_bit_set(coord->listen, slot, false);
    known->next = coord->vacant;
    coord->vacant = slot;
}

/* A slot that nobody uses; HVD_NONE when all were touched in this round or wait for a detail. */
static uint32_t find_room(struct hvd_coord *coord, uint64_t round)
{
    if (coord->vacant == HVD_NONE && coord->high == coord->limits.slots) {
        uint32_t oldest = coord->used.head;
        if (oldest == HVD_NONE || coord->known[oldest].used == round)
            return HVD_NONE;
        hvd_slot_forget(coord, oldest);
    }
    uint32_t slot = coord->vacant;
    if (slot == HVD_NONE)
        return coord->high++;
    coord->vacant = coord->known[slot].next;
    return slot;
}

/* My request for the key of a new slot gets its bit, unless it says something else: then it stays fresh, and by
 * rule 1 the slot will be forgotten. */
static void adopt(struct hvd_coord *coord, uint32_t slot)
{
    const struct hvd_known *known = &coord->known[slot];
    uint32_t ticket = coord->fresh_count ? hvd_map_find(&coord->fresh_of, known->key) : HVD_NONE;
    if (ticket == HVD_NONE)
        return;
    if (known->flags & HVD_KNOWN_MISMATCH || hvd_signature_same(&known->signature, &coord->mine[ticket].signature)) {
        hvd_mine_withdraw(coord, ticket);
        hvd_slot_attach(coord, slot, ticket);
    }
}

uint32_t hvd_slot_take(struct hvd_coord *coord, const struct hvd_fresh *fresh, uint64_t round)
{
    uint32_t slot = find_room(coord, round);
    if (slot == HVD_NONE)
        return slot;
    struct hvd_known *known = &coord->known[slot];
    *known = (struct hvd_known){
        .key = fresh->key,
        .order = fresh->order,
        .used = round,
        .flags = fresh->flags & HVD_FRESH_MISMATCH ? HVD_KNOWN_MISMATCH : 0,
        .group_next = HVD_NONE,
        .ticket = HVD_TICKET_NONE,
        .place = HVD_NONE,
        .born = round,
        .signature = fresh->signature,
    };
    list_push(coord, &coord->used, slot);
    hvd_map_put(&coord->slot_of, slot);
    hvd_bit_set(coord->listen, slot, true);
    if (hvd_passes_by(coord, &known->signature))
        say_ready(coord, slot, true);
    adopt(coord, slot);
    return slot;
}

/* Greater priority goes first. */
uint32_t hvd_front_of(const struct hvd_signature *signature)
{
    return (uint32_t)INT32_MAX - (uint32_t)signature->priority;
}

void hvd_plan_slot(struct hvd_coord *coord, uint32_t slot, uint64_t round)
{
    const struct hvd_known *known = &coord->known[slot];
    hvd_slot_touch(coord, slot, round);
    coord->done[coord->done_count++] =
        (struct hvd_sortable){known->order, known->key.high, known->key.low, slot, hvd_front_of(&known->signature)};
}
