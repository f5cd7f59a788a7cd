/* process_set.h - one process set as a member rank sees it: who is in it, what they vote on, what moves.
 *
 * Set 0 holds all ranks; it is open from the engine's start to its end. The others are opened and closed by the
 * caller, in the same order on all ranks of the job, so that the lowest free number is the same everywhere. Sets know
 * nothing of each other: each has its coordinator, its rounds, its agenda and its planes, and the turn passes over
 * all of them, so ranks that are in several sets never wait for one set while another could move. Death and abort are
 * the job's (abort.c); a rank leaves every set that it is in.
 *
 *   process_set.c     open and close
 *   vote_tree.c    votes from host to host; eager.c: small tensors that travel with them
 *   work_queue.c  what is agreed and not yet done
 *   set_space.c   where the ranks of a set meet in shared memory
 *   shm_votes.c   votes on boards -> an agreed plan, appended to the agenda
 *   execute.c    the agenda -> buckets -> a plane; results to handles; ragged.c: sizes first
 */
#ifndef HVD_ENGINE_PROCESS_SET_H
#define HVD_ENGINE_PROCESS_SET_H

#include "../negotiation/negotiation.h"
#include "../plane/plane.h"
#include "engine/execution/adasum.h"
#include "engine/host_votes/eager.h"
#include "engine/host/set_space.h"
#include "engine/device/host_staging.h"
#include "engine/host_votes/vote_tree.h"

#define HVD_PLANES_MAX 8
/* Added to a signature's dtype: the tensor lies on a device. */
#define HVD_SIGNED_ON_DEVICE 64

struct hvd_engine;
struct hvd_host;

/* A plane that works on all ranks of the set, in order of preference. */
struct hvd_open_plane {
    const struct hvd_plane *plane;
    void *self;
    int carrier;  /* its place in the table of planes */
    bool refused; /* agreed: a plane for devices that is not for these */
};

/* On which device each rank works, of some works: its ranks have greeted each other, and decided who does them. */
struct hvd_lineup {
    int64_t *device; /* of each rank, counted from 1; NULL: on its usual one */
    bool greeted;
    struct hvd_open_plane open;
    struct hvd_lineup *next;
};

/* A work that was launched on a device; see device_watch.c. */
struct hvd_watched {
    struct hvd_gpu_event *behind;
    const struct hvd_open_plane *by;
    struct hvd_key key; /* and the rest of its first tensor */
    int kind, root, peer;
    char name[HVD_NAME_MAX + 1]; /* "": it has none */
};

/* Those that may not have ended there, in order. */
struct hvd_watch {
    struct hvd_watched *work;
    uint32_t head, count, room; /* work[head] is the first */
    uint64_t stands_ns;         /* since when that is all that keeps the device; 0: it is not, or not known */
};

/* What was agreed and is not yet done, in plan order. */
struct hvd_agenda {
    struct hvd_plan_item *item; /* ring */
    uint64_t *bucket;           /* beside it: plan number << 32 | bucket */
    uint64_t *date;             /* and the date of its plan, see order.c */
    uint32_t *active;           /* and how many ranks had not joined when it was planned */
    uint32_t head, count, room; /* room is a power of two */
};

/* The bucket that is moving. */
struct hvd_moving {
    bool busy, sizes;          /* sizes: it is the exchange of numbers of rows, not the collective itself */
    bool composed;             /* adasum has more works for this bucket */
    bool waits;                /* it lies on a device, and lesser ones of other sets have to begin first; see order.c */
    bool greeting, unmet;      /* it is the greeting of ranks that have tensors on devices; unmet: which has just been,
                                  and one knew no device yet */
    struct hvd_lineup *lineup; /* it lies there; NULL: in the CPU's memory */
    bool rode;                 /* it has been done by the votes that agreed on it, see eager.c */
    struct hvd_stage stage;
    struct hvd_adasum adasum;
    uint32_t items; /* items of the agenda, from its head, that it serves */
    const struct hvd_open_plane *by;
    struct hvd_work work;
    struct hvd_piece *piece;
    void **ready;       /* beside it: events, for tensors on devices */
    uint64_t *count_of; /* as the plane wants it */
    int64_t *rows;      /* what each rank said: rows[rank * width + i], some numbers for each sized item */
    int64_t *rows_mine;
    uint32_t sized;        /* items at the head whose numbers are known */
    uint32_t width, place; /* numbers of each rank; the first that belongs to the head */
    uint32_t piece_room;
    size_t rows_room;
    int64_t *devices;          /* devices[rank * asked + i]: where the i-th item lies of those that were asked for */
    uint32_t asked, asked_for; /* how many; and of these, that are at the head now */
    uint64_t begun_ns;         /* when the plane started the work */
};

struct hvd_set {
    /* Set at open. */
    int number;
    int rank, size;
    uint32_t life;            /* which of the sets that this job has opened; 0: the global one */
    int *member;              /* rank in the job of each rank in the set */
    int *host_of;             /* the number of its host */
    bool alone;               /* this rank only: decided without anybody */
    int local[HVD_LOCAL_MAX]; /* rank in the set of its members on this host, ascending; the first is the leader */
    int locals, here;         /* how many; which of them is this rank */
    struct hvd_bells bells;   /* of these */
    struct hvd_place place[HVD_LOCAL_MAX];
    size_t vote_bytes; /* the largest that may arise */
    struct hvd_open_plane planes[HVD_PLANES_MAX];
    int planes_count;
    struct hvd_stream_table *wires, *vote_wires; /* for tensors, and of a leader for votes; NULL: none */
    struct hvd_tree *tree;                       /* of the leader of a set on several hosts; else NULL */
    struct hvd_eager_room *riders;               /* NULL: a set of one rank */

    /* Owned by the turn. */
    struct hvd_coord *coord;
    void *coord_block;
    size_t coord_block_bytes;
    struct hvd_vote *agreed, *seen;
    struct hvd_plan plan;
    bool entered;        /* my vote of this round lies on my board */
    uint64_t said_clock; /* in it */
    uint64_t served_ns;  /* when this rank's last work of it was done; kept where others are on other hosts */
    bool probing;        /* enter a round, to see who answers; see silence.c */
    int waited;          /* ticks without progress */
    uint64_t progress;
    uint64_t moved, moved_ns;       /* stall_check.c: progress, and when it was last another one */
    uint64_t planned, planned_ns;   /* stall_check.c: `plans`, likewise */
    struct hvd_link_counts crossed; /* that the engine has counted */
    bool left;                      /* a member has left, agreed: nothing more is voted on */
    int leaver;                     /* who, by its number in the job */
    uint64_t plans;
    struct hvd_agenda agenda;
    uint32_t aside; /* items of it that are in no count, see step_costs.h */
    struct hvd_moving moving;
    unsigned char *hello;      /* of all ranks and, behind them, mine, while they greet each other */
    char refusal[400];         /* why the plane for devices is not for these ranks */
    bool on_stream;            /* works lie on a device's stream that are not done there, as far as is known */
    struct hvd_watch watch;    /* the same, one by one */
    struct hvd_lineup *lineup; /* the usual one, and those that were needed; NULL: nothing was on a device yet */
    int usual;                 /* the device that this rank's first tensor lay on, counted from 1; 0: there was none */
    uint32_t join_slot;        /* HVD_SLOT_NONE: this rank has not joined */
};

/* What a submission needs to know about a set before the turn sees it. */
struct hvd_membership {
    int rank, size;
    uint32_t life;
};

/* validate.c. Any thread: may this rank submit there? */
int hvd_set_look_up(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_membership *membership,
                    struct hvd_error *error);
/* What the ranks must have in common of a request; what a kind has no use for is 0. */
struct hvd_signature hvd_set_sign(const struct hvd_request *request);
/* The global set, in the order of an engine's open: what it votes on; after the host is met, where; its planes, as
 * they turn out to work everywhere. close_all: all sets, when nobody is inside any more. */
int hvd_set_open_global(struct hvd_engine *engine, const struct hvd_options *options, struct hvd_error *error);
void hvd_set_meet(struct hvd_engine *engine, struct hvd_set *set);
void hvd_set_insert_plane(struct hvd_engine *engine, struct hvd_set *set, struct hvd_open_plane open);
/* What the planes of this set are opened with, but for the functions and what those need. */
struct hvd_plane_arg hvd_set_plane_arg(struct hvd_engine *engine, struct hvd_set *set);
void hvd_set_close_all(struct hvd_engine *engine);
/* By the turn: a request to open or close has come through the queue. */
void hvd_set_turn(struct hvd_engine *engine, uint32_t index);

/* shm_votes.c: by the turn, but open and close, which nobody else sees meanwhile */
int hvd_votes_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error);
void hvd_votes_close(struct hvd_set *set);
bool hvd_votes_step(struct hvd_engine *engine, struct hvd_set *set);
bool hvd_votes_submit_queued(struct hvd_engine *engine); /* drain the queue into the coordinators */

/* work_queue.c: by the turn */
void hvd_agenda_append(struct hvd_agenda *agenda, const struct hvd_plan *plan, uint64_t number);
void hvd_agenda_close(struct hvd_agenda *agenda);

/* execute.c: by the turn */
bool hvd_work_step(struct hvd_engine *engine, struct hvd_set *set);
void hvd_work_close(struct hvd_set *set);
/* speculation.c: by the turn. This rank's vote has left: what will be agreed is told to the plane. tag: of a work, over
 * its items, beginning with 0. */
void hvd_speculate(struct hvd_engine *engine, struct hvd_set *set);
/* The work that would be. False: it is not known. plane: the one that would do it; NULL: that has no use for a guess.
 */
bool hvd_speculate_work(struct hvd_engine *engine, struct hvd_set *set, struct hvd_work *work, struct hvd_piece *piece);
const struct hvd_open_plane *hvd_speculate_plane(const struct hvd_set *set, const struct hvd_work *work);
uint64_t hvd_speculate_tag(uint64_t tag, struct hvd_key key, uint64_t bucket);
static inline bool hvd_set_spans_hosts(const struct hvd_set *set)
{
    return set->locals < set->size;
}
static inline bool hvd_work_empty(const struct hvd_set *set)
{
    return !set->moving.busy && set->agenda.count == 0 && !set->on_stream;
}

/* Between execute.c and ragged.c. */
struct hvd_plan_item *hvd_work_item(struct hvd_set *set, uint32_t i); /* i-th of the agenda */
uint64_t hvd_work_bucket(const struct hvd_set *set, uint32_t i);
struct hvd_slot *hvd_work_slot(struct hvd_engine *engine, const struct hvd_plan_item *item);
void hvd_work_pieces(struct hvd_moving *moving, uint32_t pieces); /* room for so many */
void hvd_work_describe(struct hvd_set *set, const struct hvd_plan_item *item);
/* The i-th piece of the work is this tensor: what is to be known of it if it lies on a device. */
void hvd_work_place(struct hvd_set *set, uint32_t i, const struct hvd_slot *slot);
static inline bool hvd_item_on_device(const struct hvd_plan_item *item)
{
    return item->signature.dtype >= HVD_SIGNED_ON_DEVICE;
}
static inline int hvd_item_dtype(const struct hvd_plan_item *item)
{
    return item->signature.dtype % HVD_SIGNED_ON_DEVICE;
}

/* device.c: by the turn. usual: the flag of a request on a device that lies where this rank's others do. greets: true,
 * the head lies on a device, and the ranks of this set have to say where, or to greet each other first, which is under
 * way now. together: how many items at the head, of so many, lie on the same devices. met: all have. part: what sets
 * have on devices begins to end, for all will be closed; abort: the job has failed, so at once; else when it is done.
 */
uint32_t hvd_device_usual(struct hvd_set *set, const struct hvd_request *request);
bool hvd_device_greets(struct hvd_engine *engine, struct hvd_set *set);
uint32_t hvd_device_together(const struct hvd_set *set, uint32_t items);
void hvd_device_met(struct hvd_engine *engine, struct hvd_set *set);
void hvd_device_part(struct hvd_engine *engine, bool abort);
/* Works of this set lie on a device's stream: are they done? True: that has changed. */
bool hvd_device_settle(struct hvd_engine *engine, struct hvd_set *set);
void hvd_device_close(struct hvd_set *set);
/* device_watch.c: by the turn. launched: the bucket that has been moved may lie on a device's stream now. look: what
 * has ended there, and since when does the first of the rest stand still (stands_ns)? clear: all has ended. where: of
 * the first, which there is: on which device, and by what. */
void hvd_watch_launched(struct hvd_engine *engine, struct hvd_set *set);
void hvd_watch_look(struct hvd_set *set, uint64_t now_ns);
const struct hvd_watched *hvd_watch_first(const struct hvd_set *set); /* NULL: there is none */
void hvd_watch_where(const struct hvd_set *set, char *text, size_t text_bytes);
void hvd_watch_clear(struct hvd_set *set);
void hvd_watch_close(struct hvd_set *set);
/* order.c: by the turn. This rank is about to vote; a plan was taken; may the head, which lies on a device, begin? */
void hvd_order_vote(struct hvd_engine *engine, struct hvd_set *set);
void hvd_order_plan(struct hvd_engine *engine, const struct hvd_plan *plan);
bool hvd_order_turn(struct hvd_engine *engine, const struct hvd_set *set);
void hvd_work_start(struct hvd_engine *engine, struct hvd_set *set);
void hvd_work_by_the_cpu(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error);
void hvd_ragged_counts(struct hvd_set *set);                           /* room for moving.count_of */
void hvd_ragged_start(struct hvd_engine *engine, struct hvd_set *set); /* the head is an allgather or alltoall */
void hvd_ragged_send(struct hvd_engine *engine, struct hvd_set *set);

#endif
