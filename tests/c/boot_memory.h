/* boot_memory.h - bootstrap for ranks that are threads of one process: the tests' way in.
 *
 * The verb is the same as everywhere, allgather(mine, bytes, all). The store's client for processes is
 * Python and comes in as a callback (hvd_boot_allgather in hvdlite.h); MPI will be a file beside this one.
 */
#ifndef HVD_BOOT_MEMORY_H
#define HVD_BOOT_MEMORY_H

#include "base/base.h"

#include <pthread.h>

struct hvd_boot_memory {
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int size, arrived;
    uint64_t generation;
    size_t bytes;
    char *collected, *published;
    bool broken; /* somebody gave a different number of bytes, or left */
};

/* One rank's hold on it: the `self` of hvd_boot_memory_allgather. */
struct hvd_boot_seat {
    struct hvd_boot_memory *memory;
    int rank;
};

void hvd_boot_memory_open(struct hvd_boot_memory *memory, int size);
void hvd_boot_memory_close(struct hvd_boot_memory *memory);
/* A rank gives up: all waiting and later calls fail. */
void hvd_boot_memory_break(struct hvd_boot_memory *memory);
/* An hvd_boot_allgather. Blocks until all ranks have called it. */
int hvd_boot_memory_allgather(void *seat, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes);

#endif
