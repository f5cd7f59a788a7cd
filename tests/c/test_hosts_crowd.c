/* test_hosts_crowd.c - a job of more ranks than a host may have: 66 engines on 11 hosts, and where the limits are.
 *
 * Everything that is kept by rank is passed through once: the tree of votes, sums small (sent before they are agreed
 * on) and large (by hosts), ragged kinds, a process set of 65, a rank that leaves. Ranks are threads, streams pairs of
 * sockets: about 9,000 descriptors, so who may not open that many skips this.
 */
#define _GNU_SOURCE
#include "crew.h"

#include "boot_memory.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { RANKS = 66, HOSTS = 11, MEMBERS = RANKS - 1, ROWS = 3, FILES = 2 * RANKS * RANKS + 1000 };

static int host_of[HVD_RANKS_MAX + 1], stream[2][RANKS][RANKS], votes[2][RANKS][RANKS];
static const char *host_name[HVD_RANKS_MAX + 1];

static void pair(int table[RANKS][RANKS], int a, int b)
{
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    table[a][b] = ends[0];
    table[b][a] = ends[1];
}

/* Of the ranks `first` and up, which are called 0, 1, ... in the table. */
static void connect_all(int first, int tensors[RANKS][RANKS], int voters[RANKS][RANKS])
{
    int count = RANKS - first, peers[3];
    memset(tensors, -1, sizeof(int[RANKS][RANKS]));
    memset(voters, -1, sizeof(int[RANKS][RANKS]));
    for (int a = 0; a < count; a++) {
        for (int b = 0; b < a; b++)
            pair(tensors, a, b);
        int near = hvd_vote_peers(host_of + first, count, a, peers);
        CHECK(near >= 0 && near <= 3);
        for (int i = 0; i < near; i++)
            if (voters[a][peers[i]] < 0)
                pair(voters, a, peers[i]);
    }
}

/* Sixty-six ranks on two cores take their time. */
static void wait_long(struct hvd_engine *engine, int64_t handle, const char *submitted)
{
    char text[HVD_TEXT_MAX] = "";
    CHECK_CODE(handle < 0, 0, submitted);
    int code = HVD_AGAIN;
    for (int tries = 0; code == HVD_AGAIN && tries < 2400; tries++)
        code = hvd_engine_wait(engine, handle, 50, text, sizeof text);
    CHECK_CODE(code, HVD_OK, text);
}

static void barrier(struct hvd_engine *engine)
{
    struct hvd_error error = {0};
    struct hvd_request request = {.kind = HVD_BARRIER};
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    wait_long(engine, handle, error.text);
    hvd_engine_forget(engine, handle);
}

static void sum(struct hvd_engine *engine, int process_set, int rank, int size, int64_t count)
{
    struct hvd_error error = {0};
    float *memory = malloc(sizeof *memory * (size_t)count);
    CHECK(memory != NULL);
    for (int64_t i = 0; i < count; i++)
        memory[i] = (float)(rank + i % 7);
    struct hvd_request request = crew_sum("x", memory, count);
    request.process_set = process_set;
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    wait_long(engine, handle, error.text);
    hvd_engine_forget(engine, handle);
    for (int64_t i = 0; i < count; i++)
        CHECK(memory[i] == (float)(size * (size - 1) / 2) + (float)size * (float)(i % 7));
    free(memory);
}

/* Rank r gives r % 4 rows of what it is called. */
static void gather(struct hvd_engine *engine, int rank)
{
    struct hvd_error error = {0};
    struct hvd_output output;
    int32_t mine[4] = {rank, rank, rank, rank};
    struct hvd_request request = {
        .name = "rows", .kind = HVD_ALLGATHER, .dtype = HVD_DTYPE_int32, .ndim = 1, .dims = {rank % 4}, .input = mine};
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    wait_long(engine, handle, error.text);
    CHECK(hvd_engine_result(engine, handle, &output) == HVD_OK);
    const int32_t *next = output.data;
    for (int from = 0; from < RANKS; from++)
        for (int i = 0; i < from % 4; i++)
            CHECK(*next++ == from);
    hvd_engine_forget(engine, handle);
}

static void members(struct hvd_engine *engine, int rank)
{
    struct hvd_error error = {0};
    int ranks[MEMBERS];
    for (int i = 0; i < MEMBERS; i++)
        ranks[i] = i + 1;
    bool in = rank > 0;
    const struct hvd_streams streams = {in ? votes[1][rank - 1] : NULL, in ? stream[1][rank - 1] : NULL, NULL, NULL};
    const int number = 1;
    CHECK_CODE(hvd_engine_set_open(engine, number, 1, ranks, MEMBERS, &streams, &error), HVD_OK, error.text);
    barrier(engine);
    if (in) {
        sum(engine, number, rank - 1, MEMBERS, 5);
        sum(engine, number, rank - 1, MEMBERS, 3000);
    } else {
        float value = 0;
        struct hvd_request request = crew_sum("x", &value, 1);
        request.process_set = number;
        CHECK(hvd_engine_submit(engine, &request, &error) == HVD_EINVAL);
        CHECK_CODE(strstr(error.text, "Rank 0 is not a member") != NULL, 1, error.text);
    }
    barrier(engine);
    CHECK_CODE(hvd_engine_set_close(engine, number, &error), HVD_OK, error.text);
}

static void no_adasum(struct hvd_engine *engine)
{
    float value = 1;
    struct hvd_error error = {0};
    struct hvd_request request = crew_sum("many", &value, 1);
    request.op = HVD_OP_adasum;
    CHECK(hvd_engine_submit(engine, &request, &error) == HVD_EINVAL);
    CHECK_CODE(strstr(error.text, "'many'") && strstr(error.text, "at most 64 ranks"), 1, error.text);
}

static void *be_rank(void *of)
{
    struct hvd_boot_seat *seat = of;
    int rank = seat->rank;
    struct hvd_options options = crew_options(rank, RANKS);
    struct hvd_error error = {0};
    struct hvd_engine *engine;
    options.start_timeout_ms = 120000;
    options.leave_timeout_ms = 60000;
    options.host_of = host_of;
    options.host_name = host_name;
    options.tensor_fd = stream[0][rank];
    options.vote_fd = votes[0][rank];
    int code = hvd_engine_open(&options, hvd_boot_memory_allgather, seat, true, 1, &engine, &error);
    CHECK_CODE(code, HVD_OK, error.text);
    for (int step = 0; step < 3; step++) {
        sum(engine, 0, rank, RANKS, ROWS);
        sum(engine, 0, rank, RANKS, 100000);
    }
    gather(engine, rank);
    no_adasum(engine);
    members(engine, rank);
    hvd_engine_leave(engine, hvd_engine_leave_until(engine));
    hvd_engine_stop(engine);
    hvd_engine_free(engine);
    return NULL;
}

static void sixty_six_ranks_do_what_few_do(void)
{
    struct hvd_boot_memory memory;
    struct hvd_boot_seat seat[RANKS];
    pthread_t thread[RANKS];
    hvd_boot_memory_open(&memory, RANKS);
    connect_all(0, stream[0], votes[0]);
    connect_all(1, stream[1], votes[1]);
    for (int rank = 0; rank < RANKS; rank++) {
        seat[rank] = (struct hvd_boot_seat){&memory, rank};
        CHECK(pthread_create(&thread[rank], NULL, be_rank, &seat[rank]) == 0);
    }
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(thread[rank], NULL);
    hvd_boot_memory_close(&memory);
}

/* Before anybody is met: what is wrong is known from the options alone. */
static void refused(int size, const int *hosts, const char *says)
{
    struct hvd_options options = crew_options(0, size);
    struct hvd_error error = {0};
    struct hvd_engine *engine;
    options.host_of = hosts;
    options.host_name = hosts ? host_name : NULL;
    CHECK_CODE(hvd_engine_open(&options, NULL, NULL, true, 1, &engine, &error), HVD_EINIT, error.text);
    CHECK_CODE(strstr(error.text, says) && strstr(error.text, "this version of hvdlite"), 1, error.text);
}

int main(void)
{
    static const int one_host[HVD_RANKS_MAX + 1];
    struct rlimit files = {0, 0};
    crew_deadline(500);
    for (int rank = 0; rank <= HVD_RANKS_MAX; rank++) {
        host_of[rank] = rank % HOSTS;
        host_name[rank] = "far";
    }
    refused(HVD_RANKS_MAX + 1, host_of, "a job of 1025 ranks");
    refused(HVD_LOCAL_MAX + 1, NULL, "rank 64 is one too many on its host");
    refused(HVD_LOCAL_MAX + 1, one_host, "on its host far");
    refused(HVD_RANKS_MAX, host_of, "at most 64 ranks on one host");
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < FILES) {
        printf("skipped: %d open files are needed, and %llu are allowed\n", FILES, (unsigned long long)files.rlim_cur);
        return 77;
    }
    sixty_six_ranks_do_what_few_do();
    return 0;
}
