/* test_negotiation_join.c - rule 5 of negotiation.h as transcripts (see transcript.h). */
#include "transcript.h"

static void rule_5_join(void)
{
    transcript_play("Known tensors and new ones go on without the joined rank; then all have joined",
                    "open 3\n"
                    "all w\n"
                    "round\n> 1: w@0\n"
                    "2 !join\n"
                    "0,1 w\n"
                    "round\n> 2: w@0 without 2\n"
                    "0 v plane\n"
                    "round\n> 3:\n"
                    "1 v plane\n"
                    "round\n> 4: v@1 plane without 2\n"
                    "0 !join\n"
                    "round\n> 5:\n"
                    "1 w\n"
                    "round\n> 6: w@0 without 0,2\n"
                    "1 !join\n"
                    "round\n> 7: joined, 1 last\n"
                    "all w\n"
                    "round\n> 8: w@0 learned 1\n");
    transcript_play("While somebody has joined a broadcast fails on every rank that asked, a barrier is done",
                    "open 2\n"
                    "1 !join\n"
                    "0 w broadcast\n0 b barrier\n"
                    "round\n> 1: w@0 refused without 1, b@1 without 1\n"
                    "0 w broadcast\n"
                    "round\n> 2: w@0 refused without 1\n"
                    "0 !join\n"
                    "round\n> 3: joined, 0 last\n"
                    "all w broadcast\n"
                    "round\n> 4: w@0\n");
    transcript_play("All join at once: the greatest rank is the last", "open 3\nall !join\n"
                                                                       "settle\n> 1: joined, 2 last\n");
}

static void rule_5_join_with_requests_outstanding(void)
{
    transcript_play("What a rank submitted before it joined is done before the join ends",
                    "open 2\n"
                    "all w\n"
                    "round\n> 1: w@0\n"
                    "0 w\n0 x\n0 !join\n1 y\n1 !join\n"
                    "settle\n"
                    "> 2: y@0 without 0, x@1 without 1 ...\n"
                    "> 3: w@1 without 1 ...\n"
                    "> 4: joined, 1 last\n");
    transcript_play("Unnamed requests go on with the same number after a join, also one that came between",
                    "open 2\n"
                    "all #\n"
                    "round\n> 1: #0\n"
                    "0 !join\n1 #\n"
                    "round\n> 2: #1 without 0\n"
                    "1 #\n"
                    "round\n> 3: #2 without 0\n"
                    "1 !join\n"
                    "vote 0,1\n"
                    "0 #\n0 #\n"
                    "round\n> 4: joined, 1 last ...\n"
                    "1 #\n"
                    "settle\n> 5: #3\n"
                    "1 #\n"
                    "settle\n> 6: #4\n");
    transcript_play("A rank that joins with a contradiction that its vote had no room for holds the slot back",
                    "open 2 fresh 1\n"
                    "all w 4\n"
                    "round\n> 1: w@0\n"
                    "0 w 4\n"
                    "1 w 8\n1 a\n1 b\n1 c\n1 d\n1 !join\n"
                    "round\n> 2: ...\n");
    transcript_play("A group that does not fit into one vote is complete before the join ends",
                    "open 2 fresh 1\n"
                    "0 a group=9/3\n0 b group=9/3\n0 c group=9/3\nall !join\n"
                    "settle\n"
                    "> 1: ...\n"
                    "> 2: ...\n"
                    "> 3: a@1 without 1, b@2 without 1, c@0 without 1 ...\n"
                    "> 4: joined, 1 last\n");
    transcript_play("Join while a mismatch waits for its detail; its request had been made before",
                    "open 3\n"
                    "0 w 4\n1 w 5\n"
                    "round\n> 1:\n"
                    "1,2 !join\n"
                    "settle\n"
                    "> 2: ...\n"
                    "> 3: fails on 0 1 ...\n"
                    "> tensor 'w': ranks disagree on the shape: rank 0 said [4], rank 1 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "> 4:\n"
                    "0 !join\n"
                    "settle\n> 5: joined, 0 last\n");
}

int main(void)
{
    rule_5_join();
    rule_5_join_with_requests_outstanding();
    return 0;
}
