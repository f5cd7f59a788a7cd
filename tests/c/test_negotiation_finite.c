/* test_negotiation_finite.c - rule 14: what the NaN guard has found goes the way of a mismatch, and fails or is
 * forgiven.
 *
 * Transcripts of both ends, also in groups, without names, and beside a real mismatch; a learned list that is left
 * and found again; and votes that say it wrongly.
 */
#include "check.h"
#include "negotiation/state.h"
#include "ranks.h"
#include "transcript.h"

#define LOOK                                                                                                  \
    ". That is where to look: at the loss, the batch and the learning rate there. (With a loss scale, as of " \
    "GradScaler or LossScaleOptimizer, overflow now and then is normal, and all ranks skip that step: "       \
    "HVDLITE_NAN_GUARD=warn tells and goes on, off says nothing.) [HVD320]\n"

static void what_is_found_fails_on_all_ranks(void)
{
    transcript_play("One rank of three, of a tensor that is known; then all goes on",
                    "open 3\n"
                    "all w\nall x\n"
                    "round\n> 1: w@0, x@1\n"
                    "1 w nan=3\n0,2 w\nall x\n"
                    "settle\n"
                    "> 2: x@1 ...\n"
                    "> 3: ...\n"
                    "> 4: fails on 0 1 2\n"
                    "> tensor 'w', before its allreduce: rank 1 had 3 NaN in 4 elements; the other ranks had none" LOOK
                    "all w\n"
                    "settle\n> 5: w@0\n");
    transcript_play("All ranks the same, at once: no mismatch, and yet it is told",
                    "open 3\n"
                    "all w 2x3 nan=6\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1 2\n"
                    "> tensor 'w', before its allreduce: ranks 0-2 had 6 NaN in 6 elements" LOOK);
    transcript_play("A world of one", "open 1\n"
                                      "0 w 1 inf=1\n"
                                      "settle\n"
                                      "> 1: ...\n"
                                      "> 2: fails on 0\n"
                                      "> tensor 'w', before its allreduce: rank 0 had 1 infinity in 1 element" LOOK);
    transcript_play("More different findings than are shown; a saturated count",
                    "open 7\n"
                    "0 w reduce nan=4294967295\n1 w reduce nan=1 inf=2\n2,3 w reduce inf=1\n4 w reduce nan=9\n"
                    "5 w reduce\n6 w reduce nan=8\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1 2 3 4 5 6\n"
                    "> tensor 'w', before its reduce: rank 0 had 4294967295 or more NaN in 4 elements; "
                    "rank 4 had 9 NaN in 4 elements; rank 6 had 8 NaN in 4 elements; 3 more ranks had some, too; the "
                    "other ranks had none" LOOK);
    transcript_play("A mismatch beside it is told first",
                    "open 2 forgives 1\n"
                    "0 w 4 nan=1\n1 w 5\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1\n"
                    "> tensor 'w': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n");
}

static void what_is_forgiven_goes_on(void)
{
    transcript_play("It is told, and done in its order, with its slot, and again in the next step",
                    "open 2 forgives 1\n"
                    "all w\n"
                    "round\n> 1: w@0\n"
                    "0 w inf=2\n1 w\n"
                    "settle\n"
                    "> 2: ...\n"
                    "> 3: ...\n"
                    "> 4: told ...\n"
                    "> tensor 'w', before its allreduce: rank 0 had 2 infinities in 4 elements; the other ranks had "
                    "none" LOOK "> 5: w@0\n"
                    "all w\n"
                    "settle\n> 6: w@0\n");
    transcript_play("Unnamed requests keep their numbers, whatever comes after them",
                    "open 2 forgives 1\n"
                    "all # nan=1\n0 #\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: told ...\n"
                    "> allreduce #0 (unnamed), before its allreduce: ranks 0, 1 had 1 NaN in 4 elements" LOOK
                    "> 3: #0\n"
                    "1 #\n"
                    "settle\n> 4: #1\n");
    transcript_play("A member of a group is forgiven before the group is complete, and waits for it",
                    "open 2 forgives 1\n"
                    "all a group=9/2\n1 b group=9/2 nan=4\n0 b group=9/2\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: told ...\n"
                    "> tensor 'b', before its allreduce: rank 1 had 4 NaN in 4 elements; the other ranks had none" LOOK
                    "> 3: a@0, b@1\n");
    transcript_play(
        "A member of a group that is raised counts as arrived",
        "open 2\n"
        "all a group=9/2\n1 b group=9/2 nan=4\n0 b group=9/2\n"
        "settle\n"
        "> 1: ...\n"
        "> 2: a@0 fails on 0 1\n"
        "> tensor 'b', before its allreduce: rank 1 had 4 NaN in 4 elements; the other ranks had none" LOOK);
    transcript_play("A rank that has joined has found nothing",
                    "open 3 forgives 1\n"
                    "2 !join\n"
                    "0 w nan=1\n1 w\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: told ...\n"
                    "> tensor 'w', before its allreduce: rank 0 had 1 NaN in 4 elements; the other ranks had none" LOOK
                    "> 3: w@0 without 2\n");
}

/* Whoever finds something in every step of a learned list unlearns it, and the ranks stay together. */
static void a_learned_list_is_left_and_found_again(void)
{
    ranks_forgive = true;
    struct ranks ranks;
    ranks_open(&ranks, 3, 16, 16, 16, 4);
    static const char *const names[] = {"a", "b", "c", "d"};
    uint64_t seed = 9;
    uint32_t told = 0, done = 0, learned = 0, dirty = 0;
    for (int step = 0; step < 200; step++) {
        bool sick = step % 40 > 30;
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t with = sick ? ranks_below(&seed, 4) : 3; /* 3: nobody */
            dirty += with < 3;
            for (uint32_t rank = 0; rank < 3; rank++) {
                struct hvd_signature signature = ranks_signature(4);
                signature.not_finite = rank == with;
                CHECK(hvd_coord_submit(ranks.coord[rank], i, names[i], &signature, 0) == HVD_OK, "step %d", step);
            }
        }
        for (int rounds = 0; ranks_news(&ranks); rounds++) {
            CHECK(rounds < 30, "step %d does not end", step);
            ranks_round(&ranks);
            told += ranks.plan[0].not_finite;
            done += ranks.plan[0].items;
            learned += ranks.plan[0].learned > 0;
        }
    }
    CHECK(told == dirty && done == 800 && learned > 2, "%u told of %u, %u done, learned %u times", told, dirty, done,
          learned);
    ranks_close(&ranks);
}

/* A vote that carries it without the mark, or in a broadcast, is no vote. */
static void a_vote_says_it_in_one_way(void)
{
    struct ranks ranks;
    ranks_open(&ranks, 2, 4, 4, 4, 1);
    struct hvd_signature signature = ranks_signature(4);
    signature.not_finite = 1;
    CHECK(hvd_coord_submit(ranks.coord[0], 0, "w", &signature, 0) == HVD_OK, "refused");
    ranks_vote(&ranks, 0);
    struct hvd_vote *vote = ranks.vote[0];
    struct hvd_fresh *fresh = (struct hvd_fresh *)(vote->body + hvd_vote_fresh_at(ranks.coord[1], vote));
    CHECK(fresh->flags == HVD_FRESH_MISMATCH && hvd_vote_check(ranks.coord[1], vote, vote->bytes) == HVD_OK, "flags");
    fresh->flags = 0;
    CHECK(hvd_vote_check(ranks.coord[1], vote, vote->bytes) == HVD_EINVAL, "without the mark");
    fresh->flags = HVD_FRESH_MISMATCH;
    fresh->signature.kind = HVD_BROADCAST;
    CHECK(hvd_vote_check(ranks.coord[1], vote, vote->bytes) == HVD_EINVAL, "a broadcast");
    signature.kind = HVD_BROADCAST;
    CHECK(hvd_coord_submit(ranks.coord[1], 0, "w", &signature, 0) == HVD_EINVAL, "a broadcast is submitted");
    ranks_close(&ranks);
}

int main(void)
{
    what_is_found_fails_on_all_ranks();
    what_is_forgiven_goes_on();
    a_learned_list_is_left_and_found_again();
    a_vote_says_it_in_one_way();
    return 0;
}
