/* virtual_engine.c - does every collective end, right and soon, whatever the order in which threads go on?
 *
 * Ranks run random programs: all kinds of requests in process sets that overlap, in another order on each rank, with
 * thinking in between; quiet ones; one to three threads of a rank; ranks that join early. Each result is compared. No
 * collective ends later than LATE_NS after the last rank has submitted it: a wake-up that is lost would show.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <pthread.h>
#include <unistd.h>

enum {
    STEPS = 18,
    LINES = 3,
    AT_ONCE = 5,
    SETS = 2,
    WAIT_MS = 10000,
    LATE_NS = 6 * VIRTUAL_MS,
    CLOSE_NS = 22 * VIRTUAL_MS
};
static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_BROADCAST,     HVD_ALLGATHER, HVD_ALLTOALL,
                            HVD_REDUCE,    HVD_SEND,      HVD_REDUCESCATTER, HVD_BARRIER,   HVD_BARRIER};
static uint64_t chosen;
static int threads, steps_count, sets_count, members[SETS + 1][VIRTUAL_RANKS], member_count[SETS + 1];
static struct due {
    uint64_t since_ns; /* when the last rank was to go on with it */
    int quiet;         /* ranks that have submitted it and not said yet that they wait */
} due[LINES][STEPS][AT_ONCE];
static unsigned most_at_once, idle_one_in; /* of this schedule */
static uint64_t closed_ns;                 /* when the last rank began to leave */

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
    asked->in = virtual_memory(sizeof(float) * (size_t)asked->count);
    asked->out = virtual_memory(sizeof(float) * (size_t)asked->count);
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
    bool nothing = request->kind == HVD_BARRIER || (request->kind == HVD_SEND && asked->here != request->peer) ||
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
    virtual_poison(asked->in, sizeof(float) * (size_t)asked->count);
    virtual_poison(asked->out, sizeof(float) * (size_t)asked->count);
}

static void ready(struct due *due, uint64_t ns)
{
    due->since_ns = ns > due->since_ns ? ns : due->since_ns;
}

/* Not while a rank may go on with it, or not, as it likes. */
static void check_time(const struct due *due, uint64_t since_ns, const char *what)
{
    uint64_t now = virtual_now();
    since_ns = since_ns > due->since_ns ? since_ns : due->since_ns;
    if (due->quiet || now <= since_ns)
        return;
    virtual_waited(now - since_ns);
    CHECK_CODE(now < since_ns + LATE_NS, 1, what);
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
    static const unsigned thinking_us[] = {10, 40, 700, 4000};
    unsigned think_us = thinking_us[virtual_below(common, HVD_COUNT_OF(thinking_us))];
    int order[AT_ONCE], set[AT_ONCE], count = 1 + (int)virtual_below(common, most_at_once);
    for (int i = 0; i < count; i++) {
        char name[32];
        set[i] = line ? 0 : (int)virtual_below(common, (unsigned)sets_count + 1);
        snprintf(name, sizeof name, "%c%d.%d", 'a' + line, virtual_below(common, 4) ? 0 : number, i);
        takes_part[i] = ask(&asked[i], common, rank, set[i], name);
        int other = (int)virtual_below(own, (unsigned)i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    think(own, 2, think_us);
    int ways[] = {HVD_NOW, HVD_NOW, HVD_QUIET, HVD_SOON};
    for (int k = 0; k < count; k++) {
        int i = order[k];
        struct hvd_error error = {0};
        if (!takes_part[i])
            continue;
        int quiet = asked[i].request.quiet = ways[virtual_below(own, HVD_COUNT_OF(ways))];
        struct due *of = &due[line][number][i];
        uint64_t later_ns = quiet == HVD_SOON ? VIRTUAL_MS : 0;
        of->quiet += quiet == HVD_QUIET;
        if (quiet != HVD_QUIET) /* others may be done with it before this thread goes on */
            ready(of, virtual_now() + later_ns);
        asked[i].handle = hvd_engine_submit(engine, &asked[i].request, &error);
        CHECK_CODE(asked[i].handle > 0, 1, error.text);
        if (quiet != HVD_QUIET)
            ready(of, virtual_now() + later_ns);
        think(own, 4, think_us / 4);
    }
    for (int i = 0; i < count; i++) {
        if (!takes_part[i])
            continue;
        struct due *of = &due[line][number][i];
        think(own, 3, virtual_below(own, 2) ? think_us : 20000); /* the engine thread does it meanwhile */
        uint64_t since_ns = virtual_now();
        if (asked[i].request.quiet == HVD_QUIET)
            of->quiet--, ready(of, since_ns);
        wait_for(engine, &asked[i], own);
        check_time(of, since_ns, asked[i].name);
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
    for (int i = 0; i < steps_count; i++) {
        step(line->engine, line->rank, line->number, i, &common, &own);
        if (virtual_below(&common, idle_one_in) == 0)
            usleep(20000 + virtual_below(&common, 20000)); /* engines fall asleep */
        if (line->number == 0 && virtual_below(&common, 4) == 0)
            crew_barrier(line->engine);
    }
    return NULL;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct line line[LINES];
    pthread_t thread[LINES];
    struct hvd_engine *engine;
    uint64_t common = chosen * 7, own = common + (uint64_t)rank;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &engine, &error), HVD_OK, error.text);
    for (int set = 1; set <= sets_count; set++)
        CHECK_CODE(crew_set_open(engine, members[set], member_count[set], &error), set, error.text);
    for (int i = 0; i < threads; i++) {
        line[i] = (struct line){engine, rank, i};
        pthread_create(&thread[i], NULL, steps, &line[i]);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    crew_barrier(engine);
    if (virtual_below(&common, 3) == 0)
        join(engine, rank, size, &common, &own);
    closed_ns = virtual_now();
    virtual_close(engine);
    CHECK(virtual_now() < closed_ns + CLOSE_NS); /* who leaves looks again after 1, 2, 4 and 8 ms */
}

void virtual_engine(uint64_t seed, bool weak)
{
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    bool crowded = virtual_below(&chosen, 2);
    plan.cpus = crowded ? 1 : plan.cpus;
    plan.preempted = virtual_below(&chosen, 3) ? 100 << virtual_below(&chosen, 5) : 0;
    plan.delay_ns = virtual_below(&chosen, 2) ? 1000 << virtual_below(&chosen, 7) : 0;
    threads = 1 + (int)virtual_below(&chosen, LINES);
    sets_count = (int)virtual_below(&chosen, SETS + 1);
    for (int set = 0; set <= sets_count; set++) {
        unsigned mask = set ? 1 + virtual_below(&chosen, (1u << size) - 1) : (1u << size) - 1;
        for (int rank = 0; rank < size; rank++)
            if (mask >> rank & 1)
                members[set][member_count[set]++] = rank;
    }
    most_at_once = 1 + virtual_below(&chosen, AT_ONCE);
    steps_count = STEPS / (int)(most_at_once > 3 ? 3 : most_at_once) / (threads > 2 ? 2 : 1);
    idle_one_in = virtual_below(&chosen, 2) ? 1 : 3;
    virtual_describe("%s%d threads, %d sets, %u at once", crowded ? "crowded, " : "", threads, sets_count,
                     most_at_once);
    virtual_begin(&plan);
    virtual_run(size, body);
}
