/* test_plane_large.c - more than 2^31 elements: no count is cut to 32 bits. uint8, in place, two processes. */
#define _GNU_SOURCE
#include "bucket.h"
#include "kernel/kernel.h"

#include <string.h>
#include <sys/mman.h>

#define COUNT  ((UINT64_C(1) << 31) + 12345)
#define PERIOD 251               /* a prime: a shift by any power of two is seen */
#if defined(__SANITIZE_THREAD__) /* its shadow memory is four times what the program touches */
#define NEEDED ((uint64_t)40 << 30)
#else
#define NEEDED ((uint64_t)8 << 30)
#endif

static uint64_t available_bytes(void)
{
    unsigned long long kilobytes = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1)
            break;
    if (file)
        fclose(file);
    return kilobytes * 1024;
}

static void check(const uint8_t *memory, unsigned times, unsigned plus)
{
    uint8_t period[PERIOD];
    for (unsigned k = 0; k < PERIOD; k++)
        period[k] = (uint8_t)(k * times + plus);
    for (uint64_t at = 0; at < COUNT; at += PERIOD)
        CHECK(memcmp(memory + at, period, COUNT - at < PERIOD ? COUNT - at : PERIOD) == 0, "wrong near element %llu",
              (unsigned long long)at);
}

static void large(struct hvd_seat *seat)
{
    uint8_t *memory = mmap(NULL, COUNT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED, "no %llu bytes", (unsigned long long)COUNT);
    madvise(memory, COUNT, MADV_HUGEPAGE);
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, memory, COUNT);
    work.dtype = HVD_DTYPE_uint8;
    for (unsigned k = 0; k < PERIOD; k++)
        memory[k] = (uint8_t)(k + (unsigned)seat->arg.rank * 7);
    for (uint64_t have = PERIOD; have < COUNT; have *= 2)
        memcpy(memory + have, memory, COUNT - have < have ? COUNT - have : have);
    hvd_seat_done(seat, &work);
    check(memory, 2, 7);
    work.kind = HVD_BROADCAST;
    work.root = 1;
    if (seat->arg.rank != 1)
        memset(memory, 0, COUNT);
    hvd_seat_done(seat, &work);
    check(memory, 2, 7);
    munmap(memory, COUNT);
}

int main(void)
{
    if (available_bytes() < NEEDED)
        SKIP("more than 2^31 elements on two ranks need %llu bytes of available memory, there are %llu",
             (unsigned long long)NEEDED, (unsigned long long)available_bytes());
    hvd_world_seats(HVD_WORLD_PROCESSES, 2, "shm", NULL, large, NULL);
    return 0;
}
