/* test_base_wait.c - time, CPUs, futexes, and doorbells that lose no news. */
#define _GNU_SOURCE
#include "check.h"
#include "base/wait.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SECOND_NS 1000000000u
#define ROUNDS    20000u
#define RANKS     3

static void time_goes_forward(void)
{
    uint64_t before = hvd_now_ns(), after;
    while ((after = hvd_now_ns()) == before)
        hvd_pause();
    CHECK(after > before && after - before < 10 * (uint64_t)SECOND_NS, "%llu ns", (unsigned long long)(after - before));
}

static void affinity_counts(void)
{
    cpu_set_t all, one;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0, "sched_getaffinity");
    int usable = hvd_cpus_usable();
    CHECK(usable >= 1 && usable <= CPU_COUNT(&all), "%d usable of %d", usable, CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
    CHECK(hvd_cpus_usable() == 1, "bound to one CPU, %d usable", hvd_cpus_usable());
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0, "sched_setaffinity");
}

static _Atomic uint32_t word;

static void *futex_waker(void *unused)
{
    for (uint32_t round = 1; round <= 1000; round++) {
        while (atomic_load(&word) != 2 * round - 1) /* the waiter's turn: it is about to sleep */
            sched_yield();
        atomic_store(&word, 2 * round);
        hvd_futex_wake(&word, 1);
    }
    return NULL;
}

static void a_futex_sleeps_and_wakes(void)
{
    atomic_store(&word, 7);
    uint64_t start = hvd_now_ns();
    hvd_futex_wait(&word, 8, 100 * (uint64_t)SECOND_NS); /* another value: no sleep */
    CHECK(hvd_now_ns() - start < 50 * (uint64_t)SECOND_NS, "it slept on a word that had changed already");
    start = hvd_now_ns();
    while (hvd_now_ns() - start < 2000000u)
        hvd_futex_wait(&word, 7, 2000000u); /* nobody wakes us: only the timeout brings us back */

    pthread_t waker;
    atomic_store(&word, 0);
    CHECK(pthread_create(&waker, NULL, futex_waker, NULL) == 0, "pthread_create");
    for (uint32_t round = 1; round <= 1000; round++) {
        atomic_store(&word, 2 * round - 1);
        start = hvd_now_ns();
        while (atomic_load(&word) == 2 * round - 1) {
            hvd_futex_wait(&word, 2 * round - 1, 20 * (uint64_t)SECOND_NS);
            CHECK(hvd_now_ns() - start < 15 * (uint64_t)SECOND_NS, "round %u: the wake-up was lost", round);
        }
    }
    pthread_join(waker, NULL);
}

/* RANKS threads pass a number round and round; each sleeps on its bell until the number is its own. */

static struct hvd_asleep asleep[RANKS];
static int eventfds[RANKS];
static _Atomic uint32_t news;
static _Atomic uint32_t sleeps;

static void bells_of(int rank, struct hvd_bells *bells)
{
    *bells = (struct hvd_bells){.rank = rank, .size = RANKS};
    for (int peer = 0; peer < RANKS; peer++) {
        bells->asleep[peer] = &asleep[peer];
        bells->eventfd[peer] = eventfds[peer];
    }
}

static void sleep_until_rung(int rank, uint32_t turn)
{
    struct hvd_asleep *mine = &asleep[rank];
    atomic_store_explicit(&mine->word, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&news, memory_order_relaxed) != turn) {
        struct pollfd wait = {eventfds[rank], POLLIN, 0};
        atomic_fetch_add_explicit(&sleeps, 1, memory_order_relaxed);
        CHECK(poll(&wait, 1, 20000) == 1, "rank %d slept through number %u", rank, turn);
        uint64_t rings;
        CHECK(read(eventfds[rank], &rings, sizeof rings) == sizeof rings, "a bell that rang holds a count");
    }
    atomic_store_explicit(&mine->word, 0, memory_order_relaxed);
}

static void *bell_thread(void *rank_of)
{
    int rank = (int)(intptr_t)rank_of;
    struct hvd_bells bells;
    bells_of(rank, &bells);
    for (uint32_t turn = (uint32_t)rank; turn < ROUNDS; turn += RANKS) {
        while (atomic_load_explicit(&news, memory_order_acquire) != turn)
            sleep_until_rung(rank, turn);
        atomic_store_explicit(&news, turn + 1, memory_order_release);
        if (turn % 2)
            hvd_bells_ring_all(&bells);
        else
            hvd_bells_ring(&bells, (rank + 1) % RANKS);
    }
    return NULL;
}

static void no_news_is_lost_between_sleepers(void)
{
    pthread_t threads[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        eventfds[rank] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        CHECK(eventfds[rank] >= 0, "eventfd");
    }
    for (int rank = 0; rank < RANKS; rank++)
        CHECK(pthread_create(&threads[rank], NULL, bell_thread, (void *)(intptr_t)rank) == 0, "pthread_create");
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    CHECK(atomic_load(&news) == ROUNDS, "%u of %u", atomic_load(&news), ROUNDS);
    CHECK(atomic_load(&sleeps) > 0, "nobody ever slept: this test proves nothing here");
    for (int rank = 0; rank < RANKS; rank++)
        close(eventfds[rank]);
}

static void ringing_costs_a_system_call_only_for_sleepers(void)
{
    struct hvd_bells bells;
    for (int rank = 0; rank < RANKS; rank++) {
        eventfds[rank] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        atomic_store(&asleep[rank].word, rank == 1);
    }
    bells_of(0, &bells);
    atomic_store(&asleep[0].word, 1);
    for (int i = 0; i < 5; i++)
        hvd_bells_ring_all(&bells);
    uint64_t rings = 0;
    CHECK(read(eventfds[1], &rings, sizeof rings) == sizeof rings && rings == 1, "a burst rings a sleeper %llu times",
          (unsigned long long)rings);
    CHECK(read(eventfds[2], &rings, sizeof rings) < 0, "who is awake is left alone");
    CHECK(read(eventfds[0], &rings, sizeof rings) < 0 && atomic_load(&asleep[0].word) == 1, "nobody rings oneself");
    for (int rank = 0; rank < RANKS; rank++)
        close(eventfds[rank]);
}

int main(void)
{
    alarm(120);
    time_goes_forward();
    affinity_counts();
    a_futex_sleeps_and_wakes();
    no_news_is_lost_between_sleepers();
    ringing_costs_a_system_call_only_for_sleepers();
    return 0;
}
