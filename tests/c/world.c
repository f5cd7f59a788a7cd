/* world.c - how do tests get n ranks on one machine without a launcher?
 *
 * One shared control block holds a barrier, a board for allgather, the bells and, for process worlds, memfds
 * made before the fork. The functions a plane is opened with are built from those three. Threads share one
 * mapping of each segment; processes each make their own. The parent waits with a deadline: for threads
 * by a watchdog that ends the process, for processes by killing exactly its children. In a simulated world every wait
 * gives the baton on.
 */
#define _GNU_SOURCE
#include "world.h"
#include "baton.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HOSTS_MAX    64
#define SHARES_MAX   (4 * HOSTS_MAX)
#define BOARD_BYTES  1024
#define ARENA_BYTES  ((size_t)64 << 20)
#define LOST_BELL_MS 10000
#define LINKED_MAX   8 /* ranks of a world that has sockets, too */

const int *hvd_world_host_of;

struct world {
    enum hvd_world_kind kind;
    int size, hosts;
    pthread_barrier_t barrier;
    pthread_barrier_t met[HOSTS_MAX]; /* of a host's ranks */
    struct hvd_asleep asleep[HVD_RANKS_MAX];
    int eventfd[HVD_RANKS_MAX];
    int memfd[SHARES_MAX];
    int socket[LINKED_MAX][LINKED_MAX]; /* from the first to the second */
    char *region[SHARES_MAX];           /* thread worlds */
    _Atomic int region_users[SHARES_MAX];
    unsigned char board[HVD_RANKS_MAX][BOARD_BYTES];
    struct hvd_baton *baton; /* a simulated world's */
};

struct world_rank {
    struct world *world;
    struct hvd_plane_arg arg;
    struct hvd_bells bells; /* its rank and size are those on this host */
    struct hvd_link to[HVD_RANKS_MAX], *link[HVD_RANKS_MAX];
    int shares;
    void (*body)(const struct hvd_plane_arg *arg, void *more);
    void *more;
};

struct world_share {
    struct hvd_share share;
    struct world *world;
    int number;
};

static void meet(struct world_rank *rank)
{
    if (rank->world->baton)
        hvd_baton_meet(rank->world->baton, rank->arg.rank);
    else
        pthread_barrier_wait(&rank->world->barrier);
}

void hvd_world_meet(const struct hvd_plane_arg *arg)
{
    meet(arg->self);
}

struct hvd_sim_net *hvd_world_net(const struct hvd_plane_arg *arg)
{
    struct hvd_baton *baton = ((struct world_rank *)arg->self)->world->baton;
    return baton ? hvd_baton_net(baton) : NULL;
}

static int world_allgather(void *self, const void *mine, size_t bytes, void *all, struct hvd_error *error)
{
    struct world_rank *rank = self;
    struct world *world = rank->world;
    if (bytes > BOARD_BYTES)
        return hvd_fail(error, HVD_EINVAL, "the test's allgather takes %d bytes", BOARD_BYTES);
    memcpy(world->board[rank->arg.rank], mine, bytes);
    meet(rank);
    for (int from = 0; from < world->size; from++)
        memcpy((char *)all + (size_t)from * bytes, world->board[from], bytes);
    meet(rank);
    return HVD_OK;
}

static void world_unmap(struct hvd_share *share)
{
    struct world_share *mine = (struct world_share *)share;
    struct world *world = mine->world;
    if (world->kind == HVD_WORLD_PROCESSES)
        for (int rank = 0; rank < share->size; rank++)
            munmap(share->map[rank], share->bytes);
    else if (atomic_fetch_sub(&world->region_users[mine->number], 1) == 1)
        munmap(world->region[mine->number], share->bytes * (size_t)share->size);
    free(mine);
}

static int host_of(int rank)
{
    return hvd_world_host_of ? hvd_world_host_of[rank] : 0;
}

static struct hvd_share *world_share(void *self, size_t bytes, struct hvd_error *error)
{
    struct world_rank *rank = self;
    struct world *world = rank->world;
    struct world_share *mine = calloc(1, sizeof *mine);
    int host = host_of(rank->arg.rank), locals = rank->bells.size, number = rank->shares++ * world->hosts + host;
    CHECK(mine && number < SHARES_MAX, "share %d of rank %d", number, rank->arg.rank);
    bytes = HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE);
    size_t total = bytes * (size_t)locals;
    *mine = (struct world_share){.share = {.bytes = bytes, .size = locals, .references = 1, .unmap = world_unmap},
                                 .world = world,
                                 .number = number};
    if (rank->bells.rank == 0 && world->kind == HVD_WORLD_THREADS) {
        world->region[number] =
            mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        atomic_store(&world->region_users[number], locals);
    } else if (rank->bells.rank == 0) {
        CHECK(ftruncate(world->memfd[number], (off_t)total) == 0, "memfd of %zu bytes", total);
    }
    if (world->baton)
        meet(rank);
    else
        pthread_barrier_wait(&world->met[host]);
    for (int from = 0; from < locals; from++) {
        off_t at = (off_t)((size_t)from * bytes);
        mine->share.map[from] =
            world->kind == HVD_WORLD_THREADS
                ? world->region[number] + at
                : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, world->memfd[number], at);
        CHECK(world->region[number] != MAP_FAILED && mine->share.map[from] != MAP_FAILED, "no share of %zu bytes",
              total);
    }
    return &mine->share;
}

static bool has_sockets(const struct world *world)
{
    return world->size <= LINKED_MAX && !world->baton;
}

static struct world *world_new(enum hvd_world_kind kind, int size, struct hvd_baton *baton)
{
    struct world *world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(world != MAP_FAILED && size >= 1 && size <= HVD_RANKS_MAX, "a world of %d", size);
    world->kind = kind;
    world->size = size;
    world->baton = baton;
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&world->barrier, &shared, (unsigned)size);
    for (int rank = 0; rank < size; rank++)
        world->hosts = host_of(rank) < world->hosts ? world->hosts : host_of(rank) + 1;
    for (int host = 0; host < world->hosts; host++) {
        unsigned locals = 0;
        for (int rank = 0; rank < size; rank++)
            locals += host_of(rank) == host;
        CHECK(host < HOSTS_MAX && locals && locals <= HVD_LOCAL_MAX, "host %d", host);
        pthread_barrier_init(&world->met[host], &shared, locals);
    }
    for (int rank = 0; rank < size; rank++)
        world->eventfd[rank] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    for (int number = 0; number < SHARES_MAX; number++)
        world->memfd[number] = kind == HVD_WORLD_PROCESSES ? memfd_create("hvdlite-test", MFD_CLOEXEC) : -1;
    for (int a = 0; a < size && has_sockets(world); a++)
        for (int b = 0; b < a; b++) {
            int pair[2];
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "a pair of sockets");
            world->socket[a][b] = pair[0];
            world->socket[b][a] = pair[1];
        }
    return world;
}

static void world_free(struct world *world)
{
    for (int a = 0; a < world->size && has_sockets(world); a++)
        for (int b = 0; b < world->size; b++)
            if (a != b)
                close(world->socket[a][b]);
    pthread_barrier_destroy(&world->barrier);
    for (int host = 0; host < world->hosts; host++)
        pthread_barrier_destroy(&world->met[host]);
    for (int rank = 0; rank < world->size; rank++)
        close(world->eventfd[rank]);
    for (int number = 0; number < SHARES_MAX; number++)
        if (world->memfd[number] >= 0)
            close(world->memfd[number]);
    munmap(world, sizeof *world);
}

static void open_links(struct world_rank *rank)
{
    struct world *world = rank->world;
    for (int other = 0; other < world->size && (world->baton || has_sockets(world)); other++) {
        struct hvd_error error = {0};
        if (other == rank->arg.rank)
            continue;
        if (world->baton)
            hvd_sim_link(hvd_baton_net(world->baton), rank->arg.rank, other, &rank->to[other]);
        else
            CHECK(hvd_link_tcp.open(&rank->to[other], world->socket[rank->arg.rank][other], other, &error) == HVD_OK,
                  "%s", error.text);
        rank->link[other] = &rank->to[other];
        rank->arg.link = rank->link;
    }
}

static void *be_rank(void *of)
{
    struct world_rank *rank = of;
    for (int other = 0; other < rank->world->size; other++) {
        if (host_of(other) != host_of(rank->arg.rank))
            continue;
        if (other == rank->arg.rank)
            rank->bells.rank = rank->bells.size;
        rank->bells.asleep[rank->bells.size] = &rank->world->asleep[other];
        rank->bells.eventfd[rank->bells.size++] = rank->world->eventfd[other];
    }
    rank->arg.size = rank->world->size;
    rank->arg.one_host = rank->bells.size == rank->arg.size && !rank->world->baton;
    rank->arg.host_of = hvd_world_host_of;
    for (int i = 0; hvd_world_host_of && hvd_planes[i]; i++)
        if (strcmp(hvd_planes[i]->name, "hier") == 0)
            rank->arg.wanted = hvd_planes[i];
    rank->arg.cpus = hvd_cpus_usable();
    rank->arg.arena_bytes = ARENA_BYTES;
    rank->arg.bells = &rank->bells;
    rank->arg.self = rank;
    rank->arg.allgather = world_allgather;
    rank->arg.share = world_share;
    open_links(rank);
    if (rank->world->baton)
        hvd_baton_begin(rank->world->baton, rank->arg.rank);
    rank->body(&rank->arg, rank->more);
    if (rank->world->baton)
        hvd_baton_end(rank->world->baton, rank->arg.rank);
    return NULL;
}

static void run_threads(struct world_rank *rank, int size, int seconds)
{
    pthread_t thread[HVD_RANKS_MAX];
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += seconds;
    for (int i = 0; i < size; i++)
        CHECK(pthread_create(&thread[i], NULL, be_rank, &rank[i]) == 0, "thread of rank %d", i);
    for (int i = 0; i < size; i++)
        CHECK(pthread_timedjoin_np(thread[i], NULL, &deadline) == 0, "rank %d of %d not done after %d s", i, size,
              seconds);
}

static void run_processes(struct world_rank *rank, int size, int seconds)
{
    pid_t child[HVD_RANKS_MAX], parent = getpid();
    bool failed = false;
    fflush(NULL);
    for (int i = 0; i < size; i++) {
        child[i] = fork();
        CHECK(child[i] >= 0, "fork of rank %d", i);
        if (child[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);
            /* Other addresses in every process. */
            (void)mmap(NULL, (size_t)(i + 1) << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            be_rank(&rank[i]);
            fflush(NULL);
            _exit(0);
        }
    }
    uint64_t deadline = hvd_now_ns() + (uint64_t)seconds * 1000000000u;
    for (int i = 0, left = size; left > 0; i = (i + 1) % size) {
        int status = 0;
        pid_t ended = child[i] > 0 ? waitpid(child[i], &status, WNOHANG) : 0;
        if (ended > 0) {
            child[i] = 0;
            left--;
            failed |= status != 0;
        }
        if (failed || hvd_now_ns() > deadline) {
            for (int other = 0; other < size; other++)
                if (child[other] > 0 && kill(child[other], SIGKILL) == 0)
                    waitpid(child[other], NULL, 0);
            CHECK(false, "rank %d of %d %s", i, size, failed ? "failed" : "was not done in time");
        }
        if (ended == 0)
            poll(NULL, 0, 1);
    }
}

static void run(struct world *world, int seconds, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
    struct world_rank *rank = calloc((size_t)world->size, sizeof *rank);
    CHECK(rank, "no memory");
    for (int i = 0; i < world->size; i++)
        rank[i] = (struct world_rank){.world = world, .arg = {.rank = i}, .body = body, .more = more};
    if (world->kind == HVD_WORLD_THREADS)
        run_threads(rank, world->size, seconds);
    else
        run_processes(rank, world->size, seconds);
    free(rank);
    world_free(world);
}

void hvd_world_run(enum hvd_world_kind kind, int size, int seconds,
                   void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
    run(world_new(kind, size, NULL), seconds, body, more);
}

uint64_t hvd_world_sim(int size, uint64_t seed, const struct hvd_sim_line *line, int seconds,
                       void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
    struct hvd_baton *baton = hvd_baton_new(size, seed, line);
    run(world_new(HVD_WORLD_THREADS, size, baton), seconds, body, more);
    return hvd_baton_free(baton);
}

/* Sleep until rung. Whoever is not rung for long polls once more: if there was news, the bell was lost. */
static int sleep_and_poll(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened,
                          struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct world *world = ((struct world_rank *)arg->self)->world;
    struct hvd_asleep *asleep = &world->asleep[arg->rank];
    struct pollfd news[1 + HVD_RANKS_MAX] = {{.fd = world->eventfd[arg->rank], .events = POLLIN}};
    uint64_t rings;
    atomic_store(&asleep->word, 1);
    atomic_thread_fence(memory_order_seq_cst);
    int code = plane->poll(opened, work, progress, error);
    if (code == HVD_AGAIN && !*progress) {
        int watched = plane->watch ? plane->watch(opened, &news[1]) : 0;
        bool rung = poll(news, (nfds_t)(1 + watched), LOST_BELL_MS) > 0;
        code = plane->poll(opened, work, progress, error);
        CHECK(rung || (code == HVD_AGAIN && !*progress), "rank %d had news but its bell was not rung", arg->rank);
    }
    atomic_store(&asleep->word, 0);
    ssize_t got = read(news[0].fd, &rings, sizeof rings);
    (void)got;
    return code;
}

int hvd_world_finish(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened,
                     struct hvd_work *work, struct hvd_error *error)
{
    struct world *world = ((struct world_rank *)arg->self)->world;
    for (int idle = 0;;) {
        bool progress = false;
        if (world->baton) {
            int code = plane->poll(opened, work, &progress, error);
            hvd_baton_pass(world->baton, arg->rank, progress || code != HVD_AGAIN); /* others may see it in memory */
            if (code != HVD_AGAIN)
                return code;
            continue;
        }
        int code = idle < 50 || plane->polled ? plane->poll(opened, work, &progress, error)
                                              : sleep_and_poll(arg, plane, opened, work, &progress, error);
        if (code != HVD_AGAIN)
            return code;
        idle = progress ? 0 : idle + 1;
        if (idle > 5)
            sched_yield();
    }
}

int hvd_world_do(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened, struct hvd_work *work,
                 struct hvd_error *error)
{
    int code = plane->start(opened, work, error);
    return code ? code : hvd_world_finish(arg, plane, opened, work, error);
}

const struct hvd_plane *hvd_world_open(const struct hvd_plane_arg *arg, const char *name, void **opened)
{
    struct hvd_error error = {0};
    for (int i = 0; hvd_planes[i]; i++)
        if (strcmp(hvd_planes[i]->name, name) == 0) {
            CHECK(hvd_planes[i]->open(arg, opened, &error) == HVD_OK, "plane %s: %s", name, error.text);
            return hvd_planes[i];
        }
    CHECK(false, "no plane %s", name);
    return NULL;
}
