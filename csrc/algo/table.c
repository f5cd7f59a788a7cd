/* table.c - which algorithms this build carries, the arithmetic they share, and which one is cheapest.
 *
 * The file name is the registration: setup.py and tests/Makefile glob csrc/algo/ for plug-ins and pass their names as
 * -DHVD_ALGO_LIST="X(ring) X(direct)", in the order of the alphabet. Nobody edits a list.
 *
 * Equal chunks differ by one element at most, the first ones being longer: so a buffer of fewer elements than ranks has
 * empty chunks at its end, and no algorithm needs a special case for it. An exchange of nothing is no exchange: where a
 * range is empty, to or from stay -1, on both sides alike.
 *
 * COST. An exchange of b bytes is taken to cost alpha + beta * b, of the longer of its two ways (links carry both at
 * once). Steps follow one another, so the cost of an algorithm is the sum over its steps of the dearest exchange that
 * any rank has in it: the source is the algorithm itself. (R. W. Hockney, "The communication challenge for MPP",
 * Parallel Computing 20, 1994, for the model.) In a large world not all ranks are asked: HVD_COST_RANKS of them, spread
 * evenly, tell enough, because in every algorithm here they play one of a few parts. All is integer arithmetic on
 * agreed values, so that each rank comes to the same choice by itself. Sums saturate: a cost beyond 2^64 ns is as good
 * as never.
 */
#include "algo.h"

#include <string.h>

#ifndef HVD_ALGO_LIST
#error "build with -DHVD_ALGO_LIST, the names of the files csrc/algo/*.c but for table.c"
#endif

#define X(name) extern const struct hvd_algo hvd_algo_##name;
HVD_ALGO_LIST
#undef X

const struct hvd_algo *const hvd_algos[] = {
#define X(name) &hvd_algo_##name,
    HVD_ALGO_LIST
#undef X
        NULL};

const struct hvd_algo *hvd_algo_named(const char *name)
{
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        if (strcmp((*algo)->name, name) == 0)
            return *algo;
    return NULL;
}

uint64_t hvd_algo_cut(const struct hvd_shape *shape, int r)
{
    uint64_t size = (uint64_t)shape->size, at = 0;
    if (shape->count_of && shape->kind != HVD_ALLTOALL) {
        for (int i = 0; i < r; i++)
            at += shape->count_of[i];
        return at;
    }
    uint64_t each = shape->count / size, longer = shape->count % size;
    return each * (uint64_t)r + ((uint64_t)r < longer ? (uint64_t)r : longer);
}

void hvd_algo_folded(const struct hvd_algo *algo, const struct hvd_shape *shape, uint64_t *begin, uint64_t *end)
{
    *begin = algo->whole ? 0 : hvd_algo_cut(shape, shape->rank);
    *end = algo->whole ? shape->count : hvd_algo_cut(shape, shape->rank + 1);
}

int hvd_algo_around(const struct hvd_shape *shape, int rank, int by)
{
    int place = (rank + by) % shape->size;
    return place < 0 ? place + shape->size : place;
}

void hvd_algo_send_chunk(const struct hvd_shape *shape, struct hvd_step *step, int to, int r)
{
    step->send_at = hvd_algo_cut(shape, r);
    step->send_count = hvd_algo_cut(shape, r + 1) - step->send_at;
    step->to = to;
}

void hvd_algo_recv_chunk(const struct hvd_shape *shape, struct hvd_step *step, int from, int r)
{
    step->recv_at = hvd_algo_cut(shape, r);
    step->recv_count = hvd_algo_cut(shape, r + 1) - step->recv_at;
    step->from = from;
}

bool hvd_algo_can_in_phases(int kind, int size)
{
    (void)size;
    return kind == HVD_ALLREDUCE || kind == HVD_REDUCESCATTER || kind == HVD_ALLGATHER;
}

int hvd_algo_steps_in_phases(struct hvd_shape *shape)
{
    return (shape->kind == HVD_ALLREDUCE ? 2 : 1) * (shape->size - 1);
}

bool hvd_algo_gathers(const struct hvd_shape *shape, int *i)
{
    if (shape->kind != HVD_ALLREDUCE || *i < shape->size - 1)
        return shape->kind == HVD_ALLGATHER;
    *i -= shape->size - 1;
    return true;
}

struct hvd_step hvd_algo_step(const struct hvd_algo *algo, const struct hvd_shape *shape, int i)
{
    struct hvd_step step = {.to = -1, .from = -1};
    algo->step(shape, i, &step);
    if (step.send_count == 0)
        step.to = -1;
    if (step.recv_count == 0)
        step.from = -1;
    return step;
}

static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t multiply(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

uint64_t hvd_algo_cost(const struct hvd_algo *algo, const struct hvd_shape *shape, uint64_t element_bytes,
                       struct hvd_cost cost)
{
    struct hvd_shape seen[HVD_COST_RANKS];
    int ranks = shape->size < HVD_COST_RANKS ? shape->size : HVD_COST_RANKS, steps = 0;
    for (int i = 0; i < ranks; i++) {
        seen[i] = *shape;
        seen[i].rank = (int)((int64_t)i * shape->size / ranks);
        steps = algo->steps(&seen[i]);
    }
    uint64_t total = 0;
    for (int i = 0; i < steps; i++) {
        uint64_t longest = 0;
        for (int k = 0; k < ranks; k++) {
            struct hvd_step step = hvd_algo_step(algo, &seen[k], i);
            longest = step.send_count > longest ? step.send_count : longest;
            longest = step.recv_count > longest ? step.recv_count : longest;
        }
        if (longest)
            total = add(total,
                        add(cost.alpha_ns, multiply(multiply(longest, element_bytes), cost.beta_ps) / UINT64_C(1000)));
    }
    return total;
}

const struct hvd_algo *hvd_algo_choose(const struct hvd_shape *shape, uint64_t element_bytes, struct hvd_cost cost,
                                       bool ordered)
{
    const struct hvd_algo *best = NULL;
    uint64_t least = 0;
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++) {
        if ((ordered && !(*algo)->ordered) || !(*algo)->can(shape->kind, shape->size))
            continue;
        if ((*algo)->most && multiply(shape->count, element_bytes) > (*algo)->most)
            continue;
        uint64_t taken = hvd_algo_cost(*algo, shape, element_bytes, cost);
        if (!best || taken < least || (taken == least && strcmp((*algo)->name, best->name) < 0)) {
            best = *algo;
            least = taken;
        }
    }
    return best;
}
