/* jitter.c - a library for LD_PRELOAD that makes the timing of a process random: calls that move bytes or wait come
 * late.
 *
 * Before every so many of them the calling thread sleeps, up to JITTER_US microseconds, and of a send or
 * a receive a part may go only. What may happen in another order then happens in another order, also inside the
 * core's engine thread. The sequence of a thread follows from JITTER_SEED and the process's and the thread's number, so
 * two runs never sleep alike; "jitters" is how often it has slept, for whoever doubts it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Atomic long jitters;

static uint64_t random_number(void)
{
    static _Thread_local uint64_t state;
    if (!state) {
        const char *seed = getenv("JITTER_SEED");
        state = (uint64_t)(seed ? atol(seed) : 1) * 1000003u + (uint64_t)syscall(SYS_gettid) * 7919u;
    }
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void come_late(void)
{
    static long most;
    if (!most) {
        const char *given = getenv("JITTER_US");
        most = given ? atol(given) : 300;
    }
    uint64_t number = random_number();
    if (number % 8)
        return;
    jitters++;
    struct timespec time = {0, (long)(number / 8 % (uint64_t)most) * 1000};
    nanosleep(&time, NULL);
}

/* The next one of this name. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Of so many bytes, with JITTER_CUT, sometimes half: what a full socket does. Not every program is prepared for it. */
static size_t part_of(size_t count)
{
    return count > 64 && getenv("JITTER_CUT") && random_number() % 4 == 0 ? count / 2 : count;
}

ssize_t send(int fd, const void *bytes, size_t count, int flags)
{
    come_late();
    return REAL(send)(fd, bytes, part_of(count), flags);
}

ssize_t recv(int fd, void *bytes, size_t count, int flags)
{
    come_late();
    return REAL(recv)(fd, bytes, flags & MSG_WAITALL ? count : part_of(count), flags);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    come_late();
    return REAL(epoll_wait)(fd, events, most, timeout);
}

int sched_yield(void)
{
    come_late();
    return REAL(sched_yield)();
}
