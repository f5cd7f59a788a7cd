/* virtual_streams.c - do collectives get on whatever streams do, and is the end of one stream told in time?
 *
 * Sends and receives move parts, and bytes are on their way for some time. Each sum is compared, and none ends later
 * than a number of messages explains. In a third of the runs one stream is shut down at a random moment. From then on
 * a collective either ends well, since it does not need that stream, or fails after HVD_PATIENCE_NS on all ranks, and
 * names one of the stream's two ends. Where it carries the votes of all ranks, all of them have to fail.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

enum { STEPS = 6, WAIT_MS = 10000, LATE_NS = 6 * VIRTUAL_MS, MESSAGES = 20, PROGRAM_US = 60000, COUNT_MAX = 5000 };
/* While an engine dozes it looks each millisecond, and may find a part of a message each time. */
static uint64_t dozing_ns;
static uint64_t chosen, delay_ns, begun_ns[STEPS + 2]; /* of each step: when the last rank began it */
static int member[2][VIRTUAL_RANKS], members[2];
static struct {
    int by, before, ends[2]; /* the rank that cuts, -1: none; before a step, or STEPS: in a thread of its own */
    bool told_to_all;
    uint64_t at_ns; /* 0: not yet */
} cut;

static void begin(int step)
{
    begun_ns[step] = virtual_now(); /* nobody has begun it later */
}

/* What could end when all had begun with this step, and not before mine_ns, ends now. */
static void in_time(int step, uint64_t mine_ns, const char *what)
{
    uint64_t limit_ns = LATE_NS + dozing_ns + MESSAGES * delay_ns + (cut.at_ns ? HVD_PATIENCE_NS : 0);
    uint64_t since_ns = mine_ns > begun_ns[step] ? mine_ns : begun_ns[step];
    since_ns = since_ns > cut.at_ns ? since_ns : cut.at_ns;
    CHECK_CODE(virtual_now() < since_ns + limit_ns, 1, what);
    virtual_waited(cut.at_ns || virtual_now() < since_ns ? 0 : virtual_now() - since_ns);
}

static void *cut_one(void *self)
{
    struct hvd_engine *engine = self;
    int fd[4 * VIRTUAL_RANKS], peer[4 * VIRTUAL_RANKS], count = 0, votes_of_all = 0;
    uint64_t own = chosen * 11;
    if (cut.before == STEPS)
        usleep(virtual_below(&own, PROGRAM_US));
    for (int i = 0; i < 2 * engine->sets; i++) {
        const struct hvd_set *set = engine->set[i / 2];
        const struct hvd_stream_table *table = i % 2 ? set->wires : set->vote_wires;
        for (int other = 0; table && other < table->size; other++)
            if (table->link[other])
                fd[count] = table->link[other]->fd, peer[count++] = set->member[other];
        votes_of_all = i ? votes_of_all : count;
    }
    if (count == 0)
        return NULL;
    int which = (int)virtual_below(&own, (unsigned)count);
    cut.ends[0] = engine->options.rank, cut.ends[1] = peer[which];
    cut.told_to_all = which < votes_of_all;
    cut.at_ns = virtual_now();
    shutdown(fd[which], SHUT_RDWR);
    return NULL;
}

static void names_an_end(const struct hvd_engine *engine, int code, const char *text)
{
    char ends[2][16];
    const char *why = strstr(text, ": "); /* before it, whose request it is */
    for (int i = 0; i < 2; i++)
        snprintf(ends[i], sizeof ends[i], "rank %d ", cut.ends[i]);
    CHECK_CODE(code, HVD_EPEER, text);
    CHECK_CODE(cut.at_ns && why && (strstr(why, ends[0]) || strstr(why, ends[1])), 1, text);
    CHECK_CODE(engine->failure.culprit == cut.ends[0] || engine->failure.culprit == cut.ends[1], 1, text);
}

/* A sum of all ranks and one of the other set, at once; false: the job has failed. */
static bool sum(struct hvd_engine *engine, int rank, int step, uint64_t *common)
{
    static const int64_t counts[] = {1, 3, 1000, COUNT_MAX};
    struct hvd_error error = {0};
    float *memory[2];
    int64_t handle[2] = {0}, count[2];
    char name[2][16], text[HVD_TEXT_MAX] = "";
    bool well = true;
    for (int set = 0; set < 2; set++) {
        count[set] = counts[virtual_below(common, HVD_COUNT_OF(counts))];
        memory[set] = malloc(COUNT_MAX * sizeof(float));
        for (int64_t i = 0; i < count[set]; i++)
            memory[set][i] = (float)(16 * (rank + 1) + i % 13);
        snprintf(name[set], sizeof name[set], "%d.%d", step, set);
        struct hvd_request request = crew_sum(name[set], memory[set], count[set]);
        request.process_set = set;
        for (int i = 0; i < members[set]; i++)
            if (member[set][i] == rank)
                handle[set] = hvd_engine_submit(engine, &request, &error);
        begin(step);
    }
    for (int set = 0; set < 2; set++) {
        uint64_t mine_ns = virtual_now();
        int code = handle[set] < 0 ? error.code : HVD_OK, right = 0;
        if (handle[set] > 0)
            code = hvd_engine_wait(engine, handle[set], WAIT_MS, text, sizeof text);
        in_time(step, mine_ns, name[set]);
        for (int i = 0; i < members[set]; i++)
            right += 16 * (member[set][i] + 1);
        for (int64_t i = 0; i < count[set] && handle[set] > 0 && code == HVD_OK; i++)
            CHECK_CODE(memory[set][i] == (float)(right + members[set] * (int)(i % 13)), 1, name[set]);
        CHECK(handle[set] <= 0 || hvd_engine_forget(engine, handle[set]) == HVD_OK);
        free(memory[set]);
        if (code != HVD_OK)
            names_an_end(engine, code, handle[set] < 0 ? error.text : text);
        well &= code == HVD_OK;
    }
    return well;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    uint64_t common = chosen * 7, own = common + (uint64_t)rank;
    bool well = true, cuts = cut.by == rank;
    pthread_t other;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &engine, &error), HVD_OK, error.text);
    if (members[1])
        CHECK_CODE(crew_set_open(engine, member[1], members[1], &error), 1, error.text);
    for (int step = 0; step < STEPS && well; step++) {
        usleep(virtual_below(&common, 2) ? virtual_below(&own, 2 * PROGRAM_US / STEPS) : 0);
        if (cuts && cut.before == step)
            cut_one(engine);
        well = sum(engine, rank, step, &common);
        if (cuts && cut.before == STEPS && step == 0) /* all have begun with the steps */
            pthread_create(&other, NULL, cut_one, engine);
    }
    if (cuts && cut.before == STEPS)
        pthread_join(other, NULL);
    if (cut.by >= 0 && well) { /* and who waits for nothing hears of it, too */
        usleep(2 * PROGRAM_US + (unsigned)((HVD_PATIENCE_NS + LATE_NS + MESSAGES * delay_ns) / 1000));
        well = sum(engine, rank, STEPS, &common);
        CHECK(!well || !cut.told_to_all);
    }
    uint64_t mine_ns = virtual_now();
    begin(STEPS + 1);
    virtual_close(engine);
    in_time(STEPS + 1, mine_ns, "close");
}

void virtual_streams(uint64_t seed, bool weak)
{
    static const int parts[] = {0, 2, 3, 8};
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    const char *called = crew_world(world ? world : 1 + (int)virtual_below(&chosen, 4));
    unsigned mask = virtual_below(&chosen, 2) * virtual_below(&chosen, 1u << size);
    cut.by = virtual_below(&chosen, 3) ? -1 : (int)virtual_below(&chosen, (unsigned)size);
    cut.before = (int)virtual_below(&chosen, 2) ? STEPS : 1 + (int)virtual_below(&chosen, STEPS - 1);
    plan.part = parts[virtual_below(&chosen, HVD_COUNT_OF(parts))];
    dozing_ns = plan.part ? HVD_DOZE_TICKS * HVD_DOZE_MS * (uint64_t)VIRTUAL_MS : 0;
    plan.delay_ns = delay_ns = virtual_below(&chosen, 4) ? virtual_below(&chosen, 5 * VIRTUAL_MS) : 0;
    for (int rank = 0; rank < size; rank++) {
        member[0][members[0]++] = rank;
        if (mask >> rank & 1)
            member[1][members[1]++] = rank;
    }
    virtual_describe("%s, a part of one in %d, %.3f ms, cut by %d", called, plan.part, (double)delay_ns / 1e6, cut.by);
    virtual_begin(&plan);
    virtual_run(size, body);
}
