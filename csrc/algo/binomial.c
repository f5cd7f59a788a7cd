/* binomial.c - a tree that doubles: in each step everyone who has it gives it to one who has not.
 *
 * Question: how does a small buffer get to all ranks, or together from all ranks, in the fewest steps? Ranks are
 * counted from the root. In step k of a broadcast the first 2^k ranks have the buffer and rank v gives it to v + 2^k;
 * a reduce is the same backwards, each receiver adding what it gets. An allreduce is a reduce to rank 0 and a
 * broadcast from there.
 *
 * Cost for S bytes: ceil(log2 n) steps of S each (allreduce: twice that). Nothing is cut, so it is good for small
 * buffers only. What is combined: v with v + 2^k, the largest k first; not in rank order.
 */
#include "algo.h"

static bool can(int kind, int size)
{
    (void)size;
    return kind == HVD_ALLREDUCE || kind == HVD_REDUCE || kind == HVD_BROADCAST;
}

static int levels(int size)
{
    int levels = 0;
    while (1 << levels < size)
        levels++;
    return levels;
}

static int steps(struct hvd_shape *shape)
{
    return (shape->kind == HVD_ALLREDUCE ? 2 : 1) * levels(shape->size);
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    int up = levels(shape->size), root = shape->kind == HVD_ALLREDUCE ? 0 : shape->root;
    bool reduces = shape->kind == HVD_REDUCE || (shape->kind == HVD_ALLREDUCE && i < up);
    int level = reduces ? up - 1 - i : i - (shape->kind == HVD_ALLREDUCE ? up : 0);
    int place = hvd_algo_around(shape, shape->rank, -root), span = 1 << level;
    bool nearer = place < span && place + span < shape->size, farther = place >= span && place < 2 * span;
    int partner = hvd_algo_around(shape, shape->rank, nearer ? span : -span);
    if (nearer || farther) {
        if (nearer == reduces) {
            step->from = partner;
            step->recv_count = shape->count;
        } else {
            step->to = partner;
            step->send_count = shape->count;
        }
    }
    step->how = reduces ? HVD_STEP_REDUCE : HVD_STEP_COPY;
}

const struct hvd_algo hvd_algo_binomial = {"binomial", false, can, steps, step, false, 0};
