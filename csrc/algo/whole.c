/* whole.c - every rank sends all it has to every other, and each combines everything itself.
 *
 * Question: what is the least time in which n ranks can combine a few bytes? One exchange: nothing can be known before
 * what was farthest away has come. So each rank keeps the whole buffers of all others and combines them in rank order,
 * with one rounding, which gives the same bits everywhere and the same as `direct`.
 *
 * Cost for S bytes: n-1 messages of S, none of which waits for another, against 2(n-1) of S/n in two rounds. Each rank
 * combines all n S bytes, and keeps (n-1) S: so it is for small buffers only (`most`). Between two ranks it moves no
 * more than any other algorithm.
 *
 * A rank needs nobody's word to send: plane p2p may do so before all have agreed on what comes next
 * (plane/p2p/eager_send.c).
 */
#include "algo.h"

static bool can(int kind, int size)
{
    (void)size;
    return kind == HVD_ALLREDUCE;
}

static int steps(struct hvd_shape *shape)
{
    return shape->size - 1;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    step->to = hvd_algo_around(shape, shape->rank, i + 1);
    step->from = hvd_algo_around(shape, shape->rank, -(i + 1));
    step->send_count = step->recv_count = shape->count;
    step->how = HVD_STEP_STAGE;
    step->fold = i == shape->size - 2;
}

const struct hvd_algo hvd_algo_whole = {"whole", true, can, steps, step, true, (uint64_t)64 << 10};
