/* algo.h - who exchanges what with whom in step i. Pure: peer and range arithmetic, nothing else.
 *
 * An algorithm is a function from a step number to one exchange: at most one send and one receive. It knows no bytes,
 * no sockets and no time; the one loop that does I/O is the interpreter of plane p2p. That is why every algorithm can
 * be proved for every world size before a byte is sent (tests/c/test_algo.c), and why its cost needs no table: it
 * follows from its own steps (registry.c).
 *
 * An ordered algorithm keeps what comes and folds it, or combines each element in one step only (exchange.c): either
 * way with one rounding of result and scale. What a step receives to be combined may be what it sends.
 *
 * Steps are aligned: what a rank sends in step i its partner receives in step i, in the same range of the buffer. Each
 * rank has the same number of steps; in some it may have nothing to do. A rank may run ahead as far as its data go.
 *
 * THE BUFFER. All kinds but alltoall work in place on one buffer of `count` elements, the concatenation of one chunk
 * per rank:
 *     allreduce       begins with everyone's values, ends with the combination everywhere; chunks are cut equally
 *     reducescatter   begins likewise; chunk r is complete on rank r at the end, the rest is undefined
 *     allgather       chunk r is filled on rank r and in the end everywhere
 *     broadcast       filled on the root, in the end everywhere
 *     reduce          complete on the root at the end, undefined elsewhere
 *     alltoall        sends out of an input (ranges for rank 0, 1, ...) into an output (ranges from rank 0, 1, ...);
 * what a rank gives to itself is the interpreter's business
 *
 * One file csrc/algo/x.c per algorithm, exporting only hvd_algo_x; nobody edits a list.
 */
#ifndef HVD_ALGO_H
#define HVD_ALGO_H

#include "../base/base.h"

struct hvd_shape {
    int kind; /* HVD_ALLREDUCE, HVD_ALLGATHER, HVD_BROADCAST, HVD_REDUCE, HVD_REDUCESCATTER, HVD_ALLTOALL */
    int rank, size, root;
    uint64_t count;           /* elements in the buffer; alltoall: not looked at */
    uint64_t grain;           /* elements in one segment of a pipelined algorithm, at least 1 */
    const uint64_t *count_of; /* allgather, reducescatter: elements of chunk r, they add up to count; alltoall: from
                                 every rank to every rank, count_of[from * size + to]. NULL: chunks are cut equally */
    const int *host_of;       /* for the cost alone: a number for the host of each rank. NULL: each has its own */
    int64_t room[16];         /* the algorithm's own; written by steps() */
};

/* What becomes of what arrives. */
enum hvd_step_how {
    HVD_STEP_COPY,   /* it replaces the range */
    HVD_STEP_REDUCE, /* it is combined into the range */
    HVD_STEP_STAGE   /* it is kept, until fold */
};

struct hvd_step {
    int to, from; /* -1: nobody */
    uint64_t send_at, send_count, recv_at, recv_count;
    enum hvd_step_how how;
    bool fold; /* after this step: this rank's own chunk (of a `whole` algorithm the buffer) := the combination, in rank
                  order, of its own value and of what was kept from every other rank */
};

struct hvd_algo {
    const char *name;
    bool ordered; /* every element is combined in rank order, wherever it lies in the buffer: results are the same bits
                     whatever a tensor shares its bucket with */
    bool (*can)(int kind, int size);
    int (*steps)(struct hvd_shape *shape); /* how many; lays out `room`. Call it before step */
    /* Step i of shape->rank. *step was zeroed, to and from are -1. */
    void (*step)(const struct hvd_shape *shape, int i, struct hvd_step *step);
    bool whole;    /* each rank keeps and folds the whole buffer */
    uint64_t most; /* bytes of a buffer for which it may be the cheapest; 0: any */
};

/* The table the build makes from the file names (-DHVD_ALGO_LIST="X(ring) X(direct)"), NULL-terminated. */
extern const struct hvd_algo *const hvd_algos[];

/* Where chunk r begins; r == size: the end of the last. */
uint64_t hvd_algo_cut(const struct hvd_shape *shape, int r);
/* What shape->rank keeps of each other rank and folds: [*begin, *end). */
void hvd_algo_folded(const struct hvd_algo *algo, const struct hvd_shape *shape, uint64_t *begin, uint64_t *end);
/* rank + by, around the ring. */
int hvd_algo_around(const struct hvd_shape *shape, int rank, int by);
/* Fill in that chunk r goes to `to`, or comes from `from`. */
void hvd_algo_send_chunk(const struct hvd_shape *shape, struct hvd_step *step, int to, int r);
void hvd_algo_recv_chunk(const struct hvd_shape *shape, struct hvd_step *step, int from, int r);
/* `can` and `steps` of an algorithm that is a reducescatter and an allgather of size - 1 steps each, either alone, too.
 */
bool hvd_algo_can_in_phases(int kind, int size);
int hvd_algo_steps_in_phases(struct hvd_shape *shape);
/* Is step i of such a one in the allgather? Then *i becomes the step of that. */
bool hvd_algo_gathers(const struct hvd_shape *shape, int *i);
/* The exchange of shape->rank in step i: zeroes, then asks the algorithm. */
struct hvd_step hvd_algo_step(const struct hvd_algo *algo, const struct hvd_shape *shape, int i);

/* What a message between hosts costs: alpha_ns until it is there, and beta_ps per byte before, in which its sender's
 * and its receiver's port are busy, and those of their hosts. Agreed among ranks. */
struct hvd_cost {
    uint64_t alpha_ns, beta_ps;
};
/* Nanoseconds until all ranks are done, by the time of each of up to HVD_COST_ALL ranks; of more, HVD_COST_RANKS spread
 * over the world are looked at. Integers only, from agreed values only: the same on every rank. shape->rank is not
 * looked at. */
#define HVD_COST_ALL   64
#define HVD_COST_RANKS 16
uint64_t hvd_algo_cost(const struct hvd_algo *algo, const struct hvd_shape *shape, uint64_t element_bytes,
                       struct hvd_cost cost);
/* The cheapest that can; of equal ones what is for small buffers (`most`), then the first by name. `ordered`: only
 * such. NULL: none can. */
const struct hvd_algo *hvd_algo_choose(const struct hvd_shape *shape, uint64_t element_bytes, struct hvd_cost cost,
                                       bool ordered);
/* By name; NULL: no such algorithm. */
const struct hvd_algo *hvd_algo_named(const char *name);

#endif
