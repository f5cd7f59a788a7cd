/* sizes.c - which sizes: 1 to 8 as far as they differ (a power of two and not, one rank, two), and as many as fit.
 *
 * Under a sanitizer a few stand for all, and between ranks that run one at a time there are no races to be seen.
 */
#include "sizes.h"

#include "kernel/kernel.h"

#include <stdlib.h>

#if defined(__SANITIZE_THREAD__)
static const int sizes[] = {3, 64};
#elif defined(HVD_SANITIZED)
static const int sizes[] = {1, 2, 3, 7, 64};
#else
static const int sizes[] = {1, 2, 3, 4, 7, 8, 64};
#endif

static bool is_simulated(int size)
{
#if defined(__SANITIZE_THREAD__)
    return size == 0;
#elif defined(HVD_SANITIZED)
    return size == 3 || size == 7;
#else
    return size <= 8;
#endif
}

/* Fast to simulate: few pieces. What is rough, test_p2p_sim.c asks. */
static const struct hvd_sim_line line = {
    .delay_ns = 1000, .jitter_ns = 5000, .byte_ps = 10, .room = 1 << 18, .piece = 1 << 16, .ragged = true};

void hvd_every_size(void (*body)(const struct hvd_plane_arg *arg, void *more), const _Atomic long *works)
{
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
        long before = *works;
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 400, body, NULL);
        printf("world of %d: %ld works\n", sizes[i], (*works - before) / sizes[i]);
        CHECK(*works - before > 100, "too few works for a world of %d", sizes[i]);
    }
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
        if (is_simulated(sizes[i]))
            hvd_world_sim(sizes[i], i, &line, 400, body, NULL);
}

bool hvd_picked(int choice, int choices, int others)
{
    return getenv("TESTS_EVERYTHING") || choice == others % choices;
}

bool hvd_dtype_asked(int dtype)
{
#if defined(__SANITIZE_THREAD__)
    return dtype == HVD_DTYPE_float32 || dtype == HVD_DTYPE_int8;
#else
    return dtype != HVD_DTYPE_float8_e5m2;
#endif
}

void hvd_world_processes(int size, int seconds, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more)
{
#if !defined(__SANITIZE_THREAD__)
    hvd_world_run(HVD_WORLD_PROCESSES, size, seconds, body, more);
#else
    (void)size, (void)seconds, (void)body, (void)more;
#endif
}
