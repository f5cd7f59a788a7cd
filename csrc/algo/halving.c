/* halving.c - recursive halving, then doubling: the ring's bytes in the tree's number of steps.
 *
 * Question: how do n ranks combine a buffer of middle size? With n a power of two, partners n/2 apart exchange halves
 * of the buffer, each adding what it keeps; then partners n/4 apart halves of that half, and so on: after log2 n steps
 * each rank has one complete piece. The same way back, copying, gives everybody all of it.
 *
 * Where n is no power of two, let p be the greatest below: of the first 2(n-p) ranks the even ones first give all they
 * have to the next rank, sit still, and get the result at the end.
 *
 * Cost for S bytes and n = p: 2 log2 n steps, 2(n-1)/n S per rank. Otherwise two steps of S more.
 *
 * Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
 */
#include "algo.h"

static bool can(int kind, int size)
{
    (void)size;
    return kind == HVD_ALLREDUCE;
}

static int levels(int size)
{
    int levels = 0;
    while (2 << levels <= size)
        levels++;
    return levels;
}

static int steps(struct hvd_shape *shape)
{
    int up = levels(shape->size);
    return 2 * up + (1 << up == shape->size ? 0 : 2);
}

/* The first and the last step where ranks are left over: even ones of the first 2 * over with their neighbours. */
static void lend(const struct hvd_shape *shape, int over, bool back, struct hvd_step *step)
{
    if (shape->rank >= 2 * over)
        return;
    bool even = shape->rank % 2 == 0;
    if (even != back) {
        step->to = even ? shape->rank + 1 : shape->rank - 1;
        step->send_count = shape->count;
    } else {
        step->from = even ? shape->rank + 1 : shape->rank - 1;
        step->recv_count = shape->count;
    }
    step->how = back ? HVD_STEP_COPY : HVD_STEP_REDUCE;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    int up = levels(shape->size), over = shape->size - (1 << up);
    if (over && (i == 0 || i == 2 * up + 1)) {
        lend(shape, over, i > 0, step);
        return;
    }
    i -= over ? 1 : 0;
    if (shape->rank < 2 * over && shape->rank % 2 == 0)
        return; /* sits still */
    int place = shape->rank < 2 * over ? shape->rank / 2 : shape->rank - over;
    bool halving = i < up;
    int level = halving ? i : 2 * up - 1 - i;
    uint64_t begin = 0, end = shape->count, middle = 0;
    for (int k = 0; k <= level; k++) { /* what this rank and its partner share is decided by the levels above */
        middle = begin + (end - begin) / 2;
        if (k == level)
            break;
        bool upper = place >> (up - 1 - k) & 1;
        begin = upper ? middle : begin;
        end = upper ? end : middle;
    }
    int bit = 1 << (up - 1 - level), other = place ^ bit;
    bool keeps_upper = place & bit, sends_upper = keeps_upper != halving;
    int partner = other < over ? 2 * other + 1 : other + over;
    step->to = step->from = partner;
    step->send_at = sends_upper ? middle : begin;
    step->send_count = sends_upper ? end - middle : middle - begin;
    step->recv_at = sends_upper ? begin : middle;
    step->recv_count = sends_upper ? middle - begin : end - middle;
    step->how = halving ? HVD_STEP_REDUCE : HVD_STEP_COPY;
}

const struct hvd_algo hvd_algo_halving = {"halving", false, can, steps, step, false, 0};
