/* test_api.c - the public API over the one engine of a process: life, handles across lives, forks. */
#define _GNU_SOURCE
#include "crew.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static struct hvd_options alone(void)
{
    return crew_options(0, 1);
}

static int64_t submit(float *value, char *text)
{
    struct hvd_request request = {.name = "x",
                                  .kind = HVD_ALLREDUCE,
                                  .op = HVD_OP_average,
                                  .dtype = HVD_DTYPE_float32,
                                  .prescale = 1,
                                  .postscale = 2,
                                  .input = value,
                                  .output = value};
    return hvd_submit(&request, text, HVD_TEXT_MAX);
}

static struct hvd_owner owner;

static int run(float *value, int kind, int wait_ms, char *text)
{
    struct hvd_request like = {.name = "y",
                               .kind = kind,
                               .op = HVD_OP_sum,
                               .dtype = HVD_DTYPE_float32,
                               .ndim = 1,
                               .dims = {1},
                               .prescale = 1,
                               .postscale = 3};
    return hvd_run(&like, (uintptr_t)value, (uintptr_t)value, HVD_SOON, (int64_t)wait_ms * 1000000, &owner, text,
                   HVD_TEXT_MAX);
}

static void the_short_way(void)
{
    char text[HVD_TEXT_MAX] = "";
    float value = 1;
    struct hvd_options options = alone();
    CHECK(run(&value, HVD_ALLREDUCE, 50, text) == HVD_ESTATE && strstr(text, "use hvd.init()"));
    owner.handle = 1 << 16;
    CHECK(hvd_finish(&owner, 0, text, sizeof text) == HVD_ESTATE && owner.handle == 1 << 16);
    CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
    CHECK_CODE(run(&value, HVD_ALLREDUCE, 50, text), HVD_OK, text);
    CHECK(value == 3 && owner.handle == 0);
    CHECK(run(&value, HVD_ALLREDUCE, 0, text) == HVD_AGAIN && owner.handle > 0);
    struct hvd_owner same = owner;
    CHECK_CODE(hvd_finish(&owner, 1000000000, text, sizeof text), HVD_OK, text);
    CHECK(value == 9 && owner.handle == 0);
    CHECK_CODE(hvd_finish(&owner, 0, text, sizeof text), HVD_OK, "it says again how it ended");
    CHECK(hvd_finish(&same, 0, text, sizeof text) == HVD_EHANDLE && strstr(text, "synchronized") && same.handle == 0);
    CHECK(hvd_finish(&same, 0, text, sizeof text) == HVD_EHANDLE && strstr(text, "interrupted"));
    CHECK(run(&value, HVD_ALLGATHER, 50, text) == HVD_EINVAL && strstr(text, "allgather has a result"));
    CHECK(owner.handle == 0 && owner.code == HVD_EINVAL);
    CHECK(run(NULL, HVD_ALLREDUCE, 50, text) == HVD_EINVAL && strstr(text, "'y' has no memory"));
    hvd_shutdown(-1);
}

static void nothing_before_init(void)
{
    char text[HVD_TEXT_MAX] = "";
    float value = 1;
    int culprit, code;
    CHECK(!hvd_initialized() && hvd_rank() == HVD_ESTATE && hvd_size() == HVD_ESTATE);
    CHECK(submit(&value, text) == HVD_ESTATE && strstr(text, "use hvd.init()"));
    CHECK(hvd_wait(1 << 16, 0, text, sizeof text) == HVD_ESTATE && hvd_poll(1 << 16) == HVD_ESTATE);
    CHECK(hvd_kick() == HVD_ESTATE);
    CHECK(hvd_forget(1 << 16) == HVD_ESTATE && hvd_failure(&culprit, &code, text, sizeof text) == HVD_ESTATE);
    CHECK(hvd_alloc(100) == NULL && hvd_plane_used() == NULL && hvd_abort(0, HVD_EPEER, "x") == HVD_ESTATE);
    CHECK(hvd_shutdown(-1) == HVD_OK);
}

static void wrong_options(void)
{
    char text[HVD_TEXT_MAX] = "";
    struct hvd_options options = alone();
    options.rank = 1;
    CHECK(hvd_init(&options, NULL, NULL, text, sizeof text) == HVD_EINIT && strstr(text, "rank 1 is invalid"));
    options = alone();
    options.rank = 65, options.size = 70, options.local_size = 70;
    CHECK(hvd_init(&options, NULL, NULL, text, sizeof text) == HVD_EINIT && strstr(text, "at most 64"));
    options = alone();
    options.size = 4, options.local_size = 2;
    CHECK(hvd_init(&options, NULL, NULL, text, sizeof text) == HVD_EINIT && strstr(text, "share a host"));
    int culprit, code;
    CHECK(!hvd_initialized() && hvd_failure(&culprit, &code, text, sizeof text) == 1);
    CHECK(culprit == -1 && code == HVD_EINIT && strstr(text, "share a host"));
}

static void lives(void)
{
    char text[HVD_TEXT_MAX] = "";
    int64_t stale = 0;
    for (int life = 0; life < 5; life++) {
        struct hvd_options options = alone();
        CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
        CHECK(hvd_initialized() && hvd_rank() == 0 && hvd_size() == 1 && hvd_local_size() == 1);
        CHECK(!strcmp(hvd_plane_used(), "self"));
        CHECK(hvd_init(&options, NULL, NULL, text, sizeof text) == HVD_OK); /* twice is once */
        float value = 21;
        int64_t handle = submit(&value, text);
        CHECK(handle > 0 && handle != stale && hvd_poll(stale) == HVD_EHANDLE && hvd_kick() == HVD_OK);
        CHECK(hvd_wait(handle, 1000, text, sizeof text) == HVD_OK && value == 42);
        CHECK(hvd_poll(handle) == HVD_OK && hvd_forget(handle) == HVD_OK && hvd_forget(handle) == HVD_EHANDLE);
        stale = handle;
        CHECK(hvd_shutdown(-1) == HVD_OK && !hvd_initialized());
    }
}

#ifndef __SANITIZE_THREAD__
static void *finish_it(void *handle)
{
    char text[HVD_TEXT_MAX];
    struct hvd_owner same = *(const struct hvd_owner *)handle;
    return (void *)(intptr_t)(hvd_finish(&same, 20000000000, text, sizeof text) + 100);
}

/* Nobody should, and the thread sanitizer says so. But one of them gets the result, the other one a code, however they
 * meet. */
static void two_threads_wait_for_one_landing(void)
{
    char text[HVD_TEXT_MAX] = "";
    struct hvd_options options = alone();
    CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
    for (int i = 0; i < 500; i++) {
        float value = 1;
        pthread_t other;
        void *code;
        CHECK(run(&value, HVD_ALLREDUCE, 0, text) == HVD_AGAIN);
        CHECK(pthread_create(&other, NULL, finish_it, &owner) == 0);
        struct hvd_owner same = owner;
        int mine = hvd_finish(&same, 20000000000, text, sizeof text);
        CHECK(pthread_join(other, &code) == 0);
        int others = (int)(intptr_t)code - 100;
        CHECK((mine == HVD_OK || mine == HVD_EHANDLE) && (others == HVD_OK || others == HVD_EHANDLE));
        CHECK(mine == HVD_OK || others == HVD_OK);
    }
    CHECK(hvd_shutdown(-1) == HVD_OK);
}
#endif

static void *keep_calling(void *stop)
{
    char text[HVD_TEXT_MAX];
    long calls = 0;
    float value = 1;
    while (!atomic_load((_Atomic int *)stop)) {
        int64_t handle = submit(&value, text);
        if (handle > 0) {
            hvd_wait(handle, 50, text, sizeof text);
            hvd_forget(handle);
        }
        calls++;
    }
    return (void *)calls;
}

static void shutdown_under_way(void)
{
    char text[HVD_TEXT_MAX] = "";
    _Atomic int stop = 0;
    pthread_t thread[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&thread[i], NULL, keep_calling, &stop) == 0);
    for (int life = 0; life < 50; life++) {
        struct hvd_options options = alone();
        CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
        CHECK(hvd_shutdown(-1) == HVD_OK);
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++) {
        void *calls;
        pthread_join(thread[i], &calls);
        CHECK((long)calls > 0);
    }
}

static void children(void)
{
    char text[HVD_TEXT_MAX] = "";
    struct hvd_options options = alone();
    CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
    for (int i = 0; i < 20; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            float value = 1;
            int64_t code = submit(&value, text);
            bool right = code == HVD_EFORK && strstr(text, "forked child") && hvd_forked() && !hvd_initialized() &&
                         hvd_rank() == HVD_EFORK && hvd_kick() == HVD_EFORK &&
                         run(&value, HVD_ALLREDUCE, 50, text) == HVD_EFORK && hvd_shutdown(-1) == HVD_EFORK &&
                         hvd_init(&options, NULL, NULL, text, sizeof text) == HVD_EFORK;
            _exit(right ? 0 : 1);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    float value = 3;
    int64_t handle = submit(&value, text);
    CHECK(handle > 0 && hvd_wait(handle, 1000, text, sizeof text) == HVD_OK && value == 6 &&
          hvd_forget(handle) == HVD_OK);
    struct hvd_event events[64];
    int count = hvd_trace(events, 64);
    CHECK(count > 2 && !strcmp(hvd_trace_name((int)events[0].what), "submit") &&
          events[count - 1].time_ns >= events[0].time_ns);
    CHECK(hvd_counter(0) == 1 && !strcmp(hvd_counter_name(0), "submits"));
    hvd_shutdown(-1);
}

int main(void)
{
    crew_deadline(60);
    nothing_before_init();
    wrong_options();
#ifndef __SANITIZE_THREAD__
    two_threads_wait_for_one_landing();
#endif
    the_short_way();
    lives();
    shutdown_under_way();
    children();
    nothing_before_init();
    return 0;
}
