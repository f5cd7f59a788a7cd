/* test_negotiation_send.c - rule 10 of negotiation.h, and reduces and groups of ragged kinds, as transcripts (see
 * transcript.h). */
#include "transcript.h"

static void two_ranks_are_all_that_a_send_needs(void)
{
    transcript_play("Sender and receiver announce it in one round; the rest takes part without asking",
                    "open 4\n"
                    "1,3 x send root=1 peer=3\n"
                    "round\n> 1: x@0 without 0,2\n"
                    "3 x send root=1 peer=3\n"
                    "round\n> 2:\n"
                    "1 x send root=1 peer=3\n"
                    "round\n> 3: x@0 without 0,2\n"
                    "1,3 x send root=1 peer=3 plane\n"
                    "settle\n> 4: x@0 plane without 0,2\n");
    transcript_play("One after the other; the slot waits for the second", "open 3\n"
                                                                          "0 x send root=0 peer=2\n"
                                                                          "round\n> 1:\n"
                                                                          "2 x send root=0 peer=2\n"
                                                                          "settle\n> 2: x@0 without 1\n");
    transcript_play("The same name between other ranks, and the other way round, is another send",
                    "open 3\n"
                    "0 x send root=0 peer=1\n"
                    "2 x send root=2 peer=1\n"
                    "1 x send root=1 peer=0\n"
                    "round\n> 1:\n"
                    "1 x send root=2 peer=1\n"
                    "0 x send root=1 peer=0\n"
                    "round\n> 2: x@0 without 2, x@2 without 0\n"
                    "1 x send root=0 peer=1\n"
                    "settle\n> 3: x@1 without 2\n");
    transcript_play("A known send of another shape is announced again by both; alone it holds nothing up",
                    "open 3\n"
                    "0,1 x 4 send root=0 peer=1\n"
                    "round\n> 1: x@0 without 2\n"
                    "0,1 x 8 send root=0 peer=1\n"
                    "round\n> 2: x@0 without 2\n"
                    "0 x 2 send root=0 peer=1\nall w\n"
                    "round\n> 3: w@0 ...\n"
                    "1 x 2 send root=0 peer=1\n"
                    "settle\n> 4: x@1 without 2\n");
}

static void sender_and_receiver_disagree(void)
{
    transcript_play("Both are told who said what; the name can be used again",
                    "open 4\n"
                    "3 x 5 send root=3 peer=0\n"
                    "round\n> 1:\n"
                    "0 x 4 send root=3 peer=0\n"
                    "settle\n"
                    "> 2: ...\n"
                    "> 3: ...\n"
                    "> 4: fails on 0 3\n"
                    "> tensor 'x': ranks disagree on the shape: rank 0 said [4], rank 3 said [5]. "
                    "Submit the same shape on all ranks. [HVD350]\n"
                    "0,3 x 4 send root=3 peer=0\n"
                    "settle\n> 5: x@0 without 1,2\n");
}

static void what_is_no_send(void)
{
    transcript_play("A third rank, an unnamed one, one to itself or to nobody, one in a group",
                    "open 3\n"
                    "2 x send root=0 peer=1\n"
                    "> refused -1\n"
                    "0 # send root=0 peer=1\n"
                    "> refused -1\n"
                    "0 x send\n"
                    "> refused -1\n"
                    "0 x send peer=3\n"
                    "> refused -1\n"
                    "0 x send peer=1 group=9/2\n"
                    "> refused -1\n"
                    "0 x peer=1\n"
                    "> refused -1\n");
}

static void sends_while_a_rank_has_joined(void)
{
    transcript_play("The receiver has joined: the sender is told", "open 3\n"
                                                                   "1 !join\n"
                                                                   "round\n> 1:\n"
                                                                   "0 x send root=0 peer=1\n"
                                                                   "settle\n"
                                                                   "> 2: ...\n"
                                                                   "> 3: x@0 refused without 1,2\n");
    transcript_play("Another rank has joined: both are told", "open 3\n"
                                                              "2 !join\n"
                                                              "0,1 x send root=0 peer=1\n"
                                                              "settle\n> 1: x@0 refused without 2\n");
    transcript_play("All have joined, one with a send that nobody takes: it ends before the join does",
                    "open 3\n"
                    "0 x send root=0 peer=1\nall !join\n"
                    "settle\n> 1: x@0 refused without 1,2 ...\n> 2: joined, 2 last\n");
}

static void other_kinds(void)
{
    transcript_play("A reduce goes on while a rank has joined, an alltoall does not",
                    "open 2\n"
                    "1 !join\n"
                    "0 a reduce\n0 b alltoall\n0 c reducescatter\n"
                    "settle\n> 1: a@0 without 1, b@1 refused without 1, c@2 refused without 1\n");
    transcript_play("The root of a reduce is part of what ranks agree on",
                    "open 2\n"
                    "0 a reduce root=0\n1 a reduce root=1\n"
                    "settle\n> 1: ...\n> 2: fails on 0 1\n"
                    "> tensor 'a': ranks disagree on the root rank: rank 0 said 0, rank 1 said 1. "
                    "Submit the same root rank on all ranks. [HVD350]\n");
    transcript_play("Groups of allgathers and reducescatters are held until all their members are ready",
                    "open 2\n"
                    "0 a allgather 0x2 group=9/2\n1 a allgather 0x2 group=9/2\n"
                    "all r reducescatter group=5/2\n0 b allgather 0x2 group=9/2\n"
                    "round\n> 1:\n"
                    "all s reducescatter group=5/2\n1 b allgather 0x2 group=9/2\n"
                    "settle\n> 2: a@0, r@1, s@3, b@2\n");
}

int main(void)
{
    two_ranks_are_all_that_a_send_needs();
    sender_and_receiver_disagree();
    what_is_no_send();
    sends_while_a_rank_has_joined();
    other_kinds();
    return 0;
}
