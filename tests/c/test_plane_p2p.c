/* test_plane_p2p.c - what only plane p2p promises: every algorithm gives the right result, bytes on the wire are the
 * formula, and a peer that is lost, babbles or reads slowly is told
 * apart. (That it does everything a plane does is test_plane.c's and test_plane_exchange.c's.)
 */
#include "bucket.h"
#include "kernel/kernel.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Lists of small integers, which any order sums exactly. */
static void every_work(struct hvd_seat *seat)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLGATHER, HVD_BROADCAST};
    static const int dtypes[] = {HVD_DTYPE_float32, HVD_DTYPE_int8, HVD_DTYPE_bfloat16};
    static const uint64_t counts[] = {0, 1, 1000, 70001};
    for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++)
        for (size_t d = 0; d < HVD_COUNT_OF(dtypes); d++)
            for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++) {
                    struct hvd_work like = {.kind = kinds[k],
                                            .op = (int)(k + c) % 2 ? HVD_OP_max : HVD_OP_sum,
                                            .dtype = dtypes[d],
                                            .divide_by = seat->arg.size,
                                            .prescale = 1,
                                            .postscale = dtypes[d] == HVD_DTYPE_int8 ? 1 : 2,
                                            .root = seat->arg.size - 1};
                    hvd_bucket_do(seat, &like, counts[c], shape, (int)(c % 2), 0);
                }
}

/* Over all links so far. */
static void sent(const struct hvd_plane_arg *arg, uint64_t *bytes, uint64_t *messages)
{
    *bytes = *messages = 0;
    for (int rank = 0; rank < arg->size; rank++)
        if (rank != arg->rank) {
            *bytes += arg->link[rank]->counts.bytes_out;
            *messages += arg->link[rank]->counts.messages_out;
        }
}

static void bytes_are_counted_and_are_the_formula(struct hvd_seat *seat)
{
    enum { EACH = 5000 };
    static _Thread_local float values[EACH * 8];
    uint64_t before[2], after[2], n = (uint64_t)seat->arg.size, steps = 2 * (n - 1), head = 24;
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, values, EACH * n);
    sent(&seat->arg, &before[0], &before[1]);
    hvd_seat_done(seat, &work);
    sent(&seat->arg, &after[0], &after[1]);
    CHECK(after[1] - before[1] == steps, "%s: %llu messages", seat->arg.algo,
          (unsigned long long)(after[1] - before[1]));
    CHECK(after[0] - before[0] == steps * (EACH * sizeof(float) + head), "%s: %llu bytes", seat->arg.algo,
          (unsigned long long)(after[0] - before[0]));
}

/* As far as one gets without the others. */
static void begin(struct hvd_seat *seat, struct hvd_work *work)
{
    struct hvd_error error = {0};
    CHECK(seat->plane->start(seat->opened, work, &error) == HVD_OK, "%s", error.text);
    for (int polls = 0; polls < 50; polls++) {
        bool progress;
        CHECK(seat->plane->poll(seat->opened, work, &progress, &error) == HVD_AGAIN, "done without the others: %s",
              error.text);
    }
}

/* All have met, and those who have begun go on. */
static int end(struct hvd_seat *seat, struct hvd_work *work, bool begun)
{
    hvd_world_meet(&seat->arg);
    return begun ? hvd_world_finish(&seat->arg, seat->plane, seat->opened, work, &seat->error)
                 : hvd_seat_do(seat, work);
}

/* Small buffers of the kernel: nothing crosses in one piece, and a rank that starts late holds others up, no more. */
static void slow_readers_are_waited_for(struct hvd_seat *seat)
{
    enum { COUNT = 300000 };
    static _Thread_local float values[COUNT];
    struct hvd_plane_arg *arg = &seat->arg;
    struct hvd_piece piece;
    int small = 4096;
    for (int rank = 0; rank < arg->size; rank++)
        if (rank != arg->rank)
            setsockopt(arg->link[rank]->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(arg->rank + i % 10);
    struct hvd_work work = hvd_bucket_sum(&piece, values, COUNT);
    if (arg->rank != 0)
        begin(seat, &work);
    CHECK(end(seat, &work, arg->rank != 0) == HVD_OK, "%s: %s", arg->algo, seat->error.text);
    for (int i = 0; i < COUNT; i++)
        CHECK(values[i] == (float)(arg->size * (arg->size - 1) / 2 + arg->size * (i % 10)), "%s: element %d is %g",
              arg->algo, i, (double)values[i]);
}

static void must_fail(struct hvd_seat *seat, bool begun, int code, const char *name)
{
    static _Thread_local float values[1000];
    struct hvd_piece piece;
    struct hvd_error again = {0};
    struct hvd_work work = hvd_bucket_sum(&piece, values, 1000);
    if (begun)
        begin(seat, &work);
    int got = end(seat, &work, begun);
    CHECK(got == code && seat->error.culprit == seat->arg.size - 1 && strstr(seat->error.text, name),
          "rank %d: %d, culprit %d: %s", seat->arg.rank, got, seat->error.culprit, seat->error.text);
    CHECK(seat->plane->start(seat->opened, &work, &again) == code && strcmp(again.text, seat->error.text) == 0,
          "after a failure every call repeats it: %s", again.text);
}

/* Only links between the culprit and the others are cut, so each of the others must see it by itself. Rank 2 has sent
 * the culprit all it had to, and waits for rank 0, which begins when the end is there and stops before it sends.
 */
static void a_lost_peer_is_named(struct hvd_seat *seat)
{
    struct hvd_plane_arg *arg = &seat->arg;
    if (arg->rank < arg->size - 1) {
        must_fail(seat, arg->rank == 2, HVD_EPEER, arg->size == 2 ? "rank 1" : "rank 3");
        return;
    }
    for (int rank = 0; rank < arg->size - 1; rank++)
        if (rank != 2)
            shutdown(arg->link[rank]->fd, SHUT_RDWR);
    hvd_world_meet(arg);
    if (arg->size > 3)
        shutdown(arg->link[2]->fd, SHUT_RDWR);
}

/* Who gets junk stops, so all have sent theirs before. (Ranks that wait for one that stopped are the engine's.) */
static void a_peer_that_babbles_is_named(struct hvd_seat *seat)
{
    struct hvd_plane_arg *arg = &seat->arg;
    unsigned char junk[64];
    if (arg->rank < arg->size - 1) {
        must_fail(seat, true, HVD_EINTERNAL, "of another collective");
        return;
    }
    memset(junk, 0xab, sizeof junk);
    hvd_world_meet(arg);
    for (int rank = 0; rank < arg->size - 1; rank++)
        CHECK(write(arg->link[rank]->fd, junk, sizeof junk) == sizeof junk, "written");
}

static int open_code(const struct hvd_plane_arg *arg, void **opened, struct hvd_error *error)
{
    for (int i = 0; hvd_planes[i]; i++)
        if (strcmp(hvd_planes[i]->name, "p2p") == 0)
            return hvd_planes[i]->open(arg, opened, error);
    return HVD_EINTERNAL;
}

static void wrong_arguments_are_refused(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    void *opened;
    arg.algo = "torus";
    CHECK(open_code(&arg, &opened, &error) == HVD_EINVAL && strstr(error.text, "torus"), "%s", error.text);
    error = (struct hvd_error){0};
    arg.algo = "ring";
    CHECK(open_code(&arg, &opened, &error) == HVD_EINVAL && strstr(error.text, "deterministic"), "%s", error.text);
    arg.algo = NULL;
    arg.link = NULL;
    error = (struct hvd_error){0};
    CHECK(open_code(&arg, &opened, &error) == HVD_EINIT && strstr(error.text, "links"), "%s", error.text);
    int pipes[2];
    struct hvd_link link;
    CHECK(pipe(pipes) == 0, "a pipe");
    error = (struct hvd_error){0};
    CHECK(hvd_link_tcp.open(&link, pipes[0], 1, &error) == HVD_EINIT && strstr(error.text, "no stream socket"), "%s",
          error.text);
    close(pipes[0]);
    close(pipes[1]);
}

static void with(const char *algo, int size, void (*body)(struct hvd_seat *seat))
{
    hvd_world_seats(HVD_WORLD_THREADS, size, "p2p", &(struct hvd_plane_arg){.algo = algo, .any_order = true}, body,
                    NULL);
}

int main(void)
{
    static const int sizes[] = {2, 3, 5, 8};
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++) {
        struct hvd_plane_arg how = {.algo = (*algo)->name, .any_order = true};
        for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
            with(how.algo, sizes[i], every_work);
        for (int size = 2; size <= 6; size += 4)
            if ((*algo)->can(HVD_ALLREDUCE, size))
                with(how.algo, size, slow_readers_are_waited_for);
        if ((*algo)->can(HVD_ALLREDUCE, 3))
            hvd_world_seats(HVD_WORLD_PROCESSES, 3, "p2p", &how, slow_readers_are_waited_for, NULL);
    }
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        with("ring", sizes[i], bytes_are_counted_and_are_the_formula);
        with("direct", sizes[i], bytes_are_counted_and_are_the_formula);
    }
    for (int size = 2; size <= 4; size += 2) {
        with("direct", size, a_lost_peer_is_named);
        with("direct", size, a_peer_that_babbles_is_named);
    }
    hvd_world_run(HVD_WORLD_THREADS, 2, 50, wrong_arguments_are_refused, NULL);
    return 0;
}
