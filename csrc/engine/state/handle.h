/* handle.h - one of the two things that cross between framework threads and the turn: the handle word.
 * (The other, the submission queue, threads the same slots: a submission is a slot index.)
 *
 * A slot holds a request from submit to forget. Its word is generation << 2 | state; a waiter sleeps on it. The
 * generation makes a stale handle an error instead of somebody else's result.
 *
 *   FREE --take (framework thread)--> BUSY --finish (the turn)--> DONE --forget (framework thread)--> FREE
 *
 * Who may touch the rest of a slot: the taker until it pushes, the turn until it finishes, waiters after.
 */
#ifndef HVD_ENGINE_STATE_HANDLE_H
#define HVD_ENGINE_STATE_HANDLE_H

#include "../../cuda/block.h"
#include "../../base/base.h"
#include "../../base/wait.h"

#include <stdatomic.h>

enum { HVD_SLOT_FREE, HVD_SLOT_BUSY, HVD_SLOT_DONE };
#define HVD_SLOT_NONE UINT32_MAX
/* To an owner who asks again, since an exception has come between the end of his request and him. */
#define HVD_TOLD_NOBODY "the collective failed while this rank was interrupted, and the reason is lost" HVD_ENDS(218)

struct hvd_slot {
    _Atomic uint32_t word;
    _Atomic uint32_t waiters;
    _Atomic uint32_t next; /* in the free list or the queue: index + 1, 0 ends */
    uint32_t life;         /* of the process set that the request was checked against */
    int size;              /* of that set */
    bool with_turn;        /* the turn's own note: drained from the queue and not yet finished */
    int code;
    uint32_t name_bytes;
    _Atomic uint32_t tensor;       /* what events call it, see trace/names.h */
    _Atomic uint32_t watched;      /* 1: a thread waits for it, and an event has said so */
    _Atomic uint64_t submitted_ns; /* 0: not yet */
    _Atomic uint64_t submitted;    /* the value of that event */
    char *text;                    /* of a failure, malloc'ed */
    struct hvd_request request;    /* its name points to `name` or to `name_long` */
    char *name_long;
    char name[HVD_NAME_MAX + 1];
    void *data;              /* result of a ragged collective: the request's output, or malloc'ed; NULL: it has none, or
                                on a device */
    struct hvd_block *block; /* in which it lies there */
    int64_t *rows_of;
    int64_t rows, bytes;
    uint64_t since_ns; /* the turn's: when stall_check.c first saw the request whose word is since_word */
    uint32_t since_word;
    _Atomic uint32_t excused;     /* the word of a request whose caller sees to its time: the clock passes it by */
    _Atomic uint32_t key_word;    /* of the request whose key is `key` */
    _Atomic uint64_t key;         /* by which stall_check.c knows it; set when this rank has told of it */
    struct hvd_gpu_event *behind; /* on a device: finished, and done there when this mark is reached; NULL: it is */
};

struct hvd_handles {
    struct hvd_slot *slot;        /* HVD_HANDLES_MAX, sparse: memory is used as slots are */
    _Atomic uint64_t free_list;   /* tag << 32 | index + 1 */
    _Atomic uint32_t high;        /* slots ever used */
    _Atomic uint32_t queue;       /* newest submission: index + 1 */
    _Atomic int64_t result_bytes; /* of all slots' data that was malloc'ed */
    uint32_t first_generation;
    uint32_t with_turn; /* the turn's: drained and not yet finished */
};

int hvd_handles_open(struct hvd_handles *handles, uint32_t first_generation, struct hvd_error *error);
void hvd_handles_close(struct hvd_handles *handles);

/* Any thread. A BUSY slot with a copy of the request, or NULL when all are taken (or memory ran out). */
struct hvd_slot *hvd_handles_take(struct hvd_handles *handles, const struct hvd_request *request);
/* Any thread. Give a taken slot to the turn. */
void hvd_handles_push(struct hvd_handles *handles, struct hvd_slot *slot);
/* The turn. All submissions since, oldest first: index of the first, following links by hvd_handles_next. */
uint32_t hvd_handles_drain(struct hvd_handles *handles);
uint32_t hvd_handles_next(struct hvd_handles *handles, uint32_t index);
static inline bool hvd_handles_queued(struct hvd_handles *handles)
{
    return atomic_load_explicit(&handles->queue, memory_order_acquire) != 0;
}

/* The turn. The slot is DONE with this code; `text` is copied (NULL for HVD_OK); waiters wake. */
/* `behind` of the slot may have been set before. */
void hvd_handles_finish(struct hvd_handles *handles, uint32_t index, int code, const char *text);

/* Any thread. The slot of a handle if the handle is live, else NULL. */
struct hvd_slot *hvd_handles_find(struct hvd_handles *handles, int64_t handle);
int64_t hvd_handles_handle(struct hvd_handles *handles, struct hvd_slot *slot);
/* Any thread. DONE -> FREE; HVD_EHANDLE if somebody else was faster or it is not done. */
int hvd_handles_forget(struct hvd_handles *handles, int64_t handle);
static inline int hvd_slot_state(const struct hvd_slot *slot)
{
    return (int)(atomic_load_explicit(&slot->word, memory_order_acquire) & 3);
}
static inline uint32_t hvd_handles_index(const struct hvd_handles *handles, const struct hvd_slot *slot)
{
    return (uint32_t)(slot - handles->slot);
}

#endif
