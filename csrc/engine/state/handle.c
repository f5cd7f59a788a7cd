/* handle.c - slots, their free list, and the submission queue.
 *
 * Both lists are stacks of indices without locks. The queue is pushed by many and emptied whole by one (the
 * turn), so it needs no protection against reuse: the turn takes the head with one exchange and turns the
 * list round, which gives order of submission. The free list is popped by many: its head carries a tag that
 * every change increments, or a slot that was taken and returned meanwhile would corrupt it.
 *
 * Slots are taken last-returned-first, so a job that has ten requests in flight touches ten slots, whatever
 * HVD_HANDLES_MAX is.
 */
#include "handle.h"

#include "../../base/shared_memory.h"

#include <stdlib.h>
#include <string.h>

#define GENERATION_MASK 0x3fffffffu
#define TABLE_BYTES     (sizeof(struct hvd_slot) * HVD_HANDLES_MAX)

int hvd_handles_open(struct hvd_handles *handles, uint32_t first_generation, struct hvd_error *error)
{
    memset(handles, 0, sizeof *handles);
    handles->slot = hvd_memory_private(TABLE_BYTES, error);
    handles->first_generation = first_generation & GENERATION_MASK;
    return handles->slot ? HVD_OK : HVD_ENOMEM;
}

static void slot_clear(struct hvd_handles *handles, struct hvd_slot *slot)
{
    if (slot->data && slot->data != slot->request.output) {
        atomic_fetch_sub_explicit(&handles->result_bytes, slot->bytes, memory_order_relaxed);
        free(slot->data);
    }
    free(slot->text);
    free(slot->name_long);
    free(slot->rows_of);
    if (slot->block)
        hvd_block_give_back(slot->block, slot->behind);
    if (slot->behind)
        hvd_gpu_event_drop(slot->behind);
    slot->block = NULL;
    slot->behind = NULL;
    slot->text = NULL;
    slot->name_long = NULL;
    slot->data = NULL;
    slot->rows_of = NULL;
}

void hvd_handles_close(struct hvd_handles *handles)
{
    if (!handles->slot)
        return;
    for (uint32_t i = 0; i < atomic_load(&handles->high); i++)
        slot_clear(handles, &handles->slot[i]);
    hvd_memory_unmap(handles->slot, TABLE_BYTES);
    handles->slot = NULL;
}

static struct hvd_slot *pop_free(struct hvd_handles *handles)
{
    uint64_t head = atomic_load(&handles->free_list);
    while ((uint32_t)head != 0) {
        struct hvd_slot *slot = &handles->slot[(uint32_t)head - 1];
        uint64_t next = ((head >> 32) + 1) << 32 | atomic_load_explicit(&slot->next, memory_order_relaxed);
        if (atomic_compare_exchange_weak(&handles->free_list, &head, next))
            return slot;
    }
    uint32_t index = atomic_load(&handles->high);
    do {
        if (index >= HVD_HANDLES_MAX)
            return NULL;
    } while (!atomic_compare_exchange_weak(&handles->high, &index, index + 1));
    atomic_store(&handles->slot[index].word, handles->first_generation << 2 | HVD_SLOT_FREE);
    return &handles->slot[index];
}

static void push_free(struct hvd_handles *handles, struct hvd_slot *slot)
{
    uint64_t head = atomic_load(&handles->free_list), mine;
    do {
        atomic_store_explicit(&slot->next, (uint32_t)head, memory_order_relaxed);
        mine = ((head >> 32) + 1) << 32 | (hvd_handles_index(handles, slot) + 1);
    } while (!atomic_compare_exchange_weak(&handles->free_list, &head, mine));
}

struct hvd_slot *hvd_handles_take(struct hvd_handles *handles, const struct hvd_request *request)
{
    struct hvd_slot *slot = pop_free(handles);
    if (!slot)
        return NULL;
    slot->request = *request;
    slot->code = HVD_OK;
    slot->rows = slot->bytes = 0;
    slot->name_bytes = 0;
    atomic_store_explicit(&slot->submitted_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->watched, 0, memory_order_relaxed);
    if (request->name) {
        size_t length = strlen(request->name);
        char *name = slot->name;
        if (length > HVD_NAME_MAX) /* the whole name is what identifies a tensor */
            name = slot->name_long = malloc(length + 1);
        if (!name) {
            push_free(handles, slot);
            return NULL;
        }
        memcpy(name, request->name, length + 1);
        slot->request.name = name;
        slot->name_bytes = (uint32_t)length;
    }
    uint32_t generation = atomic_load_explicit(&slot->word, memory_order_relaxed) >> 2;
    atomic_store_explicit(&slot->word, generation << 2 | HVD_SLOT_BUSY, memory_order_release);
    return slot;
}

void hvd_handles_push(struct hvd_handles *handles, struct hvd_slot *slot)
{
    uint32_t mine = hvd_handles_index(handles, slot) + 1,
             head = atomic_load_explicit(&handles->queue, memory_order_relaxed);
    do
        atomic_store_explicit(&slot->next, head, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&handles->queue, &head, mine, memory_order_release,
                                                  memory_order_relaxed));
}

uint32_t hvd_handles_drain(struct hvd_handles *handles)
{
    uint32_t link = atomic_exchange_explicit(&handles->queue, 0, memory_order_acquire), before = 0;
    while (link) {
        struct hvd_slot *slot = &handles->slot[link - 1];
        uint32_t next = atomic_load_explicit(&slot->next, memory_order_relaxed);
        atomic_store_explicit(&slot->next, before, memory_order_relaxed);
        before = link;
        link = next;
    }
    return before ? before - 1 : HVD_SLOT_NONE;
}

uint32_t hvd_handles_next(struct hvd_handles *handles, uint32_t index)
{
    uint32_t next = atomic_load_explicit(&handles->slot[index].next, memory_order_relaxed);
    return next ? next - 1 : HVD_SLOT_NONE;
}

void hvd_handles_finish(struct hvd_handles *handles, uint32_t index, int code, const char *text)
{
    struct hvd_slot *slot = &handles->slot[index];
    if (slot->with_turn)
        handles->with_turn--;
    slot->with_turn = false;
    slot->code = code;
    slot->text = code != HVD_OK && text ? strdup(text) : NULL;
    uint32_t generation = atomic_load_explicit(&slot->word, memory_order_relaxed) >> 2;
    /* Sequentially consistent on both sides: a waiter counts itself, then looks at the word; here the word is
     * stored, then the count is looked at. */
    atomic_store(&slot->word, generation << 2 | HVD_SLOT_DONE);
    if (atomic_load(&slot->waiters))
        hvd_futex_wake(&slot->word, INT32_MAX);
}

int64_t hvd_handles_handle(struct hvd_handles *handles, struct hvd_slot *slot)
{
    uint32_t generation = atomic_load_explicit(&slot->word, memory_order_relaxed) >> 2;
    return (int64_t)generation << 16 | hvd_handles_index(handles, slot);
}

struct hvd_slot *hvd_handles_find(struct hvd_handles *handles, int64_t handle)
{
    uint32_t index = (uint32_t)(handle & (HVD_HANDLES_MAX - 1));
    if (handle <= 0 || handle >> 46 || index >= atomic_load_explicit(&handles->high, memory_order_acquire))
        return NULL;
    struct hvd_slot *slot = &handles->slot[index];
    uint32_t word = atomic_load_explicit(&slot->word, memory_order_acquire);
    return (int64_t)(word >> 2) == handle >> 16 && (word & 3) != HVD_SLOT_FREE ? slot : NULL;
}

int hvd_handles_forget(struct hvd_handles *handles, int64_t handle)
{
    struct hvd_slot *slot = hvd_handles_find(handles, handle);
    if (!slot)
        return HVD_EHANDLE;
    uint32_t done = (uint32_t)(handle >> 16) << 2 | HVD_SLOT_DONE;
    uint32_t next = (uint32_t)((handle >> 16) + 1) & GENERATION_MASK;
    /* Somebody may be reading the result: the caller promises that nobody is, as with free(). */
    if (!atomic_compare_exchange_strong(&slot->word, &done, (next ? next : 1) << 2 | HVD_SLOT_FREE))
        return HVD_EHANDLE;
    slot_clear(handles, slot);
    push_free(handles, slot);
    return HVD_OK;
}
