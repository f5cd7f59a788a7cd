/* hash_table.c - a table that grows, with open addressing.
 *
 * Half of it is free at least, so a probe is short. Who is dropped leaves no tombstone: cells behind it move up, if the
 * hole is on their way. Through the timeline of a long job go millions of tensors, of which few are on their way at any
 * time, and the table must not silt up.
 */
#include "hash_table.h"

#include <stdlib.h>

#define CELLS_FIRST 256

static uint32_t home(const struct hvd_cells *cells, uint64_t key)
{
    return (uint32_t)(key * 0x9e3779b97f4a7c15u >> 32) & (cells->count - 1);
}

/* Where the key is, or would be. */
static struct hvd_cell *place(const struct hvd_cells *cells, uint64_t key)
{
    uint32_t at = home(cells, key);
    while (cells->cell[at].key && cells->cell[at].key != key)
        at = (at + 1) & (cells->count - 1);
    return &cells->cell[at];
}

struct hvd_cell *hvd_cells_find(const struct hvd_cells *cells, uint64_t key)
{
    struct hvd_cell *found = cells->cell ? place(cells, key) : NULL;
    return found && found->key ? found : NULL;
}

static bool grow(struct hvd_cells *cells)
{
    struct hvd_cells larger = {.count = cells->count ? cells->count * 2 : CELLS_FIRST, .used = cells->used};
    larger.cell = calloc(larger.count, sizeof *larger.cell);
    if (!larger.cell)
        return false;
    for (uint32_t i = 0; i < cells->count; i++)
        if (cells->cell[i].key)
            *place(&larger, cells->cell[i].key) = cells->cell[i];
    free(cells->cell);
    *cells = larger;
    return true;
}

struct hvd_cell *hvd_cells_put(struct hvd_cells *cells, uint64_t key)
{
    struct hvd_cell *found = hvd_cells_find(cells, key);
    if (found)
        return found;
    if (2 * (cells->used + 1) > cells->count && !grow(cells))
        return NULL;
    found = place(cells, key);
    found->key = key;
    cells->used++;
    return found;
}

void hvd_cells_drop(struct hvd_cells *cells, struct hvd_cell *cell)
{
    uint32_t mask = cells->count - 1, hole = (uint32_t)(cell - cells->cell);
    for (uint32_t at = (hole + 1) & mask; cells->cell[at].key; at = (at + 1) & mask)
        if (((at - home(cells, cells->cell[at].key)) & mask) >= ((at - hole) & mask)) { /* may stand in the hole */
            cells->cell[hole] = cells->cell[at];
            hole = at;
        }
    cells->cell[hole] = (struct hvd_cell){0};
    cells->used--;
}

void hvd_cells_close(struct hvd_cells *cells)
{
    free(cells->cell);
    *cells = (struct hvd_cells){0};
}
