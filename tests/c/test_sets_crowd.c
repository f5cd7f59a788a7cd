/* test_sets_crowd.c - eight ranks, three overlapping sets and the global one, a thousand random operations at once.
 *
 * What an operation does follows from a seed, the same on all members; in which order a rank submits the operations of
 * a batch, and in which it waits for them, is its own. All results are compared with what they must be. Then the
 * deaths: of a member and of a rank that is none, while the set works.
 */
#include "crew.h"
#include "ranks.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SETS = 4, BATCH = 12, BATCHES = 21, SIZE = 8, MOST = 300, ROWS = 5 }; /* 4 * 12 * 21 = 1008 operations */

static const struct {
    int ranks[SIZE], count;
} sets[SETS] = {
    {{0, 1, 2, 3, 4, 5, 6, 7}, 8},
    {{0, 1, 2, 3, 4}, 5},
    {{3, 4, 5, 6, 7}, 5},
    {{0, 2, 5, 7}, 4},
};

/* One operation as its members know it, and this rank's memory for it. */
struct operation {
    int set, number, rank; /* rank in the set */
    struct hvd_request request;
    int64_t count, handle, splits[SIZE];
    int32_t in[MOST * SIZE], out[MOST * SIZE];
    char name[32];
};

static int index_in(int set, int rank)
{
    for (int i = 0; i < sets[set].count; i++)
        if (sets[set].ranks[i] == rank)
            return i;
    return -1;
}

static int32_t element(const struct operation *op, int from, int64_t i)
{
    return (int32_t)(from * 7 + op->set * 1000 + op->number * 13 + i % 31);
}

static int64_t split(const struct operation *op, int from, int to)
{
    return (op->number + from * 3 + to) % ROWS;
}

/* The request; false: this rank has no part in it. */
static bool make(struct operation *op, int set, int number, int rank)
{
    uint64_t seed = (uint64_t)set << 32 | (uint64_t)number;
    int size = sets[set].count, kind = (int)ranks_below(&seed, 9);
    op->set = set, op->number = number, op->rank = index_in(set, rank), op->handle = 0;
    op->count = (int64_t)ranks_below(&seed, MOST);
    snprintf(op->name, sizeof op->name, "op.%d", number % 40); /* names come again, with other kinds and shapes */
    op->request = (struct hvd_request){.name = op->name,
                                       .kind = kind == HVD_JOIN ? HVD_ALLREDUCE : kind,
                                       .op = HVD_OP_sum,
                                       .dtype = HVD_DTYPE_int32,
                                       .ndim = 1,
                                       .dims = {op->count},
                                       .prescale = 1.0,
                                       .postscale = 1.0,
                                       .input = op->in,
                                       .output = op->out,
                                       .process_set = set};
    int root = (int)ranks_below(&seed, (uint32_t)size), peer = (int)ranks_below(&seed, (uint32_t)size - 1);
    peer += peer >= root;
    switch (op->request.kind) {
    case HVD_ALLGATHER:
        op->request.dims[0] = op->rank * (number % ROWS);
        break;
    case HVD_ALLTOALL:
        op->request.dims[0] = 0;
        for (int to = 0; to < size; to++)
            op->request.dims[0] += op->splits[to] = split(op, op->rank, to);
        op->request.splits = op->splits, op->request.splits_count = size;
        break;
    case HVD_BROADCAST:
    case HVD_REDUCE:
        op->request.root = root;
        break;
    case HVD_SEND:
        op->request.root = root, op->request.peer = peer;
    }
    for (int64_t i = 0; i < MOST; i++)
        op->in[i] = element(op, op->rank, i), op->out[i] = -1;
    return op->rank >= 0 && (op->request.kind != HVD_SEND || op->rank == root || op->rank == peer);
}

static void check_sum(const struct operation *op, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t want = 0;
        for (int from = 0; from < sets[op->set].count; from++)
            want += element(op, from, first + i);
        CHECK(op->out[i] == want);
    }
}

static void check_gathered(struct hvd_engine *engine, const struct operation *op)
{
    struct hvd_output output;
    int size = sets[op->set].count;
    int64_t at = 0;
    CHECK(hvd_engine_result(engine, op->handle, &output) == HVD_OK && output.size == size);
    for (int from = 0; from < size; from++) {
        int64_t rows = from * (op->number % ROWS), first = 0;
        if (op->request.kind == HVD_ALLTOALL) {
            rows = split(op, from, op->rank);
            for (int to = 0; to < op->rank; to++)
                first += split(op, from, to);
        }
        CHECK(output.rows_of[from] == rows);
        for (int64_t i = 0; i < rows; i++)
            CHECK(((int32_t *)output.data)[at++] == element(op, from, first + i));
    }
    CHECK(output.rows == at);
}

static void check(struct hvd_engine *engine, const struct operation *op)
{
    int64_t share = 0, first = 0, size = sets[op->set].count;
    switch (op->request.kind) {
    case HVD_ALLREDUCE:
        check_sum(op, 0, op->count);
        break;
    case HVD_REDUCE:
        if (op->rank == op->request.root)
            check_sum(op, 0, op->count);
        break;
    case HVD_REDUCESCATTER:
        for (int r = 0; r <= op->rank; r++) {
            first += share;
            share = op->count / size + (r < op->count % size);
        }
        check_sum(op, first, share);
        break;
    case HVD_BROADCAST:
    case HVD_SEND:
        for (int64_t i = 0; i < op->count && (op->request.kind == HVD_BROADCAST || op->rank == op->request.peer); i++)
            CHECK(op->out[i] == element(op, op->request.root, i));
        break;
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
        check_gathered(engine, op);
    }
}

static void shuffle(int *order, int count, uint64_t *seed)
{
    for (int i = count - 1; i > 0; i--) {
        int j = (int)ranks_below(seed, (uint32_t)i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

static void open_all(struct hvd_engine *engine)
{
    struct hvd_error error = {0};
    for (int set = 1; set < SETS; set++)
        CHECK_CODE(crew_set_open(engine, sets[set].ranks, sets[set].count, &error), set, error.text);
    crew_barrier(engine);
}

static void crowd(struct hvd_engine *engine, int rank, int size)
{
    struct operation *op = malloc(sizeof *op * SETS * BATCH);
    uint64_t seed = (uint64_t)rank + 1;
    int order[SETS * BATCH];
    open_all(engine);
    for (int batch = 0; batch < BATCHES; batch++) {
        int count = 0;
        for (int set = 0; set < SETS; set++)
            for (int i = 0; i < BATCH; i++)
                count += make(&op[count], set, batch * BATCH + i, rank);
        for (int i = 0; i < count; i++)
            order[i] = i;
        shuffle(order, count, &seed);
        for (int i = 0; i < count; i++) {
            struct operation *next = &op[order[i]];
            next->handle = crew_begin(engine, &next->request);
        }
        shuffle(order, count, &seed);
        for (int i = 0; i < count; i++) {
            char text[HVD_TEXT_MAX] = "";
            int code = HVD_AGAIN;
            for (int tries = 0; code == HVD_AGAIN && tries < 600; tries++)
                code = hvd_engine_wait(engine, op[order[i]].handle, 50, text, sizeof text);
            CHECK_CODE(code, HVD_OK, text);
            check(engine, &op[order[i]]);
            CHECK(hvd_engine_forget(engine, op[order[i]].handle) == HVD_OK);
        }
    }
    crew_barrier(engine);
    free(op);
}

static void crowd_of_processes(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    crowd(engine, rank, size);
}

static int victim, status[HVD_LOCAL_MAX];

/* Ranks of set 1 work in it, the others wait in set 0; whoever dies, all are told, naming it. */
static void one_dies(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "", name[32];
    const int ranks[] = {0, 2};
    int64_t count = 1 << 20;
    float *memory = calloc((size_t)count, sizeof *memory);
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    CHECK(size == 3 && crew_set_open(engine, ranks, 2, &error) == 1);
    crew_barrier(engine);
    crew_meet(); /* the barrier is over everywhere: a death fails whatever is still under way */
    int code = HVD_OK;
    for (int step = 0; code == HVD_OK; step++) {
        struct hvd_request request = {.name = "never",
                                      .kind = HVD_ALLREDUCE,
                                      .op = HVD_OP_sum,
                                      .dtype = HVD_DTYPE_float32,
                                      .ndim = 1,
                                      .dims = {rank == 1 ? 1 : count},
                                      .prescale = 1.0,
                                      .postscale = 1.0,
                                      .input = memory,
                                      .output = memory,
                                      .process_set = rank == 1 ? 0 : 1};
        int64_t handle = hvd_engine_submit(engine, &request, &error);
        if (rank == victim && (rank == 1 || step == 3)) {
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            kill(getpid(), SIGKILL);
        }
        code = crew_wait(engine, handle, text);
    }
    CHECK_CODE(code, HVD_EPEER, text);
    snprintf(name, sizeof name, "rank %d (pid", victim);
    CHECK_CODE(strstr(text, name) != NULL, 1, text);
    CHECK(hvd_engine_set_close(engine, 1, &error) == HVD_OK); /* also in a job that has failed */
    free(memory);
}

int main(void)
{
    crew_deadline(300);
    uint64_t begun = hvd_now_ns();
    crew_threads(SIZE, crowd);
    printf("crowd of threads: %.0f ms\n", (double)(hvd_now_ns() - begun) / 1e6);
    begun = hvd_now_ns();
    crew_processes(SIZE, crowd_of_processes, NULL, status);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK_CODE(status[rank], 0, "a rank failed");
    printf("crowd of processes: %.0f ms\n", (double)(hvd_now_ns() - begun) / 1e6);
    for (victim = 0; victim < 3; victim++) {
        crew_processes(3, one_dies, NULL, status);
        for (int rank = 0; rank < 3; rank++)
            CHECK_CODE(status[rank], rank == victim ? SIGKILL : 0, "wrong end");
    }
    return 0;
}
