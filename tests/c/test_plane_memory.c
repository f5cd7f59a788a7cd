/* test_plane_memory.c - memory that a plane moves without a copy: its blocks, and works on it. */
#define _GNU_SOURCE
#include "bucket.h"
#include "kernel/kernel.h"
#include "matrix.h"
#include "world.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define BIG ((size_t)4 << 20)

static bool is_mapped(const void *memory)
{
    unsigned char resident;
    void *page = (void *)((uintptr_t)memory / HVD_PAGE * HVD_PAGE);
    return mincore(page, 1, &resident) == 0 || errno != ENOMEM;
}

static void a_block_is_aligned_and_owned(const struct hvd_plane *plane, void *opened)
{
    char outside[3 * 64] = {0};
    for (size_t bytes = 1; bytes < 100000; bytes = bytes * 3 + 1) {
        char *block = plane->alloc(opened, bytes);
        CHECK(block && (uintptr_t)block % 64 == 0, "block of %zu bytes at %p", bytes, (void *)block);
        memset(block, 1, bytes);
        CHECK(plane->owns(opened, block, bytes) && plane->owns(opened, block + bytes - 1, 1), "%zu bytes", bytes);
        plane->release(block);
    }
    CHECK(!plane->release(outside + 64 - (uintptr_t)outside % 64 + 64), "memory of others, which hvd_free asks about");
    CHECK(!plane->owns(opened, outside, sizeof outside) && !plane->owns(opened, NULL, 1), "memory of others");
    CHECK(!plane->alloc(opened, (size_t)1 << 60) && !plane->alloc(opened, SIZE_MAX - 10), "more than there is");
}

static void a_released_block_is_used_again_and_gives_its_pages_back(const struct hvd_plane *plane, void *opened)
{
    char *first = plane->alloc(opened, BIG), *second = plane->alloc(opened, BIG);
    memset(first, 0x77, BIG);
    plane->release(first);
    char *again = plane->alloc(opened, BIG);
    CHECK(again == first, "%p, not %p", (void *)again, (void *)first);
    CHECK(again[BIG / 2] == 0, "the page still holds %02x", again[BIG / 2]);
    plane->release(again);
    plane->release(second);
    char *both = plane->alloc(opened, 2 * BIG);
    CHECK(both == first, "neighbours are not joined");
    plane->release(both);
    plane->release(NULL);
}

struct user {
    const struct hvd_plane *plane;
    void *opened;
    unsigned number;
};

static void *allocate_and_release(void *of)
{
    struct user *user = of;
    unsigned char *block[16] = {0};
    size_t bytes[16] = {0};
    for (unsigned i = 0, seed = user->number; i < 2000; i++) {
        seed = seed * 1664525 + 1013904223;
        unsigned k = seed >> 28;
        for (size_t at = 0; block[k] && at < bytes[k]; at += 97)
            CHECK(block[k][at] == (unsigned char)(user->number * 16 + k), "a block was written by another thread");
        user->plane->release(block[k]);
        bytes[k] = 1 + (seed >> 8 & 0x3fff);
        block[k] = user->plane->alloc(user->opened, bytes[k]);
        CHECK(block[k], "no %zu bytes", bytes[k]);
        memset(block[k], (int)(user->number * 16 + k), bytes[k]);
    }
    for (int k = 0; k < 16; k++)
        user->plane->release(block[k]);
    return NULL;
}

static void any_thread_may_allocate_and_release(const struct hvd_plane *plane, void *opened)
{
    pthread_t thread[4];
    struct user user[4];
    for (unsigned i = 0; i < 4; i++) {
        user[i] = (struct user){plane, opened, i};
        CHECK(pthread_create(&thread[i], NULL, allocate_and_release, &user[i]) == 0, "thread %u", i);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
}

static void blocks(const struct hvd_plane_arg *arg, void *more)
{
    void *opened;
    const struct hvd_plane *plane = hvd_world_open(arg, "shm", &opened);
    a_block_is_aligned_and_owned(plane, opened);
    a_released_block_is_used_again_and_gives_its_pages_back(plane, opened);
    any_thread_may_allocate_and_release(plane, opened);
    /* A block outlives the plane; the last one takes the mapping with it. */
    char *first = plane->alloc(opened, 100), *last = plane->alloc(opened, BIG);
    plane->close(opened);
    memset(last, 3, BIG);
    plane->release(first);
    CHECK(is_mapped(last) && last[BIG - 1] == 3, "unmapped under a block");
    plane->release(last);
    CHECK(!is_mapped(last), "the last block did not unmap the arena");
}

/* Works on buckets in plane memory. `mixed`: every second rank's bucket is private, so the flag is not agreed. */
static void work_in_plane(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened,
                          const struct hvd_work *like, uint64_t count, int shape, int place, uint64_t joined,
                          bool mixed)
{
    struct hvd_bucket bucket;
    struct hvd_error error = {0};
    hvd_bucket_make(&bucket, like, count, shape, place, arg->rank, arg->size, joined, plane,
                    mixed && arg->rank % 2 ? NULL : opened);
    if (!mixed)
        bucket.work.flags |= HVD_WORK_IN_PLANE;
    CHECK(hvd_world_do(arg, plane, opened, &bucket.work, &error) == HVD_OK, "%s", error.text);
    hvd_bucket_check(&bucket);
}

static void works(const struct hvd_plane_arg *arg, void *more)
{
    void *opened;
    const struct hvd_plane *plane = hvd_world_open(arg, "shm", &opened);
    static const uint64_t counts[] = {0, 1, 5, 1000, 65537, 400001};
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        for (int i = 0; hvd_op_number(i) >= 0; i++) {
            struct hvd_work like = {.kind = HVD_ALLREDUCE,
                                    .op = hvd_op_number(i),
                                    .dtype = dtype,
                                    .divide_by = arg->size,
                                    .prescale = 1,
                                    .postscale = 1};
            bool thorough = dtype == HVD_DTYPE_float32 || like.op == HVD_OP_sum;
            if (!hvd_dtype_asked(dtype) || hvd_reduce_check(like.op, like.dtype, 1, 1))
                continue;
            for (size_t k = 0; k < HVD_COUNT_OF(counts) - (thorough ? 0 : 2); k++)
                for (int shape = 0; shape < HVD_BUCKET_SHAPES; shape++) {
                    if (dtype != HVD_DTYPE_float32 &&
                        !hvd_picked(shape, HVD_BUCKET_SHAPES, (int)k + dtype + like.op + arg->size))
                        continue;
                    work_in_plane(arg, plane, opened, &like, counts[k], shape, (int)k % 2, 0, false);
                    work_in_plane(arg, plane, opened, &like, counts[k], shape, (int)k % 2 | HVD_BUCKET_ROOTED, 0,
                                  false);
                    if (dtype == HVD_DTYPE_float32)
                        work_in_plane(arg, plane, opened, &like, counts[k], shape, (int)k % 2 | HVD_BUCKET_ROOTED, 0,
                                      true);
                    if (thorough && arg->size > 1)
                        work_in_plane(arg, plane, opened, &like, counts[k], shape, 0, 1 | 2u << arg->size / 2, false);
                }
        }
    hvd_world_meet(arg);
    plane->close(opened);
}

/* More pieces than one group of places holds. */
static void many_pieces(const struct hvd_plane_arg *arg, void *more)
{
    enum { PIECES = 70000 };
    void *opened;
    const struct hvd_plane *plane = hvd_world_open(arg, "shm", &opened);
    struct hvd_piece *piece = calloc(PIECES, sizeof *piece);
    uint16_t *memory = plane->alloc(opened, PIECES * 3 * sizeof *memory);
    struct hvd_work work = hvd_bucket_sum(piece, memory, 0);
    work.dtype = HVD_DTYPE_uint16;
    work.flags = HVD_WORK_IN_PLANE;
    work.pieces = PIECES;
    for (uint32_t k = 0, at = 0; k < PIECES; at += piece[k++].count) {
        piece[k] = (struct hvd_piece){memory + at, memory + at, k % 4};
        work.count += piece[k].count;
    }
    for (uint32_t i = 0; i < work.count; i++)
        memory[i] = (uint16_t)(i + (uint32_t)arg->rank);
    struct hvd_error error = {0};
    CHECK(hvd_world_do(arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
    for (uint32_t i = 0; i < work.count; i++)
        CHECK(memory[i] == (uint16_t)(3 * i + 3), "element %u is %u", i, memory[i]);
    plane->release(memory);
    free(piece);
    plane->close(opened);
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    static const int sizes[] = {3};
#elif defined(HVD_SANITIZED)
    static const int sizes[] = {1, 3};
#else
    static const int sizes[] = {1, 2, 3, 4, 7};
#endif
    hvd_world_run(HVD_WORLD_THREADS, 1, 60, blocks, NULL);
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 200, works, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 3, 60, many_pieces, NULL);
    hvd_world_processes(4, 200, works, NULL);
    hvd_world_processes(3, 60, many_pieces, NULL);
    return 0;
}
