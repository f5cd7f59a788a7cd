/* sim_hosts.h - thousands of ranks agree over the tree of their hosts, in one process and in a time of their own.
 *
 * Ranks are coordinators; what is between hosts is the engine's own: frames and votes of engine/host_votes/vote_tree.c
 * along the edges of engine/host_votes/tree_edges.c, over links that only count, and deliver alpha_ns + beta_ps per
 * byte later. Inside a host votes meet at once, as on boards. So bytes, messages and rounds are those of a real job;
 * times are those of its messages alone, because nothing here computes in that time.
 */
#ifndef HVD_TESTS_SIM_HOSTS_H
#define HVD_TESTS_SIM_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

struct sim_hosts;

/* One training step of all ranks. */
struct sim_step {
    uint64_t rounds, messages, bytes; /* bytes: on all edges, both ways */
    uint64_t most_bytes;              /* sent and received by one host, the busiest */
    uint64_t after_ns;                /* from the last submission anywhere until the last rank has decided all */
    uint64_t learned;                 /* lists adopted in it, so far */
    bool failed;                      /* a mismatch was told, with its text, on all ranks */
};

struct sim_hosts *sim_hosts_open(int ranks, int ranks_per_host, int tensors, uint64_t seed);
void sim_hosts_close(struct sim_hosts *sim);
int sim_hosts_count(const struct sim_hosts *sim);
int sim_hosts_deepest(const struct sim_hosts *sim); /* edges between the two hosts that are furthest from each other */

/* Every rank submits all tensors in order, evenly over spread_ns, each rank up to a hundredth slower than another; 0:
 * all at once. odd: the last rank has another shape for the first tensor. Ends when nothing is under way any more; all
 * ranks have planned everything then, with the same agreed state, or the process ends with what is wrong. */
struct sim_step sim_hosts_step(struct sim_hosts *sim, uint64_t spread_ns, bool odd);

#endif
