/* test_death.c - engines as processes: meeting, memory passed by descriptor, and how a death is known. */
#define _GNU_SOURCE
#include "crew.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
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

static void collectives_work(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    for (int step = 0; step < 5; step++) {
        sum(engine, rank, size, 11);
        sum(engine, rank, size, 123457);
    }
}

static int victim, how;
static bool hosts; /* the ranks are on several */

static void die(void)
{
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGSEGV, SIG_DFL); /* a sanitizer would catch it */
    if (how == 0)
        _exit(3);
    kill(getpid(), how);
    pause();
}

/* The thread sanitizer would sleep in _exit for a second, which is all the time that noticing a death may take. */
const char *__tsan_default_options(void)
{
    return "atexit_sleep_ms=0";
}

/* The victim ends while the others wait for it; they know within a second of its end and name it. */
static void one_dies(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float memory[4] = {0};
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, rank, size, 1000);
    crew_meet(); /* all have their sum: a death fails whatever is still under way */
    if (rank == victim)
        die();
    uint64_t begun = hvd_now_ns();
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "never", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
    char name[32];
    /* On another host the end of its streams tells, or its host's other ranks say it. */
    snprintf(name, sizeof name, hosts ? "rank %d" : "rank %d (pid", victim);
    CHECK_CODE(strstr(text, name) && strstr(text, "never") && !strcmp(text + strlen(text) - 9, " [HVD450]"), 1, text);
    CHECK(hvd_now_ns() - begun < 1000000000u);
    handle = crew_submit(engine, HVD_ALLREDUCE, "next", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
}

/* A rank that is killed while a large tensor moves; in place, private memory. */
static void one_dies_in_the_middle(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    int64_t count = 8 << 20;
    float *memory = calloc((size_t)count, sizeof *memory);
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    int code = HVD_OK;
    for (int step = 0; code == HVD_OK; step++) {
        int64_t handle =
            crew_submit(engine, HVD_ALLREDUCE, "big", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, count, &error);
        if (rank == victim && step == 2)
            die(); /* its engine thread may be anywhere in the sum */
        code = crew_wait(engine, handle, text);
    }
    CHECK_CODE(code, HVD_EPEER, text);
    free(memory);
}

/* A rank that leaves and ends is no death for those that still work on agreed things or end later. */
static void first_to_finish(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, rank, size, 5);
    if (rank == 0)
        usleep(300000); /* the others have left and ended by now */
}

/* Descriptors are all closed at the end. */
static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void check_status(int size, const int *status, bool victim_killed)
{
    for (int rank = 0; rank < size; rank++)
        if (!victim_killed || rank != victim)
            CHECK_CODE(status[rank], 0, "a rank failed");
        else
            CHECK(how == 0 ? WIFEXITED(status[rank]) && WEXITSTATUS(status[rank]) == 3
                           : WIFSIGNALED(status[rank]) && WTERMSIG(status[rank]) == how);
}

int main(void)
{
    static const int sizes[] = {2, 3, 4, 7}, ways[] = {0, SIGKILL, SIGSEGV};
    int status[HVD_LOCAL_MAX];
    crew_deadline(300);
    int before = open_descriptors();
    const char *world;
    for (int w = 0; (world = crew_world(w)); w++) {
        hosts = w > 1;
        for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++) {
            int size = sizes[k];
            if (w > 0 && size > 3)
                break;
            crew_processes(size, collectives_work, NULL, status);
            check_status(size, status, false);
            crew_processes(size, first_to_finish, NULL, status);
            check_status(size, status, false);
            for (size_t w = 0; w < HVD_COUNT_OF(ways); w++)
                for (victim = 0; victim < size; victim += size - 1) {
                    how = ways[w];
                    crew_processes(size, one_dies, NULL, status);
                    check_status(size, status, true);
                }
            how = SIGKILL;
            victim = size - 1;
            crew_processes(size, one_dies_in_the_middle, NULL, status);
            check_status(size, status, true);
            printf("%s: %d processes: ok\n", world, size);
            fflush(stdout);
        }
    }
    CHECK(open_descriptors() == before);
    return 0;
}
