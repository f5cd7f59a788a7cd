/* fuzz_check.c - one vote, damaged: hvd_vote_check and hvd_vote_merge alone, many times faster than whole rounds.
 *
 * Three coordinators were brought into each of five states once: all is new, known tensors, a learned list, a detail
 * round, one rank has joined. An input takes a true vote of one of them, damages it, and has it checked in memory of
 * exactly its length; what is accepted is merged with another, both ways, in memory of exactly the size that the
 * contract asks for. Neither function changes a coordinator, so the states stay as they are.
 */
#include "check.h"
#include "negotiation/state.h"
#include "fuzz.h"
#include "ranks.h"

enum { STATES = 5, SIZE = 3, TENSORS = 6 };

static struct ranks states[STATES];
static struct hvd_vote *damaged, *other, *merged;

static void submit_all(struct ranks *ranks, int from, bool odd)
{
    static const char *const name[TENSORS] = {"a", "b", "c", "d", "e", "f"};
    for (int rank = from; rank < SIZE; rank++)
        for (uint32_t i = 0; i < TENSORS; i++) {
            struct hvd_signature signature = ranks_signature(4 + (odd && i == 1 && rank == 2));
            hvd_coord_submit(ranks->coord[rank], i, name[i], &signature, 0);
        }
}

/* Votes of the next round lie in ranks->vote afterwards. */
static void bring_into(struct ranks *ranks, int state)
{
    ranks_open(ranks, SIZE, 12, 8, 12, 1);
    for (int steps = state == 2 ? 4 : state > 0; steps > 0; steps--) {
        submit_all(ranks, 0, false);
        ranks_round(ranks);
    }
    if (state == 4)
        hvd_coord_join(ranks->coord[0]);
    submit_all(ranks, state == 4, state == 3);
    for (int rounds = state == 3 ? 1 : 0; rounds > 0 || (state == 3 && ranks->coord[0]->details.head == HVD_NONE);
         rounds--)
        ranks_round(ranks);
    for (int rank = 0; rank < SIZE; rank++)
        ranks_vote(ranks, rank);
    CHECK(state != 2 || ranks->coord[0]->learn.count == TENSORS, "nothing was learned");
    CHECK((state == 3) == (ranks->vote[0]->detail_slot != HVD_NONE), "a detail round?");
}

void fuzz_check(struct fuzz_input input)
{
    uint32_t form = fuzz_byte(&input), at = fuzz_byte(&input) % SIZE;
    if (!merged) {
        for (int state = 0; state < STATES; state++)
            bring_into(&states[state], state);
        merged = malloc(states[0].vote_bytes);
        other = malloc(states[0].vote_bytes);
    }
    const struct ranks *ranks = &states[form % STATES];
    const struct hvd_vote *vote = ranks->vote[at], *with = ranks->vote[form / 8 % SIZE];
    size_t bytes = vote->bytes, room = form & 128 ? fuzz_below(&input, 65536) % (bytes + 1) : bytes;
    damaged = malloc(room + !room);
    memcpy(damaged, vote, room);
    while (input.left > 2)
        fuzz_damage(&input, damaged, room);
    if (hvd_vote_check(ranks->coord[(at + 1) % SIZE], damaged, room) == HVD_OK) {
        CHECK(room >= sizeof *vote && damaged->bytes <= room && damaged->round == vote->round, "%zu bytes", room);
        memcpy(merged, with, with->bytes);
        hvd_vote_merge(ranks->coord[0], merged, damaged);
        CHECK(merged->bytes <= ranks->vote_bytes, "%u bytes are merged", merged->bytes);
        memcpy(other, damaged, damaged->bytes);
        hvd_vote_merge(ranks->coord[0], other, with);
        CHECK((damaged->list && with->list) ||
                  (merged->bytes == other->bytes && memcmp(merged, other, merged->bytes) == 0),
              "merging is not commutative");
    }
    free(damaged);
}
