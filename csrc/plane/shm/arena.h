/* arena.h - plane memory: blocks that every rank of the host can reach.
 *
 * Private to plane/shm. One arena per rank and plane; its bookkeeping is private to the process, only the
 * blocks are shared. alloc and release may be called by any thread, release also after the plane is closed.
 */
#ifndef HVD_SHM_ARENA_H
#define HVD_SHM_ARENA_H

#include "../plane.h"

struct hvd_shm_arena;

/* Takes over one reference of `share`. NULL when memory is short; the reference is then dropped. */
struct hvd_shm_arena *hvd_shm_arena_new(struct hvd_share *share, int rank);
/* The plane is done with it; it goes with its last block. */
void hvd_shm_arena_close(struct hvd_shm_arena *arena);

/* 64-byte aligned, not zeroed; NULL when the arena is full. */
void *hvd_shm_arena_alloc(struct hvd_shm_arena *arena, size_t bytes);
bool hvd_shm_arena_release(void *memory);

/* Blocks are about to change: a copy for forked children is kept no longer. Never waits. */
void hvd_shm_arena_working(struct hvd_shm_arena *arena);

/* Does the range lie inside this rank's part? Where? What do others see? */
bool hvd_shm_arena_owns(const struct hvd_shm_arena *arena, const void *memory, size_t bytes);
uint64_t hvd_shm_arena_offset(const struct hvd_shm_arena *arena, const void *memory);
char *hvd_shm_arena_map(const struct hvd_shm_arena *arena, int rank);
/* Bytes in blocks that were not released, and in the copy of them; any thread. */
size_t hvd_shm_arena_used(struct hvd_shm_arena *arena);
size_t hvd_shm_arena_bytes(const struct hvd_shm_arena *arena);

#endif
