/* test_algo.c - every algorithm, proved for world sizes 1 to 64 by running it on sets of ranks instead of numbers.
 *
 * An element of a buffer is the set of ranks whose contribution it holds, one bit each. Combining two sets that share a
 * rank would count that rank twice; a copy over something that is needed would lose one. At the end every element that
 * the kind promises must hold each contribution exactly once. On the way, what a rank sends must be what its partner
 * expects in the same step, and all that crossed is counted and held against the formula. Buffers have 0, 1, n - 1,
 * n and 7n + 3 elements, so that chunks are empty, of one element, and unequal.
 */
#include "algo/algo.h"
#include "check.h"

#include <string.h>

enum { RANKS = 64, ROOM = 7 * RANKS + 3 };

struct world {
    const struct hvd_algo *algo;
    struct hvd_shape shape[RANKS];
    uint64_t state[RANKS][ROOM], before[RANKS][ROOM];
    uint64_t kept[RANKS][RANKS][ROOM]; /* by owner, sender and place */
    uint64_t sent[RANKS];
    int steps, size;
};

static struct world world;

static uint64_t everyone(void)
{
    return world.size == 64 ? UINT64_MAX : (UINT64_C(1) << world.size) - 1;
}

static const char *where(int i, int rank)
{
    static char text[200];
    const struct hvd_shape *shape = &world.shape[rank];
    snprintf(text, sizeof text, "%s, kind %d, %d ranks, %llu elements, grain %llu, root %d: step %d, rank %d",
             world.algo->name, shape->kind, shape->size, (unsigned long long)shape->count,
             (unsigned long long)shape->grain, shape->root, i, rank);
    return text;
}

/* What arrives at a rank in step i. */
static void receive(int i, int rank, const struct hvd_step *mine, const struct hvd_step *theirs)
{
    CHECK(theirs->to == rank && theirs->send_count == mine->recv_count, "%s", where(i, rank));
    CHECK(theirs->send_at == mine->recv_at, "%s", where(i, rank));
    CHECK(mine->recv_at + mine->recv_count <= world.shape[rank].count, "%s", where(i, rank));
    for (uint64_t k = mine->recv_at; k < mine->recv_at + mine->recv_count; k++) {
        uint64_t came = world.before[mine->from][k];
        if (mine->how == HVD_STEP_COPY) {
            world.state[rank][k] = came;
        } else if (mine->how == HVD_STEP_STAGE) {
            CHECK(world.kept[rank][mine->from][k] == 0, "%s: kept twice", where(i, rank));
            world.kept[rank][mine->from][k] = came;
        } else {
            CHECK((world.state[rank][k] & came) == 0, "%s: a rank would count twice", where(i, rank));
            CHECK(!world.algo->ordered || (world.state[rank][k] | came) == everyone(), "%s: not at once",
                  where(i, rank));
            world.state[rank][k] |= came;
        }
    }
}

/* In rank order: what is kept of each other rank must be that rank's own value and nothing else. */
static void fold(int i, int rank)
{
    const struct hvd_shape *shape = &world.shape[rank];
    uint64_t begin, end;
    hvd_algo_folded(world.algo, shape, &begin, &end);
    for (uint64_t k = begin; k < end; k++)
        for (int from = 0; from < world.size; from++)
            if (from != rank) {
                CHECK(world.kept[rank][from][k] == UINT64_C(1) << from, "%s: rank %d is missing", where(i, rank), from);
                world.state[rank][k] |= world.kept[rank][from][k];
            }
}

static void run_steps(void)
{
    for (int i = 0; i < world.steps; i++) {
        struct hvd_step step[RANKS];
        for (int rank = 0; rank < world.size; rank++) {
            step[rank] = hvd_algo_step(world.algo, &world.shape[rank], i);
            world.sent[rank] += step[rank].send_count;
            CHECK(step[rank].to != rank && step[rank].from != rank, "%s: with itself", where(i, rank));
        }
        for (int rank = 0; rank < world.size; rank++)
            memcpy(world.before[rank], world.state[rank], sizeof(uint64_t) * (size_t)world.shape[rank].count);
        for (int rank = 0; rank < world.size; rank++) {
            if (step[rank].to >= 0)
                CHECK(step[step[rank].to].from == rank, "%s: nobody receives", where(i, rank));
            if (step[rank].from >= 0)
                receive(i, rank, &step[rank], &step[step[rank].from]);
            if (step[rank].fold)
                fold(i, rank);
        }
    }
}

static void begin(const struct hvd_algo *algo, struct hvd_shape shape)
{
    world.algo = algo;
    world.size = shape.size;
    for (int rank = 0; rank < shape.size; rank++) {
        world.sent[rank] = 0;
        for (int from = 0; from < shape.size; from++)
            memset(world.kept[rank][from], 0, sizeof(uint64_t) * (size_t)shape.count);
        shape.rank = rank;
        world.shape[rank] = shape;
        int steps = algo->steps(&world.shape[rank]);
        CHECK(rank == 0 || steps == world.steps, "%s: %d steps, not %d", where(0, rank), steps, world.steps);
        world.steps = steps;
        for (uint64_t k = 0; k < shape.count; k++) {
            bool own = k >= hvd_algo_cut(&world.shape[rank], rank) && k < hvd_algo_cut(&world.shape[rank], rank + 1);
            bool gives = shape.kind == HVD_BROADCAST ? rank == shape.root : shape.kind == HVD_ALLGATHER ? own : true;
            world.state[rank][k] = gives ? UINT64_C(1) << rank : 0;
        }
    }
}

/* What element k of rank, in owner's chunk, must be in the end; 0: it does not matter. */
static uint64_t promised(const struct hvd_shape *shape, int rank, int owner)
{
    switch (shape->kind) {
    case HVD_ALLREDUCE:
        return everyone();
    case HVD_REDUCESCATTER:
        return owner == rank ? everyone() : 0;
    case HVD_ALLGATHER:
        return UINT64_C(1) << owner;
    case HVD_BROADCAST:
        return UINT64_C(1) << shape->root;
    default:
        return rank == shape->root ? everyone() : 0;
    }
}

static void prove(const struct hvd_algo *algo, struct hvd_shape shape)
{
    begin(algo, shape);
    run_steps();
    for (int rank = 0; rank < shape.size; rank++)
        for (uint64_t k = 0, owner = 0; k < shape.count; k++) {
            while (k >= hvd_algo_cut(&world.shape[rank], (int)owner + 1))
                owner++;
            uint64_t wanted = promised(&world.shape[rank], rank, (int)owner);
            CHECK(!wanted || world.state[rank][k] == wanted, "%s: element %llu is %llx, not %llx", where(-1, rank),
                  (unsigned long long)k, (unsigned long long)world.state[rank][k], (unsigned long long)wanted);
        }
}

/* Does it cut what it moves into segments? */
static bool has_segments(const struct hvd_algo *algo, int kind)
{
    struct hvd_shape fine = {.kind = kind, .size = 4, .count = 1000, .grain = 1}, coarse = fine;
    coarse.grain = 1000;
    return algo->can(kind, 4) && algo->steps(&fine) != algo->steps(&coarse);
}

static void test_each_contribution_arrives_exactly_once(void)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_REDUCESCATTER, HVD_ALLGATHER, HVD_BROADCAST, HVD_REDUCE};
    int proved = 0;
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        for (size_t kind = 0; kind < HVD_COUNT_OF(kinds); kind++)
            for (int size = 1; size <= RANKS; size++) {
                if (!(*algo)->can(kinds[kind], size))
                    continue;
                uint64_t n = (uint64_t)size, counts[] = {0, 1, n - 1, n, 7 * n + 3};
                for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                    for (int root = 0; root < size; root += kinds[kind] == HVD_BROADCAST ? size / 3 + 1 : size)
                        for (uint64_t grain = 1; grain <= (has_segments(*algo, kinds[kind]) ? 64 : 1); grain *= 8) {
                            prove(*algo, (struct hvd_shape){.kind = kinds[kind],
                                                            .size = size,
                                                            .root = root,
                                                            .count = counts[c],
                                                            .grain = grain});
                            proved++;
                        }
            }
    CHECK(proved > 3000, "only %d were looked at", proved);
    printf("%d proofs\n", proved);
}

static void test_chunks_may_be_as_unequal_as_they_like(void)
{
    static const int kinds[] = {HVD_REDUCESCATTER, HVD_ALLGATHER};
    uint64_t count_of[RANKS];
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        for (size_t kind = 0; kind < HVD_COUNT_OF(kinds); kind++)
            for (int size = 1; size <= RANKS && (*algo)->can(kinds[kind], size); size++) {
                uint64_t count = 0;
                for (int rank = 0; rank < size; rank++)
                    count += count_of[rank] = (uint64_t)(rank * 7 % 5); /* some have nothing */
                prove(*algo, (struct hvd_shape){
                                 .kind = kinds[kind], .size = size, .count = count, .grain = 4, .count_of = count_of});
            }
}

static void test_every_cell_of_an_alltoall_crosses_once(void)
{
    static uint64_t count_of[RANKS * RANKS];
    const struct hvd_algo *algo = hvd_algo_named("pairwise");
    for (int size = 1; size <= RANKS; size++) {
        for (int k = 0; k < size * size; k++)
            count_of[k] = (uint64_t)(k * 11 % 7);
        static bool seen[RANKS][RANKS];
        memset(seen, 0, sizeof seen);
        for (int rank = 0; rank < size; rank++) {
            struct hvd_shape shape = {
                .kind = HVD_ALLTOALL, .rank = rank, .size = size, .grain = 1, .count_of = count_of};
            for (int i = 0; i < algo->steps(&shape); i++) {
                struct hvd_step step = hvd_algo_step(algo, &shape, i);
                if (step.to < 0)
                    continue;
                struct hvd_shape theirs = shape;
                theirs.rank = step.to;
                struct hvd_step other = hvd_algo_step(algo, &theirs, i);
                CHECK(other.from == rank && other.recv_count == step.send_count && !seen[rank][step.to],
                      "%d ranks, step %d, rank %d to %d", size, i, rank, step.to);
                seen[rank][step.to] = true;
                uint64_t row = 0, column = 0;
                for (int r = 0; r < step.to; r++)
                    row += count_of[rank * size + r];
                for (int r = 0; r < rank; r++)
                    column += count_of[r * size + step.to];
                CHECK(step.send_at == row && other.recv_at == column, "%d ranks, rank %d to %d", size, rank, step.to);
            }
        }
        for (int k = 0; k < size * size; k++)
            CHECK(seen[k / size][k % size] == (k / size != k % size && count_of[k] > 0), "%d ranks, cell %d", size, k);
    }
}

/* The most that one rank sends, in elements. */
static uint64_t dearest(const char *name, int kind, int size, uint64_t count, uint64_t grain)
{
    prove(hvd_algo_named(name), (struct hvd_shape){.kind = kind, .size = size, .count = count, .grain = grain});
    uint64_t most = 0;
    for (int rank = 0; rank < size; rank++)
        most = world.sent[rank] > most ? world.sent[rank] : most;
    return most;
}

static void test_bytes_on_the_wire_are_the_formula(void)
{
    for (int size = 2; size <= RANKS; size++) {
        uint64_t n = (uint64_t)size, count = 6 * n;
        static const char *const even[] = {"ring", "direct"};
        for (size_t k = 0; k < HVD_COUNT_OF(even); k++) {
            CHECK(dearest(even[k], HVD_ALLREDUCE, size, count, 1) == 2 * (n - 1) * 6, "%s, %d", even[k], size);
            for (int rank = 0; rank < size; rank++) /* not only the dearest: every rank */
                CHECK(world.sent[rank] == 2 * (n - 1) * 6, "%s, %d ranks, rank %d", even[k], size, rank);
            CHECK(dearest(even[k], HVD_REDUCESCATTER, size, count, 1) == (n - 1) * 6, "%s, %d", even[k], size);
            CHECK(dearest(even[k], HVD_ALLGATHER, size, count, 1) == (n - 1) * 6, "%s, %d", even[k], size);
        }
        bool power = (size & (size - 1)) == 0;
        uint64_t halving = dearest("halving", HVD_ALLREDUCE, size, power ? count : 4 * n, 1);
        if (power)
            CHECK(halving == 2 * (n - 1) * 6, "halving, %d: %llu", size, (unsigned long long)halving);
        CHECK(dearest("chain", HVD_BROADCAST, size, count, 5) == count, "chain, %d", size);
        CHECK(dearest("twotree", HVD_ALLREDUCE, size, count, 5) <= 2 * count, "twotree, %d", size);
        CHECK(dearest("whole", HVD_ALLREDUCE, size, count, 1) == (n - 1) * count, "whole, %d", size);
        CHECK(size > 2 || dearest("exchange", HVD_ALLREDUCE, size, count, 1) == count, "exchange");
    }
}

static void test_steps_are_the_formula(void)
{
    for (int size = 2; size <= RANKS; size++) {
        int up = 0;
        while (1 << up < size)
            up++;
        struct hvd_shape shape = {.kind = HVD_ALLREDUCE, .size = size, .count = 1 << 20, .grain = 1 << 10};
        CHECK(hvd_algo_named("ring")->steps(&shape) == 2 * (size - 1), "%d", size);
        CHECK(hvd_algo_named("binomial")->steps(&shape) == 2 * up, "%d", size);
        CHECK(hvd_algo_named("halving")->steps(&shape) == 2 * up, "%d", size);
        CHECK(hvd_algo_named("whole")->steps(&shape) == size - 1, "%d", size);
        int steps = hvd_algo_named("twotree")->steps(&shape); /* segments of one tree: 512 */
        CHECK(steps <= 4 * (512 + up + 1), "two trees of %d ranks take %d steps", size, steps);
    }
}

static void test_the_cheapest_is_chosen(void)
{
    struct hvd_cost cost = {.alpha_ns = 20000, .beta_ps = 8000}; /* 1 Gbit/s */
    for (int size = 3; size <= 32; size += 29) {
        struct hvd_shape shape = {.kind = HVD_ALLREDUCE, .size = size, .count = 1, .grain = 1 << 14};
        const struct hvd_algo *small = hvd_algo_choose(&shape, 4, cost, false);
        uint64_t taken = hvd_algo_cost(small, &shape, 4, cost);
        for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
            if ((*algo)->can(HVD_ALLREDUCE, size))
                CHECK(taken <= hvd_algo_cost(*algo, &shape, 4, cost), "%s", (*algo)->name);
        CHECK(hvd_algo_named("ring") != small || size == 3, "a ring of 32 ranks for one element");
        shape.count = 64 << 20;
        const struct hvd_algo *large = hvd_algo_choose(&shape, 4, cost, false);
        CHECK(strcmp(large->name, "binomial") != 0, "a tree for a large buffer");
        CHECK(hvd_algo_choose(&shape, 4, cost, true)->ordered, "not in rank order");
        shape.kind = HVD_BROADCAST;
        CHECK(strcmp(hvd_algo_choose(&shape, 4, cost, false)->name, "chain") == 0, "no chain for a large broadcast");
        struct hvd_cost far = {.alpha_ns = 2000000, .beta_ps = 8000};
        uint64_t once = shape.count * 4 * 8, taken_far = hvd_algo_cost(hvd_algo_named("chain"), &shape, 4, far);
        CHECK(taken_far >= once && taken_far < once + once / 20 + (uint64_t)size * 3000000,
              "segments of a chain wait for each other: %llu", (unsigned long long)taken_far);
        shape.kind = HVD_BARRIER;
        CHECK(hvd_algo_choose(&shape, 4, cost, false) == NULL, "a barrier needs no algorithm");
    }
    struct hvd_shape two = {.kind = HVD_ALLREDUCE, .size = 2, .count = 1024, .grain = 1 << 14};
    CHECK(strcmp(hvd_algo_choose(&two, 4, cost, true)->name, "whole") == 0, "4 KB take two rounds");
    two.count = 16385; /* one more than it is for */
    for (int ordered = 0; ordered <= 1; ordered++)
        CHECK(strcmp(hvd_algo_choose(&two, 4, cost, ordered)->name, "exchange") == 0, "half of the way waits");
    CHECK(hvd_algo_cost(hvd_algo_named("exchange"), &two, 4, cost) == 20000 + 16385 * 4 * 8, "one message each way");
    struct hvd_shape ring = {.kind = HVD_ALLREDUCE, .size = 4, .count = 1000, .grain = 1};
    uint64_t by_hand = 6 * (20000 + 250 * 4 * 8);
    CHECK(hvd_algo_cost(hvd_algo_named("ring"), &ring, 4, cost) == by_hand, "%llu",
          (unsigned long long)hvd_algo_cost(hvd_algo_named("ring"), &ring, 4, cost));
    for (int size = 2; size <= 100; size += 49) { /* the last one is too large to be gone through rank by rank */
        struct hvd_shape few = {.kind = HVD_ALLREDUCE, .size = size, .count = 1600, .grain = 1}, many = few;
        uint64_t n = (uint64_t)size, most = 15000 + (n - 1) * (5000 + 1600 * 4 * 8);
        uint64_t taken = hvd_algo_cost(hvd_algo_named("whole"), &few, 4, cost);
        CHECK(taken == most, "%d messages that wait for nothing take %llu ns", size - 1, (unsigned long long)taken);
        many.count = n * 1600;
        taken = hvd_algo_cost(hvd_algo_named("direct"), &many, 4, cost);
        CHECK(taken == 2 * most, "two rounds of %d messages take %llu ns", size - 1, (unsigned long long)taken);
    }
    CHECK(hvd_algo_named("torus") == NULL, "an algorithm that does not exist");
}

/* What ranks of a host send away leaves over one wire. */
static void test_the_cost_knows_who_shares_a_wire(void)
{
    enum { RANKS_MANY = 128 };
    static const int blocks[] = {0, 0, 1, 1}, by_turns[] = {0, 1, 0, 1};
    struct hvd_cost cost = {.alpha_ns = 50000, .beta_ps = 8000};
    struct hvd_shape shape = {.kind = HVD_ALLREDUCE, .size = 4, .count = 4 << 20, .grain = 1 << 15};
    const struct hvd_algo *ring = hvd_algo_named("ring"), *halving = hvd_algo_named("halving");
    uint64_t once = shape.count * 4 * 8;
    shape.host_of = blocks;
    uint64_t of_ring = hvd_algo_cost(ring, &shape, 4, cost), of_halving = hvd_algo_cost(halving, &shape, 4, cost);
    CHECK(of_ring >= once * 3 / 2 && of_ring < once * 8 / 5, "6/4 of the bytes cross: %llu",
          (unsigned long long)of_ring);
    CHECK(of_halving >= 2 * once, "all of them cross twice: %llu", (unsigned long long)of_halving);
    CHECK(hvd_algo_choose(&shape, 4, cost, false) == ring, "%s", hvd_algo_choose(&shape, 4, cost, false)->name);
    shape.host_of = by_turns; /* halves are exchanged inside, then quarters across */
    CHECK(hvd_algo_cost(ring, &shape, 4, cost) >= 3 * once, "every edge of this ring crosses");
    CHECK(hvd_algo_choose(&shape, 4, cost, false) == halving, "%s", hvd_algo_choose(&shape, 4, cost, false)->name);
    int host_of[RANKS_MANY], own[RANKS_MANY];
    for (int rank = 0; rank < RANKS_MANY; rank++) {
        host_of[rank] = rank / 8;
        own[rank] = rank;
    }
    struct hvd_shape many = {.kind = HVD_ALLREDUCE, .size = RANKS_MANY, .count = 4 << 20, .grain = 1 << 15},
                     each = many;
    const struct hvd_algo *direct = hvd_algo_named("direct");
    many.host_of = host_of;
    uint64_t apart = hvd_algo_cost(direct, &each, 4, cost), shared = hvd_algo_cost(direct, &many, 4, cost);
    CHECK(shared > 7 * apart && shared < 9 * apart, "eight ranks on a wire: %llu, alone %llu",
          (unsigned long long)shared, (unsigned long long)apart);
    CHECK(hvd_algo_cost(ring, &many, 4, cost) <= hvd_algo_cost(ring, &each, 4, cost), "one of eight edges crosses");
    each.host_of = own;
    CHECK(hvd_algo_cost(direct, &each, 4, cost) == apart, "each rank on a host of its own");
}

int main(void)
{
    test_each_contribution_arrives_exactly_once();
    test_chunks_may_be_as_unequal_as_they_like();
    test_every_cell_of_an_alltoall_crosses_once();
    test_bytes_on_the_wire_are_the_formula();
    test_steps_are_the_formula();
    test_the_cheapest_is_chosen();
    test_the_cost_knows_who_shares_a_wire();
    return 0;
}
