/* test_stall.c - a rank keeps the others waiting: who asks hears who it is, and at the end all do; on one host and on
 * several, also where who leads another host is stopped, where who led has left the job, and where more waits than an
 * account can list. */
#define _GNU_SOURCE
#include "crew.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SIZE = 4, REPORT = 8192, LAYERS = 161 };

static struct {
    _Atomic pid_t pid[SIZE];
    _Atomic int told; /* ranks that have seen the end, or have heard who is missing */
} *shared;

static int victim;
static bool stops;

static void sum(struct hvd_engine *engine, const char *name)
{
    float memory = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    struct hvd_request request = crew_sum(name, &memory, 1);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    CHECK(memory == SIZE);
}

/* The victim is not there: a caller may ask who is missing, as often as it likes, and the job goes on. */
static void somebody_is_late(struct hvd_engine *engine, int rank, int size)
{
    float memory = 1;
    char text[HVD_TEXT_MAX] = "", words[64];
    struct hvd_request request = crew_sum("wanted", &memory, 1);
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, "first");
    crew_meet();
    if (rank == victim)
        crew_meet();
    int64_t handle = crew_begin(engine, &request);
    if (rank != victim) {
        snprintf(words, sizeof words, "missing on rank %d; rank %d (pid", victim, victim);
        for (int i = 0; i < 3 || (i < 100 && !strstr(text, words)); i++) /* others may be about to submit it */
            CHECK_CODE(hvd_engine_missing(engine, handle, 20000, &(uint64_t){0}, text, sizeof text), HVD_OK, text);
        CHECK_CODE(strstr(text, words) != NULL, 1, text);
        CHECK_CODE(strstr(text, " is alive") != NULL, 1, text);
        crew_meet();
    }
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    CHECK(hvd_engine_missing(engine, handle, 10, &(uint64_t){0}, text, sizeof text) == HVD_EHANDLE);
    sum(engine, "last");
}

/* One rank calls all the tensors of a large model otherwise, and who asks for any hears of that rank, until all have
 * all of them. */
static void somebody_calls_them_otherwise(struct hvd_engine *engine, int rank, int size)
{
    static const char *const prefix[] = {"model", "module\n.model"};
    static float memory[2][LAYERS];
    int64_t handle[2][LAYERS];
    char text[HVD_TEXT_MAX] = "", words[64], name[64];
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    CHECK(size == SIZE);
    sum(engine, "first");
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < LAYERS; i++) {
            snprintf(name, sizeof name, "%s.%d", prefix[turn ^ (rank == victim)], i);
            struct hvd_request request = crew_sum(name, &memory[turn][i], 1);
            memory[turn][i] = 1;
            handle[turn][i] = crew_begin(engine, &request);
        }
        crew_meet();
        snprintf(words, sizeof words, "missing on rank %d; rank %d (pid", victim, victim);
        for (int i = 0; i < LAYERS && !turn && rank != victim; i += 40) {
            CHECK_CODE(hvd_engine_missing(engine, handle[turn][i], 20000, &(uint64_t){0}, text, sizeof text), HVD_OK,
                       text);
            CHECK_CODE(strstr(text, words) != NULL, 1, text);
            CHECK_CODE(strstr(text, "'module\\n.model.") != NULL, 1, text); /* what it has instead */
        }
        crew_meet();
    }
    for (int i = 0; i < 2 * LAYERS; i++)
        CHECK_CODE(crew_wait(engine, handle[i / LAYERS][i % LAYERS], text), HVD_OK, text);
}

/* It never comes: all raise the same, and it is named. */
static void somebody_never_comes(struct hvd_engine *engine, int rank, int size)
{
    float memory = 1;
    char text[HVD_TEXT_MAX] = "", words[64];
    struct hvd_error error = {0};
    struct hvd_request request = crew_sum("wanted", &memory, 1);
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, "first");
    atomic_store(&shared->pid[rank], getpid());
    crew_meet();
    if (rank == victim) {
        if (stops)
            kill(getpid(), SIGSTOP);
        while (atomic_load(&shared->told) < size - 1)
            usleep(1000);
        return;
    }
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_ETIMEOUT, text);
    snprintf(words, sizeof words, "rank %d ", victim);
    CHECK_CODE(strstr(text, words) != NULL, 1, text);
    CHECK_CODE(engine->failure.culprit, victim, text);
    /* A leader that is stopped speaks for nobody: on another host it is not known what it does. */
    bool seen = !stops || engine->hosts == 1 || engine->who[victim].local != 0;
    CHECK_CODE(!seen || strstr(text, stops ? "is stopped" : "is alive"), 1, text);
    if (atomic_fetch_add(&shared->told, 1) == size - 2)
        kill(atomic_load(&shared->pid[victim]), SIGCONT);
}

static void wait_for_told(int count)
{
    while (atomic_load(&shared->told) < count)
        usleep(1000);
}

/* Does its engine know when this request came? Then it is made to believe that it was so much earlier. */
static bool is_seen(struct hvd_engine *engine, struct hvd_slot *slot, uint64_t earlier_ns)
{
    while (!hvd_turn_take(engine))
        usleep(100);
    bool seen = slot->since_ns && slot->since_word == atomic_load(&slot->word);
    slot->since_ns -= seen ? earlier_ns : 0;
    hvd_turn_run(engine);
    return seen;
}

/* The whole machine stood still for a minute, and now everybody has waited for too long: nobody ends the job before it
 * was asked around. */
static void the_machine_stood_still(struct hvd_engine *engine, int rank, int size)
{
    float memory = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    struct hvd_request request = crew_sum("wanted", &memory, 1);
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, "first");
    if (rank == victim) {
        crew_meet();
        wait_for_told(size - 1);
        return;
    }
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    CHECK_CODE(slot != NULL, 1, error.text);
    while (!is_seen(engine, slot, 0))
        usleep(10000);
    crew_meet(); /* all others have it */
    CHECK(is_seen(engine, slot, 60000000000u));
    CHECK_CODE(crew_wait(engine, handle, text), HVD_ETIMEOUT, text);
    CHECK_CODE(strstr(text, "nothing has moved for") && engine->failure.culprit == victim, 1, text);
    atomic_fetch_add(&shared->told, 1);
}

/* Until an inquiry that began after this has named the rank that is late. */
static void hear_who_is_missing(struct hvd_engine *engine, int64_t handle)
{
    char text[HVD_TEXT_MAX] = "", words[64];
    snprintf(words, sizeof words, "rank %d (", victim);
    for (int i = 0; i < 100; i++) { /* on a crowded machine it may answer too late */
        if (strstr(text, "missing on rank") && strstr(text, words) && (engine->hosts > 1 || strstr(text, " is alive")))
            break;
        CHECK_CODE(hvd_engine_missing(engine, handle, 20000, &(uint64_t){0}, text, sizeof text), HVD_OK, text);
    }
    CHECK_CODE(strstr(text, words) != NULL, 1, text);
    CHECK_CODE(engine->hosts > 1 || strstr(text, " is alive") != NULL, 1, text);
    CHECK_CODE(strstr(text, "rank 0") == NULL && strstr(text, "does not answer") == NULL, 1, text);
}

/* Ranks leave from the first one on, while others ask in sets without them: each time the next one leads. */
static void leaders_leave(struct hvd_engine *engine, int rank, int size)
{
    static const int member[] = {1, 2, 3};
    float memory = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    int set[2];
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    for (int i = 0; i < 2; i++) {
        set[i] = crew_set_open(engine, member + i, size - 1 - i, &error);
        CHECK_CODE(set[i] > 0, 1, error.text);
        crew_meet();
    }
    sum(engine, "first");
    for (int i = 0; i < 2 && rank > i; i++) { /* rank i leaves now */
        struct hvd_request request = crew_sum("wanted", &memory, 1);
        request.process_set = set[i];
        if (rank == victim)
            wait_for_told(2 * i + size - 2 - i);
        int64_t handle = crew_begin(engine, &request);
        if (rank != victim) {
            hear_who_is_missing(engine, handle);
            while (engine->hosts == 1 && !(atomic_load(&hvd_host_desk(&engine->host)->gone) >> i & 1))
                hear_who_is_missing(engine, handle);
            hear_who_is_missing(engine, handle);
            atomic_fetch_add(&shared->told, 1);
        }
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    }
}

/* As before, and nobody comes: the end is told as ever, and who has left is not blamed. */
static void leader_leaves_before_the_end(struct hvd_engine *engine, int rank, int size)
{
    static const int member[] = {1, 2, 3};
    float memory = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    int set = crew_set_open(engine, member, size - 1, &error);
    CHECK_CODE(set > 0, 1, error.text);
    crew_meet();
    sum(engine, "first");
    if (rank == 0)
        return;
    if (rank == victim) {
        wait_for_told(size - 2);
        return;
    }
    struct hvd_request request = crew_sum("wanted", &memory, 1);
    request.process_set = set;
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_ETIMEOUT, text);
    int culprit = engine->failure.culprit; /* a host that is cut off may know less */
    CHECK_CODE(culprit == victim || (engine->hosts > 1 && culprit == -1), 1, text);
    CHECK_CODE(strstr(text, "rank 3 (") && strstr(text, "nothing has moved for"), 1, text);
    atomic_fetch_add(&shared->told, 1);
}

static void run(crew_body *body, const char *world)
{
    int status[HVD_LOCAL_MAX];
    char report[REPORT] = "";
    memset(shared, 0, sizeof *shared);
    crew_report_fd = memfd_create("report", MFD_CLOEXEC);
    CHECK(crew_report_fd >= 0);
    crew_processes(SIZE, body, NULL, status);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK_CODE(status[rank], 0, world);
    CHECK(pread(crew_report_fd, report, sizeof report - 1, 0) >= 0);
    close(crew_report_fd);
    bool wanted = crew_warn_ms > 0 && !(stops && victim == 0);
    CHECK_CODE((strstr(report, "hvdlite: stall: ") != NULL), wanted, report);
    CHECK_CODE(!wanted || strstr(report, "'wanted' (allreduce)"), 1, report);
}

int main(void)
{
    crew_deadline(240);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    const char *world;
    victim = SIZE - 1;
    for (int w = 0; (world = crew_world(w)); w++) {
        crew_warn_ms = crew_limit_ms = 0;
        run(leaders_leave, world);
        memset(shared, 0, sizeof *shared);
        crew_threads(SIZE, leaders_leave);
        crew_limit_ms = 2400;
        run(the_machine_stood_still, world);
        crew_warn_ms = 400;
        crew_limit_ms = 1200;
        run(leader_leaves_before_the_end, world);
    }
    for (int w = 0; (world = crew_world(w)); w++)
        for (victim = 0; victim < SIZE && w != CREW_HOSTS - 1; victim += 3) {
            crew_warn_ms = crew_limit_ms = 0;
            stops = false;
            run(somebody_is_late, world);
            crew_threads(SIZE, somebody_is_late);
            if (w > CREW_HOSTS + 1)
                continue; /* these take seconds */
            if (victim)
                run(somebody_calls_them_otherwise, world);
            crew_warn_ms = 400;
            crew_limit_ms = 1200;
            run(somebody_never_comes, world);
            stops = true;
            run(somebody_never_comes, world);
        }
    return 0;
}
