/* virtual.c - see virtual.h. How do threads run in an order that a seed gives, with no line of csrc/ changed?
 *
 * The core is compiled with -fsanitize=thread and linked with this file in place of that sanitizer's library: so every
 * atomic access and fence of its source is a call to here, and a place where another thread may go on. Calls that wait
 * or tell the time are taken by the linker (--wrap). A thread is a stack of its own in the one thread that the kernel
 * knows (setjmp), so that a switch costs no system call, and that a process can be forked between two seeds. Who can do
 * nothing sleeps until another one has woken it, or written or closed something, or until its deadline. Where all
 * sleep, the clock goes to the first deadline. Where there is none, they wait for ever: the end, with what each waits
 * for. Kernel objects (eventfds, epoll, sockets and memory of this process) are real ones.
 *
 * Weak memory: a thread has a buffer for one store, which others do not see before it is written: by the next store, a
 * sequentially consistent fence, an operation that reads and writes, a call of the system, or by chance. Such a fence
 * that is missing on x86 shows, and one between a sequentially consistent store and an acquire load, which ARM needs.
 *
 * Source of the idea: loom and Shuttle (Rust), FoundationDB's simulation; priorities: Burckhardt et al., ASPLOS 2010.
 */
#define _GNU_SOURCE
#include "virtual_parts.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK_BYTES = 1 << 20, CHANGES = 3, YIELD_NS = 1000, OFF_NS = 50000, SWITCHES_MAX = 50000000 };

static struct thread {
    jmp_buf at;
    int error; /* its errno */
    int rank;
    bool ended, blocked, woken, interruptible;
    const void *on; /* what it waits for: a word, a mutex, a condition; NULL: for descriptors */
    uint64_t seen;  /* the news of descriptors that it has looked at */
    uint64_t deadline;
    const char *what;
    int64_t priority;
    void *(*body)(void *);
    void *argument;
} thread[VIRTUAL_THREADS];
struct virtual_plan virtual_plan;
int virtual_me = -1;
uint64_t virtual_clock = 1000000000u, virtual_next_event = VIRTUAL_NEVER;
static uint64_t news, state, switches, change_at[CHANGES], stop_at;
static int threads, ranks, stopping = -1, stays; /* one in so many switches writes out what a thread has stored */
static uint64_t stopped_ns;
static bool stop_ends;

uint64_t virtual_random(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

uint64_t virtual_now(void)
{
    return virtual_clock;
}

uint64_t virtual_switches(void)
{
    return switches;
}

bool virtual_stopped(int rank)
{
    return stopped_ns && rank == stopping;
}

uint64_t virtual_stopped_ns(void)
{
    return stopped_ns;
}

void virtual_give_up(const char *why)
{
    fprintf(stderr, "%s after %llu switches, virtual %.6f s\n", why, (unsigned long long)switches,
            (double)virtual_clock / 1e9);
    for (int i = 0; i < threads; i++)
        if (!thread[i].ended)
            fprintf(stderr, "  thread %d of rank %d: %s %s, deadline in %.3f s\n", i, thread[i].rank,
                    thread[i].blocked ? "waits for" : "can run", thread[i].what ? thread[i].what : "",
                    thread[i].deadline == VIRTUAL_NEVER ? -1.0
                                                        : ((double)thread[i].deadline - (double)virtual_clock) / 1e9);
    abort();
}

static void stop_rank(void)
{
    stopped_ns = virtual_clock;
    if (stop_ends)
        virtual_end_descriptors(stopping);
    for (int i = 0; i < threads; i++)
        if (thread[i].rank == stopping)
            virtual_wake(&thread[i], VIRTUAL_THREADS);
}

void virtual_stop(int rank, uint64_t at_switch, bool end)
{
    stopping = rank, stop_at = at_switch, stop_ends = end;
}

static bool can_run(const struct thread *of)
{
    if (of->ended || virtual_stopped(of->rank))
        return false;
    return !of->blocked || of->woken || (!of->on && of->seen != news) || of->deadline <= virtual_clock;
}

static int choose(void)
{
    for (;;) {
        int ready[VIRTUAL_THREADS], count = 0, best = 0;
        for (int i = 0; i < threads; i++)
            if (can_run(&thread[i]))
                ready[count++] = i;
        for (int i = 1; i < count; i++)
            if (thread[ready[i]].priority > thread[ready[best]].priority)
                best = i;
        if (count)
            return ready[virtual_plan.priorities ? best : (int)(virtual_random() % (uint64_t)count)];
        uint64_t next = virtual_next_event;
        for (int i = 0; i < threads; i++) {
            virtual_write_out(i);
            if (!thread[i].ended && !virtual_stopped(thread[i].rank) && thread[i].deadline < next)
                next = thread[i].deadline;
        }
        if (next == VIRTUAL_NEVER)
            virtual_give_up("all wait for ever");
        virtual_clock = next > virtual_clock ? next : virtual_clock;
        virtual_happen();
    }
}

static void hand_over(void)
{
    if (++switches > SWITCHES_MAX)
        virtual_give_up("no end");
    virtual_clock += 20 + virtual_random() % 60;
    for (int i = 0; virtual_plan.weak && i < threads; i++)
        if (CHANCE(stays))
            virtual_write_out(i);
    if (virtual_next_event <= virtual_clock)
        virtual_happen();
    if (switches == stop_at && stopping >= 0)
        stop_rank();
    for (int i = 0; i < CHANGES; i++)
        if (switches == change_at[i])
            thread[virtual_me].priority = -i - 1;
    int next = choose(), before = virtual_me;
    if (next == before)
        return;
    thread[before].error = errno;
    if (_setjmp(thread[before].at) == 0) {
        virtual_me = next;
        _longjmp(thread[next].at, 1);
    }
    errno = thread[virtual_me].error;
}

/* Others are preferred from here on: who looks again and again must not keep them from what it waits for. */
static void step_back(void)
{
    thread[virtual_me].priority = -(int64_t)switches - 100;
}

void virtual_point(void)
{
    if (virtual_me < 0 || (virtual_random() & 3))
        return;
    if (CHANCE(virtual_plan.preempted))
        virtual_block(&thread[virtual_me], virtual_clock + virtual_random() % OFF_NS, "a CPU");
    if (virtual_plan.priorities && CHANCE(256))
        step_back();
    hand_over();
}

/* A call of the system: its thread's stores are seen. Not before others may go on: what it has loaded before may be old
 * then. */
void virtual_call(void)
{
    if (virtual_me < 0)
        return;
    virtual_point();
    virtual_write_out(virtual_me);
}

void virtual_block(const void *on, uint64_t deadline, const char *what)
{
    struct thread *mine = &thread[virtual_me];
    virtual_write_out(virtual_me);
    mine->blocked = true, mine->woken = false, mine->on = on, mine->deadline = deadline, mine->what = what;
    mine->seen = news;
    hand_over();
    mine->blocked = mine->woken = false, mine->on = NULL, mine->deadline = VIRTUAL_NEVER, mine->what = NULL;
}

int virtual_wake(const void *on, int most)
{
    int woken = 0;
    for (int i = 0; i < threads && woken < most; i++)
        if (thread[i].blocked && thread[i].on == on && !thread[i].woken)
            thread[i].woken = true, woken++;
    return woken;
}

uint64_t virtual_after(const struct timespec *time)
{
    return time ? virtual_clock + (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec : VIRTUAL_NEVER;
}

/* A signal's handler has run in a thread of the user's: what it waited in returns. */
bool virtual_interrupted(void)
{
    bool is = thread[virtual_me].interruptible && CHANCE(virtual_plan.interrupted);
    errno = is ? EINTR : errno;
    return is;
}

void virtual_begin(const struct virtual_plan *of)
{
    virtual_plan = *of;
    state = of->seed * 0x9E3779B97F4A7C15u + 88172645463325252u;
    for (int i = 0; i < 8; i++)
        virtual_random();
    stays = 8 << 2 * (of->seed % 4);
    for (int i = 0; i < CHANGES; i++)
        change_at[i] = virtual_plan.priorities ? 1 + virtual_random() % 20000 : 0;
    thread[0] =
        (struct thread){.rank = -1, .deadline = VIRTUAL_NEVER, .priority = (int64_t)(virtual_random() & 0xffff)};
    threads = 1, virtual_me = 0, virtual_next_event = VIRTUAL_NEVER;
}

void virtual_wait(bool (*done)(void *self), void *self, const char *what)
{
    while (!done(self))
        virtual_block(NULL, VIRTUAL_NEVER, what);
}

int virtual_rank(void)
{
    return thread[virtual_me].rank;
}

void virtual_news(void)
{
    news++;
}

/* Threads. */
static ucontext_t maker;
static void run(void)
{
    struct thread *mine = &thread[virtual_me];
    if (_setjmp(mine->at) == 0)
        setcontext(&maker); /* until it is chosen */
    mine->body(mine->argument);
    virtual_write_out(virtual_me);
    mine->ended = true;
    virtual_wake(mine, VIRTUAL_THREADS);
    hand_over();
}

WRAP(int, pthread_create, (pthread_t * handle, const pthread_attr_t *attributes, void *(*body)(void *), void *argument))
{
    ucontext_t new;
    int before = virtual_me;
    if (threads == VIRTUAL_THREADS)
        virtual_give_up("too many threads");
    void *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int rank = thread[before].rank >= 0 ? thread[before].rank : ranks++;
    thread[threads] = (struct thread){.rank = rank, .deadline = VIRTUAL_NEVER, .body = body, .argument = argument};
    thread[threads].priority = (int64_t)(virtual_random() & 0xffff);
    thread[threads].interruptible = thread[before].rank < 0;
    (void)attributes;
    getcontext(&new);
    new.uc_stack.ss_sp = stack, new.uc_stack.ss_size = STACK_BYTES, new.uc_link = NULL;
    makecontext(&new, run, 0);
    virtual_me = threads++;
    swapcontext(&maker, &new);
    *handle = (pthread_t)(uintptr_t)virtual_me;
    virtual_me = before;
    virtual_call();
    return 0;
}

WRAP(int, pthread_join, (pthread_t handle, void **result))
{
    struct thread *of = &thread[(uintptr_t)handle];
    while (!of->ended && !virtual_stopped(of->rank))
        virtual_block(of, VIRTUAL_NEVER, "the end of a thread");
    if (result)
        *result = NULL;
    return 0;
}

WRAP(int, pthread_mutex_lock, (pthread_mutex_t * mutex))
{
    if (virtual_me < 0)
        return __real_pthread_mutex_lock(mutex);
    virtual_call();
    while (pthread_mutex_trylock(mutex) == EBUSY)
        virtual_block(mutex, VIRTUAL_NEVER, "a mutex");
    return 0;
}

WRAP(int, pthread_mutex_unlock, (pthread_mutex_t * mutex))
{
    int code = __real_pthread_mutex_unlock(mutex);
    if (virtual_me >= 0)
        virtual_wake(mutex, VIRTUAL_THREADS), virtual_call();
    return code;
}

WRAP(int, pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t *mutex))
{
    __real_pthread_mutex_unlock(mutex);
    virtual_wake(mutex, VIRTUAL_THREADS);
    virtual_block(condition, VIRTUAL_NEVER, "a condition");
    return __wrap_pthread_mutex_lock(mutex);
}

WRAP(int, pthread_cond_signal, (pthread_cond_t * condition))
{
    virtual_wake(condition, 1);
    return 0;
}

WRAP(int, pthread_cond_broadcast, (pthread_cond_t * condition))
{
    virtual_wake(condition, VIRTUAL_THREADS);
    return 0;
}

/* Time. */
WRAP(int, clock_gettime, (clockid_t clock, struct timespec *time))
{
    if (virtual_me < 0)
        return __real_clock_gettime(clock, time);
    virtual_clock += 25;
    *time = (struct timespec){(time_t)(virtual_clock / 1000000000u), (long)(virtual_clock % 1000000000u)};
    return 0;
}

static void sleep_until(uint64_t until_ns)
{
    while (virtual_clock < until_ns && !virtual_interrupted())
        virtual_block(&thread, until_ns, "time");
}

WRAP(int, nanosleep, (const struct timespec *time, struct timespec *left))
{
    (void)left;
    sleep_until(virtual_after(time));
    return 0;
}

WRAP(int, usleep, (useconds_t us))
{
    sleep_until(virtual_clock + us * (uint64_t)1000);
    return 0;
}

WRAP(int, sched_yield, (void))
{
    virtual_write_out(virtual_me);
    step_back();
    virtual_clock += YIELD_NS;
    hand_over();
    return 0;
}

WRAP(int, sched_getcpu, (void))
{
    return (int)(virtual_random() % (uint64_t)virtual_plan.cpus);
}

WRAP(void, hvd_move_to_cpu, (int cpu))
{
    (void)cpu;
}

WRAP(int, hvd_cpus_usable, (void))
{
    return virtual_plan.cpus;
}
