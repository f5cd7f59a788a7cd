/* direct.c - every rank sends every chunk straight to its owner, who combines them in rank order.
 *
 * Question: how can n ranks combine a buffer so that the bits of the result do not depend on where in it a value lies,
 * nor on how many hosts there are? The owner of a chunk keeps what arrives until it has all, and combines in rank
 * order, with one rounding, exactly as ranks of one host do in shared memory. Then it sends the result to everyone.
 *
 * Cost for S bytes: 2(n-1) steps of S/n, 2(n-1)/n S per rank, as the ring, but each rank has n-1 partners and keeps
 * (n-1)/n S for a moment. In step i the partners are i places apart, so that no rank is everybody's partner at once.
 * The two halves alone are a reducescatter and an allgather.
 */
#include "algo.h"

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    bool gathers = hvd_algo_gathers(shape, &i);
    int by = i + 1;
    int to = hvd_algo_around(shape, shape->rank, by), from = hvd_algo_around(shape, shape->rank, -by);
    if (gathers) {
        hvd_algo_send_chunk(shape, step, to, shape->rank);
        hvd_algo_recv_chunk(shape, step, from, from);
        return;
    }
    hvd_algo_send_chunk(shape, step, to, to);
    hvd_algo_recv_chunk(shape, step, from, shape->rank);
    step->how = HVD_STEP_STAGE;
    step->fold = by == shape->size - 1;
}

const struct hvd_algo hvd_algo_direct = {"direct", true, hvd_algo_can_in_phases, hvd_algo_steps_in_phases, step,
                                         false,    0};
