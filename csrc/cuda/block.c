/* block.c - where do results lie whose size is known too late for the framework to give memory?
 *
 * In a block of a list, the smallest that is large enough; sizes are rounded up to an eighth of a power of two, so that
 * a number of rows that differs from step to step finds the same one again. A new one is made only where none fits.
 *
 * A block comes back before the device has done the copy out of it: the event behind that copy stays with it, and what
 * writes it next waits for that on its own stream. No thread waits. Freeing memory does wait, for the whole device and
 * thereby perhaps for a peer (pinned.c); so blocks that have become too small are kept until an engine ends, or until
 * there is no memory left and a wait is better than an error. A new one is larger by half at least than the largest
 * that was vacant, and outgrows that one alone, once; so all blocks are at most three times the largest for each result
 * that is there at once. Small results go on using the small ones.
 *
 * The list belongs to the process, as its devices do, and has a lock: who gives a block back is any thread.
 */
#include "block.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_block *vacant;
static _Atomic uint64_t bytes_in_use;

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

uint64_t hvd_block_bytes(void)
{
    return atomic_load(&bytes_in_use);
}

static size_t rounded(size_t bytes)
{
    size_t grain = 512;
    while (grain * 16 < bytes)
        grain *= 2;
    return HVD_ALIGN_UP(bytes, grain);
}

static void end(struct hvd_block *block)
{
    int mode;
    if (block->after)
        hvd_gpu_event_drop(block->after);
    if (hvd_cuda_enter(block->cuda, block->ctx, &mode) == 0) {
        if (block->event)
            block->cuda->EventDestroy(block->event);
        if (block->at)
            block->cuda->MemFree(block->at);
        hvd_cuda_leave(block->cuda, mode);
    }
    block->cuda->DevicePrimaryCtxRelease(block->handle);
    atomic_fetch_sub(&bytes_in_use, block->bytes);
    free(block);
}

/* Does nothing on a device touch it any more? */
static bool quiet(const struct hvd_block *block)
{
    int mode;
    if (block->after)
        return hvd_gpu_event_reached(block->after, NULL) != HVD_AGAIN;
    if (!block->used || hvd_cuda_enter(block->cuda, block->ctx, &mode) != 0)
        return true;
    bool done = block->cuda->EventQuery(block->event) != HVD_CUDA_NOT_READY;
    hvd_cuda_leave(block->cuda, mode);
    return done;
}

/* Under the lock. Frees those of the list that are quiet. */
static void sweep(void)
{
    for (struct hvd_block **at = &vacant; *at && !hvd_cuda_hangs();) {
        struct hvd_block *block = *at;
        if (quiet(block)) {
            *at = block->next;
            end(block);
        } else {
            at = &block->next;
        }
    }
}

void hvd_block_free(void)
{
    pthread_mutex_lock(&lock);
    sweep();
    pthread_mutex_unlock(&lock);
}

/* Of `bytes`; where so many cannot be had, of `least`. */
static struct hvd_block *made(int ordinal, size_t bytes, size_t least, struct hvd_error *error)
{
    enum { NO_TIMING = 2, NO_MEMORY = 2 };
    int mode;
    const struct hvd_cuda *cuda = hvd_cuda_load(error);
    struct hvd_block *block = cuda ? calloc(1, sizeof *block) : NULL;
    if (!block)
        return NULL;
    *block = (struct hvd_block){.cuda = cuda, .ordinal = ordinal};
    int code = check(cuda->DeviceGet(&block->handle, ordinal), "find the device of a result", error);
    if (code == HVD_OK)
        code = check(cuda->DevicePrimaryCtxRetain(&block->ctx, block->handle), "use a device", error);
    if (code != HVD_OK) {
        free(block);
        return NULL;
    }
    code = check(hvd_cuda_enter(cuda, block->ctx, &mode), "use a device", error);
    if (code == HVD_OK) {
        int failed = cuda->MemAlloc(&block->at, bytes);
        if (failed == NO_MEMORY) {
            sweep();
            bytes = least;
            failed = cuda->MemAlloc(&block->at, bytes);
        }
        block->at = failed ? 0 : block->at;
        code = check(failed, "give memory for a result", error);
        if (failed == NO_MEMORY && error)
            error->code = HVD_ENOMEM;
        if (code == HVD_OK)
            code = check(cuda->EventCreate(&block->event, NO_TIMING), "make an event", error);
        hvd_cuda_leave(cuda, mode);
    }
    block->bytes = block->at ? bytes : 0;
    atomic_fetch_add(&bytes_in_use, block->bytes);
    if (code == HVD_OK)
        return block;
    end(block);
    return NULL;
}

/* Under the lock, and nothing that is vacant is large enough: how large a new one is to be. */
static size_t outgrow(int ordinal, size_t room)
{
    struct hvd_block *largest = NULL;
    for (struct hvd_block *block = vacant; block; block = block->next)
        if (block->ordinal == ordinal && !block->outgrown && (!largest || block->bytes > largest->bytes))
            largest = block;
    if (!largest)
        return room;
    largest->outgrown = true;
    size_t more = rounded(largest->bytes * 3 / 2);
    return room > more ? room : more;
}

struct hvd_block *hvd_block_take(int ordinal, size_t bytes, struct hvd_error *error)
{
    struct hvd_block **best = NULL, *block;
    size_t room = rounded(bytes);
    pthread_mutex_lock(&lock);
    for (struct hvd_block **at = &vacant; *at; at = &(*at)->next)
        if ((*at)->ordinal == ordinal && (*at)->bytes >= room && (!best || (*at)->bytes < (*best)->bytes))
            best = at;
    if (best) {
        block = *best;
        *best = block->next;
        block->fetched = false;
    } else {
        block = made(ordinal, outgrow(ordinal, room), room, error);
    }
    pthread_mutex_unlock(&lock);
    return block;
}

void *hvd_block_vacant(const struct hvd_block *block)
{
    return block->after ? block->after->event : block->used ? block->event : NULL;
}

int hvd_block_fetch(struct hvd_block *block, const struct hvd_gpu_event *behind, uintptr_t to, size_t bytes,
                    void *stream, struct hvd_error *error)
{
    const struct hvd_cuda *cuda = block->cuda;
    void *ctx;
    int code = check(cuda->CtxPushCurrent(block->ctx), "use a device", error);
    if (code != HVD_OK)
        return code;
    if (behind)
        code = check(cuda->StreamWaitEvent(stream, behind->event, 0), "let a stream wait for a collective", error);
    if (code == HVD_OK)
        code = check(cuda->MemcpyDtoDAsync(to, block->at, bytes, stream), "copy a result", error);
    if (code == HVD_OK)
        code = check(cuda->EventRecord(block->event, stream), "record an event", error);
    if (code == HVD_OK)
        block->fetched = block->used = true;
    cuda->CtxPopCurrent(&ctx);
    return code;
}

void hvd_block_give_back(struct hvd_block *block, struct hvd_gpu_event *behind)
{
    struct hvd_gpu_event *before = block->after;
    if (block->fetched || behind) /* what was before is behind it, too */
        block->after = NULL;
    else
        before = NULL;
    if (behind && !block->fetched) {
        hvd_gpu_event_keep(behind);
        block->after = behind;
    }
    if (before)
        hvd_gpu_event_drop(before);
    pthread_mutex_lock(&lock);
    block->next = vacant;
    vacant = block;
    pthread_mutex_unlock(&lock);
}
