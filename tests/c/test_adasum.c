/* test_adasum.c - Adasum over a plane: a bucket of tensors against the tree computed on the tensors themselves.
 *
 * Worlds of 1 to 8, all float dtypes, tensors from none to several chunks, with scales, joined ranks, in place and
 * not, and in plane memory. The result has the same bits on all ranks, and however the tensors are fused.
 */
#include "engine/execution/adasum.h"
#include "kernel/kernel.h"
#include "slow_adasum.h"
#include "world.h"

#include <math.h>
#include <string.h>

enum { TENSORS = 9, SMALL = 3000, MANY = 2500 };
static const uint64_t counts[TENSORS] = {0, 530000, 0, 17, 64, 1, 300017, 1000, 513};
static const int dtypes[] = {HVD_DTYPE_float16, HVD_DTYPE_bfloat16, HVD_DTYPE_float32, HVD_DTYPE_float64,
                             HVD_DTYPE_float8_e4m3fn};

/* Races do not depend on the number of ranks, and the thread sanitizer takes minutes for what is seconds without it. */
#if defined(__SANITIZE_THREAD__)
#define RANKS_MAX 2
#else
#define RANKS_MAX 8
#endif

struct turn {
    const struct hvd_plane_arg *arg;
    const struct hvd_plane *plane;
    void *opened;
    struct hvd_adasum adasum;
};

/* What rank gives in a tensor: something in common with the others, something of its own; tensor 4 is zero on odd
 * ranks. Halves are exact. */
static void fill(int dtype, int rank, int tensor, uint64_t count, void *to)
{
    uint64_t own = 88172645463325252u + 977u * (uint64_t)rank + 31u * (uint64_t)tensor, common = 77u + (uint64_t)tensor;
    for (int warm = 0; warm < 20; warm++)
        slow_random(&own);
    for (uint64_t i = 0; i < count; i++) {
        double value = slow_random(&own) + 0.6 * slow_random(&common);
        slow_put(dtype, to, i, tensor == 4 && rank % 2 ? 0 : value);
    }
}

static void run(struct turn *turn, struct hvd_work *bucket)
{
    struct hvd_work work;
    struct hvd_error error = {0};
    int works = 0, code;
    hvd_adasum_open(&turn->adasum, bucket, turn->arg->rank, turn->arg->size);
    while ((code = hvd_adasum_next(&turn->adasum, &work)) == HVD_AGAIN) {
        CHECK(turn->plane->can(turn->opened, &work), "%s cannot do kind %d", turn->plane->name, work.kind);
        code = hvd_world_do(turn->arg, turn->plane, turn->opened, &work, &error);
        CHECK(code == HVD_OK && ++works < 1000, "%d works, %s", works, error.text);
    }
    CHECK(code == HVD_OK, "%d", code);
}

static struct hvd_work bucket_of(int dtype, struct hvd_piece *piece, uint32_t pieces)
{
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_adasum,
                            .dtype = dtype,
                            .prescale = 1,
                            .postscale = 1,
                            .piece = piece,
                            .pieces = pieces};
    for (uint32_t k = 0; k < pieces; k++)
        work.count += piece[k].count;
    return work;
}

/* Against the tree, by what the dtype can tell apart. */
static void check_tensor(const struct turn *turn, int dtype, int tensor, uint64_t count, uint64_t joined, double scale,
                         const void *found)
{
    static const double precision[] = {[HVD_DTYPE_float16] = 0x1p-11,
                                       [HVD_DTYPE_bfloat16] = 0x1p-8,
                                       [HVD_DTYPE_float8_e4m3fn] = 0x1p-4,
                                       [HVD_DTYPE_float32] = 1e-6,
                                       [HVD_DTYPE_float64] = 2e-13};
    double *a[HVD_LOCAL_MAX];
    void *stored = malloc((count + 1) * 8);
    int size = turn->arg->size;
    for (int rank = 0; rank < size; rank++) {
        a[rank] = calloc(count + 1, sizeof(double));
        CHECK(a[rank] && stored, "no memory");
        fill(dtype, rank, tensor, count, stored);
        for (uint64_t i = 0; i < count && !(joined >> rank & 1); i++)
            a[rank][i] = slow_get(dtype, stored, i);
    }
    double last = dtype == HVD_DTYPE_float8_e4m3fn ? 0x1p-10 : 0; /* half of it, where numbers are subnormal */
    slow_adasum(a, size, count);
    for (uint64_t i = 0; i < count; i++) {
        double wanted = a[0][i] * scale, got = slow_get(dtype, found, i);
        CHECK(fabs(got - wanted) <=
                  precision[dtype] * fabs(wanted) + 4 * size * fmin(1e-6, precision[dtype]) * scale + last,
              "rank %d of %d, %s, joined %llx: element %llu of tensor %d is %.17g, not %.17g", turn->arg->rank, size,
              hvd_dtype_name(dtype), (unsigned long long)joined, (unsigned long long)i, tensor, got, wanted);
    }
    for (int rank = 0; rank < size; rank++)
        free(a[rank]);
    free(stored);
}

static void same_bits_everywhere(const struct turn *turn, const void *found, size_t bytes)
{
    uint64_t hash = 1469598103934665603u, all[HVD_LOCAL_MAX];
    struct hvd_error error = {0};
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)found)[i]) * 1099511628211u;
    CHECK(turn->arg->allgather(turn->arg->self, &hash, sizeof hash, all, &error) == HVD_OK, "%s", error.text);
    for (int rank = 0; rank < turn->arg->size; rank++)
        CHECK(all[rank] == all[0], "rank %d has other bits than rank 0", rank);
}

struct cell {
    int dtype;
    bool large, in_place, in_plane;
    uint64_t joined;
    double prescale, postscale;
};

/* The bucket whole, then in two halves, the tensors in the middle alone: the same bits. */
static void fused_and_not(struct turn *turn, const struct cell *cell)
{
    struct hvd_piece piece[TENSORS];
    size_t element = (size_t)hvd_dtype_bytes(cell->dtype), total = 0;
    bool gives = !(cell->joined >> turn->arg->rank & 1);
    for (int k = 0; k < TENSORS; k++)
        total += cell->large || counts[k] < SMALL ? counts[k] : 0;
    char *in = malloc((total + 1) * element), *first = malloc((total + 1) * element);
    char *out =
        cell->in_plane ? turn->plane->alloc(turn->opened, (total + 1) * element) : malloc((total + 1) * element);
    CHECK(in && out && first, "no memory");
    static const int cuts[][4] = {{TENSORS}, {4, TENSORS}, {3, 7, 8, TENSORS}};
    for (size_t fusion = 0; fusion < HVD_COUNT_OF(cuts); fusion++) {
        size_t at = 0;
        for (int k = 0; k < TENSORS; k++) {
            uint64_t count = cell->large || counts[k] < SMALL ? counts[k] : 0;
            char *here = (cell->in_place ? out : in) + at * element;
            fill(cell->dtype, turn->arg->rank, k, count, here);
            piece[k] = (struct hvd_piece){gives ? here : NULL, gives ? out + at * element : NULL, count};
            at += count;
        }
        for (int i = 0, begin = 0; begin < TENSORS; begin = cuts[fusion][i++]) {
            struct hvd_work bucket = bucket_of(cell->dtype, piece + begin, (uint32_t)(cuts[fusion][i] - begin));
            bucket.prescale = cell->prescale;
            bucket.postscale = cell->postscale;
            bucket.flags = cell->in_plane ? HVD_WORK_IN_PLANE : 0;
            run(turn, &bucket);
        }
        if (fusion == 0)
            memcpy(first, out, total * element);
        CHECK(!gives || memcmp(first, out, total * element) == 0, "other bits when fused otherwise (%zu)", fusion);
    }
    for (int k = 0; k < TENSORS && gives; k++)
        check_tensor(turn, cell->dtype, k, piece[k].count, cell->joined, cell->prescale * cell->postscale,
                     piece[k].out);
    if (!cell->joined)
        same_bits_everywhere(turn, out, total * element);
    if (cell->in_plane)
        turn->plane->release(out);
    else
        free(out);
    free(in);
    free(first);
}

/* More tensors than one batch of Gram matrices holds, all tiny. */
static void many_tensors(struct turn *turn)
{
    struct hvd_piece *piece = calloc(MANY, sizeof *piece);
    float *memory = calloc(MANY, 3 * sizeof *memory);
    CHECK(piece && memory, "no memory");
    for (int k = 0; k < MANY; k++) {
        float *here = memory + 3 * k;
        piece[k] = (struct hvd_piece){here, here, 3};
        /* All alike: averaged; by turns orthogonal: added. */
        here[k % 3] = 1;
        here[(k + 1) % 3] = turn->arg->rank == 0 ? (float)(k % 2) : 0;
    }
    struct hvd_work bucket = bucket_of(HVD_DTYPE_float32, piece, MANY);
    run(turn, &bucket);
    for (int k = 0; k < MANY && turn->arg->size == 2; k++) {
        /* (1,1) and (1,0): 3/4 (1,1) + 1/2 (1,0); twice (1,0): (1,0). */
        float wanted[3] = {0};
        wanted[k % 3] = k % 2 ? 1.25f : 1;
        wanted[(k + 1) % 3] = k % 2 ? 0.75f : 0;
        CHECK(memcmp(memory + 3 * k, wanted, sizeof wanted) == 0, "tensor %d is %g %g %g", k, (double)memory[3 * k],
              (double)memory[3 * k + 1], (double)memory[3 * k + 2]);
    }
    same_bits_everywhere(turn, memory, MANY * 3 * sizeof *memory);
    free(piece);
    free(memory);
}

static void opposite_gradients_vanish(struct turn *turn)
{
    float tensor[100];
    struct hvd_piece piece = {tensor, tensor, 100};
    for (int i = 0; i < 100; i++)
        tensor[i] = (turn->arg->rank % 2 ? -1.0f : 1.0f) * (float)(i + 1);
    struct hvd_work bucket = bucket_of(HVD_DTYPE_float32, &piece, 1);
    run(turn, &bucket);
    for (int i = 0; i < 100 && turn->arg->size % 2 == 0; i++)
        CHECK(tensor[i] == 0, "element %d is %g", i, (double)tensor[i]);
}

static void matrix(const struct hvd_plane_arg *arg, void *more)
{
    struct turn turn = {.arg = arg};
    turn.plane = hvd_world_open(arg, arg->size == 1 ? "self" : "shm", &turn.opened);
    for (size_t i = 0; i < HVD_COUNT_OF(dtypes); i++) {
        struct cell cell = {
            .dtype = dtypes[i], .large = arg->size <= 3 && RANKS_MAX > 2, .prescale = 1, .postscale = 1};
        fused_and_not(&turn, &cell);
        cell.in_place = true;
        fused_and_not(&turn, &cell);
        cell.large = false;
        cell.prescale = 0.75;
        cell.postscale = 3;
        fused_and_not(&turn, &cell);
        cell.joined = arg->size > 1 ? UINT64_C(1) << (arg->size - 1) | (arg->size > 4 ? 2 : 0) : 0;
        fused_and_not(&turn, &cell);
        cell.joined = 0;
        cell.in_plane = arg->size > 1;
        cell.large = arg->size == 2 && RANKS_MAX > 2;
        fused_and_not(&turn, &cell);
    }
    many_tensors(&turn);
    opposite_gradients_vanish(&turn);
    hvd_adasum_close(&turn.adasum);
    hvd_world_meet(arg);
    turn.plane->close(turn.opened);
}

int main(void)
{
    for (int size = 1; size <= RANKS_MAX; size++)
        hvd_world_run(HVD_WORLD_THREADS, size, 120, matrix, NULL);
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 120, matrix, NULL);
    return 0;
}
