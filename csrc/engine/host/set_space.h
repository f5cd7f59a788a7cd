/* set_space.h - where the ranks of a process set meet in shared memory.
 *
 * Every rank owns one sparse segment that all ranks map when the engine is opened, the set space: room for
 * HVD_SETS_MAX places, one for each set that may be open at a time. A place holds what its owner says in that set: the
 * round word, two vote boards, and what a plane wants to share. So a set is opened without talking to anybody, and a
 * place that is not in use costs no memory. The global set has its places in the control segment.
 */
#ifndef HVD_ENGINE_HOST_SET_SPACE_H
#define HVD_ENGINE_HOST_SET_SPACE_H

#include "../../base/base.h"

#include <stdatomic.h>

#define HVD_SETS_MAX   256 /* open at a time, the global one included */
#define HVD_LINE_BYTES 32

struct hvd_host;
struct hvd_share;
struct hvd_vote;

/* What a rank says in a round, in one cache line: who polls for the round word has all of it. There are two, for even
 * and odd rounds, as there are two boards. */
struct hvd_round_line {
    _Atomic uint64_t round; /* life of the set << 48 | newest such round whose vote lies on a board */
    _Atomic uint64_t ahead; /* HVD_SHORT_VOTE | how much of the learned list is ready, and that is all of the vote */
    _Atomic uint64_t date;  /* of a short vote */
    _Atomic uint64_t mark;  /* of the tensor that travels with the vote (eager.h); 0: none */
    unsigned char tensor[HVD_LINE_BYTES]; /* its elements; more lie behind the vote on the board */
};
_Static_assert(sizeof(struct hvd_round_line) == HVD_CACHE_LINE, "a round is one line");
#define HVD_SHORT_VOTE (UINT64_C(1) << 63) /* without it, the vote is on the board alone */

/* One rank's place in one set. Only that rank writes it. */
struct hvd_place {
    struct hvd_round_line *line; /* two */
    _Atomic uint64_t *posted;    /* as line->round, of the newest round whose vote is that of all hosts */
    char *boards;                /* two, for rounds of even and odd number */
    char *share;                 /* for planes; NULL in the global set, whose planes have segments of their own */
};

struct hvd_space {
    struct hvd_share *share; /* NULL: there is none, and `why` says why */
    size_t board_bytes, place_bytes;
    int rank;     /* whose own places these are */
    bool private; /* ranks are threads */
    int fd;       /* own segment, where memory must be reserved before it is touched; -1: need not be */
    char why[512];
};

/* Collective. The space is a gift: HVD_OK and share == NULL where it is not to be had. */
int hvd_space_open(struct hvd_space *space, struct hvd_host *host, size_t board_bytes, struct hvd_error *error);
void hvd_space_close(struct hvd_space *space);
struct hvd_place hvd_space_place(const struct hvd_space *space, int rank, int number);
/* Local: the first `share_bytes` of my place's share may be touched, and all of it reads as zero. */
int hvd_space_take(struct hvd_space *space, int number, struct hvd_error *error);
int hvd_space_take_share(struct hvd_space *space, int number, size_t share_bytes, struct hvd_error *error);
/* Local: all of my place is zero again, but for the round word, and its memory is given back. */
void hvd_space_clear(struct hvd_space *space, int number);

/* Has the owner entered this round? A word that an earlier set left there says no. */
static inline bool hvd_place_says(const _Atomic uint64_t *of, uint32_t life, uint64_t round)
{
    uint64_t word = atomic_load_explicit(of, memory_order_acquire);
    return word >> 48 == (life & 0xffff) && (word & 0xffffffffffff) >= round;
}
static inline void hvd_place_say(_Atomic uint64_t *of, uint32_t life, uint64_t round)
{
    atomic_store_explicit(of, (uint64_t)(life & 0xffff) << 48 | round, memory_order_release);
}
static inline bool hvd_place_entered(const struct hvd_place *place, uint32_t life, uint64_t round)
{
    return hvd_place_says(&place->line[round & 1].round, life, round);
}
static inline void hvd_place_enter(const struct hvd_place *place, uint32_t life, uint64_t round)
{
    hvd_place_say(&place->line[round & 1].round, life, round);
}
/* Nothing of this life of the set has been entered. */
static inline void hvd_place_begin(const struct hvd_place *place, uint32_t life)
{
    for (int parity = 0; parity < 2; parity++)
        hvd_place_say(&place->line[parity].round, life, 0);
}

#endif
