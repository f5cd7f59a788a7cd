/* group.c - members of a group wait for each other.
 *
 * A member that all ranks have announced is HELD: its bits stay 1, but decide no longer listens to them. When
 * as many members have arrived as the group has, they are all planned in that round. Everything here is agreed
 * state, so all ranks release a group in the same round.
 *
 * A member that ranks disagree on fails by its own detail round and counts as arrived. The others are done all
 * the same: a group says "start together", not "succeed together", and holding the rest because of one failure
 * would leave them waiting for something that cannot come. A group's entry lives from its first arrival to its
 * release. There are as many entries as slots, and failed members, which hold an entry without a slot, can use
 * them up. To forget an arrival would leave others waiting for ever, so from then on no group is held any more:
 * members are planned as they come. Nothing but the start together is lost by it.
 */
#include "state.h"

static uint32_t entry_of(struct hvd_coord *coord, struct hvd_key group)
{
    if (coord->ungrouped)
        return HVD_NONE;
    uint32_t entry = hvd_map_find(&coord->group_of, group);
    if (entry != HVD_NONE)
        return entry;
    entry = coord->groups_vacant;
    if (entry != HVD_NONE)
        coord->groups_vacant = coord->group[entry].head;
    else if (coord->groups_high < coord->limits.slots)
        entry = coord->groups_high++;
    else
        coord->ungrouped = true;
    if (coord->ungrouped)
        return HVD_NONE;
    coord->group[entry] = (struct hvd_group){.key = group, .head = HVD_NONE};
    hvd_map_put(&coord->group_of, entry);
    return entry;
}

static void end(struct hvd_coord *coord, uint32_t entry)
{
    hvd_map_drop(&coord->group_of, entry);
    coord->group[entry].head = coord->groups_vacant;
    coord->groups_vacant = entry;
}

/* Nobody is held and all have failed: the entry has done its work. */
static bool complete(struct hvd_coord *coord, uint32_t entry)
{
    struct hvd_group *group = &coord->group[entry];
    if (group->arrived < group->key.low)
        return false;
    if (group->head == HVD_NONE)
        end(coord, entry);
    return true;
}

bool hvd_group_arrive(struct hvd_coord *coord, uint32_t slot)
{
    struct hvd_known *known = &coord->known[slot];
    uint32_t entry = entry_of(coord, hvd_group_key(&known->signature));
    if (entry == HVD_NONE)
        return true;
    known->flags |= HVD_KNOWN_HELD;
    known->group_next = coord->group[entry].head;
    coord->group[entry].head = slot;
    coord->group[entry].arrived++;
    hvd_bit_set(coord->listen, slot, false);
    return complete(coord, entry);
}

uint32_t hvd_group_release(struct hvd_coord *coord, struct hvd_key group)
{
    uint32_t entry = coord->ungrouped ? HVD_NONE : hvd_map_find(&coord->group_of, group);
    if (entry == HVD_NONE)
        return HVD_NONE;
    uint32_t slot = coord->group[entry].head;
    struct hvd_known *known = &coord->known[slot];
    coord->group[entry].head = known->group_next;
    if (known->group_next == HVD_NONE)
        end(coord, entry);
    known->group_next = HVD_NONE;
    known->flags &= ~(uint32_t)HVD_KNOWN_HELD;
    hvd_bit_set(coord->listen, slot, true);
    return slot;
}

uint32_t hvd_group_release_next(struct hvd_coord *coord, uint32_t slot)
{
    while (slot != HVD_NONE && !(coord->known[slot].flags & HVD_KNOWN_HELD))
        slot = coord->known[slot].next;
    if (slot == HVD_NONE)
        return slot;
    coord->known[slot].flags &= ~(uint32_t)HVD_KNOWN_HELD;
    hvd_bit_set(coord->listen, slot, true);
    return slot;
}

void hvd_group_leave(struct hvd_coord *coord, uint32_t slot)
{
    struct hvd_known *known = &coord->known[slot];
    uint32_t entry = hvd_map_find(&coord->group_of, hvd_group_key(&known->signature));
    uint32_t *link = &coord->group[entry].head;
    while (*link != slot)
        link = &coord->known[*link].group_next;
    *link = known->group_next;
    if (--coord->group[entry].arrived == 0)
        end(coord, entry);
}

bool hvd_group_fail(struct hvd_coord *coord, struct hvd_key group)
{
    uint32_t entry = entry_of(coord, group);
    if (entry == HVD_NONE)
        return false;
    coord->group[entry].arrived++;
    return complete(coord, entry);
}
