/* test_hosts.c - a job on several hosts: a tree of eight, a host that ends, a rank that is silent, junk for a vote.
 *
 * (What a job does when all is well, test_engine.c, test_kinds.c and test_sets.c ask on hosts, too; a single death,
 * test_death.c.) There is no store here: what a rank knows of another host, it knows from streams.
 */
#define _GNU_SOURCE
#include "crew.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void sum(struct hvd_engine *engine, int rank, int size, int64_t count)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    double *memory = malloc(sizeof *memory * (size_t)count);
    for (int64_t i = 0; i < count; i++)
        memory[i] = (double)(rank + i % 5);
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "x", HVD_OP_sum, HVD_DTYPE_float64, memory, memory, count, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    for (int64_t i = 0; i < count; i++)
        CHECK(memory[i] == (double)(size * (size - 1) / 2) + (double)size * (double)(i % 5));
    free(memory);
}

static int64_t counted(const struct hvd_engine *engine, int which)
{
    return atomic_load(&engine->counter[which]);
}

/* Two hosts: each rank sends a head and all of its values; of votes each leader sends one a round, or one frame more.
 */
static void links_are_counted(struct hvd_engine *engine, int rank, int size)
{
    enum { COUNT = 100000 };
    sum(engine, rank, size, COUNT);
    sum(engine, rank, size, COUNT); /* it is known by now */
    int64_t bytes = counted(engine, HVD_COUNT_link_bytes_out), in = counted(engine, HVD_COUNT_link_bytes_in);
    int64_t messages = counted(engine, HVD_COUNT_link_messages_out), rounds = counted(engine, HVD_COUNT_rounds);
    sum(engine, rank, size, COUNT);
    bytes = counted(engine, HVD_COUNT_link_bytes_out) - bytes;
    in = counted(engine, HVD_COUNT_link_bytes_in) - in;
    messages = counted(engine, HVD_COUNT_link_messages_out) - messages;
    rounds = counted(engine, HVD_COUNT_rounds) - rounds;
    CHECK(bytes >= COUNT * (int64_t)sizeof(double) && bytes < COUNT * (int64_t)sizeof(double) + 8192);
    CHECK(in >= COUNT * (int64_t)sizeof(double) && in < COUNT * (int64_t)sizeof(double) + 8192);
    CHECK(messages >= 1 + rounds && messages <= 1 + 2 * (rounds + 1));
}

static void trees(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 10; step++) {
        sum(engine, rank, size, 3);
        sum(engine, rank, size, 40000);
        crew_barrier(engine);
    }
}

/* What a peer's engine must say of `victim`, and how soon. */
static void must_lose(struct hvd_engine *engine, int victim, const char *says, double seconds)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "", name[32];
    float memory[4] = {0};
    uint64_t begun = hvd_now_ns();
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "never", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
    snprintf(name, sizeof name, "rank %d (host ", victim);
    CHECK_CODE(strstr(text, name) && strstr(text, says) && !strncmp(text + strlen(text) - 9, " [HVD45", 7), 1, text);
    CHECK_CODE((double)(hvd_now_ns() - begun) / 1e9 < seconds, 1, "it took too long");
}

enum { ALONE_ON_ITS_HOST = 2 };

/* A host whose only rank is killed: no other process of it is left to say so. */
static void a_host_ends(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, rank, size, 1000);
    crew_meet();
    if (rank == ALONE_ON_ITS_HOST) {
        kill(getpid(), SIGKILL);
        pause();
    }
    must_lose(engine, ALONE_ON_ITS_HOST, "lost", 1.0);
}

#ifdef HVD_SANITIZED
enum { SILENT_MS = 4000 }; /* a sanitized rank may be that slow on a busy machine */
#else
enum { SILENT_MS = 1000 };
#endif
static int silent;

/* A rank that is stopped ends nothing and answers nothing. */
static void a_rank_is_silent(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, rank, size, 1000);
    crew_meet();
    if (rank == silent)
        kill(getpid(), SIGSTOP);
    else
        must_lose(engine, silent, "silent", 5.0 * SILENT_MS / 1000);
}

/* Who ends the stopped one, when all others are done. */
static void end_the_stopped(int rank)
{
    if (rank != silent)
        return;
    pid_t stopped = getpid();
    if (fork() == 0) {
        sleep(6);
        kill(stopped, SIGKILL);
        _exit(0);
    }
}

enum { LARGE = 50000 }; /* floats: too many to ride with votes */

/* Bytes that are no frame, where a vote or a tensor is due. Who wrote them gets sound ones, and may have its sum before
 * it hears of the end. */
static struct {
    int rank;        /* writes them */
    bool to_tensors; /* else to the streams of votes */
    int code;        /* what comes of it, with an error that ends like this */
    const char *ends;
} junk;

static void junk_ends_the_job(struct hvd_engine *engine, int rank, int size)
{
    char bytes[100], text[HVD_TEXT_MAX] = "";
    struct hvd_error error;
    static float many[HVD_LOCAL_MAX][LARGE];
    float *memory = many[rank];
    sum(engine, rank, size, 10);
    memset(bytes, 0x5a, sizeof bytes);
    crew_meet(); /* who is slower than the one that sends it must not have the sum spoilt */
    struct hvd_stream_table *wires = junk.to_tensors ? engine->global->wires : engine->global->vote_wires;
    for (int peer = 0; rank == junk.rank && peer < size; peer++)
        if (wires->link[peer])
            CHECK(write(wires->link[peer]->fd, bytes, sizeof bytes) == sizeof bytes);
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "never", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, LARGE, &error);
    int code = crew_wait(engine, handle, text);
    if (rank == junk.rank && code == HVD_OK)
        return;
    CHECK_CODE(code, junk.code, text);
    snprintf(bytes, sizeof bytes, "rank %d (host ", junk.rank);
    CHECK_CODE(strstr(text, bytes) && strstr(text, junk.ends), 1, text);
}

static void junk_over(int world, int size, int rank, bool to_tensors, int code, const char *ends)
{
    junk.rank = rank;
    junk.to_tensors = to_tensors;
    junk.code = code;
    junk.ends = ends;
    printf("%s: rank %d of %d sends junk\n", crew_world(world), rank, size);
    crew_threads(size, junk_ends_the_job);
}

static void check_status(int size, const int *status, int victim)
{
    for (int rank = 0; rank < size; rank++)
        CHECK_CODE(rank == victim ? WIFSIGNALED(status[rank]) : status[rank] == 0, 1, "a rank failed");
}

int main(void)
{
    int status[HVD_LOCAL_MAX];
    crew_deadline(300);
    for (int w = CREW_HOSTS; crew_world(w); w++)
        for (int size = 5; size <= 8; size++)
            crew_threads(size, trees);
    crew_world(CREW_HOSTS);
    crew_threads(2, links_are_counted);
    junk_over(CREW_HOSTS, 2, 1, false, HVD_EINTERNAL, "please report this [HVD901]");
    junk_over(CREW_HOSTS, 5, 4, false, HVD_EINTERNAL, "please report this [HVD901]");
    junk_over(CREW_HOSTS + 1, 4, 2, false, HVD_EPEER, "does not carry its tag [HVD458]");
    junk_over(CREW_HOSTS + 1, 4, 0, false, HVD_EPEER, "does not carry its tag [HVD458]");
    junk_over(CREW_HOSTS + 2, 2, 1, true, HVD_EPEER, "does not carry its tag [HVD458]");
    crew_world(CREW_HOSTS + 1);
    crew_processes(4, a_host_ends, NULL, status);
    check_status(4, status, ALONE_ON_ITS_HOST);
    crew_peer_timeout_ms = SILENT_MS;
    for (int w = CREW_HOSTS; w <= CREW_HOSTS + 1; w++)
        for (silent = 0; silent < 4; silent += 3) { /* a leader; with others on its host, one that is none */
            crew_world(w);
            printf("%s: rank %d is silent\n", crew_world(w), silent);
            crew_processes(4, a_rank_is_silent, end_the_stopped, status);
            check_status(4, status, silent);
        }
    return 0;
}
