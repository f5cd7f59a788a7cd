/* eager.h - a small tensor travels with the vote, to the ranks of a host and from host to host.
 *
 * Behind a vote lies what rides with it: on boards at the end of the vote's room, in frames behind the vote's bytes. It
 * is a list of parts: of each rank its tensor, or of each host the sum of its ranks'. Used by the turn only, but for
 * open and close. In a set on one host there are no parts: a rank's tensor lies in its round line, or behind its vote
 * if it is larger than HVD_LINE_BYTES.
 */
#ifndef HVD_ENGINE_HOST_VOTES_EAGER_H
#define HVD_ENGINE_HOST_VOTES_EAGER_H

#include "../../kernel/kernel.h"

#include <string.h>

#define HVD_EAGER_BYTES   ((size_t)8 << 10)  /* of a tensor, at most */
#define HVD_EAGER_ROOM    ((size_t)32 << 10) /* of all that rides in one vote, at most */
#define HVD_EAGER_SPOILT  UINT64_C(1)
#define HVD_EAGER_MATCHES UINT64_C(2) /* from here on marks are of works */

struct hvd_engine;
struct hvd_round_line;
struct hvd_set;
struct hvd_work;

/* As it travels. A part: the number in the set of the rank whose it is, or of a host's first, as 64 bits; then its
 * elements, to a multiple of 8 bytes. */
struct hvd_eager {
    uint64_t mark; /* of the work; 0: nobody rides; HVD_EAGER_SPOILT: some do, and not all with the same */
    uint32_t part_bytes, parts;
    unsigned char part[];
};

struct hvd_eager_room {
    struct hvd_eager *agreed; /* of all hosts */
    const void **source;      /* room for the fold: by rank of the set */
    uint64_t waits_for;       /* the tag of the work whose result lies in `agreed` and is waited for; 0: none */
    uint64_t offered;         /* mark of what this rank offered in this round; 0: nothing */
    uint64_t offered_tag;
    struct hvd_scale scale; /* of what it offered */
    size_t bytes;           /* on one host: of the tensor that it offered */
    int dtype, hosts;
    uint32_t expected;       /* parts of a whole ride of what it offered */
    bool by_host;            /* a part is a host's, not a rank's */
    uint32_t wrong, resting; /* rides in a row that served nothing; rounds to sit out. Agreed */
};

int hvd_eager_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error);
void hvd_eager_close(struct hvd_set *set);

/* This rank's vote is about to lie on a board: what rides with it, into `ride`. True: something does. */
bool hvd_eager_offer(struct hvd_engine *engine, struct hvd_set *set, struct hvd_eager *ride);
/* The same in a set on one host, into the line and the room behind the vote. */
void hvd_eager_offer_local(struct hvd_engine *engine, struct hvd_set *set, struct hvd_round_line *line, void *room);
/* All ranks have voted: what came with the vote of each, whose line is line[i] and whose room is room[i]. */
void hvd_eager_merge_local(struct hvd_set *set, struct hvd_round_line *const *line, void *const *room);
/* What rides with the vote of this host's ranks, of which ride[i] is the i-th; into `into`. Leader. */
void hvd_eager_of_host(const struct hvd_set *set, struct hvd_eager *const *ride, struct hvd_eager *into);
/* into := into (+) from. */
void hvd_eager_join(struct hvd_eager *into, const struct hvd_eager *from);
/* Is this, of so many bytes, a ride? Of parts of ranks of a set of this size. */
bool hvd_eager_check(const struct hvd_eager *ride, size_t bytes, int size);
size_t hvd_eager_bytes(const struct hvd_eager *ride);
static inline void hvd_eager_copy(struct hvd_eager *to, const struct hvd_eager *from)
{
    memcpy(to, from, hvd_eager_bytes(from));
}
/* riders->agreed is everyone's, set->plan what the round decided: who is right, and who sits out. */
void hvd_eager_agreed(struct hvd_set *set);
/* A work starts. HVD_OK: it is the one that has ridden, and is done. HVD_AGAIN: it is not. HVD_EINTERNAL: parts came
 * twice. */
int hvd_eager_take(struct hvd_set *set, const struct hvd_work *work);

#endif
