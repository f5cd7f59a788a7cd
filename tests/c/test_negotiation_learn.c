/* test_negotiation_learn.c - rule 11 of negotiation.h: what was done twice is agreed by a counter; who deviates costs
 * one round. */
#include "check.h"
#include "negotiation/state.h"
#include "ranks.h"
#include "transcript.h"

#define STEP "all a\nall b\nall c\n"

static void a_list_is_learned_and_forgotten(void)
{
    transcript_play("The third time is learned; then ranks may be anywhere in the list, also in the next step",
                    "open 3\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "all a\n0,1 b\n2 b\n0 c\n"
                    "round\n> 4: a@0, b@1\n"
                    "0 a\n1,2 c\n"
                    "round\n> 5: c@2\n"
                    "1 a\n2 a\n2 b\n"
                    "round\n> 6: a@0\n"
                    "0 b\n1 b\nall c\n"
                    "round\n> 7: b@1, c@2\n");
    transcript_play("It is learned in the middle of a step, too",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n"
                    "0 a\n0 b\n0 c\n1 a\n"
                    "round\n> 3: a@0 learned 3\n"
                    "1 b\n0 a\n"
                    "round\n> 4: b@1\n"
                    "1 c\n1 a\n"
                    "round\n> 5: a@0, c@2\n");
    transcript_play("Not where a round plans something else than the next of the list: it is proposed again",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n"
                    "0 a\n0 b\n0 c\n1 b\n"
                    "round\n> 3: b@1\n"
                    "1 a\n"
                    "round\n> 4: a@0\n"
                    "1 c\n"
                    "round\n> 5: c@2 learned 3\n" STEP "round\n> 6: a@0, b@1, c@2\n");
    transcript_play("Out of turn: all forget in that round, and what is outstanding is said in bits in the next",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "all a\nall c\n"
                    "settle\n> 4: a@0 deviated ...\n> 5: c@2\n" STEP "round\n> 6: a@0, b@1, c@2\n" STEP
                    "round\n> 7: a@0, b@1, c@2\n" STEP "round\n> 8: a@0, b@1, c@2\n" STEP
                    "round\n> 9: a@0, b@1, c@2 learned 3\n");
    transcript_play("One rank alone deviates, and the tensor that it left out comes later",
                    "open 3\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "0,2 a\n0,2 b\n0,2 c\n1 a\n1 c\n"
                    "settle\n> 4: a@0 deviated ...\n> 5: c@2\n"
                    "1 b\n"
                    "settle\n> 6: b@1\n");
}

static void what_is_not_in_the_list(void)
{
    transcript_play("New tensors, other kinds, unnamed ones and groups travel beside a list",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "all a\nall x broadcast\nall # barrier\nall y group=4/2\nall z group=4/2\n"
                    "round\n> 4: a@0, x@3, #0, y@5, z@6\n"
                    "0 b\nall x broadcast\n1 y group=4/2\n"
                    "settle\n> 5: x@3\n"
                    "1 b\n0 y group=4/2\nall z group=4/2\n"
                    "settle\n> 6: b@1, y@5, z@6\n");
    transcript_play("A longer list takes the place of a shorter one; groups and other kinds are in none",
                    "open 2\n"
                    "all a\nround\n> 1: a@0\nall a\nround\n> 2: a@0\nall a\nround\n> 3: a@0 learned 1\n"
                    "all a\nall b\nall g group=4/2\nall h group=4/2\nall x broadcast\n"
                    "round\n> 4: a@0, b@1, g@2, h@3, x@4\n"
                    "all a\nall b\n"
                    "round\n> 5: a@0, b@1\n"
                    "all a\nall b\n"
                    "round\n> 6: a@0, b@1\n"
                    "all a\nall b\n"
                    "round\n> 7: a@0, b@1 learned 2\n"
                    "all a\nall b\n"
                    "round\n> 8: a@0, b@1\n");
}

static void what_makes_all_forget(void)
{
    transcript_play("Another shape of a tensor in it",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "all a\nall b 9\nall c\n"
                    "settle\n> 4: b@1 deviated ...\n> 5: a@0, c@2\n");
    transcript_play("A rank joins: nothing is planned from a list before the join has ended",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n" STEP
                    "round\n> 3: a@0, b@1, c@2 learned 3\n"
                    "0 a\n1 !join\n"
                    "settle\n> 4: ...\n> 5: a@0 without 1\n"
                    "0 b\n0 c\n"
                    "settle\n> 6: b@1 without 1, c@2 without 1\n"
                    "0 !join\n"
                    "settle\n> 7: joined, 0 last\n" STEP "round\n> 8: a@0, b@1, c@2 learned 3\n" STEP
                    "round\n> 9: a@0, b@1, c@2\n");
    transcript_play("An evicted slot", "open 2 slots 2\n"
                                       "all a\nall b\nround\n> 1: a@0, b@1\n"
                                       "all a\nall b\nround\n> 2: a@0, b@1\n"
                                       "all a\nall b\nround\n> 3: a@0, b@1 learned 2\n"
                                       "all x\n0 b\n0 a\n1 a\n"
                                       "settle\n> 4: x@0 deviated ...\n> 5: a@1 ...\n> 6:\n");
    transcript_play("Memory that has moved into the plane, and out of it: what is agreed is always right",
                    "open 2\n"
                    "all a\nround\n> 1: a@0\nall a\nround\n> 2: a@0\nall a\nround\n> 3: a@0 learned 1\n"
                    "all a plane\n"
                    "settle\n> 4: deviated ...\n> 5: a@0 plane\n"
                    "all a plane\nround\n> 6: a@0 plane\n"
                    "all a plane\nround\n> 7: a@0 plane\n"
                    "all a plane\nround\n> 8: a@0 plane\n"
                    "all a plane\nround\n> 9: a@0 plane learned 1\n"
                    "0 a plane\n1 a\n"
                    "settle\n> 10: deviated ...\n> 11: a@0\n");
    transcript_play("Two moved before it was learned, the first of them deviates and nothing behind it counts",
                    "open 2\n" STEP "round\n> 1: a@0, b@1, c@2\n" STEP "round\n> 2: a@0, b@1, c@2\n"
                    "0 a plane\n0 b\n0 c\n"
                    "settle\n> 3: learned 3 ...\n> 4: deviated ...\n> 5:\n"
                    "1 a plane\n1 b\n1 c\n"
                    "round\n> 6: a@0 plane, b@1, c@2\n");
}

/* Where all is learned a vote is its header: its size does not depend on how many tensors there are. */
static void a_learned_vote_is_a_counter(void)
{
    enum { TENSORS = 500 };
    static char name[TENSORS][8];
    struct ranks ranks;
    ranks_open(&ranks, 2, 1000, TENSORS, TENSORS, 1);
    struct hvd_signature signature = ranks_signature(4);
    for (int step = 0; step < 5; step++) {
        for (int rank = 0; rank < 2; rank++)
            for (uint32_t i = 0; i < TENSORS; i++) {
                snprintf(name[i], sizeof name[i], "%u", i);
                CHECK(hvd_coord_submit(ranks.coord[rank], i, name[i], &signature, 0) == HVD_OK, "%u", i);
            }
        ranks_round(&ranks);
        CHECK(ranks.plan[0].items == TENSORS, "%u items", ranks.plan[0].items);
        CHECK(ranks.plan[0].learned == (step == 2 ? TENSORS : 0), "step %d: %u", step, ranks.plan[0].learned);
        CHECK((ranks.agreed->bytes == sizeof(struct hvd_vote)) == (step > 2), "step %d: %u bytes", step,
              ranks.agreed->bytes);
    }
    ranks_close(&ranks);
}

int main(void)
{
    a_list_is_learned_and_forgotten();
    what_is_not_in_the_list();
    what_makes_all_forget();
    a_learned_vote_is_a_counter();
    return 0;
}
