/* test_crowd.c - planes between hosts with more ranks than any one host has: every kind of collective, over the
 * simulated network, by every algorithm in turn and by the two planes.
 *
 * What could be wrong with 65 ranks that was right with 64? A table by rank, a set of ranks in one word, a kernel that
 * takes so many arrays. Values are closed forms of rank and place; those in rank order are held against the kernel's
 * own sum of all ranks' values, bit for bit. Kinds in which each rank sends to each are done by 65 ranks; more only sum
 * and broadcast, for a change of threads is what a simulation costs. So there is nothing here for the thread sanitizer.
 */
#include "kernel/kernel.h"
#include "world.h"

#include <string.h>

enum { COUNT = 300, PLACES = 3, EACH_WITH_EACH = 65 }; /* ranks, whose n * n messages do not take a test too long */

static const struct hvd_sim_line line = {.delay_ns = 1000, .room = 1 << 10, .piece = 1 << 9};
static int hosts_of[HVD_RANKS_MAX];

struct asked {
    const char *plane;
    const struct hvd_algo *algo; /* NULL: the cheapest */
    bool any_order;
};

static uint32_t number(int from, int to, uint64_t i)
{
    return (uint32_t)from * 1000003u + (uint32_t)to * 10007u + (uint32_t)i;
}

/* What all ranks' numbers for `to` at place i add up to. */
static uint32_t numbers(int size, int to, uint64_t i)
{
    return (uint32_t)size * number(0, to, i) + (uint32_t)(size * (size - 1) / 2) * 1000003u;
}

static void do_it(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened, struct hvd_work *work,
                  struct hvd_piece piece)
{
    struct hvd_error error = {0};
    work->op = HVD_OP_sum;
    work->divide_by = arg->size;
    work->prescale = work->postscale = 1;
    work->piece = &piece;
    work->pieces = 1;
    if (plane->can(opened, work))
        CHECK(hvd_world_do(arg, plane, opened, work, &error) == HVD_OK, "%s", error.text);
    else
        CHECK(strcmp(plane->name, "hier") == 0, "%s cannot do kind %d", plane->name, work->kind);
}

static void sum_integers(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened)
{
    uint32_t values[COUNT];
    for (uint64_t i = 0; i < COUNT; i++)
        values[i] = number(arg->rank, 7, i);
    struct hvd_work work = {.kind = HVD_ALLREDUCE, .dtype = HVD_DTYPE_int32, .count = COUNT};
    do_it(arg, plane, opened, &work, (struct hvd_piece){values, values, COUNT});
    for (uint64_t i = 0; i < COUNT; i++)
        CHECK(values[i] == numbers(arg->size, 7, i), "%d ranks, element %d of the sum", arg->size, (int)i);
}

static float fraction(int rank, int i)
{
    return 1.0f / (float)(1 + (rank * 31 + i * 17) % 101);
}

/* Sums of floats that no two orders give alike. */
static void sum_floats(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened)
{
    float values[COUNT], *all = malloc(sizeof *all * (size_t)arg->size), wanted;
    const void *source[HVD_RANKS_MAX];
    for (int i = 0; i < COUNT; i++)
        values[i] = fraction(arg->rank, i);
    struct hvd_work work = {.kind = HVD_ALLREDUCE, .dtype = HVD_DTYPE_float32, .count = COUNT};
    do_it(arg, plane, opened, &work, (struct hvd_piece){values, values, COUNT});
    struct hvd_scale scale = hvd_scale_fold(HVD_OP_sum, HVD_DTYPE_float32, arg->size, arg->size, 1, 1);
    for (int i = 0; i < COUNT; i += 13) {
        for (int rank = 0; rank < arg->size; rank++) {
            all[rank] = fraction(rank, i);
            source[rank] = &all[rank];
        }
        hvd_reduce(HVD_DTYPE_float32, &scale, &wanted, source, arg->size, 1);
        CHECK(memcmp(&values[i], &wanted, sizeof wanted) == 0, "%d ranks, element %d: %.9g, not %.9g", arg->size, i,
              (double)values[i], (double)wanted);
    }
    free(all);
}

static void broadcast(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened)
{
    uint32_t values[COUNT];
    for (int place = 0; place < PLACES; place++) {
        int root = place * (arg->size - 1) / (PLACES - 1);
        for (uint64_t i = 0; i < COUNT; i++)
            values[i] = number(arg->rank, root, i);
        struct hvd_work work = {.kind = HVD_BROADCAST, .dtype = HVD_DTYPE_int32, .count = COUNT, .root = root};
        do_it(arg, plane, opened, &work, (struct hvd_piece){values, values, COUNT});
        for (uint64_t i = 0; i < COUNT; i++)
            CHECK(values[i] == number(root, root, i), "%d ranks, from %d, element %d", arg->size, root, (int)i);
    }
}

/* Each rank has another number of elements, some none; and shares of a sum alike. */
static void ragged(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened)
{
    uint64_t count_of[HVD_RANKS_MAX], total = 0, before = 0;
    for (int rank = 0; rank < arg->size; rank++) {
        before = rank == arg->rank ? total : before;
        total += count_of[rank] = (uint64_t)(rank % 4);
    }
    uint64_t mine = count_of[arg->rank];
    uint32_t *all = malloc(sizeof *all * (total + 1)), own[4], *next = all;
    CHECK(all, "no memory");
    for (uint64_t i = 0; i < mine; i++)
        own[i] = number(arg->rank, 0, i);
    struct hvd_work gather = {.kind = HVD_ALLGATHER, .dtype = HVD_DTYPE_int32, .count = mine, .count_of = count_of};
    do_it(arg, plane, opened, &gather, (struct hvd_piece){own, all, mine});
    for (int rank = 0; rank < arg->size; rank++)
        for (uint64_t i = 0; i < count_of[rank]; i++)
            CHECK(*next++ == number(rank, 0, i), "%d ranks, gathered from %d", arg->size, rank);
    for (uint64_t i = 0; i < total; i++)
        all[i] = number(arg->rank, 9, i);
    struct hvd_work scatter = {
        .kind = HVD_REDUCESCATTER, .dtype = HVD_DTYPE_int32, .count = total, .count_of = count_of};
    do_it(arg, plane, opened, &scatter, (struct hvd_piece){all, own, total});
    for (uint64_t i = 0; i < mine; i++)
        CHECK(own[i] == numbers(arg->size, 9, before + i), "%d ranks, scattered", arg->size);
    free(all);
}

static uint64_t cell(int from, int to)
{
    return (uint64_t)((from * 5 + to * 3) % 4);
}

static void alltoall(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened)
{
    size_t n = (size_t)arg->size;
    uint64_t *count_of = malloc(sizeof *count_of * n * n), given = 0, taken = 0;
    uint32_t *in = malloc(sizeof *in * 4 * n), *out = malloc(sizeof *out * 4 * n), *next = out;
    CHECK(count_of && in && out, "no memory");
    for (size_t k = 0; k < n * n; k++)
        count_of[k] = cell((int)(k / n), (int)(k % n));
    for (int rank = 0; rank < arg->size; rank++) {
        for (uint64_t i = 0; i < cell(arg->rank, rank); i++)
            in[given++] = number(arg->rank, rank, i);
        taken += cell(rank, arg->rank);
    }
    struct hvd_work work = {.kind = HVD_ALLTOALL, .dtype = HVD_DTYPE_int32, .count = given, .count_of = count_of};
    do_it(arg, plane, opened, &work, (struct hvd_piece){in, out, given});
    for (int rank = 0; rank < arg->size; rank++)
        for (uint64_t i = 0; i < cell(rank, arg->rank); i++)
            CHECK(*next++ == number(rank, arg->rank, i), "%d ranks, from %d to %d", arg->size, rank, arg->rank);
    CHECK((uint64_t)(next - out) == taken, "%d ranks", arg->size);
    free(count_of);
    free(in);
    free(out);
}

static void all_kinds(const struct hvd_plane_arg *world, void *more)
{
    const struct asked *asked = more;
    struct hvd_plane_arg arg = *world;
    void *opened;
    arg.algo = asked->algo ? asked->algo->name : NULL;
    arg.any_order = asked->any_order;
    const struct hvd_plane *plane = hvd_world_open(&arg, asked->plane, &opened);
    bool hier = strcmp(asked->plane, "hier") == 0;
    sum_integers(&arg, plane, opened);
    broadcast(&arg, plane, opened);
    if (!hier && !asked->any_order)
        sum_floats(&arg, plane, opened);
    if (!hier && !asked->algo && arg.size <= EACH_WITH_EACH) {
        ragged(&arg, plane, opened);
        alltoall(&arg, plane, opened);
    }
    plane->close(opened);
}

/* Hosts of about as many ranks each, which are not side by side. */
static void place(int size, int hosts)
{
    for (int rank = 0; rank < size; rank++)
        hosts_of[rank] = rank % hosts;
    hvd_world_host_of = hosts_of;
}

static void both_planes(int size)
{
    place(size, size / 7);
    hvd_world_sim(size, 1, &line, 300, all_kinds, &(struct asked){"p2p", NULL, size > EACH_WITH_EACH});
    hvd_world_sim(size, 2, &line, 300, all_kinds, &(struct asked){"hier", NULL, true});
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    return 77;
#endif
    both_planes(EACH_WITH_EACH);
#if !defined(HVD_SANITIZED)
    both_planes(257);
    place(EACH_WITH_EACH, 9);
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        if ((*algo)->can(HVD_ALLREDUCE, EACH_WITH_EACH))
            hvd_world_sim(EACH_WITH_EACH, 3, &line, 300, all_kinds, &(struct asked){"p2p", *algo, true});
#endif
    return 0;
}
