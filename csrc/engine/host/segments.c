/* segments.c - the control segment, and shared segments for planes.
 *
 * Everything is built from one verb, hvd_host_exchange (bootstrap.c for processes; the boot allgather itself for
 * threads of one process). The order at open: sockets, eventfds, pidfds, then the control segment, which
 * local rank 0 makes and whose header the others check before they believe it; "same host" is proved by
 * reading rank 0's nonce in it.
 *
 * Segments in a thread world are anonymous memory that all threads address directly; the last share that is
 * dropped unmaps them all (`users` in front of each). In a process world every rank maps everyone's memfd,
 * and its own share unmaps its own mappings.
 */
#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC 0x6876646c63747231u /* "hvdlctr1" */

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* In front of a segment in a thread world. */
struct users {
    _Atomic uint32_t count;
    char pad[HVD_PAGE - sizeof(uint32_t)];
};

static int exchange_in_process(struct hvd_host *host, const void *mine, size_t bytes, void *all,
                               struct hvd_error *error)
{
    char text[HVD_TEXT_MAX] = "", *job = malloc(bytes * (size_t)host->job_size);
    HVD_ASSERT(job);
    int code = host->allgather(host->allgather_self, mine, bytes, job, text, sizeof text);
    if (code != HVD_OK)
        hvd_fail(error, code, "%s", text);
    for (int rank = 0; code == HVD_OK && rank < host->size; rank++)
        memcpy((char *)all + bytes * (size_t)rank, job + bytes * (size_t)host->member[rank], bytes);
    free(job);
    return code;
}

/* After an exchange that a rank has left half done none follows: what lies in the sockets belongs to that one. */
static int exchange_between_processes(struct hvd_host *host, const void *mine, size_t bytes, void *all, int fd,
                                      int *fds, struct hvd_error *error)
{
    if (host->ended.code != HVD_OK)
        return hvd_fail_rank(error, host->ended.code, host->ended.culprit, "%s", host->ended.text);
    int code = hvd_bootstrap_exchange(host, mine, bytes, all, fd, fds, error);
    if (code == HVD_EPEER || code == HVD_ETIMEOUT)
        host->ended = *error;
    return code;
}

int hvd_host_exchange(struct hvd_host *host, const void *mine, size_t bytes, void *all, int fd, int *fds,
                      struct hvd_error *error)
{
    if (host->size == 1 && (!host->in_process || host->job_size == 1)) {
        if (error->code != HVD_OK)
            return error->code;
        memcpy(all, mine, bytes);
        if (fds)
            fds[0] = dup(fd);
        return HVD_OK;
    }
    if (!host->in_process)
        return exchange_between_processes(host, mine, bytes, all, fd, fds, error);
    int code = exchange_in_process(host, mine, bytes, all, error);
    if (code == HVD_OK && fds) {
        code = exchange_in_process(host, &fd, sizeof fd, fds, error);
        for (int rank = 0; rank < host->size && code == HVD_OK; rank++)
            fds[rank] = dup(fds[rank]);
        char done = 1, seen[HVD_LOCAL_MAX]; /* nobody closes a descriptor that another is still duplicating */
        if (code == HVD_OK)
            code = exchange_in_process(host, &done, 1, seen, error);
    }
    return code;
}

static void unmap_process(struct hvd_share *share)
{
    for (int rank = 0; rank < share->size; rank++)
        hvd_memory_unmap(share->map[rank], share->bytes);
    if (share->fd >= 0)
        close(share->fd);
    free(share);
}

static void unmap_thread(struct hvd_share *share)
{
    for (int rank = 0; rank < share->size; rank++) {
        struct users *users = (struct users *)share->map[rank] - 1;
        if (atomic_fetch_sub(&users->count, 1) == 1)
            hvd_memory_unmap(users, share->bytes + sizeof *users);
    }
    free(share);
}

static struct hvd_share *share_new(struct hvd_host *host, size_t bytes, void (*unmap)(struct hvd_share *))
{
    struct hvd_share *share = calloc(1, sizeof *share);
    HVD_ASSERT(share);
    share->bytes = bytes;
    share->size = host->size;
    share->fd = -1;
    share->unmap = unmap;
    atomic_store(&share->references, 1);
    return share;
}

static struct hvd_share *share_in_process(struct hvd_host *host, size_t bytes, struct hvd_error *error)
{
    struct users *mine = hvd_memory_private(bytes + sizeof *mine, error), *all[HVD_LOCAL_MAX];
    if (mine)
        atomic_store(&mine->count, (uint32_t)host->size);
    if (hvd_host_exchange(host, &mine, sizeof mine, all, -1, NULL, error) != HVD_OK)
        return NULL;
    struct hvd_share *share = share_new(host, bytes, unmap_thread);
    for (int rank = 0; rank < host->size; rank++) {
        HVD_ASSERT(all[rank]); /* thread worlds are for tests: no graceful path for lack of address space */
        share->map[rank] = all[rank] + 1;
    }
    return share;
}

/* Map everyone's segment; `fd` is this rank's, negative if it has none (and `error` says why). */
static struct hvd_share *share_between_processes(struct hvd_host *host, size_t bytes, int fd, struct hvd_error *error)
{
    int fds[HVD_LOCAL_MAX];
    uint64_t all[HVD_LOCAL_MAX], mine = bytes;
    struct hvd_share *share = NULL;
    if (hvd_host_exchange(host, &mine, sizeof mine, all, fd, fds, error) == HVD_OK) {
        share = share_new(host, bytes, unmap_process);
        for (int rank = 0; rank < host->size; rank++) {
            if (all[rank] != bytes)
                hvd_fail_rank(error, HVD_EINTERNAL, host->member[rank],
                              HVD901 "rank %d shares %llu bytes where %zu are due", host->member[rank],
                              (unsigned long long)all[rank], bytes);
            if (error->code == HVD_OK)
                share->map[rank] = hvd_memory_map(fds[rank], bytes, error);
            close(fds[rank]);
        }
        uint8_t done = 1, seen[HVD_LOCAL_MAX]; /* all have mapped, or all fail */
        if (hvd_host_exchange(host, &done, sizeof done, seen, -1, NULL, error) != HVD_OK) {
            unmap_process(share);
            share = NULL;
        }
    }
    return share;
}

struct hvd_share *hvd_host_share(struct hvd_host *host, size_t bytes, struct hvd_error *error)
{
    bytes = HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE);
    if (host->in_process)
        return share_in_process(host, bytes, error);
    int fd = hvd_memory_create(bytes, host->source, error);
    struct hvd_share *share = share_between_processes(host, bytes, fd, error);
    if (share)
        share->fd = fd;
    else if (fd >= 0)
        close(fd);
    return share;
}

struct hvd_share *hvd_host_share_sparse(struct hvd_host *host, size_t bytes, int *fd, struct hvd_error *error)
{
    bytes = HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE);
    *fd = -1;
    if (host->in_process)
        return share_in_process(host, bytes, error);
    bool reserved = true;
    int mine = hvd_memory_create_sparse(bytes, host->source, &reserved, error);
    struct hvd_share *share = share_between_processes(host, bytes, mine, error);
    if (share && !reserved)
        *fd = mine;
    else if (mine >= 0)
        close(mine);
    return share;
}

/* Everyone's doorbell and, in a process world, everyone's pidfd. */
static int share_descriptors(struct hvd_host *host, struct hvd_error *error)
{
    int mine = (int)getpid(), all[HVD_LOCAL_MAX];
    int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (bell < 0)
        hvd_fail(error, HVD_EINIT, HVD120 "cannot create an eventfd (%s); is the limit of open files too low?",
                 strerror(errno));
    int code = hvd_host_exchange(host, &mine, sizeof mine, host->pid, bell, host->bells.eventfd, error);
    if (bell >= 0)
        close(bell);
    if (code != HVD_OK || host->in_process)
        return code;
    /* A kernel or a sandbox may refuse pidfds: then the socket's end of file tells of a death. */
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0), pidfds[HVD_LOCAL_MAX];
    mine = self >= 0;
    code = hvd_host_exchange(host, &mine, sizeof mine, all, self, pidfds, error);
    if (self >= 0)
        close(self);
    for (int rank = 0; rank < host->size && code == HVD_OK; rank++) {
        bool useful = all[rank] && rank != host->rank;
        host->pidfd[rank] = useful ? pidfds[rank] : -1;
        if (!useful)
            close(pidfds[rank]);
    }
    return code;
}

/* Rank 0's segment is the control segment; the others' stay untouched pages. */
static int share_control(struct hvd_host *host, size_t board_bytes, struct hvd_error *error)
{
    size_t seats = HVD_ALIGN_UP(sizeof *host->control + sizeof(struct hvd_seat) * (size_t)host->size, (size_t)HVD_PAGE);
    host->board_bytes = HVD_ALIGN_UP(board_bytes, (size_t)HVD_PAGE);
    size_t desk = sizeof(struct hvd_inbox) + sizeof(struct hvd_account) * (size_t)host->size;
    size_t bytes = seats + 2 * host->board_bytes * (size_t)host->size + desk;
    struct hvd_share *share = hvd_host_share(host, bytes, error);
    if (!share)
        return error->code;
    struct hvd_control *control = share->map[0];
    uint64_t nonce = 0, nonces[HVD_LOCAL_MAX];
    if (host->rank == 0) {
        while (nonce == 0)
            if (!hvd_random(&nonce, sizeof nonce))
                nonce = hvd_now_ns();
        control->magic = MAGIC;
        control->job = host->job;
        control->epoch = host->epoch;
        control->nonce = nonce;
        control->board_bytes = host->board_bytes;
        control->wire = HVD_WIRE_VERSION;
        control->size = (uint32_t)host->size;
    }
    int code = hvd_host_exchange(host, &nonce, sizeof nonce, nonces, -1, NULL, error);
    if (code == HVD_OK && (control->nonce != nonces[0] || control->magic != MAGIC ||
                           control->board_bytes != host->board_bytes || control->size != (uint32_t)host->size))
        code = hvd_fail_rank(error, HVD_EINIT, host->member[0],
                             HVD153 "rank %d and rank %d map different control segments; are both on one host?",
                             host->member[0], host->member[host->rank]);
    if (code != HVD_OK) {
        hvd_share_drop(share);
        return code;
    }
    host->control = control;
    host->control_share = share;
    host->bells.rank = host->rank;
    host->bells.size = host->size;
    for (int rank = 0; rank < host->size; rank++)
        host->bells.asleep[rank] = &control->seat[rank].asleep;
    return HVD_OK;
}

int hvd_host_open(struct hvd_host *host, size_t board_bytes, struct hvd_error *error)
{
    host->control = NULL;
    host->control_share = NULL;
    host->ended.code = HVD_OK;
    for (int rank = 0; rank < HVD_LOCAL_MAX; rank++)
        host->pidfd[rank] = host->socket[rank] = host->bells.eventfd[rank] = -1;
    int code = HVD_OK;
    for (int rank = 0; host->job_size == 0 && rank < host->size; rank++)
        host->member[rank] = rank;
    if (host->job_size == 0)
        host->job_size = host->size;
    if (!host->in_process && host->job_size > 1)
        code = hvd_bootstrap_sockets(host, error);
    if (code == HVD_OK)
        code = share_descriptors(host, error);
    if (code == HVD_OK)
        code = share_control(host, board_bytes, error);
    if (code != HVD_OK)
        hvd_host_close(host);
    return code;
}

void hvd_host_close_in_child(const struct hvd_host *host)
{
    for (int rank = 0; rank < host->size; rank++) {
        if (host->pidfd[rank] >= 0)
            close(host->pidfd[rank]);
        if (host->socket[rank] >= 0)
            close(host->socket[rank]);
        if (host->bells.eventfd[rank] >= 0)
            close(host->bells.eventfd[rank]);
    }
}

void hvd_host_close(struct hvd_host *host)
{
    hvd_host_close_in_child(host);
    for (int rank = 0; rank < HVD_LOCAL_MAX; rank++)
        host->pidfd[rank] = host->socket[rank] = host->bells.eventfd[rank] = -1;
    if (host->control_share)
        hvd_share_drop(host->control_share);
    host->control_share = NULL;
    host->control = NULL;
}
