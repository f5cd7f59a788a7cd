/* boot_memory.c - allgather among threads: a mutex, a condition and a generation.
 *
 * The last to arrive publishes what was collected and starts the next generation; the others copy it out. A
 * published block lives until the next one is complete, which needs everybody to have left this call.
 */
#include "boot_memory.h"

#include <stdlib.h>
#include <string.h>

void hvd_boot_memory_open(struct hvd_boot_memory *memory, int size)
{
    memset(memory, 0, sizeof *memory);
    pthread_mutex_init(&memory->lock, NULL);
    pthread_cond_init(&memory->turned, NULL);
    memory->size = size;
}

void hvd_boot_memory_close(struct hvd_boot_memory *memory)
{
    free(memory->collected);
    free(memory->published);
    pthread_cond_destroy(&memory->turned);
    pthread_mutex_destroy(&memory->lock);
}

void hvd_boot_memory_break(struct hvd_boot_memory *memory)
{
    pthread_mutex_lock(&memory->lock);
    memory->broken = true;
    pthread_cond_broadcast(&memory->turned);
    pthread_mutex_unlock(&memory->lock);
}

int hvd_boot_memory_allgather(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes)
{
    struct hvd_boot_seat *seat = self;
    struct hvd_boot_memory *memory = seat->memory;
    pthread_mutex_lock(&memory->lock);
    uint64_t generation = memory->generation;
    if (memory->arrived == 0) {
        memory->bytes = bytes;
        memory->collected = realloc(memory->collected, bytes * (size_t)memory->size + 1);
    }
    if (memory->bytes != bytes || !memory->collected)
        memory->broken = true;
    if (!memory->broken)
        memcpy(memory->collected + bytes * (size_t)seat->rank, mine, bytes);
    if (++memory->arrived == memory->size || memory->broken) {
        char *published = memory->published;
        memory->published = memory->collected;
        memory->collected = published;
        memory->arrived = 0;
        memory->generation++;
        pthread_cond_broadcast(&memory->turned);
    }
    while (memory->generation == generation && !memory->broken)
        pthread_cond_wait(&memory->turned, &memory->lock);
    int code = memory->broken ? HVD_EINIT : HVD_OK;
    if (code == HVD_OK)
        memcpy(all, memory->published, bytes * (size_t)memory->size);
    else
        hvd_text_copy(text, text_bytes, "another rank gave up during init" HVD_ENDS(121));
    pthread_mutex_unlock(&memory->lock);
    return code;
}
