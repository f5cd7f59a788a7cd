/* uncached.c - requests of this rank that have no slot yet: announced by descriptor, withdrawn, renumbered.
 *
 * A fresh request is in an array without gaps, from which a vote copies descriptors, and in a map by its key, where
 * decide finds it when a slot takes it. Removing a request moves the last one into its place, so the array has no
 * order. Unnamed requests are known by a number. When the ranks agree on a new number, waiting requests move to it.
 */
#include "state.h"

/* A request of mine becomes fresh. */
void hvd_mine_announce(struct hvd_coord *coord, uint32_t ticket)
{
    struct hvd_mine *mine = &coord->mine[ticket];
    mine->state = HVD_MINE_FRESH;
    mine->place = coord->fresh_count;
    coord->fresh[coord->fresh_count++] = ticket;
    hvd_map_put(&coord->fresh_of, ticket);
}

void hvd_mine_withdraw(struct hvd_coord *coord, uint32_t ticket)
{
    struct hvd_mine *mine = &coord->mine[ticket];
    hvd_map_drop(&coord->fresh_of, ticket);
    uint32_t last = coord->fresh[--coord->fresh_count];
    coord->fresh[mine->place] = last;
    coord->mine[last].place = mine->place;
    mine->state = HVD_MINE_IDLE;
}

void hvd_mine_renumber(struct hvd_coord *coord, uint64_t unnamed)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < coord->fresh_count; i++)
        count += coord->mine[coord->fresh[i]].key.high == 0;
    uint64_t shift = unnamed - (coord->unnamed - count);
    coord->unnamed += shift;
    if (shift == 0 || count == 0)
        return;
    for (uint32_t i = 0; i < coord->fresh_count; i++)
        if (coord->mine[coord->fresh[i]].key.high == 0)
            hvd_map_drop(&coord->fresh_of, coord->fresh[i]);
    for (uint32_t i = 0; i < coord->fresh_count; i++)
        if (coord->mine[coord->fresh[i]].key.high == 0) {
            coord->mine[coord->fresh[i]].key.low += shift;
            hvd_map_put(&coord->fresh_of, coord->fresh[i]);
        }
}
