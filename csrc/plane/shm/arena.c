/* arena.c - an allocator for few, large, long-lived blocks in shared memory.
 *
 * Where do tensors live that move without a copy? In one shared segment per rank, as large as the machine's
 * memory but sparse, so that no descriptor has to be passed when a block is made: a page costs memory once it is
 * touched, and blocks that are released give whole pages back. Blocks are few (fusion buffers, parameters'
 * gradients), so a list in address order, first fit, joined with free neighbours on release, is enough.
 *
 * The list is private memory. In the shared segment lies only one line before each block, by which release finds
 * its arena; it carries its own address mixed with a number, so that a foreign pointer or a second release is
 * caught by an assertion. A peer that writes outside what it was told could break it, as it could break the
 * tensors themselves.
 *
 * A forked child has the blocks as they were at the fork, as all other memory. The kernel does not copy shared pages on
 * write, so the parent copies the blocks before fork() into memory of its own, and the child moves that memory to their
 * place: nobody waits for anybody. The copy stays until the blocks are worked on. The next child needs only the pages
 * that differ, and workers that are forked in a row share one copy. vfork() and posix_spawn() run no handlers.
 * Where there is no address space for a copy, the child sees what the parent writes later, but nobody sees what the
 * child writes.
 *
 * Life: the plane counts as one user, every block as another, and each holds a reference of the share; the last
 * one unmaps it and frees the list. That is how a view outlives shutdown.
 */
#define _GNU_SOURCE
#include "arena.h"

#include "../../base/shared_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC       UINT64_C(0x6876646c69746521)
#define PUNCH_BYTES (1u << 20) /* from here on pages go back: refaulting costs about 2 us per page */

struct block {
    size_t at, bytes; /* with the head */
    bool free;
    struct block *before, *after;
};

struct hvd_shm_arena {
    pthread_mutex_t mutex;
    struct hvd_share *share;
    int rank;
    pid_t owner;        /* in a forked child the blocks are the parent's, and releasing one would take its pages away */
    size_t users, used; /* used: bytes in blocks, with their heads */
    size_t reach;       /* no block has ever ended behind it */
    struct block *first;
    char *_Atomic copy; /* of all up to reach, for forked children; NULL: none. Under mutex, as its size */
    size_t copied;
    struct hvd_shm_arena *next;
};

/* All arenas of this process, for its forked children; also those whose plane is closed. */
static struct {
    pthread_once_t watched;
    pthread_mutex_t mutex;
    struct hvd_shm_arena *first;
} all = {.watched = PTHREAD_ONCE_INIT, .mutex = PTHREAD_MUTEX_INITIALIZER};

struct head {
    struct hvd_shm_arena *arena;
    struct block *block;
    uint64_t magic;
    char pad[HVD_CACHE_LINE - 2 * sizeof(void *) - sizeof(uint64_t)];
};
_Static_assert(sizeof(struct head) == HVD_CACHE_LINE, "blocks stay aligned");

static void drop_copy(struct hvd_shm_arena *arena)
{
    hvd_memory_unmap(atomic_exchange(&arena->copy, NULL), arena->copied);
}

static void copy_blocks(struct hvd_shm_arena *arena)
{
    int fd = arena->share->fd;
    if (fd < 0 || arena->used == 0)
        return;
    bool blank = !atomic_load(&arena->copy);
    if (blank) {
        struct hvd_error ignored;
        hvd_error_none(&ignored);
        arena->copied = HVD_ALIGN_UP(arena->reach, HVD_PAGE);
        atomic_store(&arena->copy, hvd_memory_private(arena->copied, &ignored));
        if (!atomic_load(&arena->copy))
            return;
        hvd_memory_huge(arena->copy, arena->copied);
    }
    const char *base = arena->share->map[arena->rank];
    for (const struct block *block = arena->first; block; block = block->after)
        if (!block->free)
            hvd_memory_renew(arena->copy, base, block->at, block->at + block->bytes, fd, blank);
}

static void before_fork(void)
{
    pthread_mutex_lock(&all.mutex);
    for (struct hvd_shm_arena *arena = all.first; arena; arena = arena->next) {
        pthread_mutex_lock(&arena->mutex);
        copy_blocks(arena);
    }
}

static void after_fork_in_parent(void)
{
    for (struct hvd_shm_arena *arena = all.first; arena; arena = arena->next)
        pthread_mutex_unlock(&arena->mutex);
    pthread_mutex_unlock(&all.mutex);
}

static void after_fork_in_child(void)
{
    for (struct hvd_shm_arena *arena = all.first; arena; arena = arena->next) {
        struct hvd_share *share = arena->share;
        pthread_mutex_unlock(&arena->mutex);
        if (share->fd < 0) /* a child's child: its memory is private already */
            continue;
        void *memory = share->map[arena->rank], *copy = atomic_exchange(&arena->copy, NULL);
        if (!copy || !hvd_memory_replace(memory, arena->copied, copy))
            hvd_memory_part(memory, HVD_ALIGN_UP(arena->reach, HVD_PAGE), share->fd);
        close(share->fd);
        share->fd = -1;
    }
    pthread_mutex_unlock(&all.mutex);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void enlist(struct hvd_shm_arena *arena)
{
    pthread_once(&all.watched, watch_forks);
    pthread_mutex_lock(&all.mutex);
    arena->next = all.first;
    all.first = arena;
    pthread_mutex_unlock(&all.mutex);
}

static void delist(const struct hvd_shm_arena *arena)
{
    pthread_mutex_lock(&all.mutex);
    struct hvd_shm_arena **at = &all.first;
    while (*at != arena)
        at = &(*at)->next;
    *at = arena->next;
    pthread_mutex_unlock(&all.mutex);
}

struct hvd_shm_arena *hvd_shm_arena_new(struct hvd_share *share, int rank)
{
    struct hvd_shm_arena *arena = calloc(1, sizeof *arena);
    struct block *whole = calloc(1, sizeof *whole);
    if (!arena || !whole) {
        free(arena);
        free(whole);
        hvd_share_drop(share);
        return NULL;
    }
    whole->bytes = share->bytes;
    whole->free = true;
    *arena = (struct hvd_shm_arena){.mutex = PTHREAD_MUTEX_INITIALIZER,
                                    .share = share,
                                    .rank = rank,
                                    .owner = getpid(),
                                    .users = 1,
                                    .first = whole};
    enlist(arena);
    return arena;
}

/* Ends one use; called with the mutex held, which it gives up. */
static void leave(struct hvd_shm_arena *arena)
{
    struct hvd_share *share = arena->share;
    bool last = --arena->users == 0;
    pthread_mutex_unlock(&arena->mutex);
    if (last) {
        delist(arena);
        for (struct block *block = arena->first, *after; block; block = after) {
            after = block->after;
            free(block);
        }
        pthread_mutex_destroy(&arena->mutex);
        free(arena);
    }
    hvd_share_drop(share);
}

void hvd_shm_arena_close(struct hvd_shm_arena *arena)
{
    pthread_mutex_lock(&arena->mutex);
    leave(arena);
}

/* Cut `bytes` off the front of a free block; the rest stays free. */
static bool split(struct block *block, size_t bytes)
{
    if (block->bytes > bytes) {
        struct block *rest = malloc(sizeof *rest);
        if (!rest)
            return false;
        *rest = (struct block){block->at + bytes, block->bytes - bytes, true, block, block->after};
        if (rest->after)
            rest->after->before = rest;
        block->after = rest;
        block->bytes = bytes;
    }
    block->free = false;
    return true;
}

/* Takes a block's follower into it. */
static void join(struct block *block)
{
    struct block *after = block->after;
    block->bytes += after->bytes;
    block->after = after->after;
    if (block->after)
        block->after->before = block;
    free(after);
}

void *hvd_shm_arena_alloc(struct hvd_shm_arena *arena, size_t bytes)
{
    if (bytes > arena->share->bytes)
        return NULL;
    size_t needed = HVD_ALIGN_UP(bytes + sizeof(struct head), HVD_CACHE_LINE);
    char *base = arena->share->map[arena->rank];
    struct head *head = NULL;
    pthread_mutex_lock(&arena->mutex);
    struct block *block = arena->first;
    while (block && (!block->free || block->bytes < needed))
        block = block->after;
    if (block && split(block, needed)) {
        head = (struct head *)(base + block->at);
        *head = (struct head){.arena = arena, .block = block, .magic = MAGIC ^ (uintptr_t)head};
        if (block->at + block->bytes > arena->reach)
            arena->reach = block->at + block->bytes;
        drop_copy(arena);
        arena->users++;
        arena->used += block->bytes;
        hvd_share_keep(arena->share);
    }
    pthread_mutex_unlock(&arena->mutex);
    return head ? head + 1 : NULL;
}

bool hvd_shm_arena_release(void *memory)
{
    if (!memory)
        return true;
    struct head *head = (struct head *)memory - 1;
    if (head->magic != (MAGIC ^ (uintptr_t)head))
        return false;
    struct hvd_shm_arena *arena = head->arena;
    struct block *block = head->block;
    if (arena->owner != getpid())
        return true;
    head->magic = 0;
    pthread_mutex_lock(&arena->mutex);
    drop_copy(arena);
    char *base = arena->share->map[arena->rank];
    uintptr_t from = HVD_ALIGN_UP((uintptr_t)(base + block->at), HVD_PAGE);
    uintptr_t end = (uintptr_t)(base + block->at + block->bytes) / HVD_PAGE * HVD_PAGE;
    if (block->bytes >= PUNCH_BYTES)
        (void)madvise((void *)from, end - from, MADV_REMOVE); /* refused: the pages just stay ours */
    block->free = true;
    arena->used -= block->bytes;
    if (block->after && block->after->free)
        join(block);
    if (block->before && block->before->free)
        join(block->before);
    leave(arena);
    return true;
}

void hvd_shm_arena_working(struct hvd_shm_arena *arena)
{
    if (atomic_load_explicit(&arena->copy, memory_order_relaxed) && pthread_mutex_trylock(&arena->mutex) == 0) {
        drop_copy(arena);
        pthread_mutex_unlock(&arena->mutex);
    }
}

bool hvd_shm_arena_owns(const struct hvd_shm_arena *arena, const void *memory, size_t bytes)
{
    uint64_t offset = hvd_shm_arena_offset(arena, memory); /* huge for what lies below */
    return offset < arena->share->bytes && bytes <= arena->share->bytes - offset;
}

uint64_t hvd_shm_arena_offset(const struct hvd_shm_arena *arena, const void *memory)
{
    return (uint64_t)((uintptr_t)memory - (uintptr_t)arena->share->map[arena->rank]);
}

char *hvd_shm_arena_map(const struct hvd_shm_arena *arena, int rank)
{
    return arena->share->map[rank];
}

size_t hvd_shm_arena_used(struct hvd_shm_arena *arena)
{
    pthread_mutex_lock(&arena->mutex);
    size_t used = atomic_load(&arena->copy) ? 2 * arena->used : arena->used;
    pthread_mutex_unlock(&arena->mutex);
    return used;
}

size_t hvd_shm_arena_bytes(const struct hvd_shm_arena *arena)
{
    return arena->share->bytes;
}
