/* test_engine_device_stall.c - what was launched on a GPU that is none (tests/stub) and does not end there: it is told
 * of, and ended, in time; a stopped rank is named; and what the user computes there before is no stall.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef HVD_SANITIZED
enum { SLOW = 3 };
#else
enum { SLOW = 1 };
#endif
enum { WARN_MS = 400 * SLOW, LIMIT_MS = 1600 * SLOW, SILENT_MS = 1200 * SLOW };

static _Atomic int *stopped; /* the process that stops itself */

static int64_t begin(struct hvd_engine *engine, const char *name, float *value, int rank, void *ready)
{
    struct hvd_request request = crew_sum(name, value, 1);
    request.device = rank + 1;
    request.ready = ready;
    return crew_begin(engine, &request);
}

static void sum(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    float value = (float)rank;
    CHECK_CODE(crew_wait(engine, begin(engine, "warm", &value, rank, NULL), text), HVD_OK, text);
    CHECK(value == (float)(size * (size - 1)) / 2);
}

/* What rank 0 has reported so far. */
static const char *report(void)
{
    static char text[16384];
    ssize_t got = pread(crew_report_fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = '\0';
    return text;
}

/* The second collective does not end on the device, and the third lies behind it. Rank `last` stops, if it is not
 * negative. Returns the code with which the job ends, and why. */
static int launch_and_wait(struct hvd_engine *engine, int rank, int size, int last, char *text)
{
    static float value[2] = {1, 1}; /* what is let go of there may touch them after the end */
    int64_t handle[2];
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    sum(engine, rank, size);
    gpus_fail("runs", 1, 1);
    crew_meet();
    for (int i = 0; i < 2; i++) {
        handle[i] = begin(engine, i ? "behind" : "stands", &value[i], rank, NULL);
        int code = HVD_AGAIN;
        while (code == HVD_AGAIN)
            code = hvd_engine_wait(engine, handle[i], 100, text, HVD_TEXT_MAX);
        CHECK_CODE(code, HVD_OK, text);
    }
    crew_meet(); /* all have both on their streams */
    if (rank == last) {
        atomic_store(stopped, getpid());
        kill(getpid(), SIGSTOP);
    }
    return hvd_engine_finish(engine, handle[0], 60000000000, text, HVD_TEXT_MAX);
}

static void does_not_end(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    CHECK_CODE(launch_and_wait(engine, rank, size, -1, text), HVD_ETIMEOUT, text);
    CHECK_CODE(strstr(text, "nothing has moved for") &&
                   strstr(text, "stands' (allreduce) was launched on GPUs, and does "
                                "not end there") != NULL,
               1, text);
    CHECK_CODE(strstr(text, "rank 0 waits on device 0, uuid abab") && strstr(text, "NCCL 2.21.5 (") &&
                   strstr(text, "rank 1 waits on device 1") && strstr(text, "[HVD553]"),
               1, text);
    if (rank)
        return;
    CHECK_CODE(strstr(report(), "or make no progress (HVDLITE_STALL_CHECK_TIME, ") &&
                   strstr(report(), "'stands' (allreduce): launched on GPUs, and does not end there\n") &&
                   strstr(report(), "  rank 0 waits on device 0, uuid abab"),
               1, report());
}

static void end_the_stopped(void)
{
    while (!atomic_load(stopped))
        usleep(1000);
    kill(atomic_exchange(stopped, 0), SIGKILL);
}

static void names_who_is_stopped(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    CHECK_CODE(launch_and_wait(engine, rank, size, 1, text), HVD_ETIMEOUT, text);
    CHECK_CODE(strstr(text, "launched on GPUs, and does not end there without rank 1; rank 1 (pid ") &&
                   strstr(text, ") is stopped (by a signal or a debugger)"),
               1, text);
    end_the_stopped();
}

/* On another host, which HVDLITE_PEER_TIMEOUT is for: nobody has asked for anything since. */
static void names_who_is_silent(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    uint64_t begun = hvd_now_ns();
    int code = launch_and_wait(engine, rank, size, 1, text);
    CHECK_CODE(code, HVD_EPEER, text);
    CHECK_CODE(strstr(text, "rank 1 ") && strstr(text, "is silent: it has not answered for"), 1, text);
    CHECK(hvd_now_ns() - begun < 10ull * SILENT_MS * 1000000u);
    end_the_stopped();
}

/* The ranks' own computation on their devices takes far longer than the limits. */
static void waits_for_the_user(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    float value = 1;
    sum(engine, rank, size);
    void *gate = gpus_gate();
    int64_t handle = begin(engine, "late", &value, rank, gate);
    CHECK_CODE(hvd_engine_finish(engine, handle, 3 * LIMIT_MS * (int64_t)1000000, text, sizeof text), HVD_AGAIN, text);
    crew_meet();
    gpus_open_gate(gate);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    CHECK(value == (float)size);
    sum(engine, rank, size);
    if (rank == 0)
        CHECK_CODE(report()[0], 0, report());
    hvd_cuda_load(NULL)->EventDestroy(gate);
}

static void run(crew_body *body, int dies)
{
    int status[2];
    CHECK(ftruncate(crew_report_fd, 0) == 0 && lseek(crew_report_fd, 0, SEEK_SET) == 0);
    crew_processes(2, body, NULL, status);
    for (int rank = 0; rank < 2; rank++)
        CHECK(rank == dies ? WIFSIGNALED(status[rank]) : WIFEXITED(status[rank]) && WEXITSTATUS(status[rank]) == 0);
}

int main(void)
{
    crew_deadline(300);
    gpus_find();
    stopped = mmap(NULL, sizeof *stopped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    crew_report_fd = memfd_create("report", MFD_CLOEXEC);
    CHECK(stopped != MAP_FAILED && crew_report_fd >= 0);
    crew_warn_ms = WARN_MS;
    crew_limit_ms = LIMIT_MS;
    run(does_not_end, -1);
    run(names_who_is_stopped, 1);
    run(waits_for_the_user, -1);
    crew_warn_ms = crew_limit_ms = 0;
    crew_peer_timeout_ms = SILENT_MS;
    crew_world(CREW_HOSTS);
    run(names_who_is_silent, 1);
    return 0;
}
