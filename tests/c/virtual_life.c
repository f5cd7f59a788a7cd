/* virtual_life.c - does a rank come and go at any moment, and is nothing of it left?
 *
 * Three lives in a row. In each the ranks open sets, use them and close some, make different numbers of collectives and
 * leave. A second thread of each rank submits, polls and waits all that time, and is inside the engine when that ends:
 * as in api.c, it is freed when nobody is inside. What all ranks submit is right; what they do not is refused soon, and
 * the text names a rank that has left. Nobody touches memory of a request that is over. After each life descriptors and
 * memory are level.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

enum { LIVES = 3, STEPS = 4, ROUNDS = 3, LEFT_MAX = 6, COUNT = 256, LARGE = 150000, WAITS = 200 };
enum { LATE_SET = 9, LATE_LIFE = 40, LEAVE_MS = 25, LATE_NS = 20 * VIRTUAL_MS };
enum { BYTES = LARGE * sizeof(float), BINS = 64, EACH = 7 };
static uint64_t chosen;
static int over, descriptors; /* lives that are over, of all ranks together */
static size_t heap;
static struct seat {
    struct hvd_engine *engine; /* NULL: hidden, as in api.c */
    int rank, size, inside, left_count;
    uint64_t choice, leaves_ns;            /* 0: it has not begun to leave */
    uint64_t left_ns, ended_ns, opened_ns; /* opened: the late set, by its second thread, which `opens_late` */
    bool stops, opens_late;
    float *left[LEFT_MAX]; /* of requests that nobody waits for */
} seats[VIRTUAL_RANKS];

struct set {
    int number;
    unsigned mask; /* of its ranks */
    int count;     /* of elements */
};

static unsigned everyone(const struct seat *seat)
{
    return (1u << seat->size) - 1;
}

static struct hvd_engine *enter(struct seat *seat)
{
    seat->inside += seat->engine != NULL;
    return seat->engine;
}

/* A refusal names a rank of the mask that has left, or the end of this engine. */
static int check_refusal(const struct seat *seat, unsigned mask, uint64_t since_ns, int code, const char *text)
{
    uint64_t first_ns = UINT64_MAX;
    bool named = code == HVD_ESTATE && seat->stops && strstr(text, HVD_ENDS(457));
    for (int rank = 0; rank < seat->size; rank++) {
        char who[64];
        snprintf(who, sizeof who, "rank %d left the job", rank);
        if (!(mask >> rank & 1) || !seats[rank].leaves_ns)
            continue;
        named |= code == HVD_EPEER && strstr(text, HVD_ENDS(451)) && strstr(text, who);
        first_ns = seats[rank].leaves_ns < first_ns ? seats[rank].leaves_ns : first_ns;
    }
    CHECK_CODE(named, true, text);
    since_ns = since_ns > first_ns ? since_ns : first_ns;
    virtual_waited(virtual_now() - since_ns);
    CHECK_CODE(virtual_now() < since_ns + LATE_NS, 1, text);
    return code;
}

static int keep(struct seat *seat, float *memory)
{
    CHECK(seat->left_count < LEFT_MAX);
    seat->left[seat->left_count++] = memory;
    return HVD_AGAIN;
}

/* One sum among the ranks of the mask: HVD_OK, or why not. HVD_AGAIN: nobody has waited for it. */
static int use(struct seat *seat, struct set set, const char *name, bool may_go)
{
    static const int ways[] = {HVD_NOW, HVD_NOW, HVD_SOON, HVD_QUIET};
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    struct hvd_engine *engine = enter(seat);
    if (!engine)
        return HVD_ESTATE;
    float *memory = virtual_memory(BYTES), sum = 0;
    for (int i = 0; i < set.count; i++)
        memory[i] = (float)(seat->rank + i);
    struct hvd_request request = crew_sum(name, memory, set.count);
    request.process_set = set.number;
    request.quiet = ways[virtual_below(&seat->choice, HVD_COUNT_OF(ways))];
    uint64_t since_ns = virtual_now();
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    seat->inside--;
    CHECK_CODE(handle > 0, 1, error.text);
    int polls = (int)virtual_below(&seat->choice, 6), code = HVD_AGAIN;
    if (may_go && polls >= 4 && seat->left_count < LEFT_MAX - 1)
        return keep(seat, memory);
    since_ns = request.quiet == HVD_NOW ? since_ns : virtual_now();
    for (int i = 0; i < polls + WAITS && code == HVD_AGAIN; i++) {
        if (!(engine = enter(seat)))
            return keep(seat, memory);
        if (i < polls)
            hvd_engine_poll(engine, handle), usleep(30);
        else
            code = hvd_engine_finish(engine, handle, 50000000, text, sizeof text);
        seat->inside--;
    }
    for (int rank = 0; rank < seat->size; rank++)
        sum += (float)(set.mask >> rank & 1 ? rank : 0);
    for (int i = 0; i < set.count && code == HVD_OK; i++)
        CHECK(memory[i] == sum + (float)(__builtin_popcount(set.mask) * i));
    virtual_poison(memory, BYTES);
    return code == HVD_OK ? code : check_refusal(seat, set.mask, since_ns, code, text);
}

/* A set of all, at any moment: the rank may be leaving, or be gone when it is open. */
static void open_late(struct seat *seat)
{
    static const int ranks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct hvd_error error = {0};
    struct hvd_engine *engine = enter(seat);
    if (!engine)
        return;
    int code = crew_set_open_as(engine, LATE_SET, LATE_LIFE, ranks, seat->size, &error);
    seat->inside--;
    CHECK_CODE(code == HVD_OK || (code == HVD_ESTATE && seat->stops), 1, error.text);
    seat->opened_ns = virtual_now();
}

static void *second(void *self)
{
    struct seat *seat = self;
    for (int i = 0; seat->engine; i++) {
        char name[32];
        snprintf(name, sizeof name, "b%d", i);
        use(seat, (struct set){0, everyone(seat), i % 8 ? COUNT : LARGE}, name, true);
        if (seat->opens_late && !seat->opened_ns)
            open_late(seat);
        if (virtual_below(&seat->choice, 3) == 0)
            usleep(virtual_below(&seat->choice, 1000));
    }
    return NULL;
}

/* A set is opened and used while all ranks are there. Mostly it is closed again, and what only one rank has submitted
 * is refused; else it is `kept`. */
static void use_set(struct seat *seat, uint64_t *common, struct set *kept)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    int ranks[VIRTUAL_RANKS], count = 0;
    int64_t handle = 0;
    float *memory = virtual_memory(BYTES);
    struct set set = {.mask = 1 + virtual_below(common, (1u << seat->size) - 1), .count = COUNT};
    for (int rank = 0; rank < seat->size; rank++)
        if (set.mask >> rank & 1)
            ranks[count++] = rank;
    bool closes = virtual_below(common, 4), lone = virtual_below(common, 3) == 0 && count > 1;
    set.number = crew_set_open(seat->engine, ranks, count, &error);
    CHECK_CODE(set.number > 0, 1, error.text);
    crew_barrier(seat->engine);
    for (int i = (int)virtual_below(common, 3); i > 0; i--)
        CHECK(!(set.mask >> seat->rank & 1) || use(seat, set, "in a set", false) == HVD_OK);
    if (closes && lone && seat->rank == ranks[0]) {
        struct hvd_request request = crew_sum("alone", memory, COUNT);
        request.process_set = set.number;
        handle = crew_begin(seat->engine, &request);
    }
    crew_barrier(seat->engine);
    if (closes)
        CHECK_CODE(hvd_engine_set_close(seat->engine, set.number, &error), HVD_OK, error.text);
    else
        *kept = set;
    if (handle)
        CHECK_CODE(hvd_engine_finish(seat->engine, handle, 50000000, text, sizeof text), HVD_EINVAL, text);
    CHECK_CODE(!handle || strstr(text, HVD_ENDS(213)), 1, text);
    virtual_poison(memory, BYTES);
}

/* Each rank makes some collectives, and by chance does not wait for its last. Those that all of the set make before are
 * done, also if others have left the job. */
static void make_steps(struct seat *seat, uint64_t *common, const struct set *kept)
{
    int steps[VIRTUAL_RANKS], mine;
    for (int rank = 0; rank < seat->size; rank++)
        steps[rank] = (int)virtual_below(common, STEPS);
    mine = steps[seat->rank];
    for (int i = 0; i < STEPS; i++) {
        const struct set *set = virtual_below(common, 2) ? kept : &(struct set){0, everyone(seat), LARGE};
        bool done = true, refused = false;
        for (int rank = 0; rank < seat->size; rank++) {
            done &= !(set->mask >> rank & 1) || i + 1 < steps[rank];
            refused |= (set->mask >> rank & 1) && i >= steps[rank];
        }
        if (i >= mine || !(set->mask >> seat->rank & 1))
            continue;
        int code = use(seat, *set, "a", i + 1 == mine);
        CHECK_CODE(!done || code == HVD_OK, 1, "a collective of all");
        CHECK_CODE(refused && code == HVD_OK, 0, "a collective without a rank");
        usleep(virtual_below(&seat->choice, 4) ? 0 : virtual_below(&seat->choice, 3000));
    }
}

/* As hvd_shutdown does it. */
static void end(struct seat *seat, struct hvd_engine *engine, pthread_t *other)
{
    seat->leaves_ns = virtual_now();
    hvd_engine_leave(engine, hvd_engine_leave_until(engine));
    seat->left_ns = virtual_now();
    seat->engine = NULL;
    seat->stops = true;
    hvd_engine_stop(engine);
    while (seat->inside)
        usleep(100);
    hvd_engine_free(engine);
    seat->ended_ns = virtual_now();
    if (other)
        pthread_join(*other, NULL);
    while (seat->left_count)
        virtual_poison(seat->left[--seat->left_count], BYTES);
}

/* What is in use. malloc's caches count as used: so they are filled, with blocks of just their sizes. */
static size_t heap_in_use(void)
{
    void *block[BINS * EACH], *larger[BINS * EACH];
    int blocks = 0, others = 0;
    while (blocks < BINS * EACH) {
        size_t bytes = 24 + 16 * (size_t)(blocks / EACH);
        void *new = malloc(bytes);
        *(malloc_usable_size(new) == bytes ? &block[blocks++] : &larger[others++]) = new;
        CHECK(others < BINS * EACH);
    }
    while (blocks)
        free(block[--blocks]);
    while (others)
        free(larger[--others]);
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

/* Of each engine that was a process the runtime keeps a descriptor: its pidfd. All leave soon, except where the late
 * set was not open everywhere before anybody had left: then some wait for votes in it, as long as they may. Ends of its
 * streams that a rank has not taken lie in streams.c. */
static void check_level(int life, int kept)
{
    int count = -kept, opened = 0, size = seats[0].size;
    uint64_t opened_ns = 0, left_ns = UINT64_MAX, before = heap;
    heap = heap_in_use();
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD, 0L) >= 0;
    for (int rank = 0; rank < size; rank++) {
        const struct seat *of = &seats[rank];
        opened += of->opened_ns > 0;
        opened_ns = of->opened_ns > opened_ns ? of->opened_ns : opened_ns;
        left_ns = of->left_ns < left_ns ? of->left_ns : left_ns;
    }
    bool in_time = opened == 0 || (opened == size && opened_ns + VIRTUAL_MS < left_ns);
    for (int rank = 0; rank < size; rank++) {
        uint64_t since_ns = seats[rank].leaves_ns > opened_ns ? seats[rank].leaves_ns : opened_ns;
        virtual_waited(in_time ? seats[rank].ended_ns - since_ns : 0);
        CHECK_CODE(seats[rank].ended_ns < since_ns + LATE_NS + (in_time ? 0 : LEAVE_MS * VIRTUAL_MS), 1, "leave");
    }
    CHECK_CODE(opened % size ? descriptors : count, descriptors, "descriptors");
    descriptors = count;
    CHECK_CODE(life < LIVES - 1 || heap == before, 1, "memory");
}

static bool all_over(void *life)
{
    return over == seats[0].size * (*(int *)life + 1);
}

static void body(int rank, int size)
{
    static int kept;
    uint64_t common = chosen * 7;
    struct seat *seat = &seats[rank];
    for (int life = 0; life < LIVES; life++) {
        struct hvd_error error;
        struct hvd_engine *engine;
        pthread_t other;
        bool in_process = virtual_below(&common, 2), two = virtual_below(&common, 3),
             late = two && virtual_below(&common, 3) == 0;
        struct set kept_set = {0, (1u << size) - 1, COUNT};
        *seat = (struct seat){.rank = rank, .size = size, .choice = common + (uint64_t)rank};
        CHECK_CODE(virtual_open(rank, size, life, in_process, &engine, &error), HVD_OK, error.text);
        kept += !in_process;
        engine->options.leave_timeout_ms = LEAVE_MS;
        seat->engine = engine;
        if (two)
            pthread_create(&other, NULL, second, seat);
        for (int i = (int)virtual_below(&common, ROUNDS); i > 0; i--)
            use_set(seat, &common, &kept_set);
        seat->opens_late = late;
        make_steps(seat, &common, &kept_set);
        end(seat, engine, two ? &other : NULL);
        if (++over == size * (life + 1))
            check_level(life, kept);
        virtual_news();
        virtual_wait(all_over, &life, "the end of a life");
    }
}

void virtual_life(uint64_t seed, bool weak)
{
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    plan.part = virtual_below(&chosen, 3) ? 0 : 8;
    plan.interrupted = virtual_below(&chosen, 3) ? 0 : 50;
    virtual_describe("one in %d in parts", plan.part);
    virtual_begin(&plan);
    for (int fd = 0; fd < 1024; fd++)
        descriptors += fcntl(fd, F_GETFD, 0L) >= 0;
    virtual_run(size, body);
}
