/* wait.c - time, CPUs, randomness, futexes and doorbells on this platform.
 *
 * Idea: a waiter first looks, then pauses, then sleeps; how long each phase lasts is the waiter's decision,
 * the means are here. A doorbell is an eventfd plus a shared word that says whether ringing is needed. The
 * order that makes it safe (both sides): store, sequentially consistent fence, load. The sleeper stores
 * asleep = 1 and then looks at the news; the ringer stores the news and then looks at asleep; at least
 * one of them sees the other.
 */
#define _GNU_SOURCE
#include "wait.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t hvd_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void hvd_move_to_cpu(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one); /* one beyond the set is left out, and then nothing is changed */
    sched_setaffinity(0, sizeof one, &one);
}

bool hvd_random(void *bytes, size_t count)
{
    return syscall(SYS_getrandom, bytes, count, 0) == (long)count; /* the libc of manylinux2014 has no wrapper */
}

/* CPUs that the cgroup's quota pays for, rounded up; 0 when there is no quota or none can be read. */
static int cpus_of_quota(void)
{
    long long quota = -1, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (file) {
        if (fscanf(file, "%lld %lld", &quota, &period) != 2)
            quota = -1;
        fclose(file);
    } else if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re"))) {
        if (fscanf(file, "%lld", &quota) != 1)
            quota = -1;
        fclose(file);
        period = 100000;
    }
    return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int hvd_cpus_usable(void)
{
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    int quota = cpus_of_quota();
    if (quota > 0 && quota < cpus)
        cpus = quota;
    return cpus > 0 ? cpus : 1;
}

void hvd_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns)
{
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                               .tv_nsec = (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &timeout, NULL, 0);
}

void hvd_futex_wake(_Atomic uint32_t *word, int waiters)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, waiters, NULL, NULL, 0);
}

static void ring(const struct hvd_bells *bells, int rank)
{
    /* The ringer clears the word, so that a burst of news costs one system call, not one each. */
    if (atomic_load_explicit(&bells->asleep[rank]->word, memory_order_relaxed) &&
        atomic_exchange_explicit(&bells->asleep[rank]->word, 0, memory_order_acq_rel)) {
        uint64_t one = 1;
        ssize_t written = write(bells->eventfd[rank], &one, sizeof one); /* EAGAIN: it is rung already */
        (void)written;
    }
}

void hvd_bells_ring(const struct hvd_bells *bells, int rank)
{
    atomic_thread_fence(memory_order_seq_cst);
    ring(bells, rank);
}

bool hvd_bells_any_asleep(const struct hvd_bells *bells)
{
    bool any = false;
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < bells->size; rank++)
        any |= rank != bells->rank && atomic_load_explicit(&bells->asleep[rank]->word, memory_order_relaxed);
    return any;
}

void hvd_bells_ring_all(const struct hvd_bells *bells)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < bells->size; rank++)
        if (rank != bells->rank)
            ring(bells, rank);
}
