/* virtual_fork.c - a process forks in the midst of collectives: is nobody disturbed, and does the child keep nothing?
 *
 * The ranks are threads of one process, so its child has the descriptors of all. It does for each engine what api.c
 * does for its one (the handler is that file's own), and looks what is left: no stream, no bell, no epoll. At once
 * after that the objects of the kernel that both have are as before: a child that took something out of an epoll
 * instance, or read a bell, would show. The parent goes on: all sums are right and soon. The child lives on meanwhile,
 * and tensors in shared memory stay there as they were; where a rank ends then, the others hear of it all the same.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include "virtual_parts.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 8, FORKS = 3, COUNT = 300, FILES = 1024, WAIT_MS = 3000, LATE_NS = 6 * VIRTUAL_MS };
static uint64_t chosen, last_ns[STEPS];
static struct hvd_engine *engines[VIRTUAL_RANKS]; /* as api.c has its one: from the end of init to that of leave */
static float *tensor[VIRTUAL_RANKS], first[VIRTUAL_RANKS];
static bool in_process, forking, was_open[FILES];
static int unsettled, dies, forker, forks, me, kept, end_of[FORKS],
    childs_end; /* unsettled: engines that are not in `engines` */
static struct objects {
    char text[1 << 16];
} before, after;

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD, 0L) >= 0;
}

/* What the kernel says of each descriptor: what an epoll instance watches, the count of a bell, bytes to be read. */
static void look_at_objects(struct objects *objects)
{
    size_t length = 0;
    for (int fd = 0; fd < FILES; fd++) {
        char path[64];
        int waiting = 0, file;
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
        if (fd == childs_end || !is_open(fd) || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            continue;
        ioctl(fd, FIONREAD, &waiting);
        length += (size_t)sprintf(objects->text + length, "%d: %d\n", fd, waiting);
        length += (size_t)read(file, objects->text + length, sizeof objects->text - length - 64);
        close(file);
        CHECK(length < sizeof objects->text - 64);
    }
    objects->text[length] = '\0';
}

static void before_fork(void)
{
    me = virtual_me;
    for (int i = 0; i < VIRTUAL_THREADS; i++) /* the kernel interrupts all CPUs for it */
        virtual_write_out(i);
    virtual_me = -1; /* no other thread goes on until the child has said how it is */
    look_at_objects(&before);
}

static void after_fork_in_parent(void)
{
    char said = 0;
    close(childs_end);
    CHECK(read(end_of[forks], &said, 1) == 1 && said == '+');
    look_at_objects(&after);
    CHECK_CODE(strcmp(before.text, after.text), 0, "objects that the child has, too");
    virtual_me = me;
}

/* As in api.c. */
static void after_fork_in_child(void)
{
    for (int rank = 0; rank < VIRTUAL_RANKS; rank++) {
        struct hvd_engine *engine = engines[rank];
        if (!engine || virtual_stopped(rank)) /* its descriptors are closed */
            continue;
        hvd_host_close_in_child(&engine->host);
        const int others[] = {engine->host.store.fd, engine->epoll, engine->call, engine->soon.timer, engine->space.fd};
        for (size_t i = 0; i < HVD_COUNT_OF(others); i++)
            if (others[i] >= 0)
                close(others[i]);
        hvd_stream_close_in_child(engine);
    }
}

/* What is left beside memory; the runtime has a copy of each pidfd. */
static bool keeps_nothing(int own)
{
    int left = 0;
    for (int fd = 0; fd < FILES; fd++) {
        char path[64], what[256] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (was_open[fd] || fd == own || readlink(path, what, sizeof what - 1) < 0 || !strncmp(what, "/memfd:", 7))
            continue;
        left++;
        if (strcmp(what, "anon_inode:[eventfd]"))
            fprintf(stderr, "the child keeps %d: %s\n", fd, what);
        left += strcmp(what, "anon_inode:[eventfd]") != 0;
    }
    return left == kept;
}

static bool as_it_was(int size)
{
    bool is = true;
    for (int rank = 0; rank < size; rank++)
        for (int i = 0; i < COUNT && tensor[rank]; i++)
            is &= tensor[rank][i] == first[rank];
    return is;
}

static void run_child(int socket, int size)
{
    char none;
    alarm(60);
    bool right = (unsettled || keeps_nothing(socket)) && as_it_was(size);
    ssize_t written = write(socket, right ? "+" : "-", 1);
    while (written == 1 && read(socket, &none, 1) > 0)
        ; /* until the parent has ended its end */
    _exit(right && as_it_was(size) ? 0 : 1);
}

static void fork_here(int size)
{
    int pair[2], most = forks;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    end_of[most] = pair[0];
    childs_end = pair[1];
    forking = true;
    if (fork() == 0) {
        for (int i = 0; i <= most; i++)
            close(end_of[i]);
        run_child(pair[1], size);
    }
    forks++;
    forking = false;
}

static void *fork_at_random(void *size)
{
    uint64_t choice = chosen * 3;
    for (int i = 1 + (int)virtual_below(&choice, FORKS); i > 0; i--) {
        usleep(virtual_below(&choice, 5000));
        fork_here(*(int *)size);
    }
    return NULL;
}

/* One sum; false: the rank that ends is named. */
static bool step(struct hvd_engine *engine, int rank, int size, int number, uint64_t *own)
{
    float memory[COUNT];
    char text[HVD_TEXT_MAX] = "";
    for (int i = 0; i < COUNT; i++)
        memory[i] = (float)(rank + i);
    usleep(virtual_below(own, 3) ? 0 : virtual_below(own, 2000));
    while (forking) /* its memory is copied just now */
        usleep(20);
    if (tensor[rank]) /* not while it is worked on */
        first[rank]++;
    for (int i = 0; i < COUNT && tensor[rank]; i++)
        tensor[rank][i] = first[rank];
    struct hvd_request request = crew_sum("a", memory, COUNT);
    int64_t handle = crew_begin(engine, &request);
    last_ns[number] = virtual_now();
    int code = hvd_engine_wait(engine, handle, WAIT_MS, text, sizeof text);
    if (dies >= 0 && code != HVD_OK) {
        char who[32];
        snprintf(who, sizeof who, "rank %d", dies);
        CHECK_CODE(code, HVD_EPEER, text);
        CHECK_CODE(virtual_stopped(dies) && strstr(text, who), 1, text);
        return false;
    }
    CHECK_CODE(code, HVD_OK, text);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
    virtual_waited(virtual_now() - last_ns[number]);
    CHECK(virtual_now() < last_ns[number] + LATE_NS);
    for (int i = 0; i < COUNT; i++)
        CHECK(memory[i] == (float)(size * (size - 1) / 2 + size * i));
    return true;
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    pthread_t other;
    uint64_t own = chosen * 7 + (uint64_t)rank;
    CHECK_CODE(virtual_open(rank, size, 0, in_process, &engine, &error), HVD_OK, error.text);
    kept += !in_process;
    engines[rank] = engine;
    unsettled--;
    tensor[rank] = hvd_engine_alloc(engine, COUNT * sizeof(float));
    if (rank == forker)
        pthread_create(&other, NULL, fork_at_random, &size);
    bool all = true;
    for (int i = 0; i < STEPS && all; i++)
        all = step(engine, rank, size, i, &own);
    if (rank == forker)
        pthread_join(other, NULL);
    if (rank == dies)
        virtual_stop(rank, virtual_switches() + 1 + virtual_below(&own, 2000), true);
    while (dies >= 0 && all)
        all = step(engine, rank, size, STEPS - 1, &own);
    float *memory = tensor[rank];
    tensor[rank] = NULL;
    if (memory)
        hvd_free(memory);
    hvd_engine_leave(engine, hvd_engine_leave_until(engine));
    engines[rank] = NULL;
    unsettled++;
    hvd_engine_stop(engine);
    hvd_engine_free(engine);
    unsettled--;
}

void virtual_fork(uint64_t seed, bool weak)
{
    int size, world, count = 0, status;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    in_process = virtual_below(&chosen, 3) == 0;
    forker = (int)virtual_below(&chosen, (unsigned)size);
    dies = in_process || virtual_below(&chosen, 3) ? -1 : (int)virtual_below(&chosen, (unsigned)size);
    virtual_describe("%s, rank %d forks, rank %d ends", in_process ? "threads" : "processes", forker, dies);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    unsettled = size;
    virtual_begin(&plan);
    for (int fd = 0; fd < FILES; fd++)
        count += was_open[fd] = is_open(fd);
    virtual_run(size, body);
    for (int i = 0; i < forks; i++)
        close(end_of[i]);
    for (int i = 0; i < forks; i++)
        CHECK(wait(&status) > 0 && status == 0);
    for (int fd = 0; fd < FILES; fd++)
        count -= is_open(fd);
    CHECK_CODE(dies >= 0 || -count == kept, 1, "descriptors");
}
