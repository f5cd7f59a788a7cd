/* engine.h - one rank's engine: a value, not a global. 64 of them live in one process in the tests.
 *
 * Threads. Framework threads (any number) call the functions of the first part. THE TURN owns everything of the
 * second part: it is a token, usually taken by the engine thread, and by a thread that waits for a collective
 * while the engine thread has nothing to do. Only its holder may touch what the turn owns. Exactly two things
 * cross: the submission queue and the handle word (handle.h); abort and leave are single words.
 *
 *   progress.c            the token; state/wake.c: who sleeps and who wakes whom; lifecycle/thread.c: the engine thread
 *   process_set.h     one process set: what it agrees on and what it moves
 *   shm_votes.c       votes inside a host; host_votes/: between hosts, and small tensors that travel with them
 *   drain.c           requests go to the coordinators; execution/: agreed work goes to planes
 *   stream_watch.c    how the engine thread sleeps on streams (state/streams.c)
 *   stall/            what waits for too long, and for whom; who does not answer. lifecycle/stall_check.c: when
 *   abort.c           death and abort; state/failure.c: how that is told; lifecycle/shutdown.c: how a rank leaves
 *   flight_recorder/  what happened, in a ring and in a file; what training steps cost
 *   deferred_wake.c   submissions that wake nobody now, and are sent within a millisecond
 *   device/           works on devices: their order, and their way through host memory
 *   validate.c        local mistakes in a request
 *   lifecycle/open.c  begin and end
 *   engine.c          submit, wait
 */
#ifndef HVD_ENGINE_H
#define HVD_ENGINE_H

#include "../trace/names.h"
#include "../trace/trace.h"
#include "engine/state/handle.h"
#include "engine/host/host.h"
#include "process_set.h"
#include "engine/stall/stall.h"
#include "engine/flight_recorder/step_costs.h"
#include "engine/state/streams.h"

#include <pthread.h>

/* X(name): counted since init. What crossed links is added when a bucket is done or a round decided. exposed_ns: that
 * threads have waited for collectives, all together; negotiation_ns: see step_costs.c; data_ns, optimizer_ns:
 * as whoever trains has measured. */
#define HVD_COUNTERS(X)       \
    X(submits)                \
    X(rounds)                 \
    X(buckets)                \
    X(elements)               \
    X(sleeps)                 \
    X(turns_taken_by_waiters) \
    X(learned)                \
    X(deviations)             \
    X(link_bytes_out)         \
    X(link_bytes_in)          \
    X(link_messages_out)      \
    X(link_messages_in)       \
    X(rides)                  \
    X(exposed_ns)             \
    X(negotiation_ns)         \
    X(data_ns)                \
    X(optimizer_ns)

/* X(name): what memory of ours is for, see memory_use.c. */
#define HVD_USAGES(X) \
    X(lanes)          \
    X(arena)          \
    X(results)        \
    X(boards)         \
    X(sets)           \
    X(records)        \
    X(devices)        \
    X(pinned)

enum {
#define X(name) HVD_USAGE_##name,
    HVD_USAGES(X)
#undef X
        HVD_USAGES_MAX
};

enum {
#define X(name) HVD_COUNT_##name,
    HVD_COUNTERS(X)
#undef X
        HVD_COUNTERS_MAX
};

/* Kinds of request that only the engine itself submits: `input` is the set. */
#define HVD_ENGINE_SET_OPEN  -1
#define HVD_ENGINE_SET_CLOSE -2
#define HVD_ENGINE_TUNE      -3 /* of the global one, to dims[0] bytes */

enum { HVD_EVENT_BELL, HVD_EVENT_SOON, HVD_EVENT_STORE, HVD_EVENT_PIDFD, HVD_EVENT_SOCKET, HVD_EVENT_WIRE };

/* Where a rank of the job is, and what errors call it. */
struct hvd_who {
    int host;  /* hosts are numbered in the order of their first ranks */
    int local; /* its number on its host */
    char called[96];
};

/* The end of a stream, seen and not yet believed: somebody may be about to say why, see abort.c. */
struct hvd_suspicion {
    uint64_t since_ns; /* 0: none */
    int culprit;
    int set, waited; /* its number; ticks for which it had waited before, see silence.c */
    bool missed;     /* what should have crossed is missing: who has left is to blame, too */
    char text[320];
};

/* events.c: where records go, and whether one is due. */
struct hvd_flight {
    char *folder;  /* NULL: nowhere, unless told */
    char host[96]; /* what this host is called */
    int asked;     /* an eventfd in the engine thread's epoll; -1 without a signal */
    pthread_mutex_t lock;
    bool opened, failed_written;            /* written: under lock */
    _Atomic uint32_t due;                   /* HVD_WHY_*: the engine thread shall write one; 0: no */
    char *waiting;                          /* what was waited for when the job failed: JSON; before `failed` is */
    _Atomic uint64_t unnamed[HVD_SETS_MAX]; /* life of the set << 32 | requests without a name so far */
};

/* deferred_wake.c: the alarm clock of submissions that wake nobody. */
struct hvd_alarm {
    int timer; /* in the engine thread's epoll; -1 without one */
    pthread_mutex_t lock;
    _Atomic uint32_t armed;
};

/* What a rank knows of a set by its number; it need not be a member. */
struct hvd_set_record {
    bool open;
    uint32_t life;
    int count, rank; /* rank: its own in the set, -1: no member */
    int16_t *ranks;  /* the record's own */
    struct hvd_set *set;
};

struct hvd_engine {
    /* Set at open, then read by all. */
    struct hvd_options options;     /* its pointers are lent during open only */
    struct hvd_who *who;            /* by rank */
    int hosts, cpus;                /* cpus: that this process may use */
    const struct hvd_plane *wanted; /* the plane that was asked for; NULL: the best */
    const char *algo;
    struct hvd_cost link_cost;       /* of a message between hosts, agreed; both 0: not known */
    _Atomic uint8_t *wire_byte;      /* by descriptor, see stream_watch.c; NULL: no streams */
    bool in_process, alone;          /* alone: world of 1, no thread, no host segment */
    bool spins, cpu_each, busy_cpus; /* ranks fit the CPUs; are as many, and no CUDA; the turn's: CPUs are busy */
    uint64_t spin_ns, busy_until_ns, busy_ns, breath_ns; /* see progress.c */
    struct hvd_set *global;
    struct hvd_space space;
    bool bound; /* a plane is bound to the engine thread: waiters never take the turn */
    struct hvd_host host;
    pthread_t thread;
    bool thread_runs, patience; /* patience: the engine thread's: it has let a submission wait for a tick */
    int epoll, bell, call;      /* eventfds: bell, which others ring; call, which only the engine thread hears */

    /* Crosses between threads. */
    struct hvd_handles handles;
    struct hvd_alarm soon;
    uintptr_t comm;      /* MPI communicator of the set that is opened next */
    _Atomic bool silent; /* there is a plane whose works go on without a ring */
    _Atomic bool polled; /* votes of some set cross over MPI: the engine thread looks for them all the time */
    uint32_t naps;       /* in a row that such works have let pass; the turn's */
    struct {
        bool owes;                  /* the turn's: a work of a plane that lingers has ended since it looked last */
        uint64_t since_ns, next_ns; /* none had ended since; when to look again, 0: nobody lingers */
    } linger;                       /* the engine thread's */
    struct hvd_trace_ring trace;
    struct hvd_trace_names names;
    struct hvd_flight flight;
    _Atomic int64_t counter[HVD_COUNTERS_MAX];
    struct hvd_steps steps;
    _Atomic int64_t fusion_bytes;  /* in force in the global set; written by the turn */
    _Atomic int wire_high;         /* greatest descriptor of a stream + 1 */
    _Atomic uint64_t alarm_ns;     /* when the engine thread shall look around at the latest; 0: when there is news */
    _Atomic uint32_t turn;         /* 0 free, 1 held */
    _Atomic uint32_t asleep_alone; /* stands in for the seat's word in a world of 1 */
    _Atomic uint32_t dozing;       /* not 0: the engine thread is to look by itself every millisecond, see progress.c */
    _Atomic bool bell_masked;      /* the engine thread does not hear its bell; written under bell_lock */
    _Atomic uint32_t listening;    /* 1: the holder of the turn sleeps, and its bell wakes it; see stream_watch.c */
    _Atomic bool tick_due;         /* the engine thread needs the turn for silence.c, and found it taken */
    _Atomic uint32_t waiters;      /* threads inside hvd_engine_wait */
    _Atomic uint32_t takers;       /* of these, that are about to take the turn from the engine thread */
    _Atomic uint32_t stop;         /* the engine thread shall end */
    _Atomic uint32_t stopped;      /* the turn is never given back */
    _Atomic uint32_t leave_wanted;
    _Atomic uint32_t left;        /* 1 + rank that has left the global set, agreed; own leave included */
    _Atomic uint32_t leaver;      /* 1 + rank that was the first to leave any set, agreed; not this one */
    _Atomic uint64_t abort_alone; /* stands in for control->abort in a world of 1 */
    _Atomic uint32_t witnessing;  /* 1: a thread of this rank has written an abort */
    _Atomic uint32_t failed;      /* 1: `failure` is written and will not change */
    struct hvd_error failure;
    _Atomic uint32_t noticed; /* 1: `notice` is written and will not change; 2: and somebody has read it */
    char notice[1024];
    _Atomic uint32_t guarded, guard_word; /* nan_guard.c: tensors told of; whether guard_text is to be read */
    char guard_text[HVD_TEXT_MAX];
    pthread_mutex_t opening_lock, records_lock; /* never the turn's, see process_set.c */
    pthread_mutex_t bell_lock;                  /* held for one epoll_ctl */
    struct hvd_set_record record[HVD_SETS_MAX];
    uint32_t lives; /* under opening_lock: the greatest life that a set has had here */

    /* Owned by the turn. */
    struct hvd_suspicion suspicion;
    struct hvd_stall stall;
    uint64_t ticked_ns;                /* the engine thread's: when the clock of silence.c ticked last */
    int active;                        /* ticks for which the engine thread will doze on without a waiter */
    uint64_t left_turn_ns;             /* when a waiter last gave it back */
    struct hvd_set *set[HVD_SETS_MAX]; /* that this rank is a member of; the global one first */
    int sets;
    uint32_t newest; /* slot of the request that was drained from the queue last */
    uint32_t last;   /* tensor (trace/names.h) and kind of what a user has submitted last; 0: nothing */
    int last_kind;
    uint64_t clock; /* see order.c */
    struct hvd_set *by_number[HVD_SETS_MAX];
};

/* ---- for api.c and the tests: any thread ---- */

/* Collective and blocking. in_process: ranks are threads of this process (tests). first_generation keeps handles
 * of an earlier engine stale. On failure *engine is NULL and nothing stays. */
int hvd_engine_open(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, bool in_process,
                    uint32_t first_generation, struct hvd_engine **engine, struct hvd_error *error);
/* Three steps of an end. leave: agreed by votes, bounded by leave_timeout_ms; other threads may still call in.
 * stop: ends the thread and finishes every handle, so that waiters return. free: when nobody is inside. */
uint64_t hvd_engine_leave_until(const struct hvd_engine *engine);      /* who begins to leave now */
bool hvd_engine_leaving(struct hvd_engine *engine, uint64_t until_ns); /* waits; has all been agreed and done? */
void hvd_engine_leave(struct hvd_engine *engine, uint64_t until_ns);   /* the same, and this is its end */
void hvd_engine_stop(struct hvd_engine *engine);
void hvd_engine_free(struct hvd_engine *engine);
/* As hvd_named says, and what they are; NULL: none was asked for. */
int hvd_engine_find_named(const char *plane, const char *algo, const struct hvd_plane **wanted,
                          const struct hvd_algo **forced, struct hvd_error *error);
/* As hvd_set_open and hvd_set_close say. */
int hvd_engine_set_open(struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                        const struct hvd_streams *streams, struct hvd_error *error);
int hvd_engine_set_close(struct hvd_engine *engine, int number, struct hvd_error *error);
int hvd_engine_notice(struct hvd_engine *engine, char *text, size_t text_bytes);               /* as hvd_notice */
int hvd_engine_guarded(struct hvd_engine *engine, char *text, size_t text_bytes);              /* as hvd_guarded */
int hvd_engine_tune(struct hvd_engine *engine, int64_t fusion_bytes, struct hvd_error *error); /* as hvd_tune */
int64_t hvd_engine_submit(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_error *error);
int hvd_engine_check(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_error *error);
int64_t hvd_engine_run(struct hvd_engine *engine, const struct hvd_request *request, int64_t wait_ns, char *text,
                       size_t text_bytes);
/* By a waiter: do the engine's work until done(self), or patience or time is at an end; false: another thread does it.
 * `patient` begins as true. */
bool hvd_engine_take_part(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns,
                          bool *patient);
/* Of a handle that went well, and whose mark nobody will ask for: is the collective done on its device, too? Blocks
 * until then: HVD_OK, HVD_AGAIN, or why the job has failed meanwhile. */
int hvd_engine_reached(struct hvd_engine *engine, const struct hvd_slot *slot, uint64_t until_ns, char *text,
                       size_t text_bytes);
int hvd_engine_finish(struct hvd_engine *engine, int64_t handle, int64_t wait_ns, char *text, size_t text_bytes);
void hvd_engine_kick(struct hvd_engine *engine);
int hvd_engine_poll(struct hvd_engine *engine, int64_t handle);
int hvd_engine_behind(struct hvd_engine *engine, int64_t handle, void *stream, struct hvd_error *error);
int hvd_engine_fetch(struct hvd_engine *engine, int64_t handle, uintptr_t to, void *stream, struct hvd_error *error);
int hvd_engine_wait(struct hvd_engine *engine, int64_t handle, int timeout_ms, char *text, size_t text_bytes);
int hvd_engine_result(struct hvd_engine *engine, int64_t handle, struct hvd_output *output);
int hvd_engine_forget(struct hvd_engine *engine, int64_t handle);
void *hvd_engine_alloc(struct hvd_engine *engine, size_t bytes);
int64_t hvd_engine_usage(struct hvd_engine *engine, int kind); /* bytes that this rank uses for HVD_USAGE_* */
/* As hvd_submit_many and hvd_wait_many say. */
int hvd_engine_submit_many(struct hvd_engine *engine, const struct hvd_request *const *requests, int count,
                           struct hvd_owner *owners, struct hvd_error *error);
int hvd_engine_wait_many(struct hvd_engine *engine, struct hvd_owner *owners, int count, int timeout_ms, char *text,
                         size_t text_bytes);
/* As hvd_dump says. signals: from now on (number 0: no more) this signal of the process asks for a record. */
int hvd_engine_dump(struct hvd_engine *engine, const char *folder, int why, char *text, size_t text_bytes);
void hvd_flight_signals(struct hvd_engine *engine, int number);
/* Tell everyone why the job ends; the first call of the job wins. */
void hvd_engine_abort(struct hvd_engine *engine, int culprit, int code, const char *reason);
void hvd_engine_script_ended(struct hvd_engine *engine); /* tells the launcher so */

/* ---- between the files of this folder ---- */

static inline void hvd_count(struct hvd_engine *engine, int which, int64_t by)
{
    atomic_fetch_add_explicit(&engine->counter[which], by, memory_order_relaxed);
}

/* By the turn: is anything of this rank's under way? */
static inline bool hvd_engine_busy(const struct hvd_engine *engine)
{
    for (int i = 0; i < engine->sets; i++)
        if ((engine->set[i]->entered && (engine->handles.with_turn || engine->set[i]->tree)) ||
            !hvd_work_empty(engine->set[i]))
            return true;
    return false;
}

/* engine.c: a checked request goes to the turn; its handle. validate.c: what is wrong with it. */
int64_t hvd_engine_push(struct hvd_engine *engine, const struct hvd_request *request,
                        const struct hvd_membership *membership, struct hvd_error *error);
int hvd_request_check(const struct hvd_membership *membership, const struct hvd_request *request,
                      struct hvd_error *error);

/* engine.c: hvd_engine_push, after the guard's look at the tensor. nan_guard.c: what that finds, as
 * hvd_request.not_finite has it; tell: by the turn, the guard warns of what is agreed. */
int64_t hvd_guard_push(struct hvd_engine *engine, const struct hvd_request *request,
                       const struct hvd_membership *membership, struct hvd_error *error);
uint64_t hvd_guard_look(int mode, const struct hvd_request *request);
void hvd_guard_tell(struct hvd_engine *engine, const char *text);

/* names.c */
extern const struct hvd_coord_names hvd_engine_names;
extern const uint8_t hvd_engine_bytes_of[]; /* of an element, by the dtype of a signature */
const char *hvd_engine_kind(int kind);
/* names.c: what carried a bucket, from an event's `by`: a plane, or "votes", or "cpu". Static. */
const char *hvd_engine_carrier(int by);

/* events.c: what the ring is told, and its records. A request of this engine is under way; it is watched by a waiting
 * thread, or no more (now_ns 0: the clock is read); the set's bucket begins; its plan was taken (before it is on the
 * agenda). end: the request is finished otherwise than in a bucket. */
int hvd_flight_open(struct hvd_engine *engine, struct hvd_error *error);
void hvd_flight_close(struct hvd_engine *engine);
void hvd_flight_submit(struct hvd_engine *engine, struct hvd_slot *slot, int64_t bytes);
void hvd_flight_watch(struct hvd_engine *engine, struct hvd_slot *slot, bool begins, uint64_t now_ns);
void hvd_flight_start(struct hvd_engine *engine, struct hvd_set *set);
void hvd_flight_round(struct hvd_engine *engine, struct hvd_set *set, uint32_t aside, uint64_t now_ns);
void hvd_flight_end(struct hvd_engine *engine, uint32_t index, int code, const char *text);
/* keep: by the turn, before a failure ends all requests. ask: the engine thread shall write a record; due: it does. */
void hvd_flight_keep(struct hvd_engine *engine);
void hvd_flight_ask(struct hvd_engine *engine, uint32_t why);
void hvd_flight_due(struct hvd_engine *engine);
/* dump.c: the record itself, in JSON. waiting: a text to be freed. */
char *hvd_record_waiting(struct hvd_engine *engine);
/* timeline_rows.c: see hvd_timeline_follow. */
int hvd_engine_follow(struct hvd_engine *engine, struct hvd_follower *follower, struct hvd_spans *spans);
int hvd_record_write(struct hvd_engine *engine, const char *folder, bool guarded, uint32_t why, char *path,
                     size_t path_bytes, struct hvd_error *error);
/* rotation.c: `name` in an open folder is about to be written: what another life has left there gets another name. */
void hvd_rotate_in(int in, const char *name, uint64_t job, uint64_t epoch);
int hvd_engine_keep(struct hvd_engine *engine, const char *path, uint64_t *job, uint64_t *epoch); /* as hvd_rotate */

/* progress.c */
void hvd_turn_note_cpu(const struct hvd_engine *engine);  /* of a thread that submits or waits */
void hvd_turn_go_to_cpu(const struct hvd_engine *engine); /* by the engine thread, before it works */
bool hvd_turn_once(struct hvd_engine *engine); /* by the holder: one pass over everything; true: something moved */
bool hvd_turn_take(struct hvd_engine *engine); /* try */
/* By a waiter: try a little, unless done(self); the engine thread gives way. */
bool hvd_turn_take_over(struct hvd_engine *engine, bool (*done)(void *self), void *self);
/* By the holder, who gives the turn back in it. run: until nothing moves and nobody waits (the engine thread; a
 * submitter in a world of 1). drive: until done(self), out of patience, or until_ns; returns done(self). */
void hvd_turn_run(struct hvd_engine *engine);
bool hvd_turn_drive(struct hvd_engine *engine, bool (*done)(void *self), void *self, uint64_t until_ns);
void hvd_turn_ring(struct hvd_engine *engine); /* any thread: the engine thread looks around, whoever has the turn */
void hvd_turn_call(const struct hvd_engine *engine); /* any thread: it does, and no listener takes that from it */
void hvd_turn_kick(struct hvd_engine *engine); /* any thread: there is news; wake the engine thread if it sleeps */
/* thread.c: the engine thread. What a waiter wants of it when it gives the turn back, in `dozing`, and whether it
 * knows: to look by itself, so often, until that many times have gone by without a waiter. */
#define HVD_DOZE_MS    1
#define HVD_DOZE_TICKS 10
enum { HVD_DOZE_ASKED = 1, HVD_DOZE_HEARD };
int hvd_turn_thread_start(struct hvd_engine *engine, struct hvd_error *error);
void hvd_turn_thread_stop(struct hvd_engine *engine);

/* deferred_wake.c. arm: something was pushed that nobody was woken for. disarm: by a holder of the turn, before it
 * looks at the queue. rang: by the engine thread. */
bool hvd_alarm_open(struct hvd_alarm *soon);
void hvd_alarm_close(struct hvd_alarm *soon);
void hvd_alarm_arm(struct hvd_alarm *soon);
int hvd_alarm_until_alarm(struct hvd_engine *engine, int sleep_ms); /* the shorter of both, for epoll; -1: no limit */
void hvd_alarm_linger(struct hvd_engine *engine);                   /* by the engine thread, that has the turn */
/* By the turn: what the works under way make of who waits for them. nap: before the turn ends; where nobody will ring,
 * set the alarm clock, later each time that nothing moved. */
enum hvd_silence { HVD_RINGS, HVD_SILENT, HVD_POLLED };
enum hvd_silence hvd_alarm_silence(const struct hvd_engine *engine);
void hvd_alarm_nap(struct hvd_engine *engine);
void hvd_alarm_disarm(struct hvd_alarm *soon);
void hvd_alarm_rang(struct hvd_alarm *soon);

/* network_cost.c: at open, by all ranks of the job together: what a message between hosts costs, into
 * engine->link_cost; told or measured. probe: its part between leaders, in a ring; both links may be the same. */
int hvd_cost_agree(struct hvd_engine *engine, const struct hvd_options *options, struct hvd_error *error);
int hvd_cost_probe(struct hvd_link *next, struct hvd_link *before, uint64_t deadline_ns, struct hvd_cost *cost,
                   struct hvd_error *error);

/* silence.c: by the engine thread, that has the turn, every tick_ms (-1: there are no ticks). */
void hvd_silence_tick(struct hvd_engine *engine);
uint64_t hvd_silence_progress(const struct hvd_set *set); /* anything that changes when the set gets on */
int hvd_silence_tick_ms(const struct hvd_engine *engine);
bool hvd_silence_decides(const struct hvd_engine *engine, uint64_t now); /* who is lost, not the suspicion */

/* abort.c, failure.c */
#define HVD_PATIENCE_NS 200000000u /* how long the bare end of a stream waits for somebody to say who died */
_Atomic uint64_t *hvd_abort_word(struct hvd_engine *engine);
bool hvd_abort_seen(struct hvd_engine *engine); /* by the turn: take note of an abort; true if it was new */
/* By the turn: fail all BUSY handles, of one set or (NULL) of all. */
void hvd_abort_handles(struct hvd_engine *engine, const struct hvd_set *set, int code, const char *why);
/* By the turn: a member of the set has left, agreed; `rank` is its number in the set. */
void hvd_abort_left(struct hvd_engine *engine, struct hvd_set *set, int rank);
void hvd_abort_text(struct hvd_engine *engine, uint32_t slot, const char *why, char *text, size_t text_bytes);
/* By the turn: the stream to a rank of the job has ended, or the like, which the set does not expect; `missed`: though
 * work that was agreed on needs it. Somebody may know better: after a moment it is believed. judge: is the moment
 * over? */
void hvd_abort_suspect(struct hvd_engine *engine, const struct hvd_set *set, int rank, bool missed, const char *text);
bool hvd_abort_judge(struct hvd_engine *engine);
/* Any thread: the process of this rank of the host has ended. */
void hvd_abort_lost(struct hvd_engine *engine, int local);
void hvd_abort_left_text(int rank, char *text, size_t text_bytes);
bool hvd_abort_has_left(const struct hvd_engine *engine, int rank);

#endif
