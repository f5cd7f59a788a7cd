/* virtual_engine.c - does every collective end, right and soon, whatever the order in which threads go on?
 *
 * Ranks run random programs: all kinds of requests in process sets that overlap, in another order on each rank, with
 * thinking in between; quiet ones; one or two threads of a rank; ranks that join early. Each result is compared. No
 * collective ends later than LATE_NS after the last rank has submitted it: a wake-up that is lost would show.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <pthread.h>
#include <unistd.h>

enum { STEPS = 6, AT_ONCE = 5, SETS = 2, WAIT_MS = 10000, LATE_NS = 6 * VIRTUAL_MS };
static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER,
                            HVD_ALLTOALL,  HVD_REDUCE,    HVD_SEND,      HVD_REDUCESCATTER};
static uint64_t chosen;
static int threads, sets_count, members[SETS + 1][VIRTUAL_RANKS], member_count[SETS + 1];
static uint64_t last_ns[2][STEPS][AT_ONCE]; /* when the last rank was ready to go on with it */

/* A collective of one rank. */
struct asked {
    struct hvd_request request;
    int64_t handle, count;
    int size, here; /* of its set */
    float *in, *out;
    char name[32];
};

static float value(int rank, int64_t i)
{
    return (float)(rank + 1) * 16 + (float)(i % 13);
}

static float sum_of(const int *ranks, int count, int64_t i)
{
    float sum = 0;
    for (int k = 0; k < count; k++)
        sum += value(ranks[k], i);
    return sum;
}

/* What all ranks agree on; false: this rank has no part in it. */
static bool ask(struct asked *asked, uint64_t *common, int rank, int set, const char *name)
{
    static const int64_t counts[] = {1, 2, 3, 64, 1000, 5000};
    *asked = (struct asked){.size = member_count[set], .here = -1};
    struct hvd_request *request = &asked->request;
    *request = (struct hvd_request){.kind = kinds[virtual_below(common, HVD_COUNT_OF(kinds))],
                                    .op = HVD_OP_sum,
                                    .dtype = HVD_DTYPE_float32,
                                    .ndim = 1,
                                    .prescale = 1.0,
                                    .postscale = 1.0,
                                    .process_set = set};
    asked->count = counts[virtual_below(common, HVD_COUNT_OF(counts))] * asked->size;
    request->root = (int)virtual_below(common, (unsigned)asked->size);
    for (int i = 0; i < asked->size; i++)
        asked->here = members[set][i] == rank ? i : asked->here;
    if (request->kind == HVD_SEND && asked->size < 2)
        request->kind = HVD_ALLREDUCE;
    if (request->kind == HVD_SEND)
        request->peer = (request->root + 1) % asked->size;
    if (asked->here < 0 || (request->kind == HVD_SEND && asked->here != request->root && asked->here != request->peer))
        return false;
    snprintf(asked->name, sizeof asked->name, "%s", name);
    request->name = asked->name;
    request->dims[0] = asked->count;
    asked->in = malloc(sizeof(float) * (size_t)asked->count);
    asked->out = malloc(sizeof(float) * (size_t)asked->count);
    for (int64_t i = 0; i < asked->count; i++)
        asked->in[i] = value(rank, i);
    request->input = asked->in;
    request->output = request->kind == HVD_ALLGATHER || request->kind == HVD_ALLTOALL ? NULL : asked->out;
    if (request->kind == HVD_REDUCE && asked->here != request->root)
        request->output = NULL;
    return true;
}

static void check(struct hvd_engine *engine, struct asked *asked, int set)
{
    const struct hvd_request *request = &asked->request;
    const int *ranks = members[set];
    const float *out = asked->out;
    int64_t share = asked->count / asked->size, first = share * asked->here, count = asked->count;
    struct hvd_output output = {0};
    bool ragged = request->kind == HVD_ALLGATHER || request->kind == HVD_ALLTOALL;
    if (ragged) {
        CHECK(hvd_engine_result(engine, asked->handle, &output) == HVD_OK);
        out = output.data;
        count = request->kind == HVD_ALLGATHER ? asked->count * asked->size : asked->count;
        CHECK(output.rows == count);
    } else if (request->kind == HVD_REDUCESCATTER) {
        count = share;
    }
    bool nothing = (request->kind == HVD_SEND && asked->here != request->peer) ||
                   (request->kind == HVD_REDUCE && asked->here != request->root);
    for (int64_t i = 0; i < count && !nothing; i++) {
        float right = 0;
        switch (request->kind) {
        case HVD_ALLREDUCE:
        case HVD_REDUCE:
            right = sum_of(ranks, asked->size, i);
            break;
        case HVD_REDUCESCATTER:
            right = sum_of(ranks, asked->size, first + i);
            break;
        case HVD_ALLGATHER:
            right = value(ranks[i / asked->count], i % asked->count);
            break;
        case HVD_ALLTOALL:
            right = value(ranks[i / share], first + i % share);
            break;
        default:
            right = value(ranks[request->root], i);
        }
        CHECK_CODE(out[i] == right, 1, asked->name);
    }
    CHECK(hvd_engine_forget(engine, asked->handle) == HVD_OK);
    free(asked->in);
    free(asked->out);
}

static void ready(int line, int step, int i)
{
    if (virtual_now() > last_ns[line][step][i])
        last_ns[line][step][i] = virtual_now();
}

static void think(uint64_t *own, unsigned one_in, unsigned us)
{
    if (virtual_below(own, one_in) == 0)
        usleep(virtual_below(own, us));
}

/* Waits, or polls and waits then. */
static void wait_for(struct hvd_engine *engine, struct asked *asked, uint64_t *own)
{
    char text[HVD_TEXT_MAX] = "";
    for (int i = (int)virtual_below(own, 8) ? 0 : 20; i > 0 && hvd_engine_poll(engine, asked->handle) == HVD_AGAIN; i--)
        usleep(20);
    CHECK_CODE(hvd_engine_wait(engine, asked->handle, WAIT_MS, text, sizeof text), HVD_OK, text);
}

static void step(struct hvd_engine *engine, int rank, int line, int number, uint64_t *common, uint64_t *own)
{
    struct asked asked[AT_ONCE];
    bool takes_part[AT_ONCE];
    int order[AT_ONCE], set[AT_ONCE], count = 1 + (int)virtual_below(common, AT_ONCE);
    for (int i = 0; i < count; i++) {
        char name[32];
        set[i] = line ? 0 : (int)virtual_below(common, (unsigned)sets_count + 1);
        snprintf(name, sizeof name, "%c%d.%d", 'a' + line, virtual_below(common, 4) ? 0 : number, i);
        takes_part[i] = ask(&asked[i], common, rank, set[i], name);
        int other = (int)virtual_below(own, (unsigned)i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    think(own, 2, 4000);
    int ways[] = {HVD_NOW, HVD_NOW, HVD_QUIET, HVD_SOON};
    for (int k = 0; k < count; k++) {
        int i = order[k];
        struct hvd_error error = {0};
        if (!takes_part[i])
            continue;
        asked[i].request.quiet = ways[virtual_below(own, HVD_COUNT_OF(ways))];
        asked[i].handle = hvd_engine_submit(engine, &asked[i].request, &error);
        CHECK_CODE(asked[i].handle > 0, 1, error.text);
        ready(line, number, i);
        think(own, 4, 300);
    }
    for (int i = 0; i < count; i++)
        if (takes_part[i] && asked[i].request.quiet != HVD_NOW)
            ready(line, number, i); /* now it is to be done */
    for (int i = 0; i < count; i++) {
        if (!takes_part[i])
            continue;
        uint64_t since_ns = virtual_now();
        wait_for(engine, &asked[i], own);
        since_ns = since_ns > last_ns[line][number][i] ? since_ns : last_ns[line][number][i];
        virtual_waited(virtual_now() - since_ns);
        CHECK_CODE(virtual_now() < since_ns + LATE_NS, 1, asked[i].name);
        check(engine, &asked[i], set[i]);
    }
}

/* Each rank makes a number of steps of its own, then joins. */
static void join(struct hvd_engine *engine, int rank, int size, uint64_t *common, uint64_t *own)
{
    unsigned steps[VIRTUAL_RANKS], most = 0;
    char text[HVD_TEXT_MAX] = "";
    for (int other = 0; other < size; other++) {
        steps[other] = virtual_below(common, 4);
        most = steps[other] > most ? steps[other] : most;
    }
    for (unsigned i = 0; i < steps[rank]; i++) {
        float memory = value(rank, i), sum = 0;
        for (int other = 0; other < size; other++)
            sum += steps[other] > i ? value(other, i) : 0;
        think(own, 3, 2000);
        struct hvd_request request = crew_sum("uneven", &memory, 1);
        CHECK_CODE(crew_wait(engine, crew_begin(engine, &request), text), HVD_OK, text);
        CHECK(memory == sum);
    }
    struct hvd_request request = {.kind = HVD_JOIN};
    struct hvd_output output;
    int64_t handle = crew_begin(engine, &request);
    CHECK_CODE(hvd_engine_wait(engine, handle, WAIT_MS, text, sizeof text), HVD_OK, text);
    CHECK(hvd_engine_result(engine, handle, &output) == HVD_OK && steps[output.rows] == most);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
}

struct line {
    struct hvd_engine *engine;
    int rank, number;
};

static void *steps(void *self)
{
    const struct line *line = self;
    uint64_t common = chosen + (uint64_t)line->number, own = common * 31 + (uint64_t)line->rank;
    for (int i = 0; i < STEPS; i++) {
        step(line->engine, line->rank, line->number, i, &common, &own);
        if (virtual_below(&common, 3) == 0)
            usleep(virtual_below(&common, 30000)); /* engines fall asleep */
        if (line->number == 0 && virtual_below(&common, 4) == 0)
            crew_barrier(line->engine);
    }
    return NULL;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct line line[2] = {{.rank = rank}, {.rank = rank, .number = 1}};
    uint64_t common = chosen * 7, own = common + (uint64_t)rank;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &line[0].engine, &error), HVD_OK, error.text);
    for (int set = 1; set <= sets_count; set++)
        CHECK_CODE(crew_set_open(line[0].engine, members[set], member_count[set], &error), set, error.text);
    pthread_t other;
    line[1].engine = line[0].engine;
    if (threads > 1)
        pthread_create(&other, NULL, steps, &line[1]);
    steps(&line[0]);
    if (threads > 1)
        pthread_join(other, NULL);
    crew_barrier(line[0].engine);
    if (virtual_below(&common, 3) == 0)
        join(line[0].engine, rank, size, &common, &own);
    virtual_close(line[0].engine);
}

void virtual_engine(uint64_t seed, bool weak)
{
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    threads = 1 + (int)virtual_below(&chosen, 2);
    sets_count = (int)virtual_below(&chosen, SETS + 1);
    for (int set = 0; set <= sets_count; set++) {
        unsigned mask = set ? 1 + virtual_below(&chosen, (1u << size) - 1) : (1u << size) - 1;
        for (int rank = 0; rank < size; rank++)
            if (mask >> rank & 1)
                members[set][member_count[set]++] = rank;
    }
    virtual_describe("%d threads, %d sets", threads, sets_count);
    virtual_begin(&plan);
    virtual_run(size, body);
}
