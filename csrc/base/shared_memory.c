/* shared_memory.c - shared segments without names, and parcels: bytes with descriptors over a unix socket.
 *
 * A parcel is bounded and of known size on both sides, so a receiver never allocates what a sender asks
 * for. Descriptors ride with the first byte of a parcel (the kernel ties them to it), the rest may follow
 * in pieces. The sockets are non-blocking; waiting is one poll() on the socket, the deadline and a second
 * descriptor that may bring the news that somebody died.
 */
#define _GNU_SOURCE
#include "shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1u
#endif
#ifndef O_TMPFILE
#define O_TMPFILE (020000000 | O_DIRECTORY)
#endif

bool hvd_memory_has_memfd(void)
{
    int fd = (int)syscall(SYS_memfd_create, "hvdlite", MFD_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static int open_dev_shm(struct hvd_error *error)
{
    int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        hvd_fail(error, HVD_EINIT,
                 HVD652 "no shared memory: memfd_create is refused here and /dev/shm cannot be opened (%s)",
                 strerror(errno));
    return fd;
}

int hvd_memory_reserve(int fd, size_t from, size_t bytes, struct hvd_error *error)
{
    /* Asked first, since a tmpfs as large as the memory would take all of it before fallocate fails. */
    struct statvfs room;
    uint64_t free_bytes = fstatvfs(fd, &room) == 0 ? (uint64_t)room.f_bavail * room.f_frsize : 0;
    int failed = bytes > free_bytes ? ENOSPC : posix_fallocate(fd, (off_t)from, (off_t)bytes);
    if (!failed)
        return HVD_OK;
    return hvd_fail(error, HVD_EINIT,
                    HVD652
                    "/dev/shm is too small: this rank needs %.1f MB more of it and %.1f MB are free (%s). Make it "
                    "larger, by that much for each rank (docker run --shm-size=1g; mount -o remount,size=1g "
                    "/dev/shm), or allow memfd_create (HVDLITE_SHARED_MEMORY=auto)",
                    (double)bytes / 1e6, (double)free_bytes / 1e6, strerror(failed));
}

static int create_in_dev_shm(size_t bytes, struct hvd_error *error)
{
    int fd = open_dev_shm(error);
    if (fd >= 0 && hvd_memory_reserve(fd, 0, bytes, error) != HVD_OK) {
        close(fd);
        return error->code;
    }
    return fd >= 0 ? fd : HVD_EINIT;
}

static int cut_to(int fd, size_t bytes, struct hvd_error *error)
{
    if (ftruncate(fd, (off_t)bytes) == 0)
        return fd;
    int failed = errno;
    close(fd);
    return hvd_fail(error, HVD_EINIT, HVD652 "cannot make a shared segment of %.1f MB (%s)", (double)bytes / 1e6,
                    strerror(failed));
}

int hvd_memory_create_sparse(size_t bytes, enum hvd_memory_source source, bool *reserved, struct hvd_error *error)
{
    int fd = source == HVD_MEMORY_BEST ? (int)syscall(SYS_memfd_create, "hvdlite", MFD_CLOEXEC) : -1;
    *reserved = fd >= 0;
    if (fd < 0)
        fd = open_dev_shm(error);
    return fd < 0 ? HVD_EINIT : cut_to(fd, bytes, error);
}

void hvd_memory_clear(void *memory, size_t bytes, bool shared)
{
    if (shared ? madvise(memory, bytes, MADV_REMOVE) : madvise(memory, bytes, MADV_DONTNEED))
        memset(memory, 0, bytes);
}

int hvd_memory_create(size_t bytes, enum hvd_memory_source source, struct hvd_error *error)
{
    int fd = source == HVD_MEMORY_BEST ? (int)syscall(SYS_memfd_create, "hvdlite", MFD_CLOEXEC) : -1;
    if (fd < 0)
        return create_in_dev_shm(bytes, error);
    return cut_to(fd, bytes, error);
}

void *hvd_memory_map(int fd, size_t bytes, struct hvd_error *error)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        hvd_fail(error, HVD_ENOMEM,
                 HVD652 "cannot reserve %.1f MB of address space for a shared segment (%s); is RLIMIT_AS set?",
                 (double)bytes / 1e6, strerror(errno));
        return NULL;
    }
    return memory;
}

void *hvd_memory_private(size_t bytes, struct hvd_error *error)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        hvd_fail(error, HVD_ENOMEM, HVD951 "cannot allocate %.1f MB of memory (%s)", (double)bytes / 1e6,
                 strerror(errno));
        return NULL;
    }
    return memory;
}

void hvd_memory_unmap(void *memory, size_t bytes)
{
    if (memory)
        munmap(memory, bytes);
}

void hvd_memory_part(void *memory, size_t bytes, int fd)
{
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (bytes > 0 && mmap(memory, bytes, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED)
        (void)mprotect(memory, bytes, PROT_READ);
}

void hvd_memory_renew(char *copy, const char *memory, size_t from, size_t end, int fd, bool blank)
{
    while (from < end) {
        off_t data = lseek(fd, (off_t)from, SEEK_DATA);
        if (data < 0 && errno == ENXIO)
            return;
        off_t hole = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
        from = data < 0 ? from : (size_t)data;
        size_t until = hole < 0 || (size_t)hole > end ? end : (size_t)hole;
        for (size_t part; from < until; from += part) {
            part = until - from < HVD_PAGE ? until - from : HVD_PAGE;
            if (blank || memcmp(copy + from, memory + from, part) != 0)
                memcpy(copy + from, memory + from, part);
        }
    }
}

bool hvd_memory_replace(void *memory, size_t bytes, void *with)
{
    return mremap(with, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, memory) != MAP_FAILED;
}

uint64_t hvd_memory_resident(const void *memory, size_t bytes)
{
    unsigned char there[1024]; /* for 4 MB at a time */
    uintptr_t at = (uintptr_t)memory / HVD_PAGE * HVD_PAGE, end = (uintptr_t)memory + bytes;
    uint64_t pages = 0;
    for (; at < end; at += sizeof there * HVD_PAGE) {
        size_t part = HVD_ALIGN_UP(end - at, HVD_PAGE);
        part = part < sizeof there * HVD_PAGE ? part : sizeof there * HVD_PAGE;
        if (mincore((void *)at, part, there) == 0)
            for (size_t i = 0; i < part / HVD_PAGE; i++)
                pages += there[i] & 1;
    }
    return pages * HVD_PAGE;
}

/* Wait until the socket is ready for `events`; the codes of the parcel functions. */
static int wait_ready(int socket, short events, int watch, uint64_t deadline_ns)
{
    for (;;) {
        uint64_t now = hvd_now_ns();
        if (now >= deadline_ns)
            return HVD_ETIMEOUT;
        uint64_t left_ms = (deadline_ns - now) / 1000000u + 1;
        struct pollfd fds[2] = {{.fd = socket, .events = events}, {.fd = watch, .events = POLLIN}};
        int ready = poll(fds, watch >= 0 ? 2 : 1, left_ms > 1000 ? 1000 : (int)left_ms);
        if (ready < 0 && errno != EINTR)
            return HVD_EPEER;
        if (ready > 0 && fds[0].revents)
            return HVD_OK;
        if (ready > 0 && watch >= 0 && fds[1].revents)
            return HVD_AGAIN;
    }
}

union control_room {
    char bytes[CMSG_SPACE(sizeof(int) * HVD_LOCAL_MAX)];
    struct cmsghdr align;
};

int hvd_parcel_send(int socket, struct hvd_parcel *parcel, int watch, uint64_t deadline_ns)
{
    while (parcel->done < parcel->length) {
        union control_room room;
        struct iovec piece = {(char *)parcel->bytes + parcel->done, parcel->length - parcel->done};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
        if (parcel->done == 0 && parcel->fds_count > 0) {
            size_t fds_bytes = sizeof(int) * (size_t)parcel->fds_count;
            memset(&room, 0, sizeof room);
            message.msg_control = room.bytes;
            message.msg_controllen = CMSG_SPACE(fds_bytes);
            struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = SOL_SOCKET;
            header->cmsg_type = SCM_RIGHTS;
            header->cmsg_len = CMSG_LEN(fds_bytes);
            memcpy(CMSG_DATA(header), parcel->fds, fds_bytes);
        }
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            parcel->done += (size_t)sent;
        } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int code = wait_ready(socket, POLLOUT, watch, deadline_ns);
            if (code != HVD_OK)
                return code;
        } else if (!(sent < 0 && errno == EINTR)) {
            return HVD_EPEER;
        }
    }
    return HVD_OK;
}

/* Take the descriptors that came with a message, all or none of them. */
static int take_fds(struct msghdr *message, struct hvd_parcel *parcel)
{
    int taken = 0;
    bool wrong = (message->msg_flags & MSG_CTRUNC) != 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
            if (taken < parcel->fds_count)
                parcel->fds[taken++] = fd;
            else {
                close(fd);
                wrong = true;
            }
        }
    }
    if (!wrong && taken == parcel->fds_count)
        return HVD_OK;
    for (int i = 0; i < taken; i++) {
        close(parcel->fds[i]);
        parcel->fds[i] = -1;
    }
    return message->msg_flags & MSG_CTRUNC ? HVD_ENOMEM : HVD_EINVAL;
}

int hvd_parcel_receive(int socket, struct hvd_parcel *parcel, int watch, uint64_t deadline_ns)
{
    while (parcel->done < parcel->length) {
        union control_room room;
        struct iovec piece = {(char *)parcel->bytes + parcel->done, parcel->length - parcel->done};
        struct msghdr message = {
            .msg_iov = &piece, .msg_iovlen = 1, .msg_control = room.bytes, .msg_controllen = sizeof room.bytes};
        ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got > 0) {
            bool first = parcel->done == 0;
            parcel->done += (size_t)got;
            if (first) {
                int code = take_fds(&message, parcel);
                if (code != HVD_OK)
                    return code;
            }
        } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int code = wait_ready(socket, POLLIN, watch, deadline_ns);
            if (code != HVD_OK)
                return code;
        } else if (!(got < 0 && errno == EINTR)) {
            return HVD_EPEER;
        }
    }
    return HVD_OK;
}
