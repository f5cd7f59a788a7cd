/* virtual_calls.c - calls of the system in virtual time: descriptors and what crosses them. See virtual.h.
 *
 * Who waits for a descriptor asks the kernel each time that there is news of any. A timer is an eventfd that the clock
 * writes to. Bytes may be on their way: then they are sent for good when they are due, in their order, even if the
 * sender has closed its end meanwhile.
 */
#define _GNU_SOURCE
#include "virtual_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { TIMERS = 64, FILES = 1024, PIDFDS = 64, FULL_NS = 10000 };
static struct {
    int fd;
    uint64_t at, every;
} timer[TIMERS];
static int rank_of[FILES]; /* 1 + whose it is; 0: nobody's */
static struct {
    int fd, rank;
} pidfd[PIDFDS];
static int pidfds;
static struct message {
    struct message *next;
    int stream, fd; /* where it was sent; another descriptor of the same, as that may be closed before it arrives */
    uint64_t at;
    size_t bytes, done;
    char content[];
} *on_its_way;

long __real_syscall(long number, ...);
ssize_t __real_send(int fd, const void *bytes, size_t count, int flags);
int __real_close(int fd);

/* Events of the clock. */
static void write_one(int fd)
{
    uint64_t one = 1;
    virtual_news();
    __real_syscall(SYS_write, fd, &one, sizeof one);
}

static void deliver(void)
{
    bool full[FILES] = {false};
    for (struct message **at = &on_its_way, *message; (message = *at);) {
        ssize_t sent = 0;
        if (message->at <= virtual_clock && !full[message->stream]) {
            sent = __real_send(message->fd, message->content + message->done, message->bytes - message->done,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
            message->done += sent > 0 ? (size_t)sent : 0;
            virtual_news();
        }
        if (message->done == message->bytes || (sent < 0 && errno != EAGAIN)) {
            *at = message->next;
            __real_close(message->fd);
            free(message);
            continue;
        }
        full[message->stream] = true; /* what was sent after it comes after it */
        if (message->at <= virtual_clock)
            message->at = virtual_clock + FULL_NS;
        at = &message->next;
    }
}

void virtual_happen(void)
{
    int error = errno;
    virtual_next_event = VIRTUAL_NEVER;
    for (int i = 0; i < TIMERS; i++) {
        if (timer[i].at && timer[i].at <= virtual_clock) {
            timer[i].at = timer[i].every ? timer[i].at + timer[i].every : 0;
            write_one(timer[i].fd);
        }
        if (timer[i].at && timer[i].at < virtual_next_event)
            virtual_next_event = timer[i].at;
    }
    deliver();
    for (struct message *message = on_its_way; message; message = message->next)
        virtual_next_event = message->at < virtual_next_event ? message->at : virtual_next_event;
    errno = error;
}

void virtual_end_descriptors(int rank)
{
    for (int fd = 0; fd < FILES; fd++)
        if (rank_of[fd] == rank + 1)
            __real_close(fd), rank_of[fd] = 0;
    for (int i = 0; i < pidfds; i++)
        if (pidfd[i].rank == rank)
            write_one(pidfd[i].fd);
    virtual_news();
}

/* Waiting for descriptors. */
WRAP(int, epoll_wait, (int fd, struct epoll_event *events, int most, int ms))
{
    uint64_t until_ns = ms < 0 ? VIRTUAL_NEVER : virtual_clock + (uint64_t)ms * 1000000u;
    for (virtual_call();; virtual_block(NULL, until_ns, "epoll")) {
        int count = __real_epoll_wait(fd, events, most, 0);
        if (count || virtual_clock >= until_ns)
            return count;
    }
}

WRAP(int, ppoll, (struct pollfd * fds, nfds_t count, const struct timespec *time, const sigset_t *signals))
{
    const struct timespec none = {0, 0};
    uint64_t until_ns = virtual_after(time);
    for (virtual_call();; virtual_block(NULL, until_ns, "poll")) {
        int found = __real_ppoll(fds, count, &none, signals);
        if (found || virtual_clock >= until_ns)
            return found;
        if (virtual_interrupted())
            return -1;
    }
}

WRAP(int, poll, (struct pollfd * fds, nfds_t count, int ms))
{
    if (virtual_me < 0)
        return __real_poll(fds, count, ms);
    const struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};
    return __wrap_ppoll(fds, count, ms < 0 ? NULL : &time, NULL);
}

/* Descriptors: whose they are, for the end of a rank. */
static int owned(int fd)
{
    if (fd >= FILES)
        virtual_give_up("too many descriptors");
    if (fd >= 0 && virtual_me >= 0)
        rank_of[fd] = virtual_rank() + 1;
    return fd;
}
#define OWNED(name, args, call)           \
    WRAP(int, name, args)                 \
    {                                     \
        return owned(__real_##name call); \
    }
OWNED(eventfd, (unsigned value, int flags), (value, flags))
OWNED(epoll_create1, (int flags), (flags))
OWNED(socket, (int domain, int type, int protocol), (domain, type, protocol))
OWNED(dup, (int fd), (fd))

WRAP(int, accept4, (int fd, struct sockaddr *address, socklen_t *bytes, int flags))
{
    virtual_call();
    return owned(__real_accept4(fd, address, bytes, flags));
}

WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t bytes))
{
    virtual_call();
    virtual_news();
    return __real_connect(fd, address, bytes);
}

WRAP(int, fcntl, (int fd, int command, long argument))
{
    int result = __real_fcntl(fd, command, argument);
    return command == F_DUPFD_CLOEXEC ? owned(result) : result;
}

void __real_streams_take(int purpose, int rank, const int *ranks, int count, int *row);
void __wrap_streams_take(int purpose, int rank, const int *ranks, int count, int *row)
{
    __real_streams_take(purpose, rank, ranks, count, row);
    for (int i = 0; i < count; i++)
        owned(row[i]);
}

WRAP(int, close, (int fd))
{
    virtual_call();
    for (int i = 0; i < TIMERS && virtual_me >= 0; i++)
        if (timer[i].fd == fd)
            timer[i].fd = 0, timer[i].at = 0;
    if (fd >= 0 && fd < FILES)
        rank_of[fd] = 0;
    virtual_news();
    return __real_close(fd);
}

WRAP(int, timerfd_create, (int clock, int flags))
{
    (void)clock, (void)flags;
    int fd = __wrap_eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), i = 0;
    while (timer[i].fd)
        if (++i == TIMERS)
            virtual_give_up("too many timers");
    timer[i].fd = fd;
    return fd;
}

WRAP(int, timerfd_settime, (int fd, int flags, const struct itimerspec *when, struct itimerspec *before))
{
    uint64_t count;
    (void)before;
    virtual_call();
    __real_syscall(SYS_read, fd, &count, sizeof count);
    for (int i = 0; i < TIMERS; i++)
        if (timer[i].fd == fd) {
            uint64_t first = virtual_after(&when->it_value);
            timer[i].at = first == virtual_clock ? 0 : flags & TFD_TIMER_ABSTIME ? first - virtual_clock : first;
            timer[i].every = virtual_after(&when->it_interval) - virtual_clock;
        }
    virtual_happen();
    return 0;
}

/* Bytes. */
#define NEWS(type, name, args, arguments) \
    WRAP(type, name, args)                \
    {                                     \
        virtual_call();                   \
        virtual_news();                   \
        return __real_##name arguments;   \
    }
NEWS(int, epoll_ctl, (int epoll, int what, int fd, struct epoll_event *event), (epoll, what, fd, event))
NEWS(ssize_t, write, (int fd, const void *bytes, size_t count), (fd, bytes, count))
NEWS(ssize_t, read, (int fd, void *bytes, size_t count), (fd, bytes, count))
NEWS(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
NEWS(int, shutdown, (int fd, int how), (fd, how))

WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags))
{
    virtual_call();
    virtual_news();
    ssize_t got = __real_recvmsg(fd, message, flags);
    for (struct cmsghdr *at = got >= 0 ? CMSG_FIRSTHDR(message) : NULL; at; at = CMSG_NXTHDR(message, at))
        for (size_t i = 0; at->cmsg_type == SCM_RIGHTS && i < (at->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++)
            owned(((int *)(void *)CMSG_DATA(at))[i]);
    return got;
}

/* Of so many bytes a part may move, or none; what is on its way is never lost. */
static size_t part_of(size_t count)
{
    return CHANCE(virtual_plan.part) ? virtual_random() % (count + 1) : count;
}

WRAP(ssize_t, recv, (int fd, void *bytes, size_t count, int flags))
{
    virtual_call();
    virtual_news();
    size_t most = part_of(count);
    errno = EAGAIN;
    return most || !count ? __real_recv(fd, bytes, most, flags) : -1;
}

WRAP(ssize_t, send, (int fd, const void *bytes, size_t count, int flags))
{
    virtual_call();
    size_t most = part_of(count);
    errno = EAGAIN;
    if (!most && count)
        return -1;
    if (!virtual_plan.delay_ns) {
        virtual_news();
        return __real_send(fd, bytes, most, flags);
    }
    struct message *message = malloc(sizeof *message + most), **last = &on_its_way;
    *message = (struct message){.stream = fd, .fd = __real_dup(fd), .bytes = most};
    message->at = virtual_clock + virtual_random() % virtual_plan.delay_ns;
    memcpy(message->content, bytes, most);
    for (; *last; last = &(*last)->next)
        if ((*last)->stream == fd && (*last)->at > message->at)
            message->at = (*last)->at;
    *last = message;
    virtual_next_event = message->at < virtual_next_event ? message->at : virtual_next_event;
    return (ssize_t)most;
}

static int new_pidfd(void)
{
    int fd = __wrap_eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pidfds == PIDFDS)
        virtual_give_up("too many pidfds");
    pidfd[pidfds].fd = __real_dup(fd);
    pidfd[pidfds++].rank = virtual_rank();
    return fd;
}

long __wrap_syscall(long number, ...)
{
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    virtual_call();
    if (virtual_me >= 0 && number == SYS_pidfd_open)
        return new_pidfd();
    if (virtual_me >= 0 && number == SYS_getrandom) {
        for (long i = 0; i < a[1]; i++)
            ((uint8_t *)a[0])[i] = (uint8_t)(virtual_random() >> 16);
        return a[1];
    }
    if (virtual_me < 0 || number != SYS_futex) {
        long result = __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
        return number == SYS_memfd_create ? owned((int)result) : result;
    }
    const uint32_t *word = (const uint32_t *)a[0];
    if (((int)a[1] & 127) == FUTEX_WAKE)
        return virtual_wake(word, (int)a[2]);
    errno = EAGAIN;
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != (uint32_t)a[2] || virtual_interrupted())
        return -1;
    virtual_block(word, virtual_after((const struct timespec *)a[3]), "a futex");
    return 0;
}
