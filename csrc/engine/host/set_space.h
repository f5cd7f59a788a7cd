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

#define HVD_SETS_MAX 256 /* open at a time, the global one included */

struct hvd_host;
struct hvd_share;
struct hvd_vote;

/* One rank's place in one set. Only that rank writes it. */
struct hvd_place {
    _Atomic uint64_t *round;  /* life of the set << 48 | newest round whose vote lies on a board */
    _Atomic uint64_t *posted; /* the same, of the newest round for which that is the vote of all hosts */
    char *boards;             /* two, for rounds of even and odd number */
    char *share;              /* for planes; NULL in the global set, whose planes have segments of their own */
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
    return hvd_place_says(place->round, life, round);
}
static inline void hvd_place_enter(const struct hvd_place *place, uint32_t life, uint64_t round)
{
    hvd_place_say(place->round, life, round);
}

#endif
