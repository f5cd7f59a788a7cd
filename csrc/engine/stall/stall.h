/* stall.h - the clock of collectives that wait for too long (stall_check.c), and what is asked of all ranks then
 * (inquiry.c).
 *
 * Who owns what: the clock is the engine thread's; an inquiry and its book belong to the turn, as frames do that come
 * for it; a caller whose own patience is over only sets a bit in his host's desk, and reads there what was found.
 */
#ifndef HVD_ENGINE_STALL_STALL_H
#define HVD_ENGINE_STALL_STALL_H

#include "rank_status.h"

struct hvd_engine;
struct hvd_set;
struct hvd_slot;
struct hvd_neighbor;
struct hvd_frame;
struct hvd_book; /* of a leader: the accounts that have come */

struct hvd_stall {
    /* The engine thread's. */
    uint64_t tick_ns; /* between looks; 0: there is no clock */
    uint64_t next_ns; /* when it looks again */
    uint64_t asked_ns, repeat_ns, told_ns, sign;
    uint64_t looked_ns, late_ns; /* when it has looked; for how long what should have ended the job has not */
    uint64_t asked;              /* the inquiry for which this rank's stack was asked for */
    uint64_t stack_ns;           /* when */
    bool led;                    /* this rank has begun to lead its host */
    int64_t stack_bytes;
    uintptr_t stack_handler; /* of the signal that asks for it, when the engine began */
    /* Set by who has the turn. */
    _Atomic bool news;
    uint32_t why;            /* HVD_WANT_*, of the inquiry that is open */
    _Atomic uint64_t number; /* 0: none is open here; also looked at without the turn */
    uint64_t until_ns;
    struct hvd_book *book; /* for when it leads */
    /* What neighbor.c does with frames that are no votes; NULL: none may come. Set when the engine opens. */
    bool (*may_come)(const struct hvd_set *set, const struct hvd_frame *head);
    bool (*take)(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near,
                 const struct hvd_frame *head, const char *body);
};

int hvd_stall_open(struct hvd_engine *engine, struct hvd_error *error);
/* By the turn: since when a request waits without its set getting on. */
uint64_t hvd_stall_since(const struct hvd_engine *engine, const struct hvd_slot *slot);
/* Who leads this host: its first rank that is not gone. gone: that one has left, and does nothing more. */
int hvd_stall_leader(const struct hvd_engine *engine);
void hvd_stall_gone(struct hvd_engine *engine, int local);
/* status_board.c: the desk of this host; does this rank lead there? want: HVD_WANT_* bits for who does. */
struct hvd_inbox *hvd_inbox(const struct hvd_engine *engine);
bool hvd_inbox_leads(const struct hvd_engine *engine);
void hvd_inbox_want(struct hvd_engine *engine, uint64_t what);
/* inquiry.c. open, close: the book. The others by the turn but tell: answer: this rank's account. lead: a leader's
 * part; true: who leads the job has come to an end, and is to tell the user. */
int hvd_inquiry_open(struct hvd_engine *engine, struct hvd_error *error);
void hvd_inquiry_close(struct hvd_engine *engine);
void hvd_inquiry_answer(struct hvd_engine *engine, uint64_t number, uint64_t now);
bool hvd_inquiry_lead(struct hvd_engine *engine, uint64_t now);
void hvd_inquiry_tell(struct hvd_engine *engine, uint64_t now);
void hvd_stall_ring(const struct hvd_engine *engine, int local);
/* By the engine thread, without the turn, whenever it is awake. */
void hvd_stall_look(struct hvd_engine *engine);
/* By the turn: a frame has come (vote_tree.h) that is for here. may_come: from the head alone. */
bool hvd_stall_may_come(const struct hvd_set *set, const struct hvd_frame *head);
bool hvd_stall_take(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near,
                    const struct hvd_frame *head, const char *body);
#define HVD_STALL_BODY_MAX \
    (sizeof(struct hvd_account) > sizeof(struct hvd_finding) ? sizeof(struct hvd_account) : sizeof(struct hvd_finding))

/* Any thread: who is missing for this handle's collective? Blocks for wait_ms at most; HVD_OK and the text, HVD_AGAIN:
 * nothing is known, HVD_EHANDLE. From then on the clock of stall_check.c passes the request by. */
int hvd_engine_missing(struct hvd_engine *engine, int64_t handle, int wait_ms, uint64_t *asked, char *text,
                       size_t text_bytes);

#endif
