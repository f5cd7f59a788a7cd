/* pairwise.c - everyone has something of its own for everyone: in step i the partners are i places apart.
 *
 * Question: in which order do n ranks exchange n(n-1) different messages so that in each step every rank sends one and
 * receives one, and nobody is sent to by two? Rank r sends to r + i and receives from r - i. (With a power of two r xor
 * i would pair them; around the ring any n will do, and links carry both ways at once.)
 *
 * Cost: n-1 steps; each rank sends what it gives to others, and nothing twice. Ranges lie in the input and in the
 * output, one after the other by rank: finding them is a sum over a row and a column of count_of.
 */
#include "algo.h"

static bool can(int kind, int size)
{
    (void)size;
    return kind == HVD_ALLTOALL;
}

static int steps(struct hvd_shape *shape)
{
    return shape->size - 1;
}

static uint64_t cell(const struct hvd_shape *shape, int from, int to)
{
    return shape->count_of[(size_t)from * (size_t)shape->size + (size_t)to];
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    step->to = hvd_algo_around(shape, shape->rank, i + 1);
    step->from = hvd_algo_around(shape, shape->rank, -i - 1);
    for (int r = 0; r < step->to; r++)
        step->send_at += cell(shape, shape->rank, r);
    for (int r = 0; r < step->from; r++)
        step->recv_at += cell(shape, r, shape->rank);
    step->send_count = cell(shape, shape->rank, step->to);
    step->recv_count = cell(shape, step->from, shape->rank);
}

const struct hvd_algo hvd_algo_pairwise = {"pairwise", true, can, steps, step, false, 0};
