/* test_negotiation.c - the rules of negotiation.h, each as a transcript (see transcript.h); rule 5 is in
 * test_negotiation_join.c. */
#include "transcript.h"

static void known_tensors_are_one_bit(void)
{
    transcript_play("A tensor is fresh once, then known: it is done in the round in which its last rank is ready",
                    "open 3\n"
                    "0,1 w\n"
                    "round\n> 1:\n"
                    "2 w\n"
                    "round\n> 2: w@0\n"
                    "all w\n"
                    "round\n> 3: w@0\n"
                    "1 w\n"
                    "settle\n> 4:\n"
                    "0,2 w\n"
                    "round\n> 5: w@0 learned 1\n");
    transcript_play("What was submitted after the vote is in the next round's vote", "open 2\n"
                                                                                     "0 w\n"
                                                                                     "vote 0,1\n"
                                                                                     "1 w\n"
                                                                                     "round\n> 1: ...\n"
                                                                                     "round\n> 2: w@0\n");
    transcript_play("The next step's tensor of the same name waits for the next round", "open 2\n"
                                                                                        "all w\n"
                                                                                        "round\n> 1: w@0\n"
                                                                                        "0 w\n"
                                                                                        "round\n> 2:\n"
                                                                                        "0 w\n> refused -3\n"
                                                                                        "1 w\n"
                                                                                        "round\n> 3: w@0\n");
    transcript_play("A name is taken from the moment it is submitted", "open 2\n"
                                                                       "0 w\n"
                                                                       "0 w\n> refused -3\n"
                                                                       "0 w 8\n> refused -3\n"
                                                                       "1 w\n"
                                                                       "round\n> 1: w@0\n");
    transcript_play("Two tensors in opposite orders are both done", "open 2\n"
                                                                    "0 a\n1 b\n"
                                                                    "round\n> 1:\n"
                                                                    "0 b\n1 a\n"
                                                                    "round\n> 2: a@0, b@1\n");
}

static void rule_1_a_changed_shape_makes_everyone_forget(void)
{
    transcript_play("One rank changes the shape of a known tensor while the other votes its bit: both are told",
                    "open 2\n"
                    "all w 4\n"
                    "round\n> 1: w@0\n"
                    "0 w 8\n1 w 4\n"
                    "settle\n"
                    "> 2: ...\n"
                    "> 3: ...\n"
                    "> 4: fails on 0 1\n"
                    "> tensor 'w': ranks disagree on the shape: rank 0 said [8], rank 1 said [4]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "all w 4\n"
                    "round\n> 5: w@0\n");
    transcript_play("A slot that was made while this rank held another shape back is forgotten at once",
                    "open 2\n"
                    "0 w 4\n"
                    "vote 0,1\n"
                    "1 w 8\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: ...\n"
                    "> 3: ...\n"
                    "> 4: fails on 0 1\n"
                    "> tensor 'w': ranks disagree on the shape: rank 0 said [4], rank 1 said [8]. "
                    "Submit the same shape on all ranks. [HVD350]\n");
    transcript_play("All ranks change it, in different rounds", "open 3\n"
                                                                "all w 4\n"
                                                                "round\n> 1: w@0\n"
                                                                "0 w 8\n"
                                                                "settle\n> 2: ...\n> 3:\n"
                                                                "1 w 8\n"
                                                                "settle\n> 4:\n"
                                                                "2 w 8\n"
                                                                "settle\n> 5: w@0\n");
    transcript_play("All ranks change it in one round: done in that round, and it keeps its place in the plan",
                    "open 2\n"
                    "all a\nall b\nall c\n"
                    "round\n> 1: a@0, b@1, c@2\n"
                    "all b 8\nall c\nall a\n"
                    "round\n> 2: a@0, b@1, c@2\n");
    transcript_play("There and back again", "open 2\n"
                                            "all w 4\n"
                                            "round\n> 1: w@0\n"
                                            "0 w 8\n"
                                            "round\n> 2: ...\n"
                                            "1 w 8\n"
                                            "round\n> 3: w@0\n"
                                            "0 w 4\n"
                                            "vote 0,1\n"
                                            "1 w 4\n"
                                            "round\n> 4: ...\n"
                                            "round\n> 5: w@0\n"
                                            "1 w 8\n"
                                            "settle\n> 6: ...\n> 7:\n"
                                            "0 w 8\n"
                                            "settle\n> 8: w@0\n");
}

static void rule_2_a_mismatch_is_told_once_all_have_announced(void)
{
    transcript_play("It waits for the last rank, whatever that says, and other tensors go on meanwhile",
                    "open 3\n"
                    "0 w broadcast root=0\n1 w broadcast root=1\n"
                    "all x\n"
                    "round\n> 1: x@0\n"
                    "2 w broadcast root=1\nall x\n"
                    "round\n> 2: x@0 ...\n"
                    "all x\n"
                    "round\n> 3: x@0 learned 1 fails on 0 1 2\n"
                    "> tensor 'w': ranks disagree on the root rank: rank 0 said 0, ranks 1, 2 said 1. "
                    "Submit the same root rank on all ranks. [HVD350]\n");
    transcript_play("Two tensors at once are told one after the other",
                    "open 2\n"
                    "0 a float32\n1 a float64\n"
                    "0 b sum pre=2\n1 b max pre=0.5\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1 ...\n"
                    "> tensor 'a': ranks disagree on the dtype: rank 0 said float32, rank 1 said float64. "
                    "Submit the same dtype on all ranks. [HVD350]\n"
                    "> 3: fails on 0 1\n"
                    "> tensor 'b': ranks disagree on the reduce op and the prescale factor: rank 0 said reduce op sum, "
                    "prescale factor 2; rank 1 said reduce op max, prescale factor 0.5. "
                    "Submit the same reduce op and prescale factor on all ranks. [HVD350]\n");
    transcript_play(
        "Where a tensor lies is told apart from its dtype",
        "open 2\n"
        "0 a float32 gpu\n1 a float32\n"
        "0 b float32\n1 b float64 gpu\n"
        "settle\n"
        "> 1: ...\n"
        "> 2: fails on 0 1 ...\n"
        "> tensor 'a': ranks disagree on the device: rank 0 said a GPU, rank 1 said the CPU. "
        "Submit the same device on all ranks: move the tensor with .cuda() or .cpu(). [HVD350]\n"
        "> 3: fails on 0 1\n"
        "> tensor 'b': ranks disagree on the device and the dtype: rank 0 said device the CPU, dtype float32; "
        "rank 1 said device a GPU, dtype float64. "
        "Submit the same device and dtype on all ranks: move the tensor with .cuda() or .cpu(). [HVD350]\n");
    transcript_play("More than two sayings are a table", "open 7\n"
                                                         "0,1,2 w 8\n3 w 8x1\n4 w 9\n5 w 10\n6 w 11\n"
                                                         "settle\n"
                                                         "> 1: ...\n"
                                                         "> 2: fails on 0 1 2 3 4 5 6\n"
                                                         "> tensor 'w': ranks disagree on the shape:\n"
                                                         "  ranks 0-2: [8]\n"
                                                         "  rank 4: [9]\n"
                                                         "  rank 5: [10]\n"
                                                         "  rank 6: [11]\n"
                                                         "  1 more rank: something else again\n"
                                                         "Submit the same shape on all ranks. [HVD350]\n");
}

static void rule_3_unnamed_requests_match_by_number(void)
{
    transcript_play("Unnamed and named mix, in any order between them, and a slot ends with its unnamed request",
                    "open 2\n"
                    "0 #\n0 w\n0 #\n"
                    "round\n> 1:\n"
                    "1 w\n1 #\n"
                    "round\n> 2: #0, w@1\n"
                    "1 #\nall #\n"
                    "round\n> 3: #1, #2\n"
                    "0 v\n"
                    "round\n> 4:\n"
                    "1 v\n"
                    "round\n> 5: v@0\n");
    transcript_play("Different collectives under one number are a mismatch, and the set goes on",
                    "open 2\n"
                    "all # barrier\n"
                    "0 #\n1 # broadcast\n"
                    "all #\n"
                    "settle\n"
                    "> 1: #0, #2 ...\n"
                    "> 2: fails on 0 1\n"
                    "> collective #1 (unnamed): ranks disagree on the collective: rank 0 said allreduce, "
                    "rank 1 said broadcast. Call the same collective on all ranks. [HVD350]\n"
                    "0 # 3\n1 # 5\n"
                    "settle\n"
                    "> 3: ...\n"
                    "> 4: fails on 0 1\n"
                    "> allreduce #3 (unnamed): ranks disagree on the shape: rank 0 said [3], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n");
}

static void rule_4_a_group_is_held_until_its_last_member(void)
{
    transcript_play("Members arrive in different rounds; others pass", "open 2\n"
                                                                       "all a group=9/3\nall x\n"
                                                                       "round\n> 1: x@1\n"
                                                                       "0 b group=9/3\nall x\n"
                                                                       "round\n> 2: x@1\n"
                                                                       "all c group=9/3\n"
                                                                       "round\n> 3:\n"
                                                                       "1 b group=9/3\n"
                                                                       "round\n> 4: a@0, b@2, c@3\n"
                                                                       "all a group=9/3\nall b group=9/3\n"
                                                                       "round\n> 5:\n"
                                                                       "all c group=9/3\n"
                                                                       "round\n> 6: a@0, b@2, c@3\n");
    transcript_play("A member that fails counts as arrived, before the others or after them",
                    "open 2\n"
                    "0 a 4 group=9/2\n1 a 5 group=9/2\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1\n"
                    "> tensor 'a': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "all b group=9/2\n"
                    "settle\n> 3: b@0\n"
                    "all b group=9/2\n"
                    "0 a 4 group=9/2\n1 a 5 group=9/2\n"
                    "settle\n"
                    "> 4: ...\n"
                    "> 5: b@0 fails on 0 1\n"
                    "> tensor 'a': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n");
    transcript_play("More groups with failed members than the table has room for: groups are held no longer",
                    "open 2 slots 2\n"
                    "0 a 4 group=1/2\n1 a 5 group=1/2\n"
                    "settle\n> 1: ...\n> 2: fails on 0 1\n"
                    "> tensor 'a': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "0 b 4 group=2/2\n1 b 5 group=2/2\n"
                    "settle\n> 3: ...\n> 4: fails on 0 1\n"
                    "> tensor 'b': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "all c group=3/2\n"
                    "round\n> 5: c@0\n"
                    "all d group=3/2\nall aa group=1/2\n"
                    "settle\n> 6: d@1, aa@0\n");
    transcript_play("A group here and none there is a mismatch of each member",
                    "open 2\n"
                    "0 a group=9/2\n0 b group=9/2\n1 a\n1 b\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: fails on 0 1 ...\n"
                    "> tensor 'a': ranks disagree on the group: rank 0 said group 9 of 2, rank 1 said no group. "
                    "Submit the same group on all ranks. [HVD350]\n"
                    "> 3: fails on 0 1\n"
                    "> tensor 'b': ranks disagree on the group: rank 0 said group 9 of 2, rank 1 said no group. "
                    "Submit the same group on all ranks. [HVD350]\n");
}

static void rule_6_leave(void)
{
    transcript_play("In the round in which a rank leaves nothing is planned, and nothing can be submitted any more",
                    "open 3\n"
                    "all w\n1,2 !leave\n"
                    "settle\n> 1: left 1\n"
                    "0 x\n> refused -9\n"
                    "0 !leave\n"
                    "settle\n> 2: left 1\n");
}

static void rule_7_a_full_table_evicts_the_oldest(void)
{
    transcript_play("The slot unused for longest goes; a request that waits in it is announced again",
                    "open 2 slots 2\n"
                    "all a\nall b\n"
                    "round\n> 1: a@0, b@1\n"
                    "all b\n"
                    "round\n> 2: b@1\n"
                    "0 a\n1 c\n"
                    "settle\n> 3: ...\n> 4:\n"
                    "1 a\n"
                    "round\n> 5: a@1\n"
                    "0 c\n"
                    "round\n> 6: c@0\n");
    transcript_play("No slot to be had: what all have announced is done without one",
                    "open 2 slots 2\n"
                    "all a\nall b\nall c\nall d\n"
                    "round\n> 1: a@0, b@1, c@none, d@none\n"
                    "0 c\nall a\nall b\n"
                    "settle\n> 2: a@0, b@1 ...\n> 3:\n"
                    "1 c\n"
                    "settle\n> 4: c@0\n");
    transcript_play("More fresh keys than a vote can carry, different on every rank",
                    "open 2 fresh 1\n"
                    "0 a\n0 b\n0 c\n1 c\n1 d\n1 a\n"
                    "settle\n> 1: c@0 ...\n> 2: a@1 ...\n> 3: ...\n> 4:\n"
                    "0 d\n1 b\n"
                    "settle\n> 5: b@2, d@3\n");
}

static void rule_8_in_plane_needs_all_ranks(void)
{
    transcript_play("Fresh and known alike", "open 2\n"
                                             "all a plane\n0 b plane\n1 b\n"
                                             "round\n> 1: a@0 plane, b@1\n"
                                             "0 a plane\n1 a\nall b plane\n"
                                             "round\n> 2: a@0, b@1 plane\n");
}

static void rule_9_items_keep_the_order_of_submission(void)
{
    transcript_play("The smallest number that any rank gave counts", "open 2\n"
                                                                     "0 c\n0 a\n0 b\n1 b\n1 c\n1 a\n"
                                                                     "round\n> 1: c@0, b@1, a@2\n"
                                                                     "0 a\n0 b\n0 c\n1 a\n1 b\n1 c\n"
                                                                     "round\n> 2: c@0, b@1, a@2\n");
    transcript_play("Of what is ready together greater priority goes first, known, fresh or without a slot",
                    "open 2 slots 3\n"
                    "all a priority=-2147483648\nall b\nall c priority=2147483647\nall d priority=7\n"
                    "all e priority=7\n"
                    "round\n> 1: c@2, d@none, e@none, b@1, a@0\n"
                    "all a priority=-2147483648\nall b\nall c priority=2147483647\n"
                    "round\n> 2: c@2, b@1, a@0\n"
                    "all a priority=1\nall b\n"
                    "round\n> 3: a@0, b@1\n");
    transcript_play("Priority is part of the signature",
                    "open 2\n"
                    "0 a priority=1\n1 a priority=2\n"
                    "settle\n> 1: ...\n> 2: fails on 0 1\n"
                    "> tensor 'a': ranks disagree on the priority: rank 0 said 1, "
                    "rank 1 said 2. Submit the same priority on all ranks. [HVD350]\n");
}

static void rule_11_a_setting_is_agreed_with_the_plan(void)
{
    transcript_play("The greatest proposal of a round goes with its plan; one made after the vote rides in the next",
                    "open 3\n"
                    "all w\n0 !tune 8\n2 !tune 4\n"
                    "round\n> 1: w@0 tuned to 8\n"
                    "0 !tune 5\n1 w\n"
                    "vote all\n"
                    "0 !tune 6\n"
                    "round\n> 2: tuned to 5 ...\n"
                    "round\n> 3: tuned to 6\n"
                    "1 !tune 0\n"
                    "settle\n> 4: tuned to 0\n");
}

static void rule_13_a_plan_is_dated_later_than_what_any_rank_said(void)
{
    transcript_play("A plan is dated later than any that a rank has said; a date alone is no news",
                    "open 3\n"
                    "all w\n0 !date 8\n2 !date 4\n"
                    "round\n> 1: w@0 dated 9\n"
                    "all !date 11\n"
                    "settle\n"
                    "all w\nvote 1,2\n"
                    "1 !date 20\n0 !date 12\n"
                    "round\n> 2: w@0 dated 13\n");
}

int main(void)
{
    known_tensors_are_one_bit();
    rule_1_a_changed_shape_makes_everyone_forget();
    rule_2_a_mismatch_is_told_once_all_have_announced();
    rule_3_unnamed_requests_match_by_number();
    rule_4_a_group_is_held_until_its_last_member();
    rule_6_leave();
    rule_7_a_full_table_evicts_the_oldest();
    rule_8_in_plane_needs_all_ranks();
    rule_9_items_keep_the_order_of_submission();
    rule_11_a_setting_is_agreed_with_the_plan();
    rule_13_a_plan_is_dated_later_than_what_any_rank_said();
    return 0;
}
