/* test_hier_sim.c - planes hier and p2p of one set over the same simulated links, over many seeds; and what hier gains,
 * on the network's clock.
 *
 * Each work is done by either of them, all ranks drawing the same; before it some ranks guess rightly or wrongly what
 * p2p might do next, over links that take a few bytes at a time: half a guess is then on a link that hier uses next.
 * Ranks of a host share a port, as they share a card.
 */
#include "bucket.h"
#include "plane/hier/state.h"
#include "world.h"

#include <string.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 6 };
#else
enum { SEEDS = 24 };
#endif
enum { WORKS = 16, MANY = 1 << 20 };

static const int pairs[] = {0, 0, 1, 1}, ragged[] = {0, 1, 0, 2, 1, 2, 0}, wide[] = {0, 0, 0, 0, 1, 1, 1, 1};
static const struct {
    int size;
    const int *host_of;
} worlds[] = {{4, pairs}, {7, ragged}, {8, wide}};

static const struct hvd_sim_line lines[] = {
    {.delay_ns = 100, .jitter_ns = 100000, .byte_ps = 100, .room = 500, .piece = 200, .ragged = true},
    {.delay_ns = 10, .jitter_ns = 0, .byte_ps = 0, .room = 37, .piece = 37},
    {.delay_ns = 2000000, .jitter_ns = 10000, .byte_ps = 8000, .room = 1 << 20, .piece = 1 << 15, .ragged = true},
};

static struct hvd_work draw_work(int size, uint64_t *draw)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_BROADCAST, HVD_ALLGATHER};
    static const int dtypes[] = {HVD_DTYPE_float32, HVD_DTYPE_int32, HVD_DTYPE_bfloat16, HVD_DTYPE_float8_e4m3fn};
    static const int ops[] = {HVD_OP_sum, HVD_OP_average, HVD_OP_max};
    return (struct hvd_work){.kind = kinds[hvd_sim_below(draw, HVD_COUNT_OF(kinds))],
                             .op = ops[hvd_sim_below(draw, HVD_COUNT_OF(ops))],
                             .dtype = dtypes[hvd_sim_below(draw, HVD_COUNT_OF(dtypes))],
                             .divide_by = size,
                             .prescale = 1,
                             .postscale = 1,
                             .root = (int)hvd_sim_below(draw, (uint64_t)size)};
}

static void works_of_both(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    uint64_t seed = *(uint64_t *)more, draw = seed, own = seed + 1000 * (uint64_t)arg.rank;
    void *opened[2];
    arg.any_order = true;
    const struct hvd_plane *plane[] = {hvd_world_open(&arg, "hier", &opened[0]),
                                       hvd_world_open(&arg, "p2p", &opened[1])};
    for (int i = 1; i <= WORKS; i++) {
        struct hvd_work like = draw_work(arg.size, &draw);
        uint64_t most = UINT64_C(1) << hvd_sim_below(&draw, 12), count = hvd_sim_below(&draw, most);
        int shape = (int)hvd_sim_below(&draw, HVD_BUCKET_SHAPES), by = hvd_sim_below(&draw, 3) == 0;
        struct hvd_bucket bucket;
        struct hvd_error error = {0};
        hvd_bucket_make(&bucket, &like, count, shape, HVD_BUCKET_OUT_OF_PLACE, arg.rank, arg.size, 0, NULL, NULL);
        bucket.work.tag = (uint64_t)i;
        by = plane[0]->can(opened[0], &bucket.work) ? by : 1;
        struct hvd_work guess = bucket.work;
        guess.tag += hvd_sim_below(&own, 2) * 1000;
        if (hvd_sim_below(&own, 3))
            plane[1]->foresee(opened[1], &guess);
        CHECK(hvd_world_do(&arg, plane[by], opened[by], &bucket.work, &error) == HVD_OK, "seed %llu, work %d on %s: %s",
              (unsigned long long)seed, i, plane[by]->name, error.text);
        hvd_bucket_check(&bucket);
    }
    hvd_world_meet(&arg);
    plane[1]->close(opened[1]);
    plane[0]->close(opened[0]);
}

static void guesses_leave_no_half_messages(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (size_t k = 0; k < HVD_COUNT_OF(lines); k++) {
            size_t w = (seed + k) % HVD_COUNT_OF(worlds);
            struct hvd_sim_line line = lines[k];
            hvd_world_host_of = line.host_of = worlds[w].host_of;
            hvd_world_sim(worlds[w].size, seed, &line, 300, works_of_both, &seed);
        }
}

struct timed {
    const char *plane, *algo;
    struct hvd_cost cost;
    uint64_t count;
};

static void one_sum(const struct hvd_plane_arg *world, void *more)
{
    struct timed *timed = more;
    struct hvd_plane_arg arg = *world;
    struct hvd_piece piece;
    struct hvd_error error = {0};
    void *opened;
    float *values = malloc(timed->count * sizeof *values);
    CHECK(values, "no memory");
    for (uint64_t i = 0; i < timed->count; i++)
        values[i] = (float)(arg.rank + (int)(i % 7));
    arg.algo = timed->algo;
    arg.any_order = true;
    arg.link_cost = timed->cost;
    const struct hvd_plane *plane = hvd_world_open(&arg, timed->plane, &opened);
    struct hvd_work work = hvd_bucket_sum(&piece, values, timed->count);
    CHECK(hvd_world_do(&arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    for (uint64_t i = 0; i < timed->count; i++)
        CHECK(values[i] == (float)(arg.size * (arg.size - 1) / 2 + arg.size * (int)(i % 7)), "element %llu",
              (unsigned long long)i);
    hvd_world_meet(&arg);
    plane->close(opened);
    free(values);
}

/* 1 Gbit/s, ranks of a host on one port. The flat ring sends 2 (n - 1) / n of the bytes of n ranks over each host's
 * port, hier those of as many hosts: 1.5 times as much with two hosts of two. */
static void hier_is_faster_than_a_flat_ring(uint64_t delay_ns)
{
    struct hvd_sim_line line = {
        .host_of = pairs, .delay_ns = delay_ns, .byte_ps = 8000, .room = 1 << 22, .piece = 1 << 16};
    struct hvd_cost cost = {.alpha_ns = delay_ns, .beta_ps = line.byte_ps};
    struct timed ring = {"p2p", "ring", cost, MANY}, flat = {"p2p", NULL, cost, MANY},
                 hier = {"hier", NULL, cost, MANY};
    hvd_world_host_of = pairs;
    uint64_t of_ring = hvd_world_sim(4, 1, &line, 100, one_sum, &ring);
    uint64_t of_flat = hvd_world_sim(4, 1, &line, 100, one_sum, &flat);
    uint64_t of_hier = hvd_world_sim(4, 1, &line, 100, one_sum, &hier);
    printf("2 hosts x 2 ranks, 1 Gbit/s, %.2f ms, 4 MB: ring %.1f ms, p2p's choice %.1f ms, hier %.1f ms\n",
           (double)delay_ns / 1e6, (double)of_ring / 1e6, (double)of_flat / 1e6, (double)of_hier / 1e6);
    CHECK(of_ring * 10 >= of_hier * 13, "hier takes %llu ns, a flat ring %llu", (unsigned long long)of_hier,
          (unsigned long long)of_ring);
    CHECK(of_flat >= of_hier, "hier takes %llu ns, p2p %llu", (unsigned long long)of_hier, (unsigned long long)of_flat);
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++) {
        struct timed forced = {"p2p", (*algo)->name, cost, MANY};
        if ((*algo)->most || !(*algo)->can(HVD_ALLREDUCE, 4))
            continue;
        uint64_t took = hvd_world_sim(4, 1, &line, 100, one_sum, &forced);
        CHECK(of_flat * 20 <= took * 21, "p2p takes %llu ns, %s %llu", (unsigned long long)of_flat, (*algo)->name,
              (unsigned long long)took);
    }
    uint64_t port = MANY * sizeof(float) * 8;
    CHECK(of_hier > port && of_hier < port + port / 20 + 4 * delay_ns, "hier takes %llu ns, its bytes %llu",
          (unsigned long long)of_hier, (unsigned long long)port);
}

static void choices_follow_the_cost(void)
{
    const struct hvd_cost here = {50000, 1000}, gigabit = {50000, 8000}, far = {2000000, 8000}, fast = {5000, 80};
    struct hvd_hier_place place;
    hvd_hier_lay_out(pairs, 4, 0, &place);
    uint64_t at_gigabit = hvd_hier_least_bytes(&place, 4, true, gigabit);
    CHECK(at_gigabit <= hvd_hier_least_bytes(&place, 4, true, here), "a slower wire makes it worth less");
    CHECK(hvd_hier_least_bytes(&place, 4, true, here) < hvd_hier_least_bytes(&place, 4, true, fast),
          "a wire as fast as memory makes it worth as much");
    CHECK(at_gigabit > (8 << 10), "what may leave early is left to p2p");
    CHECK(hvd_hier_segments(&place, 64 << 20, far) < hvd_hier_segments(&place, 64 << 20, gigabit), "pauses are dear");
    CHECK(hvd_hier_segments(&place, 4 << 20, far) == 1 && hvd_hier_segments(&place, 1, here) == 1, "one is enough");
    CHECK(hvd_hier_segments(&place, 64 << 20, fast) < hvd_hier_segments(&place, 64 << 20, (struct hvd_cost){5000, 500}),
          "the wire takes so little that there is less to hide");
}

int main(void)
{
    guesses_leave_no_half_messages();
    hier_is_faster_than_a_flat_ring(50000);
    hier_is_faster_than_a_flat_ring(4000000);
    choices_follow_the_cost();
    return 0;
}
