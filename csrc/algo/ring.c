/* ring.c - chunks travel around a ring of ranks.
 *
 * Question: how do all ranks combine a large buffer so that each link carries as little as possible, to one neighbour
 * only? In the first phase chunk c starts at rank c + 1 and is passed on, each rank adding its own values, until it
 * is complete on rank c (reduce-scatter); in the second phase the complete chunks travel once around (allgather).
 *
 * Cost for S bytes: 2(n-1) steps of S/n, so each rank sends 2(n-1)/n S, the least there can be. Good for large
 * buffers; the number of steps makes it slow for small ones. Chunk c is combined in the order c+1, c+2, ..., c: the
 * bits of a sum depend on where in the buffer a value lies.
 *
 * Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
 */
#include "algo.h"

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    int next = hvd_algo_around(shape, shape->rank, 1), before = hvd_algo_around(shape, shape->rank, -1);
    bool gathers = hvd_algo_gathers(shape, &i);
    int back = gathers ? -i : -i - 1; /* the chunk that this rank passes on */
    hvd_algo_send_chunk(shape, step, next, hvd_algo_around(shape, shape->rank, back));
    hvd_algo_recv_chunk(shape, step, before, hvd_algo_around(shape, shape->rank, back - 1));
    step->how = gathers ? HVD_STEP_COPY : HVD_STEP_REDUCE;
}

const struct hvd_algo hvd_algo_ring = {"ring", false, hvd_algo_can_in_phases, hvd_algo_steps_in_phases, step, false, 0};
