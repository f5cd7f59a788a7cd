/* rank_status.h - what a rank tells of itself when a collective has waited for too long, and what is made of it.
 *
 * An inquiry (stall_check.c) asks every rank for an account: what it has submitted that is not done, what it submitted
 * last, where its Python stands. Accounts have one size, so that they lie beside each other in the memory of a host,
 * and cross from host to host as they are. Rank 0 makes of all of them one report, and a finding: for each tensor that
 * waits, one line that says who is missing. That goes back to all.
 *
 * Of one size, an account lists 96 requests, those that have waited longest, and of a large model more wait. So it has
 * a set of bits (a Bloom filter) of all that waits, too: a rank whose list was cut surely lacks what is not in it, and
 * only what may be there, one in thousands by mistake, is held against nobody.
 *
 * Only its members need to know of a process set, and sets without a common rank may have one number. So an account
 * says who the members are of the sets that its requests are in, and marks a set by its number and its first member.
 */
#ifndef HVD_ENGINE_STALL_RANK_STATUS_H
#define HVD_ENGINE_STALL_RANK_STATUS_H

#include "../../base/base.h"

#include <stdatomic.h>

#define HVD_ENTRIES_MAX   96
#define HVD_FILTER_WORDS  128
#define HVD_NAMES_BYTES   3072
#define HVD_STACK_BYTES   2560
#define HVD_FINDING_KEYS  256
#define HVD_FINDING_LINES 8
#define HVD_FINDING_BYTES 1600
#define HVD_CIRCLES_MAX   8

/* The mark of a process set; the global one has 0. */
#define HVD_SET_MARK(number, first) ((number) | (first) << 8)
#define HVD_MARK_NUMBER(mark)       ((mark) & 0xff)

struct hvd_engine;
struct hvd_slot;
struct hvd_who;

/* A request that is not done. Of kind HVD_JOIN: this rank has joined in that set. */
enum { HVD_ENTRY_AGREED = 1, HVD_ENTRY_ON_DEVICE = 3 };
struct hvd_entry {
    uint64_t key;    /* the same on all ranks */
    uint64_t number; /* how many this rank had submitted before */
    int32_t set;     /* its mark */
    int16_t kind;
    uint16_t asked; /* 1: somebody has asked who is missing for it, and hears of it before others */
    int32_t root, peer;
    uint32_t waited_ms;
    uint16_t name;   /* where in `names`; names[0] is empty */
    uint16_t agreed; /* HVD_ENTRY_*: all have submitted it, and it is being carried out; or does not end on a device */
};

enum hvd_rank_state {
    HVD_RANK_ALIVE,
    HVD_RANK_STOPPED,
    HVD_RANK_GONE,
    HVD_RANK_STUCK,
    HVD_RANK_MUTE,
    HVD_RANK_LEFT,  /* it took its leave, and takes part in nothing */
    HVD_RANK_APART, /* the way to its host went by a rank that has left */
    HVD_RANK_UNHEARD
};

struct hvd_account {
    int32_t rank, pid;
    uint32_t state;         /* enum hvd_rank_state; of one that does not answer what others see of it */
    uint32_t entries, more; /* more: requests that found no room */
    uint32_t pad;
    uint64_t filter[HVD_FILTER_WORDS]; /* of all, hvd_account_may_have */
    char device[240];                  /* where what lies on a device does not end; "": nothing is known of that */
    struct {
        int32_t set; /* its mark; 0: no more sets */
        uint64_t members[HVD_RANKS_MAX / 64];
    } circle[HVD_CIRCLES_MAX];
    char last[HVD_NAME_MAX + 33]; /* what it submitted last, as it is to be called */
    char names[HVD_NAMES_BYTES], stack[HVD_STACK_BYTES];
    struct hvd_entry entry[HVD_ENTRIES_MAX];
};

/* What is known of tensors that wait: `line` says who has not submitted those with its number. */
struct hvd_finding {
    uint32_t keys, lines;
    struct {
        uint64_t key; /* hvd_finding_key */
        uint32_t line;
    } of[HVD_FINDING_KEYS];
    char line[HVD_FINDING_LINES][HVD_FINDING_BYTES];
};

static inline uint64_t hvd_finding_key(uint64_t key, int32_t mark)
{
    return key ^ (uint64_t)mark << 40;
}

/* One on each host, in the control segment; its leader (the first rank there that is not `gone`) writes, but for
 * `wanted`, `gone` and accounts. */
struct hvd_inbox {
    _Atomic uint64_t wanted;  /* HVD_WANT_*: somebody asks for an inquiry */
    _Atomic uint64_t gone;    /* bit i: local rank i has left the job, and its engine does nothing more */
    _Atomic uint64_t inquiry; /* the newest that this host knows of */
    _Atomic uint64_t found;   /* to which one `finding` belongs; 0 while it is written */
    _Atomic uint64_t answered[HVD_LOCAL_MAX];
    struct hvd_finding finding;
    struct hvd_account account[];
};

#define HVD_WANT_REPORT 1u /* it is time to tell the user */
#define HVD_WANT_END    2u /* it is time to end the job */
#define HVD_WANT_ANSWER 4u /* a caller's own patience is over */

/* What is to be said of one in that state: "is stopped (...)". */
const char *hvd_state_words(enum hvd_rank_state state);
/* Of two that are missing, who is rather at fault: who is stopped than who computes, and that one than who waits for
 * something else; who has left, or was not asked, is at no fault. NULL: nothing was heard of it. */
int hvd_account_weight(const struct hvd_account *account);
/* Of what all have submitted: may it wait for this rank? */
static inline bool hvd_account_holds_up(const struct hvd_account *account)
{
    return !account || (account->state != HVD_RANK_ALIVE && hvd_account_weight(account) > 0);
}
/* rank_status.c. fill: by the turn. other: of a rank of this host that does not answer. sane: of bytes from elsewhere;
 * makes an end to texts. */
/* A request of a user, or one that no user knows of, has come to the turn. */
void hvd_account_submitted(struct hvd_engine *engine, const struct hvd_slot *slot);
void hvd_account_fill(struct hvd_engine *engine, struct hvd_account *account, uint64_t now_ns);
void hvd_account_other(const struct hvd_engine *engine, int local, struct hvd_account *account);
bool hvd_account_sane(struct hvd_account *account, int ranks);
/* add: it waits there. may_have: does it, listed or not? No: surely not. */
void hvd_account_add(struct hvd_account *account, uint64_t key, int set); /* set: its mark */
/* Is that rank in a set in which this account has a request? */
bool hvd_account_in_set(const struct hvd_account *account, int set, int rank);
bool hvd_account_may_have(const struct hvd_account *account, uint64_t key, int set);
bool hvd_finding_sane(struct hvd_finding *finding);
/* The stack of this process: ask for it, and has it come? Without the turn. handler: what the signal calls now. */
void hvd_account_ask_stack(struct hvd_engine *engine);
uintptr_t hvd_account_handler(int signal);
bool hvd_account_has_stack(struct hvd_engine *engine, uint64_t now_ns);

/* missing_ranks.c. Pure. What the ranks have told (NULL: nothing was heard). */
struct hvd_inquiry {
    const struct hvd_account *const *of;
    int size;
    const struct hvd_who *who;
    uint32_t least_ms; /* what has waited less is no news */
};
#define HVD_REPORT_BYTES 32768
/* report: for the user, "" if nobody is missing. end: the same in a sentence or two. sign: tells whether the next
 * report says something new. */
struct hvd_told {
    char report[HVD_REPORT_BYTES];
    char end[1024];
    struct hvd_finding finding;
    uint64_t sign;
    bool on_device; /* something that is told of does not end there */
    int culprit;    /* the missing rank that is most likely at fault, -1: none */
};
void hvd_finding_make(const struct hvd_inquiry *inquiry, struct hvd_told *told);

#endif
