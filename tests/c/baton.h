/* baton.h - ranks that are threads and run one at a time, in an order that a seed gives, over a simulated network.
 *
 * A rank runs until it gives the baton on. When all have looked and none has moved anything, the network's clock goes
 * to its next event; when there is none either, they wait for each other for ever, and the test ends with who and when.
 * No real time passes but that of the work itself, and the same seed runs the same way again.
 */
#ifndef HVD_TEST_BATON_H
#define HVD_TEST_BATON_H

#include "netsim.h"

struct hvd_baton;

/* For ranks that begin one after the other, rank 0 first. */
struct hvd_baton *hvd_baton_new(int size, uint64_t seed, const struct hvd_sim_line *line);
struct hvd_sim_net *hvd_baton_net(struct hvd_baton *baton);
/* When all have ended. Returns the network's time. */
uint64_t hvd_baton_free(struct hvd_baton *baton);

/* By a rank's thread: first and last of all. */
void hvd_baton_begin(struct hvd_baton *baton, int rank);
void hvd_baton_end(struct hvd_baton *baton, int rank);
/* Others may run. moved: this rank has moved something since it was given the baton. */
void hvd_baton_pass(struct hvd_baton *baton, int rank, bool moved);
/* All ranks that have not ended meet. */
void hvd_baton_meet(struct hvd_baton *baton, int rank);

#endif
