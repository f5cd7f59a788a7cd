/* wait.h - how a thread waits: pause, yield, futex; and the doorbell that wakes another rank.
 *
 * Two kinds of sleeper exist. A caller waiting for a handle sleeps on a futex inside its own process. An
 * engine sleeps in epoll, because it also waits for sockets and process ends; other ranks of the host wake
 * it by its eventfd. The shared `asleep` word spares the system call while it is awake.
 */
#ifndef HVD_BASE_WAIT_H
#define HVD_BASE_WAIT_H

#include "base.h"

#include <stdatomic.h>

#if defined(__x86_64__) || defined(__i386__)
static inline void hvd_pause(void)
{
    __builtin_ia32_pause();
}
#elif defined(__aarch64__)
static inline void hvd_pause(void)
{
    __asm__ volatile("yield" ::: "memory");
}
#else
static inline void hvd_pause(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}
#endif

/* Private futex. wait returns when *word != value, when woken, spuriously, or after timeout_ns. */
void hvd_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns);
void hvd_futex_wake(_Atomic uint32_t *word, int waiters);

/* One word per rank, in memory that all ranks of the host share: 1 while its engine sleeps or is about to. */
struct hvd_asleep {
    _Atomic uint32_t word;
    char pad[2 * HVD_CACHE_LINE - sizeof(uint32_t)];
};

/* The bells of a host. Lent to planes; `asleep` and `eventfd` have one entry per rank of the set. */
struct hvd_bells {
    struct hvd_asleep *asleep[HVD_LOCAL_MAX];
    int eventfd[HVD_LOCAL_MAX];
    int rank, size;
};

/* Wake the others if they sleep. To be called after the store that is the news: the fence inside pairs
 * with the one a sleeper makes between setting its word and looking at the news a last time. */
void hvd_bells_ring_all(const struct hvd_bells *bells);
bool hvd_bells_any_asleep(const struct hvd_bells *bells); /* of the others; with the same fence */
void hvd_bells_ring(const struct hvd_bells *bells, int rank);

#endif
