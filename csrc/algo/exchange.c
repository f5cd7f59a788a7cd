/* exchange.c - two ranks send each other the whole buffer at once: recursive doubling, of one level.
 *
 * Question: how do two ranks combine a large buffer so that the wire never waits? Halving and the ring move as many
 * bytes, S each way, but half of what they send has to come first. Here nothing that leaves waits for anything that
 * comes. Each rank combines what comes with its own values, in the same range, behind what it has sent of them: so the
 * buffer is worked on in place, with no memory beside it, in contrast to `whole`.
 *
 * Every element is combined once, in rank order on both sides, with the scale and one rounding: the same bits as
 * `direct`. Since the buffer is sent and completed from its beginning to its end, plane p2p packs and unpacks it on the
 * way (plane/p2p/pack.h).
 *
 * Cost for S bytes: one step of S. Each rank combines all of it, twice as much as in halving, while the wire is busy.
 */
#include "algo.h"

static bool can(int kind, int size)
{
    return kind == HVD_ALLREDUCE && size == 2;
}

static int steps(struct hvd_shape *shape)
{
    (void)shape;
    return 1;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    (void)i;
    step->to = step->from = 1 - shape->rank;
    step->send_count = step->recv_count = shape->count;
    step->how = HVD_STEP_REDUCE;
}

const struct hvd_algo hvd_algo_exchange = {"exchange", true, can, steps, step, false, 0};
