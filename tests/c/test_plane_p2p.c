/* test_plane_p2p.c - what only plane p2p promises: every algorithm gives the right result, bytes on the wire are the
 * formula, bits do not depend on the neighbours in a bucket, and a peer that is lost, babbles or reads slowly is told
 * apart. (That it does everything a plane does is test_plane.c's and test_plane_exchange.c's.)
 */
#include "bucket.h"
#include "kernel/kernel.h"
#include "world.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const struct hvd_plane *open_p2p(struct hvd_plane_arg *arg, const char *algo, void **opened)
{
    arg->algo = algo;
    arg->any_order = algo != NULL;
    return hvd_world_open(arg, "p2p", opened);
}

/* Lists of small integers, which any order sums exactly. */
static void every_algorithm(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLGATHER, HVD_BROADCAST};
    static const int dtypes[] = {HVD_DTYPE_float32, HVD_DTYPE_int8, HVD_DTYPE_bfloat16};
    static const uint64_t counts[] = {0, 1, 1000, 70001};
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++) {
        struct hvd_plane_arg arg = *world;
        void *opened;
        const struct hvd_plane *plane = open_p2p(&arg, (*algo)->name, &opened);
        for (size_t k = 0; k < HVD_COUNT_OF(kinds); k++)
            for (size_t d = 0; d < HVD_COUNT_OF(dtypes); d++)
                for (size_t c = 0; c < HVD_COUNT_OF(counts); c++)
                    for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++) {
                        struct hvd_work like = {.kind = kinds[k],
                                                .op = (int)(k + c) % 2 ? HVD_OP_max : HVD_OP_sum,
                                                .dtype = dtypes[d],
                                                .divide_by = arg.size,
                                                .prescale = 1,
                                                .postscale = dtypes[d] == HVD_DTYPE_int8 ? 1 : 2,
                                                .root = arg.size - 1};
                        struct hvd_bucket bucket;
                        struct hvd_error error = {0};
                        hvd_bucket_make(&bucket, &like, counts[c], shape, (int)(c % 2), arg.rank, arg.size, 0, NULL,
                                        NULL);
                        CHECK(hvd_world_do(&arg, plane, opened, &bucket.work, &error) == HVD_OK, "%s: %s",
                              (*algo)->name, error.text);
                        hvd_bucket_check(&bucket);
                    }
        hvd_world_meet(&arg);
        plane->close(opened);
    }
}

static void bytes_are_counted_and_are_the_formula(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    static const char *const names[] = {"ring", "direct"};
    enum { EACH = 5000 };
    static _Thread_local float values[EACH * 8];
    for (size_t k = 0; k < HVD_COUNT_OF(names); k++) {
        struct hvd_plane_arg arg = *world;
        struct hvd_piece piece;
        struct hvd_error error = {0};
        void *opened;
        uint64_t before = 0, after = 0, messages = 0, n = (uint64_t)arg.size;
        const struct hvd_plane *plane = open_p2p(&arg, names[k], &opened);
        struct hvd_work work = hvd_bucket_sum(&piece, values, EACH * n);
        for (int rank = 0; rank < arg.size; rank++) {
            before += rank == arg.rank ? 0 : arg.link[rank]->counts.bytes_out;
            messages -= rank == arg.rank ? 0 : arg.link[rank]->counts.messages_out;
        }
        CHECK(hvd_world_do(&arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
        for (int rank = 0; rank < arg.size; rank++) {
            after += rank == arg.rank ? 0 : arg.link[rank]->counts.bytes_out;
            messages += rank == arg.rank ? 0 : arg.link[rank]->counts.messages_out;
        }
        uint64_t steps = 2 * (n - 1), head = 24;
        CHECK(messages == steps, "%s: %llu messages", names[k], (unsigned long long)messages);
        CHECK(after - before == steps * (EACH * sizeof(float) + head), "%s: %llu bytes", names[k],
              (unsigned long long)(after - before));
        hvd_world_meet(&arg);
        plane->close(opened);
    }
}

/* Values whose sum depends on the order: the same ones alone, and in the middle of a bucket of another size. */
static void bits_do_not_depend_on_the_bucket(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    enum { COUNT = 4001 };
    static _Thread_local float alone[COUNT], fused[COUNT], other[777], last[12345];
    struct hvd_plane_arg arg = *world;
    struct hvd_error error = {0};
    void *opened;
    const struct hvd_plane *plane = open_p2p(&arg, NULL, &opened);
    for (int i = 0; i < COUNT; i++)
        alone[i] = fused[i] = 1.0f / (float)(1 + (i * 7 + arg.rank * 31) % 101) * (float)(1 << (arg.rank * 3 + i % 5));
    struct hvd_piece piece, pieces[] = {{other, other, 777}, {fused, fused, COUNT}, {last, last, 12345}};
    struct hvd_work work = hvd_bucket_sum(&piece, alone, COUNT);
    CHECK(hvd_world_do(&arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    work.piece = pieces;
    work.pieces = 3;
    work.count = 777 + COUNT + 12345;
    CHECK(hvd_world_do(&arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    CHECK(memcmp(alone, fused, sizeof alone) == 0, "rank %d: other bits in a bucket", arg.rank);
    hvd_world_meet(&arg);
    plane->close(opened);
}

/* As far as one gets without the others. */
static void begin(const struct hvd_plane *plane, void *opened, struct hvd_work *work)
{
    struct hvd_error error = {0};
    CHECK(plane->start(opened, work, &error) == HVD_OK, "%s", error.text);
    for (int polls = 0; polls < 50; polls++) {
        bool progress;
        CHECK(plane->poll(opened, work, &progress, &error) == HVD_AGAIN, "done without the others: %s", error.text);
    }
}

/* Small buffers of the kernel: nothing crosses in one piece, and a rank that starts late holds others up, no more. */
static void slow_readers_are_waited_for(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    enum { COUNT = 300000 };
    static _Thread_local float values[COUNT];
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++) {
        struct hvd_plane_arg arg = *world;
        if (!(*algo)->can(HVD_ALLREDUCE, arg.size))
            continue;
        struct hvd_piece piece;
        struct hvd_error error = {0};
        void *opened;
        int small = 4096;
        const struct hvd_plane *plane = open_p2p(&arg, (*algo)->name, &opened);
        for (int rank = 0; rank < arg.size; rank++)
            if (rank != arg.rank)
                setsockopt(arg.link[rank]->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        for (int i = 0; i < COUNT; i++)
            values[i] = (float)(arg.rank + i % 10);
        struct hvd_work work = hvd_bucket_sum(&piece, values, COUNT);
        if (arg.rank != 0)
            begin(plane, opened, &work);
        hvd_world_meet(&arg);
        int code = arg.rank == 0 ? hvd_world_do(&arg, plane, opened, &work, &error)
                                 : hvd_world_finish(&arg, plane, opened, &work, &error);
        CHECK(code == HVD_OK, "%s: %s", (*algo)->name, error.text);
        for (int i = 0; i < COUNT; i++)
            CHECK(values[i] == (float)(arg.size * (arg.size - 1) / 2 + arg.size * (i % 10)), "%s: element %d is %g",
                  (*algo)->name, i, (double)values[i]);
        hvd_world_meet(&arg);
        plane->close(opened);
    }
}

static void must_fail(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened, bool begun,
                      int code, const char *name)
{
    static _Thread_local float values[1000];
    struct hvd_piece piece;
    struct hvd_error error = {0};
    struct hvd_work work = hvd_bucket_sum(&piece, values, 1000);
    if (begun)
        begin(plane, opened, &work);
    hvd_world_meet(arg);
    int got =
        begun ? hvd_world_finish(arg, plane, opened, &work, &error) : hvd_world_do(arg, plane, opened, &work, &error);
    CHECK(got == code && error.culprit == arg->size - 1 && strstr(error.text, name), "rank %d: %d, culprit %d: %s",
          arg->rank, got, error.culprit, error.text);
    struct hvd_error again = {0};
    CHECK(plane->start(opened, &work, &again) == code && strcmp(again.text, error.text) == 0,
          "after a failure every call repeats it: %s", again.text);
}

/* Only links between the culprit and the others are cut, so each of the others must see it by itself. Rank 2 has sent
 * the culprit all it had to, and waits for rank 0, which begins when the end is there and stops before it sends.
 */
static void a_lost_peer_is_named(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    struct hvd_plane_arg arg = *world;
    void *opened;
    const struct hvd_plane *plane = open_p2p(&arg, "direct", &opened);
    if (arg.rank == arg.size - 1) {
        for (int rank = 0; rank < arg.size - 1; rank++)
            if (rank != 2)
                shutdown(arg.link[rank]->fd, SHUT_RDWR);
        hvd_world_meet(&arg);
        if (arg.size > 3)
            shutdown(arg.link[2]->fd, SHUT_RDWR);
    } else {
        must_fail(&arg, plane, opened, arg.rank == 2, HVD_EPEER, arg.size == 2 ? "rank 1" : "rank 3");
    }
    hvd_world_meet(&arg);
    plane->close(opened);
}

/* Who gets junk stops, so all have sent theirs before. (Ranks that wait for one that stopped are the engine's.) */
static void a_peer_that_babbles_is_named(const struct hvd_plane_arg *world, void *more)
{
    (void)more;
    struct hvd_plane_arg arg = *world;
    void *opened;
    const struct hvd_plane *plane = open_p2p(&arg, "direct", &opened);
    if (arg.rank == arg.size - 1) {
        unsigned char junk[64];
        memset(junk, 0xab, sizeof junk);
        hvd_world_meet(&arg);
        for (int rank = 0; rank < arg.size - 1; rank++)
            CHECK(write(arg.link[rank]->fd, junk, sizeof junk) == sizeof junk, "written");
    } else {
        must_fail(&arg, plane, opened, true, HVD_EINTERNAL, "of another collective");
    }
    hvd_world_meet(&arg);
    plane->close(opened);
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
    (void)more;
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

int main(void)
{
    static const int sizes[] = {2, 3, 5, 8};
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 200, every_algorithm, NULL);
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 100, bytes_are_counted_and_are_the_formula, NULL);
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 100, bits_do_not_depend_on_the_bucket, NULL);
    }
    hvd_world_run(HVD_WORLD_THREADS, 2, 200, slow_readers_are_waited_for, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 6, 200, slow_readers_are_waited_for, NULL);
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, slow_readers_are_waited_for, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 2, 50, a_lost_peer_is_named, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 50, a_lost_peer_is_named, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 2, 50, a_peer_that_babbles_is_named, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 50, a_peer_that_babbles_is_named, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 2, 50, wrong_arguments_are_refused, NULL);
    return 0;
}
