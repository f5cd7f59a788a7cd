/* scatter_list.c - scatter lists: what lies at position k of a bucket?
 *
 * A bucket is a list of tensors that travel together. Packing them into one buffer would cost a pass over
 * memory each way; instead every stage of a segment walks the pieces that the segment covers, copying or
 * reducing run by run, while the bytes are in the cache anyway. Many small pieces in a segment and many
 * segments in a piece are the same loop. Cursors step to the neighbouring piece in either direction, so a
 * stage that returns to the start of its segment needs no search. Empty pieces are stepped over.
 */
#include "scatter_list.h"

#include "../../kernel/kernel.h"

static void seek(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t position)
{
    while (position < at->begin)
        at->begin -= work->piece[--at->piece].count;
    while (position >= at->begin + work->piece[at->piece].count) {
        at->begin += work->piece[at->piece++].count;
        HVD_ASSERT(at->piece < work->pieces);
    }
}

struct hvd_shm_run hvd_shm_run(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                               size_t element_bytes)
{
    seek(work, at, from);
    const struct hvd_piece *piece = &work->piece[at->piece];
    uint64_t skip = from - at->begin;
    struct hvd_shm_run run = {.count = piece->count - skip < count ? piece->count - skip : count};
    if (piece->in)
        run.in = (const char *)piece->in + skip * element_bytes;
    if (piece->out)
        run.out = (char *)piece->out + skip * element_bytes;
    return run;
}

void hvd_shm_copy_in(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                     size_t element_bytes, void *to)
{
    for (uint64_t done = 0; done < count;) {
        struct hvd_shm_run run = hvd_shm_run(work, at, from + done, count - done, element_bytes);
        if (run.in)
            hvd_copy((char *)to + done * element_bytes, run.in, run.count * element_bytes);
        done += run.count;
    }
}

/* To where the result is wanted, by one of the kernel's copies. */
static void copy_to(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                    size_t element_bytes, const char *staged, void (*copy)(void *dst, const void *src, size_t bytes))
{
    for (uint64_t done = 0; done < count;) {
        struct hvd_shm_run run = hvd_shm_run(work, at, from + done, count - done, element_bytes);
        if (run.out)
            copy(run.out, staged + done * element_bytes, run.count * element_bytes);
        done += run.count;
    }
}

void hvd_shm_copy_out(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                      size_t element_bytes, const void *staged)
{
    copy_to(work, at, from, count, element_bytes, staged, hvd_copy);
}

void hvd_shm_take_back(const struct hvd_work *work, struct hvd_shm_cursor *at, uint64_t from, uint64_t count,
                       size_t element_bytes, const void *staged)
{
    copy_to(work, at, from, count, element_bytes, staged, hvd_copy_back);
}
