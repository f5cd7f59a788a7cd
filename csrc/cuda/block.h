/* block.h - memory on a device in which a result lies until its framework has fetched it.
 *
 * Of an allgather or alltoall the size is known only when the ranks have agreed, and then nobody of the framework is
 * there to be asked for memory: its threads may wait in another order on every rank. So the core gives a block, the
 * collective fills it, and who waits for the result has it copied into memory of his framework's, on his own stream.
 * Blocks come back and are given again, so that a training loop allocates in its first steps only. Any thread.
 */
#ifndef HVD_CUDA_BLOCK_H
#define HVD_CUDA_BLOCK_H

#include "gpu_event.h"

struct hvd_block {
    const struct hvd_cuda *cuda;
    uintptr_t at;
    size_t bytes;
    int ordinal, handle;
    bool fetched;                /* since it was taken */
    bool outgrown;               /* by one that was made since, in its place */
    void *ctx, *event;           /* recorded behind its latest copy, if there was one */
    bool used;                   /* there was */
    struct hvd_gpu_event *after; /* of a result that nobody has fetched; NULL: nothing writes it any more */
    struct hvd_block *next;
};

/* Room for so many bytes on this device. NULL: error says why. */
struct hvd_block *hvd_block_take(int ordinal, size_t bytes, struct hvd_error *error);
/* The event after which it may be written, until it is given back; NULL: it may now. */
void *hvd_block_vacant(const struct hvd_block *block);
/* On this stream of its device: wait for `behind` (NULL: nothing to wait for), then copy the result's bytes. */
int hvd_block_fetch(struct hvd_block *block, const struct hvd_gpu_event *behind, uintptr_t to, size_t bytes,
                    void *stream, struct hvd_error *error);
/* Nobody will ask for it any more. behind: where the writing of it ends; NULL: it has ended. */
void hvd_block_give_back(struct hvd_block *block, struct hvd_gpu_event *behind);
/* What nobody has is freed, which waits for devices. */
void hvd_block_free(void);
uint64_t hvd_block_bytes(void); /* of all */

#endif
