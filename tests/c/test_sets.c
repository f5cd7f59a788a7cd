/* test_sets.c - process sets: overlapping, opened and closed again, in threads and in processes; wrong arguments. */
#include "crew.h"

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

/* What Python does: open, then nobody goes on before all have. */
static int open_set(struct hvd_engine *engine, const int *ranks, int count)
{
    struct hvd_error error = {0};
    int number = crew_set_open(engine, ranks, count, &error);
    CHECK_CODE(number > 0, 1, error.text);
    crew_barrier(engine);
    return number;
}

static void close_set(struct hvd_engine *engine, int number)
{
    struct hvd_error error = {0};
    crew_barrier(engine);
    CHECK_CODE(hvd_engine_set_close(engine, number, &error), HVD_OK, error.text);
}

static int index_in(const int *ranks, int count, int rank)
{
    for (int i = 0; i < count; i++)
        if (ranks[i] == rank)
            return i;
    return -1;
}

static int64_t submit_sum(struct hvd_engine *engine, int set, const char *name, float *memory, int64_t count,
                          struct hvd_error *error)
{
    struct hvd_request request = crew_sum(name, memory, count);
    request.process_set = set;
    memset(error, 0, sizeof *error);
    return hvd_engine_submit(engine, &request, error);
}

/* The sum of 2^rank over the members: every subset has its own. */
static void sum_over(struct hvd_engine *engine, int set, const int *ranks, int count, int rank, const char *name,
                     int64_t elements)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float want = 0, *memory = malloc(sizeof *memory * (size_t)(elements + 1));
    for (int i = 0; i < count; i++)
        want += (float)(1 << ranks[i]);
    for (int64_t i = 0; i < elements; i++)
        memory[i] = (float)(1 << rank);
    int64_t handle = submit_sum(engine, set, name, memory, elements, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    for (int64_t i = 0; i < elements; i++)
        CHECK(memory[i] == want);
    free(memory);
}

/* Even ranks, the upper half, and one rank alone; names are the same in all of them. */
static void overlapping(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t counts[] = {0, 1, 1000, 70000, 300001};
    int even[HVD_LOCAL_MAX], upper[HVD_LOCAL_MAX], last[1] = {size - 1}, all[HVD_LOCAL_MAX], evens = 0, uppers = 0;
    for (int r = 0; r < size; r++) {
        all[r] = r;
        if (r % 2 == 0)
            even[evens++] = r;
        if (r >= size / 2)
            upper[uppers++] = r;
    }
    const struct {
        const int *ranks;
        int count;
    } sets[] = {{all, size}, {even, evens}, {upper, uppers}, {last, 1}, {all, size}};
    int number[5] = {0};
    for (int i = 1; i < 5; i++) {
        number[i] = open_set(engine, sets[i].ranks, sets[i].count);
        CHECK(number[i] == i);
    }
    for (int step = 0; step < 4; step++)
        for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
            for (int i = 0; i < 5; i++)
                if (index_in(sets[i].ranks, sets[i].count, rank) >= 0)
                    sum_over(engine, number[i], sets[i].ranks, sets[i].count, rank, step % 2 ? NULL : "same",
                             counts[c]);
    for (int i = 1; i < 5; i++)
        close_set(engine, number[i]);
}

static int all_processes_status[HVD_LOCAL_MAX];

/* A number that was closed is given out again, to other ranks; what the earlier set left there is not believed. */
static void numbers_are_used_again(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 12; step++) {
        int first[HVD_LOCAL_MAX], count = 0, second[2] = {step % size, (step + 1) % size};
        for (int r = 0; r < size; r++)
            if (r != step % size || size == 1)
                first[count++] = r;
        if (second[0] > second[1]) {
            int swap = second[0];
            second[0] = second[1];
            second[1] = swap;
        }
        int pair = second[0] == second[1] ? 1 : 2;
        int a = open_set(engine, first, count), b = open_set(engine, second, pair);
        CHECK(a == 1 && b == 2);
        for (int i = 0; i < 1 + step % 3; i++) { /* an odd and an even number of rounds */
            if (index_in(first, count, rank) >= 0)
                sum_over(engine, a, first, count, rank, "x", 100);
            if (index_in(second, pair, rank) >= 0)
                sum_over(engine, b, second, pair, rank, "x", 100000);
        }
        close_set(engine, a);
        close_set(engine, b);
    }
}

static void overlapping_process(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    overlapping(engine, rank, size);
    numbers_are_used_again(engine, rank, size);
}

static void wrong_arguments(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    const int outside[] = {0, size}, negative[] = {-1}, twice[] = {0, 0}, descending[] = {1, 0}, zero[] = {0};
    CHECK(crew_set_open(engine, outside, 2, &error) == HVD_EINVAL && strstr(error.text, "is not one of 0 to"));
    memset(&error, 0, sizeof error);
    CHECK(crew_set_open(engine, negative, 1, &error) == HVD_EINVAL && strstr(error.text, "rank -1"));
    memset(&error, 0, sizeof error);
    CHECK(crew_set_open(engine, twice, 2, &error) == HVD_EINVAL && strstr(error.text, "twice"));
    memset(&error, 0, sizeof error);
    CHECK(size == 1 || (crew_set_open(engine, descending, 2, &error) == HVD_EINVAL && strstr(error.text, "ascend")));
    memset(&error, 0, sizeof error);
    CHECK(crew_set_open(engine, NULL, 0, &error) == HVD_EINVAL && strstr(error.text, "at least one"));
    memset(&error, 0, sizeof error);
    CHECK(hvd_engine_set_close(engine, 0, &error) == HVD_EINVAL && strstr(error.text, "global"));
    memset(&error, 0, sizeof error);
    CHECK(hvd_engine_set_close(engine, 7, &error) == HVD_EINVAL && strstr(error.text, "does not exist"));
    CHECK(hvd_engine_set_close(engine, -1, &error) == HVD_EINVAL);
    CHECK(hvd_engine_set_close(engine, HVD_SETS_MAX, &error) == HVD_EINVAL);
    float memory[4] = {0};
    CHECK(submit_sum(engine, 5, "x", memory, 4, &error) == HVD_EINVAL && strstr(error.text, "does not exist"));
    CHECK(submit_sum(engine, -1, "x", memory, 4, &error) == HVD_EINVAL);
    CHECK(submit_sum(engine, HVD_SETS_MAX, "x", memory, 4, &error) == HVD_EINVAL);
    int number = open_set(engine, zero, 1);
    CHECK(number == 1); /* no failed open has consumed a number */
    if (rank == 0) {
        sum_over(engine, number, zero, 1, rank, "x", 8);
    } else {
        char name[64];
        snprintf(name, sizeof name, "Rank %d is not a member of the provided process set", rank);
        CHECK(submit_sum(engine, number, "x", memory, 4, &error) == HVD_EINVAL);
        CHECK_CODE(strstr(error.text, name) && strstr(error.text, "rank 0:"), 1, error.text);
    }
    close_set(engine, number);
    CHECK(submit_sum(engine, number, "x", memory, 4, &error) == HVD_EINVAL && strstr(error.text, "does not exist"));
    CHECK(hvd_engine_set_close(engine, number, &error) == HVD_EINVAL);
}

/* Sets that only their members open: two of one number and life, a third across both. */
static void opened_by_members(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    const struct hvd_streams none = {0};
    const int pair[] = {rank & ~1, rank | 1}, across[] = {1, 2};
    CHECK_CODE(engine != NULL && size == 4, 1, crew_open_error.text);
    CHECK_CODE(crew_set_open_as(engine, 3, 5, pair, 2, &error), HVD_OK, error.text);
    CHECK(hvd_engine_set_open(engine, 3, 6, pair, 2, &none, &error) == HVD_EINVAL && strstr(error.text, "already"));
    memset(&error, 0, sizeof error);
    CHECK(hvd_engine_set_open(engine, 4, 5, pair, 2, &none, &error) == HVD_EINVAL && strstr(error.text, "before"));
    CHECK(hvd_engine_set_open(engine, 0, 6, pair, 2, &none, &error) == HVD_EINVAL);
    if (rank == 1 || rank == 2)
        CHECK_CODE(crew_set_open_as(engine, 1, 6, across, 2, &error), HVD_OK, error.text);
    crew_barrier(engine);
    for (int i = 0; i < 20; i++) {
        sum_over(engine, 3, pair, 2, rank, "x", 1000);
        if (rank == 1 || rank == 2)
            sum_over(engine, 1, across, 2, rank, "x", 1000);
    }
    crew_barrier(engine);
    CHECK_CODE(hvd_engine_set_close(engine, 3, &error), HVD_OK, error.text);
    if (rank == 1 || rank == 2) /* a number that is free again: what lies there is of an earlier life */
        CHECK_CODE(crew_set_open_as(engine, 3, 9, across, 2, &error), HVD_OK, error.text);
    crew_barrier(engine);
    if (rank == 1 || rank == 2)
        sum_over(engine, 3, across, 2, rank, "x", 1000);
}

/* Closing gives back what was outstanding; the ranks of an error are the job's. */
static void outstanding_at_close(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float memory[8] = {0};
    const int ranks[] = {0, size - 1};
    int number = open_set(engine, ranks, 2);
    if (rank == 0) {
        int64_t handle = submit_sum(engine, number, "alone", memory, 4, &error);
        crew_barrier(engine);
        CHECK(hvd_engine_set_close(engine, number, &error) == HVD_OK);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_EINVAL, text);
        CHECK_CODE(strstr(text, "was removed") && strstr(text, "alone"), 1, text);
    } else {
        close_set(engine, number);
    }
    number = open_set(engine, ranks, 2);
    if (rank == 0 || rank == size - 1) {
        int64_t handle = submit_sum(engine, number, "shape", memory, rank ? 5 : 4, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_EMISMATCH, text);
        char name[64];
        snprintf(name, sizeof name, "rank %d said [5]", size - 1);
        CHECK_CODE(strstr(text, name) && strstr(text, "rank 0 said [4]"), 1, text);
        struct hvd_request request = {.name = "root", .kind = HVD_BROADCAST, .dtype = HVD_DTYPE_float32};
        request.input = request.output = memory, request.root = rank != 0, request.process_set = number;
        CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_EMISMATCH, text);
        snprintf(name, sizeof name, "rank %d said %d", size - 1, size - 1);
        CHECK_CODE(strstr(text, name) && strstr(text, "rank 0 said 0"), 1, text);
    }
    close_set(engine, number);
}

/* All places are taken; then one is free again. */
static void as_many_as_there_are(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    int all[HVD_LOCAL_MAX];
    for (int r = 0; r < size; r++)
        all[r] = r;
    for (int i = 1; i < HVD_SETS_MAX; i++)
        CHECK_CODE(crew_set_open(engine, all, i % 8 == 1 ? size : 1, &error), i, error.text);
    CHECK(crew_set_open(engine, all, 1, &error) == HVD_EINVAL && strstr(error.text, "remove some"));
    crew_barrier(engine);
    for (int i = 1; i < HVD_SETS_MAX; i += 24)
        sum_over(engine, i, all, size, rank, "x", 100);
    crew_barrier(engine);
    CHECK(hvd_engine_set_close(engine, 100, &error) == HVD_OK);
    CHECK(crew_set_open(engine, all, size, &error) == 100);
    crew_barrier(engine);
    sum_over(engine, 100, all, size, rank, "x", 100);
}

/* Who leaves, leaves its sets; sets without it go on. */
static void leaving(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float memory[4] = {0};
    int others[HVD_LOCAL_MAX];
    const int with[] = {0, size - 1};
    for (int r = 0; r < size - 1; r++)
        others[r] = r;
    int a = open_set(engine, with, 2), b = open_set(engine, others, size - 1);
    if (rank == size - 1)
        return;
    if (rank == 0) {
        int64_t handle = submit_sum(engine, a, "after", memory, 4, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
        char name[64];
        snprintf(name, sizeof name, "process set %d: rank %d left", a, size - 1);
        CHECK_CODE(strstr(text, name) != NULL, 1, text);
    }
    for (int step = 0; step < 3; step++)
        sum_over(engine, b, others, size - 1, rank, "on", 1000);
}

static void hold_turn(struct hvd_engine *engine)
{
    while (!hvd_turn_take(engine))
        usleep(100);
}

/* Rank 1 has voted and is stopped before it reads the votes; rank 0 votes to leave, reads, ends. What it said in the
 * set must still be there when rank 1 goes on. */
static void who_leaves_takes_nothing_away(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float memory[2] = {0};
    const int both[2] = {0, 1};
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    CHECK(size == 2 && open_set(engine, both, 2) == 1);
    crew_meet();
    hold_turn(engine);
    crew_meet();
    if (rank == 0) {
        crew_meet();
        atomic_store(&engine->leave_wanted, 1);
        while (!engine->set[0]->left || !engine->set[1]->left)
            hvd_turn_once(engine);
        hvd_turn_run(engine);
        return;
    }
    int64_t handle[2];
    for (int set = 0; set < 2; set++)
        CHECK((handle[set] = submit_sum(engine, set, "x", &memory[set], 1, &error)) > 0);
    while (!engine->set[0]->entered || !engine->set[1]->entered)
        hvd_turn_once(engine);
    crew_meet();
    struct pollfd ended = {.fd = engine->host.pidfd[0], .events = POLLIN};
    CHECK(ended.fd < 0 || poll(&ended, 1, 20000) == 1);
    hvd_turn_run(engine);
    for (int set = 0; set < 2; set++) {
        CHECK_CODE(crew_wait(engine, handle[set], text), HVD_EPEER, text);
        CHECK_CODE(strstr(text, "rank 0 left") != NULL, 1, text);
    }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static void without_much_room(void) /* sanitizers need addresses themselves */ {}
#else
/* Where addresses are short there are no sets; the rest works, and the error says what is missing. */
static void limit_addresses(int rank)
{
    unsigned long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm && fscanf(statm, "%lu", &pages) == 1);
    fclose(statm);
    rlim_t most = pages * HVD_PAGE + (400u << 20);
    CHECK(setrlimit(RLIMIT_AS, &(struct rlimit){most, most}) == 0);
}

static void without_room(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    int all[HVD_LOCAL_MAX], own[1] = {rank};
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    for (int r = 0; r < size; r++)
        all[r] = r;
    CHECK_CODE(crew_set_open(engine, all, size, &error), HVD_ENOMEM, error.text);
    CHECK_CODE(strstr(error.text, "no shared memory for process sets") && strstr(error.text, "MB"), 1, error.text);
    memset(&error, 0, sizeof error);
    CHECK_CODE(crew_set_open(engine, own, 1, &error), 1, error.text); /* which needs none */
    sum_over(engine, 1, own, 1, rank, "x", 100);
    sum_over(engine, 0, all, size, rank, "x", 100000);
}

static void without_much_room(void)
{
    crew_processes(2, without_room, limit_addresses, all_processes_status);
    CHECK_CODE(all_processes_status[0] | all_processes_status[1], 0, "a rank failed");
}
#endif

int main(void)
{
    static const int sizes[] = {1, 2, 3, 4, 7};
    static const struct {
        const char *name;
        crew_body *body;
        int least, most;
    } tests[] = {
        {"overlapping sets", overlapping, 1, 7},
        {"numbers are used again", numbers_are_used_again, 1, 7},
        {"wrong arguments", wrong_arguments, 1, 7},
        {"outstanding at close, and a mismatch", outstanding_at_close, 2, 7},
        {"as many as there are", as_many_as_there_are, 1, 2},
        {"leaving", leaving, 2, 7},
        {"opened by their members", opened_by_members, 4, 4},
    };
    crew_deadline(300);
    const char *world;
    for (int w = 0; (world = crew_world(w)); w++)
        for (size_t i = 0; i < HVD_COUNT_OF(tests); i++)
            for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++)
                if ((w == 0 || (sizes[k] < 5 && tests[i].body != as_many_as_there_are)) && sizes[k] >= tests[i].least &&
                    sizes[k] <= tests[i].most) {
                    uint64_t begun = hvd_now_ns();
                    crew_threads(sizes[k], tests[i].body);
                    printf("%s: %s, %d ranks: %.0f ms\n", world, tests[i].name, sizes[k],
                           (double)(hvd_now_ns() - begun) / 1e6);
                    fflush(stdout);
                }
    crew_world(0);
    for (int size = 2; size <= 4; size++) {
        crew_shared_memory = size == 3; /* /dev/shm, where memory is reserved place by place */
        crew_processes(size, overlapping_process, NULL, all_processes_status);
        for (int rank = 0; rank < size; rank++)
            CHECK_CODE(all_processes_status[rank], 0, "a rank failed");
    }
    crew_processes(2, who_leaves_takes_nothing_away, NULL, all_processes_status);
    CHECK_CODE(all_processes_status[0] | all_processes_status[1], 0, "a rank failed");
    without_much_room();
    return 0;
}
