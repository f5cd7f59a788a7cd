/* test_p2p_sim.c - plane p2p over many seeds of a simulated network: what sockets do once in a thousand runs.
 *
 * A seed gives everything: the network's times and where it cuts what is sent, the order in which ranks run, the works,
 * the algorithm. All ranks of a world draw the same works. A deadlock ends the test at once (baton.h). Then: a rank is
 * gone at any moment, and every other one has either the right values or its name. And the time that a collective takes
 * is what the cost model says, by which algorithms are chosen.
 */
#include "bucket.h"
#include "kernel/kernel.h"
#include "plane/p2p/eager_send.h"
#include "world.h"

#include <string.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 12 };
#else
enum { SEEDS = 24 };
#endif
enum { WORKS = 12, SUMS = 300 };

static const struct hvd_sim_line lines[] = {
    /* every call moves a few bytes, pieces of other links overtake by far */
    {.delay_ns = 100, .jitter_ns = 100000, .byte_ps = 100, .room = 500, .piece = 200, .ragged = true},
    /* little fits on the way, all of it comes soon */
    {.delay_ns = 10, .jitter_ns = 0, .byte_ps = 0, .room = 37, .piece = 37},
    /* slow and long: much is on the way */
    {.delay_ns = 2000000, .jitter_ns = 10000, .byte_ps = 8000, .room = 1 << 20, .piece = 1 << 15, .ragged = true},
};

static const struct hvd_algo *any_algo(uint64_t *draw)
{
    int count = 0;
    while (hvd_algos[count])
        count++;
    int i = (int)hvd_sim_below(draw, (uint64_t)count + 1);
    return i == count ? NULL : hvd_algos[i];
}

static const struct hvd_plane *open_any(struct hvd_plane_arg *arg, uint64_t *draw, void **opened)
{
    const struct hvd_algo *algo = any_algo(draw);
    arg->algo = algo ? algo->name : NULL;
    arg->any_order = algo || hvd_sim_below(draw, 2);
    arg->link_cost = (struct hvd_cost){hvd_sim_below(draw, 2) * 100000, hvd_sim_below(draw, 2) * 8000};
    return hvd_world_open(arg, "p2p", opened);
}

/* A work that may be any; sums are of small integers, which any order sums exactly. */
static struct hvd_work draw_work(int size, uint64_t *draw)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_ALLGATHER,
                                HVD_BROADCAST, HVD_ALLTOALL,  HVD_REDUCESCATTER};
    static const int dtypes[] = {HVD_DTYPE_float32, HVD_DTYPE_float64,  HVD_DTYPE_int8,
                                 HVD_DTYPE_int32,   HVD_DTYPE_bfloat16, HVD_DTYPE_float8_e5m2};
    static const int ops[] = {HVD_OP_sum, HVD_OP_average, HVD_OP_min, HVD_OP_max};
    return (struct hvd_work){.kind = kinds[hvd_sim_below(draw, HVD_COUNT_OF(kinds))],
                             .op = ops[hvd_sim_below(draw, HVD_COUNT_OF(ops))],
                             .dtype = dtypes[hvd_sim_below(draw, HVD_COUNT_OF(dtypes))],
                             .divide_by = size,
                             .prescale = 1,
                             .postscale = hvd_sim_below(draw, 4) ? 1 : 2,
                             .root = (int)hvd_sim_below(draw, (uint64_t)size)};
}

/* Some ranks guess what comes next, rightly or not; so the others find messages that left too early, or too late. */
static void may_foresee(const struct hvd_plane *plane, void *opened, const struct hvd_work *next, uint64_t *own)
{
    struct hvd_work guess = *next;
    uint64_t how = next->piece[0].in ? hvd_sim_below(own, 4) : 0; /* who has joined has nothing to guess */
    guess.tag += how == 1;                                        /* another tensor of the same shape */
    if (how > 0 && plane->foresee)
        plane->foresee(opened, &guess);
    if (how == 3 && plane->foresee) /* again */
        plane->foresee(opened, &guess);
}

static void any_works(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    uint64_t draw = *(uint64_t *)more; /* a copy: the same on all ranks */
    uint64_t own = draw + 1000 * (uint64_t)arg.rank;
    void *opened;
    const struct hvd_plane *plane = open_any(&arg, &draw, &opened);
    for (int i = 0; i < WORKS; i++) {
        struct hvd_work like = draw_work(arg.size, &draw);
        uint64_t most = UINT64_C(1) << hvd_sim_below(&draw, hvd_bucket_shapes(like.kind) > HVD_BUCKET_SHAPES ? 9 : 12);
        uint64_t count = hvd_sim_below(&draw, most);
        int shape = (int)hvd_sim_below(&draw, (uint64_t)hvd_bucket_shapes(like.kind)),
            place = (int)hvd_sim_below(&draw, HVD_BUCKET_PLACES);
        bool joins = like.kind == HVD_ALLREDUCE && hvd_sim_below(&draw, 4) == 0;
        struct hvd_bucket bucket;
        struct hvd_error error = {0};
        hvd_bucket_make(&bucket, &like, count, shape, place, arg.rank, arg.size,
                        joins ? UINT64_C(1) << (arg.size - 1) : 0, NULL, NULL);
        bucket.work.tag = (uint64_t)i;
        may_foresee(plane, opened, &bucket.work, &own);
        CHECK(hvd_world_do(&arg, plane, opened, &bucket.work, &error) == HVD_OK, "seed %llu, %s: %s",
              (unsigned long long)*(uint64_t *)more, arg.algo ? arg.algo : "the cheapest", error.text);
        hvd_bucket_check(&bucket);
    }
    plane->close(opened);
}

/* Both have a wrong guess under way, of which the line holds a few bytes: it must not wait for what follows it. */
static void wrong_guesses_and_an_exchange(const struct hvd_plane_arg *arg, void *more)
{
    enum { COUNT = 20000 };
    static _Thread_local float values[COUNT];
    struct hvd_piece piece;
    struct hvd_error error = {0};
    void *opened;
    const struct hvd_plane *plane = hvd_world_open(arg, "p2p", &opened);
    struct hvd_work guess = hvd_bucket_sum(&piece, values, HVD_EARLY_BYTES / sizeof *values), work;
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(arg->rank + i % 10);
    plane->foresee(opened, &guess);
    work = hvd_bucket_sum(&piece, values, COUNT);
    CHECK(hvd_world_do(arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < COUNT; i++)
        CHECK(values[i] == (float)(1 + 2 * (i % 10)), "element %d is %g", i, (double)values[i]);
    plane->close(opened);
}

static void every_seed_of_any_works(void)
{
    static const int sizes[] = {2, 3, 4, 5, 7, 8, 13};
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (size_t k = 0; k < HVD_COUNT_OF(lines); k++)
            hvd_world_sim(sizes[seed % HVD_COUNT_OF(sizes)], seed, &lines[k], 300, any_works, &seed);
    for (size_t k = 0; k < HVD_COUNT_OF(lines); k++)
        hvd_world_sim(2, k, &lines[k], 300, wrong_guesses_and_an_exchange, NULL);
}

struct doom {
    uint64_t seed, moments;       /* it is gone at one of so many ns */
    int victim, failed, finished; /* how often, of all survivors' sums */
};

/* Sums until somebody is missed. */
static void until_a_rank_is_gone(const struct hvd_plane_arg *world, void *more)
{
    static _Thread_local float values[SUMS];
    struct doom *doom = more;
    struct hvd_plane_arg arg = *world;
    uint64_t draw = doom->seed;
    void *opened;
    const struct hvd_plane *plane = open_any(&arg, &draw, &opened);
    int code = HVD_OK;
    hvd_sim_drop(hvd_world_net(&arg), doom->victim, hvd_sim_below(&draw, doom->moments));
    for (int turn = 0; code == HVD_OK; turn++) {
        struct hvd_piece piece;
        struct hvd_error error = {0};
        struct hvd_work work = hvd_bucket_sum(&piece, values, SUMS);
        for (int i = 0; i < SUMS; i++)
            values[i] = (float)(arg.rank + (i + turn) % 11);
        code = hvd_world_do(&arg, plane, opened, &work, &error);
        if (arg.rank == doom->victim)
            continue;
        if (code != HVD_OK) {
            CHECK(code == HVD_EPEER && error.culprit == doom->victim, "seed %llu, rank %d: %d, culprit %d, not %d: %s",
                  (unsigned long long)doom->seed, arg.rank, code, error.culprit, doom->victim, error.text);
            CHECK(plane->start(opened, &work, &error) == HVD_EPEER, "it is forgotten");
            doom->failed++;
            break;
        }
        doom->finished++;
        for (int i = 0; i < SUMS; i++)
            CHECK(values[i] == (float)(arg.size * (arg.size - 1) / 2 + arg.size * ((i + turn) % 11)),
                  "seed %llu, rank %d: element %d is %g", (unsigned long long)doom->seed, arg.rank, i,
                  (double)values[i]);
    }
    plane->close(opened);
}

static void every_moment_at_which_a_rank_is_gone(void)
{
    int finished = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (size_t k = 0; k < HVD_COUNT_OF(lines); k++) {
            int size = 2 + (int)(seed % 7);
            struct doom doom = {.seed = seed,
                                .moments = 40 * (lines[k].delay_ns + lines[k].jitter_ns),
                                .victim = (int)(seed / 7) % size};
            hvd_world_sim(size, seed, &lines[k], 300, until_a_rank_is_gone, &doom);
            CHECK(doom.failed == size - 1, "%d of %d survivors miss it", doom.failed, size - 1);
            finished += doom.finished;
        }
    CHECK(finished > SEEDS, "only %d sums came to an end: no rank lived long enough", finished);
}

static const struct hvd_algo *timed;
static uint64_t timed_count;

static void one_sum(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_piece piece;
    struct hvd_error error = {0};
    void *opened;
    float *values = calloc(timed_count, sizeof *values);
    arg.algo = timed->name;
    arg.any_order = true;
    const struct hvd_plane *plane = hvd_world_open(&arg, "p2p", &opened);
    struct hvd_work work = hvd_bucket_sum(&piece, values, timed_count);
    CHECK(values && hvd_world_do(&arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    plane->close(opened);
    free(values);
}

/* Never slower than the model, but for the heads of messages, and never faster than every rank's share of the bytes can
 * leave its port. What a ring passes on while it is still arriving makes it faster than the model; where nothing is
 * passed on, the network is as slow as that, but for the work of ranks, which takes no time here.
 */
static void time_is_what_the_cost_model_says(void)
{
    const struct hvd_cost cost = {.alpha_ns = 50000, .beta_ps = 1000};
    const struct hvd_sim_line line = {
        .delay_ns = cost.alpha_ns, .byte_ps = cost.beta_ps, .room = 1 << 22, .piece = 1 << 16};
    static const uint64_t counts[] = {16, 4096, 262144};
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        for (int size = 2; size <= 8; size += size < 4 ? 1 : 4)
            for (size_t k = 0; k < HVD_COUNT_OF(counts) && (*algo)->can(HVD_ALLREDUCE, size); k++) {
                struct hvd_shape shape = {
                    .kind = HVD_ALLREDUCE, .size = size, .count = counts[k], .grain = (128 << 10) / sizeof(float)};
                timed = *algo;
                timed_count = counts[k];
                uint64_t model = hvd_algo_cost(timed, &shape, sizeof(float), cost);
                uint64_t took = hvd_world_sim(size, 1, &line, 100, one_sum, NULL);
                uint64_t n = (uint64_t)size, heads = (uint64_t)timed->steps(&shape) * 24;
                uint64_t port = 2 * (n - 1) * (counts[k] / n) * sizeof(float) * cost.beta_ps / 1000;
                CHECK(took <= model + heads * cost.beta_ps / 1000 && took >= cost.alpha_ns + port,
                      "%s, %d ranks, %llu elements: %llu ns, and the model says %llu", timed->name, size,
                      (unsigned long long)counts[k], (unsigned long long)took, (unsigned long long)model);
                bool passes_on = timed != hvd_algo_named("direct") && timed != hvd_algo_named("whole");
                CHECK(passes_on || model <= took + (uint64_t)timed->steps(&shape) * 5000,
                      "%s, %d ranks, %llu elements: %llu ns is less than the model's %llu", timed->name, size,
                      (unsigned long long)counts[k], (unsigned long long)took, (unsigned long long)model);
                if (timed == hvd_algo_named("ring") && size == 8 && k == HVD_COUNT_OF(counts) - 1)
                    CHECK(took * 5 < model * 4, "a ring that waits for whole chunks: %llu of %llu ns",
                          (unsigned long long)took, (unsigned long long)model);
            }
}

int main(void)
{
    every_seed_of_any_works();
    every_moment_at_which_a_rank_is_gone();
    time_is_what_the_cost_model_says();
    return 0;
}
