/* sim.h - the simulator: n coordinators run random programs under random delays.
 *
 * Each rank submits at random moments: before it votes, after it has voted, between two decides of others.
 * Votes are merged in random trees. A seed fixes everything, so a failure is replayed by its seed.
 *
 * What must hold (and ends the test with the seed if it does not):
 *   - after each round all ranks have the same plan and the same agreed state (ranks.c);
 *   - every tree of merges gives the same bytes (ranks.c);
 *   - each request is planned or failed exactly once, with its own ticket and signature, on all ranks alike;
 *     it fails with a mismatch if and only if two ranks said different things of it;
 *   - an item without a ticket means that the rank has joined, or that it is a send between two others;
 *   - the plane flag of an item is the AND of what its ranks gave;
 *   - nobody waits for ever: without news nothing that all have submitted is pending; with room in the tables
 *     what all have submitted is done two rounds later, a mismatch some rounds more;
 *   - the number of rounds is bounded by the number of submissions.
 */
#ifndef HVD_TESTS_SIM_H
#define HVD_TESTS_SIM_H

#include <stdbool.h>
#include <stdint.h>

struct sim_result {
    int size;
    uint64_t rounds, submissions, planned, mismatches, refused, joins, slotless, sends;
    uint64_t learned, deviations, ahead; /* lists adopted; forgotten; planned from lists */
    bool left;                           /* a rank left before the end */
};

struct sim_result sim_run(uint64_t seed);

#endif
