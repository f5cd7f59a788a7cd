/* engine.h - one rank's engine: a value, not a global. 64 of them live in one process in the tests.
 *
 * Threads. Framework threads (any number) call the functions of the first part. THE TURN owns everything of the
 * second part: it is a token, usually taken by the engine thread, and by a thread that waits for a collective
 * while the engine thread has nothing to do. Only its holder may touch what the turn owns. Exactly two things
 * cross: the submission queue and the handle word (handle.h); abort and leave are single words.
 *
 *   turn.c    the token, one turn, who sleeps and who wakes whom, the engine thread
 *   agree.c   votes on boards -> an agreed plan, appended to the agenda
 *   work.c    the agenda -> buckets -> a plane; results to handles
 *   abort.c   death, abort, leave: what ends a job
 *   engine.c  open, close, submit, wait
 */
#ifndef HVD_ENGINE_H
#define HVD_ENGINE_H

#include "../coord/coord.h"
#include "../plane/plane.h"
#include "../trace/trace.h"
#include "handle.h"
#include "host.h"

#include <pthread.h>

/* X(name): counted since init. */
#define HVD_COUNTERS(X) \
    X(submits)          \
    X(rounds)           \
    X(buckets)          \
    X(elements)         \
    X(sleeps)           \
    X(turns_taken_by_waiters)

enum {
#define X(name) HVD_COUNT_##name,
    HVD_COUNTERS(X)
#undef X
        HVD_COUNTERS_MAX
};

#define HVD_PLANES_MAX 8

/* A plane that works on all ranks of the set, in order of preference. */
struct hvd_open_plane {
    const struct hvd_plane *plane;
    void *self;
};

/* What was agreed and is not yet done, in plan order. */
struct hvd_agenda {
    struct hvd_plan_item *item; /* ring; bucket numbers are unique across plans: round << 16 or so, see agree.c */
    uint64_t *bucket;           /* beside it: plan number << 32 | bucket */
    uint32_t head, count, room; /* room is a power of two */
};

/* The bucket that is moving. */
struct hvd_moving {
    bool busy, sizes; /* sizes: it is the exchange of first dimensions, not the collective itself */
    uint32_t items;   /* items of the agenda, from its head, that it serves */
    const struct hvd_open_plane *by;
    struct hvd_work work;
    struct hvd_piece *piece;
    uint64_t *count_of; /* allgather: elements by rank */
    int64_t *rows;      /* allgather: first dimensions, rows[rank * sized + i] for the next `sized` items */
    int64_t *rows_mine;
    uint32_t sized, sized_used, piece_room, rows_room;
};

struct hvd_engine {
    /* Set at open, then read by all. */
    struct hvd_options options;
    bool in_process, alone; /* alone: world of 1, no thread, no host segment */
    bool spins;             /* ranks fit the CPUs: a waiter may spin */
    uint64_t spin_ns;
    struct hvd_open_plane planes[HVD_PLANES_MAX];
    int planes_count;
    bool bound; /* a plane is bound to the engine thread: waiters never take the turn */
    struct hvd_host host;
    pthread_t thread;
    bool thread_runs;
    int epoll, bell; /* bell: own eventfd */

    /* Crosses between threads. */
    struct hvd_handles handles;
    struct hvd_trace_ring trace;
    _Atomic int64_t counter[HVD_COUNTERS_MAX];
    _Atomic uint32_t turn;         /* 0 free, 1 held */
    _Atomic uint32_t asleep_alone; /* stands in for the seat's word in a world of 1 */
    _Atomic uint32_t dozing;       /* 1: the engine thread looks by itself every millisecond, see turn.c */
    _Atomic uint32_t waiters;      /* threads inside hvd_engine_wait */
    _Atomic uint32_t stop;         /* the engine thread shall end */
    _Atomic uint32_t leave_wanted;
    _Atomic uint32_t left;        /* 1 + rank that has left, agreed; own leave included */
    _Atomic uint64_t abort_alone; /* stands in for control->abort in a world of 1 */
    _Atomic uint32_t witnessing;  /* 1: a thread of this rank has written an abort */
    _Atomic uint32_t failed;      /* 1: `failure` is written and will not change */
    struct hvd_error failure;

    /* Owned by the turn. */
    bool active;           /* a waiter had the turn since the engine thread dozed off */
    uint64_t left_turn_ns; /* when a waiter last gave it back */
    struct hvd_coord *coord;
    void *coord_memory, *coord_block;
    size_t vote_bytes;
    struct hvd_vote *agreed, *seen;
    struct hvd_plan plan;
    bool entered; /* my vote of this round lies on my board */
    uint64_t plans;
    struct hvd_agenda agenda;
    struct hvd_moving moving;
    uint32_t join_slot; /* HVD_SLOT_NONE: this rank has not joined */
};

/* ---- for api.c and the tests: any thread ---- */

/* Collective and blocking. in_process: ranks are threads of this process (tests). first_generation keeps handles
 * of an earlier engine stale. On failure *engine is NULL and nothing stays. */
int hvd_engine_open(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, bool in_process,
                    uint32_t first_generation, struct hvd_engine **engine, struct hvd_error *error);
/* Three steps of an end. leave: agreed by votes, bounded by leave_timeout_ms; other threads may still call in.
 * stop: ends the thread and finishes every handle, so that waiters return. free: when nobody is inside. */
void hvd_engine_leave(struct hvd_engine *engine);
void hvd_engine_stop(struct hvd_engine *engine);
void hvd_engine_free(struct hvd_engine *engine);
int64_t hvd_engine_submit(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_error *error);
int hvd_engine_poll(struct hvd_engine *engine, int64_t handle);
int hvd_engine_wait(struct hvd_engine *engine, int64_t handle, int timeout_ms, char *text, size_t text_bytes);
int hvd_engine_result(struct hvd_engine *engine, int64_t handle, struct hvd_output *output);
int hvd_engine_forget(struct hvd_engine *engine, int64_t handle);
void *hvd_engine_alloc(struct hvd_engine *engine, size_t bytes);
/* Tell everyone why the job ends; the first call of the job wins. */
void hvd_engine_abort(struct hvd_engine *engine, int culprit, int code, const char *reason);

/* ---- between the files of this folder ---- */

static inline void hvd_count(struct hvd_engine *engine, int which, int64_t by)
{
    atomic_fetch_add_explicit(&engine->counter[which], by, memory_order_relaxed);
}

/* names.c */
extern const struct hvd_coord_names hvd_engine_names;
const char *hvd_engine_kind(int kind);

/* turn.c */
bool hvd_turn_once(struct hvd_engine *engine); /* by the holder: one pass over everything; true: something moved */
bool hvd_turn_take(struct hvd_engine *engine); /* try */
/* By the holder, who gives the turn back in it. run: until nothing moves and nobody waits (the engine thread; a
 * submitter in a world of 1). drive: until done(self), out of patience, or until_ns; returns done(self). */
void hvd_turn_run(struct hvd_engine *engine);
bool hvd_turn_drive(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns);
void hvd_turn_kick(struct hvd_engine *engine); /* any thread: there is news; wake the engine thread if it sleeps */
int hvd_turn_thread_start(struct hvd_engine *engine, struct hvd_error *error);
void hvd_turn_thread_stop(struct hvd_engine *engine);

/* agree.c: by the turn */
bool hvd_agree_step(struct hvd_engine *engine);
int hvd_agree_open(struct hvd_engine *engine, struct hvd_error *error);
void hvd_agree_close(struct hvd_engine *engine);
bool hvd_agree_submit_queued(struct hvd_engine *engine); /* drain the queue into the coordinator */

/* work.c: by the turn */
bool hvd_work_step(struct hvd_engine *engine);
void hvd_work_close(struct hvd_engine *engine);
bool hvd_work_empty(const struct hvd_engine *engine);

/* abort.c */
bool hvd_abort_seen(struct hvd_engine *engine); /* by the turn: take note of an abort; true if it was new */
void hvd_abort_handles(struct hvd_engine *engine, int code, const char *why); /* by the turn: fail all BUSY handles */
void hvd_abort_left(struct hvd_engine *engine, int rank);                     /* by the turn: a rank has left, agreed */
void hvd_abort_text(struct hvd_engine *engine, uint32_t slot, const char *why, char *text, size_t text_bytes);
void hvd_abort_lost(struct hvd_engine *engine, int rank); /* any thread: its process has ended */
void hvd_abort_left_text(int rank, char *text, size_t text_bytes);
bool hvd_abort_has_left(const struct hvd_engine *engine, int rank);

#endif
