/* crew.c - threads and processes as ranks. See crew.h. */
#define _GNU_SOURCE
#include "crew.h"

#include "boot_memory.h"
#include "streams.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct crew_kind {
    const char *name, *plane;
    bool linked;
    const int *host_of; /* NULL: one host */
    enum { UNSIGNED, SIGNS_VOTES, SIGNS_ALL } keys;
} kinds[] = {{"shared memory", NULL, false, NULL, UNSIGNED},
             {"p2p on one host", "p2p", true, NULL, UNSIGNED},
             {"hosts of one rank", NULL, true, (const int[]){0, 1, 2, 3, 4, 5, 6, 7}, UNSIGNED},
             {"hosts of 2, 1 and more", NULL, true, (const int[]){0, 0, 1, 2, 2, 2, 2, 2}, SIGNS_VOTES},
             {"two hosts, interleaved", NULL, true, (const int[]){7, 3, 7, 3, 7, 3, 7, 3}, SIGNS_ALL}};
static const struct crew_kind *kind = &kinds[0];

struct hvd_error crew_open_error;
pid_t crew_pid[HVD_LOCAL_MAX];
int crew_shared_memory, crew_peer_timeout_ms, crew_nan_guard, crew_warn_ms, crew_limit_ms, crew_report_fd = -1;
int crew_store_fd[HVD_LOCAL_MAX];
uint64_t crew_alpha_ns;

static void too_late(int signal)
{
    static const char text[] = "the test is not over in time\n";
    ssize_t written = write(2, text, sizeof text - 1);
    (void)written;
    abort();
}

void crew_deadline(int seconds)
{
    signal(SIGALRM, too_late);
    alarm((unsigned)seconds);
}

const char *crew_world(int i)
{
    if ((size_t)i >= HVD_COUNT_OF(kinds))
        return NULL;
    kind = &kinds[i];
    return kind->name;
}

static const int everyone[] = {0, 1, 2, 3, 4, 5, 6, 7};
static const char *const host_name[] = {"a", "b", "c", "d", "e", "f", "g", "h"}; /* of each rank's host */

struct row {
    int tensor[STREAMS_RANKS], vote[STREAMS_RANKS];
    unsigned char tensor_key[STREAMS_RANKS][HVD_KEY_PAIR_BYTES], vote_key[STREAMS_RANKS][HVD_KEY_PAIR_BYTES];
};

/* What rank `mine` signs with and what its peer does; each direction of each stream has a key of its own. */
static void make_keys(int purpose, int mine, const int *ranks, int count, unsigned char (*key)[HVD_KEY_PAIR_BYTES])
{
    for (int i = 0; i < count; i++)
        for (int way = 0; way < 2; way++) {
            unsigned char *half = key[i] + (size_t)way * HVD_KEY_BYTES;
            memset(half, purpose, HVD_KEY_BYTES);
            half[0] = (unsigned char)(way ? ranks[i] : mine);
            half[1] = (unsigned char)(way ? mine : ranks[i]);
        }
}

static struct hvd_streams streams_of(const struct row *row)
{
    return (struct hvd_streams){row->vote, row->tensor, kind->keys != UNSIGNED ? row->vote_key[0] : NULL,
                                kind->keys == SIGNS_ALL ? row->tensor_key[0] : NULL};
}

/* The streams that rank `mine` of these needs; their purposes are `purpose` and the next. */
static void take_row(int purpose, const int *ranks, int count, int mine, struct row *row)
{
    int host_of[STREAMS_RANKS], peers[3], voters[STREAMS_RANKS];
    for (int i = 0; i < count; i++) {
        host_of[i] = kind->host_of ? kind->host_of[ranks[i]] : 0;
        voters[i] = -1;
    }
    int near = hvd_vote_peers(host_of, count, mine, peers);
    for (int i = 0; i < near; i++)
        voters[peers[i]] = ranks[peers[i]];
    streams_take(purpose, ranks[mine], ranks, count, row->tensor);
    streams_take(purpose + 1, ranks[mine], voters, count, row->vote);
    make_keys(purpose, ranks[mine], ranks, count, row->tensor_key);
    make_keys(purpose + 1, ranks[mine], ranks, count, row->vote_key);
}

/* Purposes of streams: each life of a crew has its own, and in it each set. */
#define LIFE_PURPOSES 100

/* `row` must live until the engine is open. */
static void link_options(struct hvd_options *options, struct row *row)
{
    options->plane = kind->plane;
    if (!kind->linked || options->size < 2)
        return;
    take_row(LIFE_PURPOSES * (int)options->epoch, everyone, options->size, options->rank, row);
    const struct hvd_streams streams = streams_of(row);
    options->tensor_fd = streams.tensor_fd;
    options->vote_fd = streams.vote_fd;
    options->vote_keys = streams.vote_keys;
    options->tensor_keys = streams.tensor_keys;
    options->host_of = kind->host_of;
    options->host_name = kind->host_of ? host_name : NULL;
    options->peer_timeout_ms = crew_peer_timeout_ms;
    options->link_alpha_ns = crew_alpha_ns;
    options->link_beta_ps = crew_alpha_ns ? 8000 : 0;
}

int crew_set_open(struct hvd_engine *engine, const int *ranks, int count, struct hvd_error *error)
{
    int number = 1;
    while (number < HVD_SETS_MAX && engine->record[number].open)
        number++;
    int code = crew_set_open_as(engine, number, engine->lives + 1, ranks, count, error);
    return code == HVD_OK ? number : code;
}

int crew_set_open_as(struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                     struct hvd_error *error)
{
    struct row row;
    int mine = -1;
    for (int i = 0; i < count; i++)
        mine = ranks[i] == engine->options.rank ? i : mine;
    if (!kind->linked || mine < 0)
        return hvd_engine_set_open(engine, number, life, ranks, count, &(struct hvd_streams){0}, error);
    take_row(LIFE_PURPOSES * (int)engine->options.epoch + 2 * (int)life, ranks, count, mine, &row);
    const struct hvd_streams streams = streams_of(&row);
    return hvd_engine_set_open(engine, number, life, ranks, count, &streams, error);
}

struct hvd_options crew_options(int rank, int size)
{
    struct hvd_options options = {.rank = rank,
                                  .size = size,
                                  .local_rank = rank,
                                  .local_size = size,
                                  .cross_size = 1,
                                  .job = 4711,
                                  .epoch = 0,
                                  .store_fd = -1,
                                  .fusion_bytes = 64 << 20,
                                  .slots_max = 1024,
                                  .start_timeout_ms = 20000,
                                  .leave_timeout_ms = 2000,
                                  .spin_us = -1,
                                  .shared_memory = crew_shared_memory,
                                  .nan_guard = crew_nan_guard,
                                  .stall_warn_ms = crew_warn_ms,
                                  .collective_timeout_ms = crew_limit_ms,
                                  .report_fd = crew_report_fd,
                                  .trace_events = 1024};
    memset(options.secret, 7, sizeof options.secret);
    return options;
}

static pthread_barrier_t *meeting; /* of the ranks that run now */

void crew_meet(void)
{
    pthread_barrier_wait(meeting);
}

struct seat {
    struct hvd_boot_seat boot;
    int size;
    crew_body *body;
};

int crew_open(int rank, int size, int life, hvd_boot_allgather *allgather, void *self, bool in_process,
              struct hvd_engine **engine, struct hvd_error *error)
{
    struct hvd_options options = crew_options(rank, size);
    struct row row;
    options.epoch = (uint64_t)life;
    options.store_fd = crew_store_fd[rank] ? crew_store_fd[rank] : -1;
    link_options(&options, &row);
    return hvd_engine_open(&options, allgather, self, in_process, (uint32_t)life + 1, engine, error);
}

static void *thread_rank(void *self)
{
    struct seat *seat = self;
    struct hvd_error error = {0};
    struct hvd_engine *engine;
    int code = crew_open(seat->boot.rank, seat->size, 0, hvd_boot_memory_allgather, &seat->boot, true, &engine, &error);
    CHECK_CODE(code, HVD_OK, error.text);
    seat->body(engine, seat->boot.rank, seat->size);
    hvd_engine_leave(engine, hvd_engine_leave_until(engine));
    hvd_engine_stop(engine);
    hvd_engine_free(engine);
    return NULL;
}

void crew_threads(int size, crew_body *body)
{
    struct hvd_boot_memory memory;
    struct seat seat[HVD_LOCAL_MAX];
    pthread_t thread[HVD_LOCAL_MAX];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)size);
    meeting = &barrier;
    hvd_boot_memory_open(&memory, size);
    if (kind->linked)
        streams_open(size, 0);
    for (int rank = 0; rank < size; rank++) {
        seat[rank] = (struct seat){.boot = {&memory, rank}, .size = size, .body = body};
        CHECK(pthread_create(&thread[rank], NULL, thread_rank, &seat[rank]) == 0);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(thread[rank], NULL);
    hvd_boot_memory_close(&memory);
    pthread_barrier_destroy(&barrier);
    streams_close();
}

#define BLOCK 8192
static struct page {
    pthread_barrier_t barrier;
    char block[HVD_LOCAL_MAX][BLOCK];
} *page;

static int page_allgather(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes)
{
    const struct hvd_options *options = self;
    CHECK(bytes <= BLOCK);
    memcpy(page->block[options->rank], mine, bytes);
    pthread_barrier_wait(&page->barrier);
    for (int rank = 0; rank < options->size; rank++)
        memcpy((char *)all + bytes * (size_t)rank, page->block[rank], bytes);
    pthread_barrier_wait(&page->barrier);
    return HVD_OK;
}

static void process_rank(int rank, int size, crew_body *body, void (*before)(int))
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct hvd_options options = crew_options(rank, size);
    struct hvd_engine *engine;
    if (kind->linked)
        streams_keep(rank);
    if (before)
        before(rank);
    crew_open(rank, size, 0, page_allgather, &options, false, &engine, &crew_open_error);
    body(engine, rank, size);
    if (engine) {
        hvd_engine_leave(engine, hvd_engine_leave_until(engine));
        hvd_engine_stop(engine);
        hvd_engine_free(engine);
    }
    exit(0);
}

void crew_processes(int size, crew_body *body, void (*before)(int rank), int *status)
{
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&page->barrier, &attributes, (unsigned)size);
    meeting = &page->barrier;
    fflush(NULL);
    if (kind->linked)
        streams_open(size, 12);
    for (int rank = 0; rank < size; rank++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            process_rank(rank, size, body, before);
        crew_pid[rank] = pid;
    }
    streams_close();
    for (int rank = 0; rank < size; rank++)
        while (waitpid(crew_pid[rank], &status[rank], 0) < 0)
            CHECK(errno == EINTR);
    munmap(page, sizeof *page);
}

struct hvd_request crew_sum(const char *name, float *memory, int64_t count)
{
    return (struct hvd_request){.name = name,
                                .kind = HVD_ALLREDUCE,
                                .op = HVD_OP_sum,
                                .dtype = HVD_DTYPE_float32,
                                .ndim = 1,
                                .dims = {count},
                                .prescale = 1.0,
                                .postscale = 1.0,
                                .input = memory,
                                .output = memory};
}

int64_t crew_submit(struct hvd_engine *engine, int kind, const char *name, int op, int dtype, const void *in, void *out,
                    int64_t count, struct hvd_error *error)
{
    struct hvd_request request = {.name = name,
                                  .kind = kind,
                                  .op = op,
                                  .dtype = dtype,
                                  .ndim = 1,
                                  .dims = {count},
                                  .prescale = 1.0,
                                  .postscale = 1.0,
                                  .input = in,
                                  .output = out};
    memset(error, 0, sizeof *error);
    return hvd_engine_submit(engine, &request, error);
}

int crew_wait(struct hvd_engine *engine, int64_t handle, char *text)
{
    int code = HVD_AGAIN;
    for (int i = 0; i < 400 && code == HVD_AGAIN; i++)
        code = hvd_engine_wait(engine, handle, 50, text, HVD_TEXT_MAX);
    for (int i = 0; i < 400000 && code == HVD_OK && hvd_engine_poll(engine, handle) == HVD_AGAIN; i++)
        usleep(50); /* it lies on a device */
    if (code != HVD_AGAIN)
        CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
    return code;
}

void crew_barrier(struct hvd_engine *engine)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request request = {.kind = HVD_BARRIER};
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
}

int64_t crew_begin(struct hvd_engine *engine, const struct hvd_request *request)
{
    struct hvd_error error = {0};
    int64_t handle = hvd_engine_submit(engine, request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    return handle;
}

int crew_wait_only(struct hvd_engine *engine, int64_t handle, char *text)
{
    int code = HVD_AGAIN;
    for (int i = 0; i < 400 && code == HVD_AGAIN; i++)
        code = hvd_engine_wait(engine, handle, 50, text, HVD_TEXT_MAX);
    return code;
}
