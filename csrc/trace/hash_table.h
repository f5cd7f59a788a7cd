/* hash_table.h - what a timeline remembers by a number that is not 0: a lane, or a tensor on its way in one.
 *
 * The coordinator's map (negotiation/key_map.c) finds entries that others hold, in a table that never grows; here the
 * entries are the table's own, and nobody knows how many will come. One thread. A cell's address holds until the next
 * put or drop.
 */
#ifndef HVD_TRACE_HASH_TABLE_H
#define HVD_TRACE_HASH_TABLE_H

#include "../base/base.h"

struct hvd_cell {
    uint64_t key; /* 0: free */
    int lane;
    uint32_t unnamed; /* of a tensor without a name, where its lane goes back to; 0: it has one */
    uint64_t t_ns, bytes;
};

struct hvd_cells {
    struct hvd_cell *cell; /* a power of two of them, at most half of them used; NULL: none yet */
    uint32_t count, used;
};

struct hvd_cell *hvd_cells_find(const struct hvd_cells *cells, uint64_t key); /* NULL: it is not there */
struct hvd_cell *hvd_cells_put(struct hvd_cells *cells, uint64_t key); /* there or made, zeroed; NULL: no memory */
void hvd_cells_drop(struct hvd_cells *cells, struct hvd_cell *cell);
void hvd_cells_close(struct hvd_cells *cells);

#endif
