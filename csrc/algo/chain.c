/* chain.c - a broadcast in segments, handed from rank to rank.
 *
 * Question: how does a large buffer get from one rank to all when each link should carry it only once? The root sends
 * segment after segment to its neighbour, which passes each on while the next one comes.
 *
 * Cost for S bytes in k segments: k + n - 2 steps of S/k; each rank but the last sends S. As k grows this comes to S
 * alone, against log2(n) S of a binomial tree; the n - 2 steps until the last rank has its first segment are the price.
 */
#include "algo.h"

static bool can(int kind, int size)
{
    (void)size;
    return kind == HVD_BROADCAST;
}

static uint64_t segments(const struct hvd_shape *shape)
{
    return (shape->count + shape->grain - 1) / shape->grain;
}

static int steps(struct hvd_shape *shape)
{
    return shape->size < 2 || shape->count == 0 ? 0 : (int)segments(shape) + shape->size - 2;
}

static uint64_t length(const struct hvd_shape *shape, uint64_t at)
{
    return shape->count - at < shape->grain ? shape->count - at : shape->grain;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    int place = hvd_algo_around(shape, shape->rank, -shape->root);
    int64_t passed_on = (int64_t)i - place, segment_count = (int64_t)segments(shape);
    if (place < shape->size - 1 && passed_on >= 0 && passed_on < segment_count) {
        step->to = hvd_algo_around(shape, shape->rank, 1);
        step->send_at = (uint64_t)passed_on * shape->grain;
        step->send_count = length(shape, step->send_at);
    }
    if (place > 0 && passed_on + 1 >= 0 && passed_on + 1 < segment_count) {
        step->from = hvd_algo_around(shape, shape->rank, -1);
        step->recv_at = (uint64_t)(passed_on + 1) * shape->grain;
        step->recv_count = length(shape, step->recv_at);
    }
}

const struct hvd_algo hvd_algo_chain = {"chain", true, can, steps, step, false, 0};
