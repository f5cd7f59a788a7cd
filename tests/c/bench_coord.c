/* bench_coord.c - what agreement costs, without the wire.
 *
 *     bench_coord                 161 tensors on 2 ranks, then 10,000 ranks
 *     bench_coord RANKS TENSORS   only that many
 *
 * Per phase the median over rounds of: submitting all tensors, writing one vote, checking and merging one vote,
 * deciding, fusing; in ns, on one rank. With many ranks the merges run as a binary tree, as they would between hosts,
 * and the critical path is shown: the merges on the way from a leaf to the root and back, one decide.
 */
#include "check.h"
#include "coord/state.h"
#include "ranks.h"

#include <time.h>

#define ROUNDS 51

enum { SUBMIT, VOTE, MERGE, DECIDE, FUSE, PHASES };
static const char *const phase_name[PHASES] = {"submit all", "vote", "check and merge one", "decide", "fuse"};

struct bench {
    int size, tensors;
    struct hvd_coord_limits limits;
    char *coords, *votes;
    size_t coord_bytes, vote_bytes;
    struct hvd_plan plan;
    char (*name)[48];
    uint64_t sample[PHASES][ROUNDS];
};

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static struct hvd_coord *coord_of(struct bench *bench, int rank)
{
    return (struct hvd_coord *)(bench->coords + bench->coord_bytes * (size_t)rank);
}

static struct hvd_vote *vote_of(struct bench *bench, int rank)
{
    return (struct hvd_vote *)(bench->votes + bench->vote_bytes * (size_t)rank);
}

static void *take(size_t bytes)
{
    void *memory = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes, (size_t)HVD_CACHE_LINE));
    CHECK(memory, "%zu bytes", bytes);
    return memory;
}

static void open_bench(struct bench *bench, int size, int tensors)
{
    uint32_t room = (uint32_t)tensors + 3;
    bench->size = size;
    bench->tensors = tensors;
    bench->limits =
        (struct hvd_coord_limits){.size = size, .slots = room, .tickets = room, .fresh = room, .names = &ranks_names};
    bench->coord_bytes = HVD_ALIGN_UP(hvd_coord_bytes(&bench->limits), (size_t)HVD_CACHE_LINE);
    bench->vote_bytes = HVD_ALIGN_UP(hvd_vote_bytes_max(&bench->limits), (size_t)HVD_CACHE_LINE);
    bench->coords = take(bench->coord_bytes * (size_t)size);
    bench->votes = take(bench->vote_bytes * (size_t)size);
    bench->plan.items_max = 2 * room;
    bench->plan.item = take(sizeof *bench->plan.item * bench->plan.items_max);
    bench->name = take(sizeof *bench->name * room);
    for (int i = 0; i < tensors; i++)
        snprintf(bench->name[i], sizeof *bench->name, "layer%d.%d.conv%d.weight", 1 + i / 40, i / 6, i % 6);
    for (int rank = 0; rank < size; rank++) {
        bench->limits.rank = rank;
        hvd_coord_open(coord_of(bench, rank), &bench->limits);
    }
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void one_round(struct bench *bench, int round)
{
    uint8_t bytes_of[11] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
    struct hvd_signature signature = ranks_signature(1000);
    uint64_t start = now_ns(), merges = 0;
    for (int rank = 0; rank < bench->size; rank++)
        for (int i = 0; i < bench->tensors; i++) {
            signature.dims[0] = 1000 + i;
            int code = hvd_coord_submit(coord_of(bench, rank), (uint32_t)i, bench->name[i], &signature, 0);
            CHECK(code == HVD_OK, "%d", code);
        }
    bench->sample[SUBMIT][round] = (now_ns() - start) / (uint64_t)bench->size;
    start = now_ns();
    for (int rank = 0; rank < bench->size; rank++)
        hvd_coord_vote(coord_of(bench, rank), vote_of(bench, rank), bench->vote_bytes);
    bench->sample[VOTE][round] = (now_ns() - start) / (uint64_t)bench->size;
    start = now_ns();
    for (int step = 1; step < bench->size; step *= 2)
        for (int rank = 0; rank + step < bench->size; rank += 2 * step, merges++) {
            CHECK(hvd_vote_check(coord_of(bench, rank), vote_of(bench, rank + step), bench->vote_bytes) == HVD_OK,
                  "vote of rank %d", rank + step);
            hvd_vote_merge(coord_of(bench, rank), vote_of(bench, rank), vote_of(bench, rank + step));
        }
    bench->sample[MERGE][round] = merges ? (now_ns() - start) / merges : 0;
    uint64_t deciding = 0, fusing = 0;
    for (int rank = 0; rank < bench->size; rank++) {
        start = now_ns();
        hvd_coord_decide(coord_of(bench, rank), vote_of(bench, 0), &bench->plan);
        uint64_t middle = now_ns();
        hvd_plan_fuse(&bench->plan, 64 << 20, bytes_of);
        fusing += now_ns() - middle;
        deciding += middle - start;
        CHECK(bench->plan.items == (uint32_t)bench->tensors, "%u items", bench->plan.items);
    }
    bench->sample[DECIDE][round] = deciding / (uint64_t)bench->size;
    bench->sample[FUSE][round] = fusing / (uint64_t)bench->size;
}

static void run(int size, int tensors)
{
    struct bench bench = {0};
    open_bench(&bench, size, tensors);
    int rounds = size > 100 ? 5 : ROUNDS, levels = 0;
    for (int step = 1; step < size; step *= 2)
        levels++;
    one_round(&bench, 0);
    printf("%d ranks, %d tensors, coordinator %zu KB, vote %u bytes fresh\n", size, tensors, bench.coord_bytes >> 10,
           vote_of(&bench, size - 1)->bytes);
    for (int phase = 0; phase < PHASES; phase++)
        printf("  fresh  %-20s %9llu ns\n", phase_name[phase], (unsigned long long)bench.sample[phase][0]);
    for (int round = 0; round < rounds; round++)
        one_round(&bench, round);
    uint64_t median[PHASES], sum = 0;
    for (int phase = 0; phase < PHASES; phase++) {
        qsort(bench.sample[phase], (size_t)rounds, sizeof bench.sample[phase][0], by_size);
        median[phase] = bench.sample[phase][rounds / 2];
        sum += median[phase];
        printf("  known  %-20s %9llu ns\n", phase_name[phase], (unsigned long long)median[phase]);
    }
    printf("  known  all of these once    %9llu ns; vote %u bytes; %d levels of merges and a decide: %llu ns\n",
           (unsigned long long)sum, vote_of(&bench, size - 1)->bytes, levels,
           (unsigned long long)(median[VOTE] + median[MERGE] * (uint64_t)levels + median[DECIDE]));
    free(bench.coords);
    free(bench.votes);
    free(bench.plan.item);
    free(bench.name);
}

int main(int argc, char **argv)
{
    if (argc > 2) {
        run(atoi(argv[1]), atoi(argv[2]));
        return 0;
    }
    run(2, 161);
    run(10000, 161);
    return 0;
}
