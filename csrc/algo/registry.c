/* registry.c - which algorithms this build carries, the arithmetic they share, and which one is cheapest.
 *
 * The file name is the registration: setup.py and tests/Makefile glob csrc/algo/ for plug-ins and pass their names as
 * -DHVD_ALGO_LIST="X(ring) X(direct)", in the order of the alphabet. Nobody edits a list.
 *
 * Equal chunks differ by one element at most, the first ones being longer: so a buffer of fewer elements than ranks has
 * empty chunks at its end, and no algorithm needs a special case for it. An exchange of nothing is no exchange: where a
 * range is empty, to or from stay -1, on both sides alike.
 *
 * COST. The source is the algorithm itself: its steps are gone through with a time of its own for every rank. A message
 * of b bytes keeps its sender's port, and its receiver's, busy for beta * b, and arrives alpha later (R. W. Hockney,
 * "The communication challenge for MPP", Parallel Computing 20, 1994). It leaves when the port is free and what it
 * consists of has come; so what does not wait for anything costs no alpha of its own: all messages of `whole` are under
 * way at once, and a chain's segments follow each other. Of alpha a small part is work of the two ranks (MESSAGE_NS),
 * which keeps ports busy, too: else a thousand small messages would cost nothing. (The model is LogGP then: A.
 * Alexandrov et al., "LogGP: incorporating long messages into the LogP model", SPAA 1995.) What a ring passes on while
 * it is still arriving makes it a little faster than this says.
 *
 * Ranks of a host share its wire: what several of them send to other hosts leaves one after the other, and comes so.
 * What they send each other takes what loopback takes, or less if the wire is faster.
 *
 * In a large world not all ranks are asked: some, spread evenly, with all of their hosts, tell enough, because in every
 * algorithm here they play one of a few parts; what comes to one of them left when the last of them would have sent it.
 * All is integer arithmetic on agreed values, so that each rank comes to the same choice by itself. Sums saturate: a
 * cost beyond 2^64 ns is as good as never.
 */
#include "algo.h"

#include <string.h>

#ifndef HVD_ALGO_LIST
#error "build with -DHVD_ALGO_LIST, the names of the files csrc/algo/*.c but for registry.c"
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

#define MESSAGE_NS UINT64_C(5000)  /* of alpha: a message's system calls */
#define INSIDE_NS  UINT64_C(20000) /* of a message inside a host */
#define INSIDE_PS  UINT64_C(500)
#define CAME_MAX   16 /* arrivals that a rank remembers; what came before them came in time */

struct port {
    uint64_t out, in; /* when it is free for the next byte, each way */
    uint64_t sends;   /* when the message of this step begins to leave */
    uint64_t last;    /* when the newest message had come */
    struct {
        uint64_t begin, end, at;
    } came[CAME_MAX]; /* which range was complete when, newest last */
    uint32_t arrivals;
};

static void note_arrival(struct port *port, uint64_t begin, uint64_t end)
{
    uint32_t i = port->arrivals++ % CAME_MAX;
    port->came[i].begin = begin;
    port->came[i].end = end;
    port->came[i].at = port->last;
}

/* When all of [begin, end) is what it shall be. Arrivals are in order, so the newest one tells. */
static uint64_t complete(const struct port *port, uint64_t begin, uint64_t end)
{
    for (uint32_t k = 1; k <= CAME_MAX && k <= port->arrivals; k++) {
        uint32_t i = (port->arrivals - k) % CAME_MAX;
        if (begin < port->came[i].end && port->came[i].begin < end)
            return port->came[i].at;
    }
    return 0;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t on_wire(uint64_t bytes, struct hvd_cost cost)
{
    return multiply(bytes, cost.beta_ps) / UINT64_C(1000);
}

/* What keeps ports busy, of one message. */
static uint64_t busy(uint64_t bytes, struct hvd_cost cost)
{
    uint64_t work = cost.alpha_ns < MESSAGE_NS ? cost.alpha_ns : MESSAGE_NS;
    return add(work, on_wire(bytes, cost));
}

/* What a host's wire carries next begins then, each way. */
struct wire {
    uint64_t out, in;
};

/* The ranks that are gone through. */
struct seen {
    struct hvd_shape shape[HVD_COST_ALL];
    struct port port[HVD_COST_ALL];
    struct wire wire[HVD_COST_ALL];
    int wire_of[HVD_COST_ALL];
    int ranks;
    bool all;
    struct hvd_cost across, inside;
};

static bool crosses(const struct hvd_shape *shape, int peer)
{
    return !shape->host_of || shape->host_of[shape->rank] != shape->host_of[peer];
}

static void add_rank(struct seen *seen, const struct hvd_shape *shape, int rank)
{
    int k = seen->ranks++;
    seen->shape[k] = *shape;
    seen->shape[k].rank = rank;
    seen->wire_of[k] = k;
    for (int other = k - 1; other >= 0 && shape->host_of; other--)
        if (shape->host_of[seen->shape[other].rank] == shape->host_of[rank])
            seen->wire_of[k] = other; /* in the end that of the first */
}

static int ranks_like(const struct hvd_shape *shape, int rank)
{
    int count = 0;
    for (int other = 0; other < shape->size && shape->host_of; other++)
        count += shape->host_of[other] == shape->host_of[rank];
    return shape->host_of ? count : 1;
}

/* This rank, and all of its host, if they are not there yet and there is room for them. */
static void add_host(struct seen *seen, const struct hvd_shape *shape, int rank)
{
    for (int k = 0; k < seen->ranks; k++)
        if (seen->shape[k].rank == rank)
            return;
    if (seen->ranks + ranks_like(shape, rank) > HVD_COST_ALL)
        return;
    for (int other = 0; other < shape->size; other++)
        if (other == rank || !crosses(&(struct hvd_shape){.rank = rank, .host_of = shape->host_of}, other))
            add_rank(seen, shape, other);
}

static void pick_ranks(struct seen *seen, const struct hvd_shape *shape)
{
    seen->all = shape->size <= HVD_COST_ALL;
    for (int rank = 0; rank < shape->size && seen->all; rank++)
        add_rank(seen, shape, rank);
    int like = seen->all ? 1 : ranks_like(shape, 0), hosts = like < HVD_COST_RANKS ? HVD_COST_RANKS / like : 1;
    for (int i = 0; i < hosts && !seen->all; i++)
        add_host(seen, shape, (int)((int64_t)i * shape->size / hosts));
}

static void send_in_time(struct seen *seen, int k, const struct hvd_step *step, uint64_t bytes)
{
    const struct hvd_shape *shape = &seen->shape[k];
    struct port *port = &seen->port[k];
    struct wire *wire = &seen->wire[seen->wire_of[k]];
    if (step->to < 0)
        return;
    uint64_t ready = 0;
    if (shape->kind != HVD_ALLTOALL)
        ready = complete(port, step->send_at, step->send_at + step->send_count);
    bool away = crosses(shape, step->to);
    struct hvd_cost cost = away ? seen->across : seen->inside;
    port->sends = later(later(port->out, ready), away ? wire->out : 0);
    port->out = add(port->sends, busy(bytes, cost));
    wire->out = away ? add(port->sends, on_wire(bytes, cost)) : wire->out;
}

static void receive_in_time(struct seen *seen, int k, const struct hvd_algo *algo, const struct hvd_step *step,
                            uint64_t sent, uint64_t bytes)
{
    const struct hvd_shape *shape = &seen->shape[k];
    struct port *port = &seen->port[k];
    struct wire *wire = &seen->wire[seen->wire_of[k]];
    if (step->from >= 0) {
        bool away = crosses(shape, step->from);
        struct hvd_cost cost = away ? seen->across : seen->inside;
        uint64_t begins = later(later(port->in, sent), away ? wire->in : 0);
        port->in = add(begins, busy(bytes, cost));
        wire->in = away ? add(begins, on_wire(bytes, cost)) : wire->in;
        uint64_t on_its_way = cost.alpha_ns < MESSAGE_NS ? 0 : cost.alpha_ns - MESSAGE_NS;
        port->last = later(port->last, add(port->in, on_its_way));
        if (step->how != HVD_STEP_STAGE)
            note_arrival(port, step->recv_at, step->recv_at + step->recv_count);
    }
    if (step->fold) {
        uint64_t begin, end;
        hvd_algo_folded(algo, shape, &begin, &end);
        note_arrival(port, begin, end);
    }
}

uint64_t hvd_algo_cost(const struct hvd_algo *algo, const struct hvd_shape *shape, uint64_t element_bytes,
                       struct hvd_cost cost)
{
    struct seen seen = {.across = cost, .inside = {INSIDE_NS, INSIDE_PS}};
    seen.inside.alpha_ns = cost.alpha_ns < INSIDE_NS ? cost.alpha_ns : INSIDE_NS;
    seen.inside.beta_ps = cost.beta_ps < INSIDE_PS ? cost.beta_ps : INSIDE_PS;
    pick_ranks(&seen, shape);
    int steps = 0;
    for (int k = 0; k < seen.ranks; k++)
        steps = algo->steps(&seen.shape[k]);
    uint64_t total = 0;
    for (int i = 0; i < steps; i++) {
        struct hvd_step step[HVD_COST_ALL];
        uint64_t latest = 0;
        for (int k = 0; k < seen.ranks; k++) {
            step[k] = hvd_algo_step(algo, &seen.shape[k], i);
            send_in_time(&seen, k, &step[k], multiply(step[k].send_count, element_bytes));
            latest = later(latest, step[k].to < 0 ? 0 : seen.port[k].sends);
        }
        for (int k = 0; k < seen.ranks; k++) {
            uint64_t sent = seen.all && step[k].from >= 0 ? seen.port[step[k].from].sends : latest;
            receive_in_time(&seen, k, algo, &step[k], sent, multiply(step[k].recv_count, element_bytes));
            total = later(total, later(seen.port[k].out, seen.port[k].last));
        }
    }
    return total;
}

/* Of two that take the same time: what is for small buffers, since it may leave early; then by name. */
static bool is_preferred(const struct hvd_algo *algo, const struct hvd_algo *other)
{
    return algo->most != other->most ? algo->most > other->most : strcmp(algo->name, other->name) < 0;
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
        if (!best || taken < least || (taken == least && is_preferred(*algo, best))) {
            best = *algo;
            least = taken;
        }
    }
    return best;
}
