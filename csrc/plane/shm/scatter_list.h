/* scatter_list.h - the concatenation of a bucket's pieces, walked without packing it.
 *
 * For plane/shm and plane/hier. Positions count elements from the start of the bucket. A cursor remembers the piece
 * where the last walk ended, so that going on from there costs nothing, however many pieces there are.
 */
#ifndef HVD_PLANE_SHM_SCATTER_LIST_H
#define HVD_PLANE_SHM_SCATTER_LIST_H

#include "../plane.h"

struct hvd_shm_cursor {
    uint64_t begin; /* position of the piece's first element */
    uint32_t piece;
};

/* A run of elements inside one piece. in or out are NULL where the piece's are. */
struct hvd_shm_run {
    const char *in;
    char *out;
    uint64_t count;
};

/* The run that begins at position `from`, at most `count` (> 0) long. */
struct hvd_shm_run hvd_shm_run(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                               size_t element_bytes);
/* Elements [from, from + count) of the inputs to `to`, or from `data` to the outputs (skipped where NULL). */
void hvd_shm_copy_in(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                     size_t element_bytes, void *to);
void hvd_shm_copy_out(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                      size_t element_bytes, const void *staged);
/* The same, of staged bytes that another core wrote and this one will write next. */
void hvd_shm_take_back(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                       size_t element_bytes, const void *staged);

#endif
