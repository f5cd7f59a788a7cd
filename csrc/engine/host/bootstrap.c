/* bootstrap.c - ranks as processes: the star of unix sockets and its one verb.
 *
 * Local rank 0 binds an abstract unix socket (no file, nothing to clean up) under a random name and publishes
 * it through the boot allgather. A connection counts only after both sides have checked the peer's uid
 * (SO_PEERCRED) and rank 0 has read a greeting with magic, wire version, job, epoch, rank and the job's
 * secret. Strangers are dropped; each has a short limit of its own.
 *
 * hvd_bootstrap_exchange: every rank sends a part to rank 0 (a status, bytes, at most one descriptor), rank 0 sends
 * everybody all of them. A rank that failed locally still takes part, with its status and text: so all ranks
 * fail together with the same words. A rank that ends meanwhile is noticed by rank 0 as end of file; the
 * others hear it from rank 0's verdict or from the store, and wait a moment for that before they blame rank 0 itself.
 * So it is with time: all wait for rank 0, which alone knows for whom it waits, so they give it a little more than it
 * gives the others. Where a descriptor is due and a failing rank has none, its socket stands in: their number is fixed.
 *
 * Cost: 2 (n - 1) messages, n descriptors each at most. Done at init only.
 */
#define _GNU_SOURCE
#include "host.h"
#include "../state/store_frames.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAGIC       0x6876646c69746531u /* "hvdlite1" */
#define GREETING_NS 2000000000u
#define PATIENCE_NS 300000000u  /* how long a bare end of file waits for somebody to say who died */
#define KNOCK_MS    2           /* how often a full queue is tried again */
#define VERDICT_NS  2000000000u /* until rank 0, whose time is up, has told the others for whom it waited */

struct greeting {
    uint64_t magic, job, epoch;
    uint32_t wire, rank;
    uint8_t secret[32];
};

/* What rank 0 publishes. */
struct address {
    uint8_t name[16];
    uint32_t ready;       /* 0: rank 0 could not listen, text says why */
    uint64_t deadline_ns; /* rank 0's, by the clock of this host */
    char text[252];
};

/* One rank's part of an exchange on the wire; its bytes follow. */
struct part {
    int32_t code, culprit;
    uint32_t bytes, fds;
    char text[512];
};

static void say(struct part *part, const struct hvd_error *error)
{
    part->code = error->code;
    part->culprit = error->culprit;
    hvd_text_copy(part->text, sizeof part->text, error->text);
}

/* Nothing will come of it: those that are here already hear why, in place of the first exchange. */
static void dismiss(struct hvd_host *host, const struct hvd_error *error)
{
    struct part part = {.bytes = 0};
    say(&part, error);
    for (int rank = 1; rank < host->size; rank++) {
        struct hvd_parcel parcel = {.bytes = &part, .length = sizeof part};
        if (host->socket[rank] >= 0)
            hvd_parcel_send(host->socket[rank], &parcel, -1, host->deadline_ns);
    }
}

static bool same_uid(int socket)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

static bool same_secret(const uint8_t *a, const uint8_t *b)
{
    volatile uint8_t differ = 0;
    for (int i = 0; i < 32; i++)
        differ |= a[i] ^ b[i];
    return differ == 0;
}

static socklen_t name_socket(struct sockaddr_un *un, const struct address *address)
{
    memset(un, 0, sizeof *un);
    un->sun_family = AF_UNIX;
    char *path = un->sun_path + 1; /* a leading NUL makes the name abstract */
    int length = sprintf(path, "hvdlite-");
    for (size_t i = 0; i < sizeof address->name; i++)
        length += sprintf(path + length, "%02x", address->name[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Listen under a new random name; the descriptor, or -1 with errno. */
static int listen_here(struct address *address)
{
    struct sockaddr_un un;
    if (!hvd_random(address->name, sizeof address->name))
        return -1;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0)
        return -1;
    socklen_t length = name_socket(&un, address);
    if (bind(listener, (struct sockaddr *)&un, length) != 0 || listen(listener, HVD_LOCAL_MAX) != 0) {
        int failed = errno;
        close(listener);
        errno = failed;
        return -1;
    }
    return listener;
}

/* Read one greeting; the rank it proves to be, or -1 for a stranger. */
static int greet(struct hvd_host *host, int socket)
{
    struct greeting greeting;
    struct hvd_parcel parcel = {.bytes = &greeting, .length = sizeof greeting};
    uint64_t limit_ns = hvd_now_ns() + GREETING_NS;
    if (limit_ns > host->deadline_ns)
        limit_ns = host->deadline_ns;
    if (!same_uid(socket) || hvd_parcel_receive(socket, &parcel, -1, limit_ns) != HVD_OK)
        return -1;
    if (greeting.magic != MAGIC || greeting.job != host->job || greeting.epoch != host->epoch ||
        greeting.wire != HVD_WIRE_VERSION || !same_secret(greeting.secret, host->secret))
        return -1;
    if (greeting.rank == 0 || greeting.rank >= (uint32_t)host->size || host->socket[greeting.rank] >= 0)
        return -1;
    return (int)greeting.rank;
}

static int missing_rank(const struct hvd_host *host)
{
    for (int rank = 1; rank < host->size; rank++)
        if (host->socket[rank] < 0)
            return rank;
    return -1;
}

/* Rank 0: take connections until everyone is there. */
static int accept_all(struct hvd_host *host, int listener, struct hvd_error *error)
{
    int missing;
    while ((missing = missing_rank(host)) >= 0) {
        if (hvd_now_ns() >= host->deadline_ns)
            return hvd_fail_rank(error, HVD_ETIMEOUT, host->member[missing],
                                 HVD113
                                 "rank %d did not connect to rank %d of this host in time; is it stopped, or the host "
                                 "overloaded? (--start-timeout gives more time)",
                                 host->member[missing], host->member[0]);
        struct pollfd fds[2] = {{.fd = listener, .events = POLLIN}, {.fd = host->store.fd, .events = POLLIN}};
        int ready = poll(fds, host->store.fd >= 0 ? 2 : 1, 100);
        if (ready > 0 && host->store.fd >= 0 && fds[1].revents) {
            int code = hvd_report_read(&host->store, error);
            if (code != HVD_AGAIN)
                return code;
        }
        if (ready <= 0 || !fds[0].revents)
            continue;
        int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        int rank = socket >= 0 ? greet(host, socket) : -1;
        if (rank >= 0)
            host->socket[rank] = socket;
        else if (socket >= 0)
            close(socket);
    }
    return HVD_OK;
}

/* A peer is not there any more: the store may say who has ended the job. HVD_AGAIN: not soon. */
static int told_who_ended(struct hvd_host *host, struct hvd_error *error)
{
    uint64_t until_ns = hvd_now_ns() + PATIENCE_NS;
    int code = HVD_AGAIN;
    for (bool late = host->store.fd < 0; code == HVD_AGAIN && !late;) {
        late = hvd_now_ns() >= until_ns; /* asked first: a process that was stopped meanwhile looks once more */
        if (poll(&(struct pollfd){.fd = host->store.fd, .events = POLLIN}, 1, late ? 0 : 20) > 0)
            code = hvd_report_read(&host->store, error);
    }
    return code;
}

/* The peer's socket ended, or the time is up: find out whom to blame. */
static int blame(struct hvd_host *host, int code, int local, struct hvd_error *error)
{
    int peer = host->member[local], mine = host->member[host->rank];
    if (code == HVD_ETIMEOUT)
        return hvd_fail_rank(
            error, code, peer,
            HVD113 "rank %d did not answer in time during init; is it stopped? (--start-timeout gives more time)",
            peer);
    if (code == HVD_ENOMEM)
        return hvd_fail_rank(error, HVD_EINIT, mine,
                             HVD120
                             "rank %d may open too few files for %d ranks: raise the limit (ulimit -n) to %d or more",
                             mine, host->size, 64 + 8 * host->size);
    if (code != HVD_EPEER)
        return hvd_fail_rank(error, HVD_EINIT, peer, HVD104 "rank %d sent data of another protocol during init", peer);
    code = told_who_ended(host, error);
    return code != HVD_AGAIN ? code : hvd_fail_rank(error, HVD_EPEER, peer, HVD121 "rank %d ended during init", peer);
}

/* A queue that strangers have filled is full until rank 0 takes them out of it: so a rank 0 that is stopped is waited
 * for no longer than any. */
static int knock(struct hvd_host *host, const struct address *address, struct hvd_error *error)
{
    struct sockaddr_un un;
    socklen_t length = name_socket(&un, address);
    int failed, code, to = host->socket[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (to < 0)
        return hvd_fail(error, HVD_EINIT, HVD153 "cannot create a unix socket (%s)", strerror(errno));
    while ((failed = connect(to, (struct sockaddr *)&un, length) ? errno : 0) == EAGAIN) {
        struct pollfd news = {.fd = host->store.fd, .events = POLLIN};
        if (poll(&news, 1, KNOCK_MS) > 0 && (code = hvd_report_read(&host->store, error)) != HVD_AGAIN)
            return code;
        if (hvd_now_ns() >= host->deadline_ns + VERDICT_NS)
            return blame(host, HVD_ETIMEOUT, 0, error);
    }
    if (failed == ECONNREFUSED && (code = told_who_ended(host, error)) != HVD_AGAIN)
        return code; /* it has died since it told its address */
    if (failed || !same_uid(to))
        return hvd_fail_rank(error, HVD_EINIT, host->member[0],
                             HVD153
                             "rank %d cannot be reached on this host (%s); do the ranks run in different network "
                             "namespaces or as different users?",
                             host->member[0], strerror(failed ? failed : EPERM));
    return HVD_OK;
}

static int connect_to_first(struct hvd_host *host, const struct address *address, struct hvd_error *error)
{
    struct greeting greeting = {
        .magic = MAGIC, .job = host->job, .epoch = host->epoch, .wire = HVD_WIRE_VERSION, .rank = (uint32_t)host->rank};
    memcpy(greeting.secret, host->secret, sizeof greeting.secret);
    struct hvd_parcel parcel = {.bytes = &greeting, .length = sizeof greeting};
    int code = knock(host, address, error);
    if (code != HVD_OK || hvd_parcel_send(host->socket[0], &parcel, -1, host->deadline_ns) == HVD_OK)
        return code;
    code = told_who_ended(host, error);
    return code != HVD_AGAIN ? code
                             : hvd_fail_rank(error, HVD_EPEER, host->member[0],
                                             HVD121 "rank %d closed the connection during init", host->member[0]);
}

int hvd_bootstrap_sockets(struct hvd_host *host, struct hvd_error *error)
{
    struct address mine = {.ready = 0}, *all = calloc((size_t)host->job_size, sizeof *all), *first;
    int listener = -1;
    if (!all)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    first = &all[host->member[0]];
    if (host->rank == 0 && host->size > 1) {
        listener = listen_here(&mine);
        mine.ready = listener >= 0;
        mine.deadline_ns = host->deadline_ns;
        if (listener < 0)
            hvd_text_write(mine.text, sizeof mine.text, HVD153 "rank %d cannot listen on a unix socket (%s)",
                           host->member[0], strerror(errno));
    }
    char text[HVD_TEXT_MAX] = "";
    int code = host->allgather(host->allgather_self, &mine, sizeof mine, all, text, sizeof text);
    if (code != HVD_OK)
        hvd_fail(error, code, "%s", text);
    else if (host->size > 1 && !first->ready)
        code = hvd_fail_rank(error, HVD_EINIT, host->member[0], "%.251s", first->text);
    else if (host->size > 1 && host->rank == 0 && (code = accept_all(host, listener, error)) != HVD_OK)
        dismiss(host, error);
    else if (host->size > 1 && host->rank != 0)
        code = connect_to_first(host, first, error);
    if (host->rank != 0 && host->size > 1)
        host->verdict_ns =
            (first->deadline_ns > host->deadline_ns ? first->deadline_ns : host->deadline_ns) + VERDICT_NS;
    if (listener >= 0)
        close(listener);
    free(all);
    return code;
}

static int part_receive(struct hvd_host *host, int peer, struct hvd_parcel *parcel, struct hvd_error *error)
{
    int code;
    uint64_t until_ns = host->rank == 0 ? host->deadline_ns : host->verdict_ns;
    while ((code = hvd_parcel_receive(host->socket[peer], parcel, host->store.fd, until_ns)) == HVD_AGAIN) {
        int found = hvd_report_read(&host->store, error);
        if (found != HVD_AGAIN)
            return found;
    }
    const struct part *verdict = parcel->bytes;
    bool dismissed = host->rank != 0 && parcel->done >= sizeof *verdict && verdict->code < 0;
    return code == HVD_OK || dismissed ? HVD_OK : blame(host, code, peer, error);
}

/* Where nobody asks who did not hear it, error is NULL: to find that out takes time. */
static int part_send(struct hvd_host *host, int peer, struct hvd_parcel *parcel, struct hvd_error *error)
{
    int code = hvd_parcel_send(host->socket[peer], parcel, -1, host->deadline_ns);
    return code == HVD_OK || !error ? HVD_OK : blame(host, code, peer, error);
}

/* Rank 0 reads everybody's part; the first that failed, or is missing, becomes the verdict on all. */
static void collect(struct hvd_host *host, char *parts, size_t stride, int *fds, struct part *verdict)
{
    for (int rank = 1; rank < host->size; rank++) {
        struct part *part = (struct part *)(parts + (size_t)rank * stride);
        struct hvd_parcel parcel = {
            .bytes = part, .length = stride, .fds = fds ? &fds[rank] : NULL, .fds_count = fds ? 1 : 0};
        struct hvd_error seen = {0};
        if (part_receive(host, rank, &parcel, &seen) != HVD_OK) {
            if (verdict->code == HVD_OK)
                say(verdict, &seen);
            return; /* the others' parts may never come */
        }
        part->text[sizeof part->text - 1] = '\0';
        if (verdict->code == HVD_OK && part->code != HVD_OK)
            memcpy(verdict, part, sizeof *part);
        if (verdict->code == HVD_OK && part->bytes != ((struct part *)parts)->bytes) {
            seen.code = HVD_OK;
            hvd_fail_rank(
                &seen, HVD_EINIT, host->member[rank],
                HVD104 "rank %d takes another path through init than rank %d: install the same hvdlite for all ranks",
                host->member[rank], host->member[0]);
            say(verdict, &seen);
        }
    }
}

/* Rank 0's side: collect, then send all parts (and all descriptors) to all. Slot 0 carries the verdict. */
static int exchange_first(struct hvd_host *host, char *parts, size_t stride, int fd, int *fds, struct hvd_error *error)
{
    struct part verdict;
    memcpy(&verdict, parts, sizeof verdict);
    if (fds)
        fds[0] = fcntl(fd >= 0 ? fd : host->socket[1], F_DUPFD_CLOEXEC, 0);
    collect(host, parts, stride, fds, &verdict);
    memcpy(parts, &verdict, sizeof verdict);
    for (int rank = 1; fds && rank < host->size; rank++)
        if (fds[rank] < 0)
            fds[rank] = fcntl(host->socket[rank], F_DUPFD_CLOEXEC, 0);
    int code = HVD_OK;
    for (int rank = 1; rank < host->size; rank++) {
        struct hvd_parcel parcel = {
            .bytes = parts, .length = stride * (size_t)host->size, .fds = fds, .fds_count = fds ? host->size : 0};
        int sent = part_send(host, rank, &parcel, verdict.code == HVD_OK ? error : NULL);
        if (code == HVD_OK)
            code = sent;
    }
    return verdict.code == HVD_OK ? code : HVD_OK;
}

int hvd_bootstrap_exchange(struct hvd_host *host, const void *mine, size_t bytes, void *all, int fd, int *fds,
                           struct hvd_error *error)
{
    size_t stride = HVD_ALIGN_UP(sizeof(struct part) + bytes, _Alignof(struct part)); /* parts are read in place */
    char *parts = calloc((size_t)host->size, stride);
    HVD_ASSERT(parts && bytes > 0 && host->size > 1);
    struct part *own = (struct part *)parts;
    own->bytes = (uint32_t)bytes;
    own->fds = fds != NULL;
    if (error->code != HVD_OK)
        say(own, error);
    memcpy(parts + sizeof *own, mine, bytes);
    for (int rank = 0; fds && rank < host->size; rank++)
        fds[rank] = -1;
    int code, stand_in = fd >= 0 ? fd : host->socket[host->rank == 0];
    if (host->rank == 0) {
        code = exchange_first(host, parts, stride, fd, fds, error);
    } else {
        struct hvd_parcel to = {.bytes = parts, .length = stride, .fds = &stand_in, .fds_count = fds ? 1 : 0};
        struct hvd_parcel from = {
            .bytes = parts, .length = stride * (size_t)host->size, .fds = fds, .fds_count = fds ? host->size : 0};
        if ((code = part_send(host, 0, &to, error)) == HVD_OK)
            code = part_receive(host, 0, &from, error);
    }
    if (code != HVD_OK)
        host->ended = *error;
    if (code == HVD_OK && own->code != HVD_OK) {
        own->text[sizeof own->text - 1] = '\0';
        code = own->code;
        hvd_fail_rank(error, code, own->culprit, "%s", own->text);
    }
    for (int rank = 0; rank < host->size; rank++) {
        if (code == HVD_OK) {
            memcpy((char *)all + (size_t)rank * bytes, parts + (size_t)rank * stride + sizeof *own, bytes);
        } else if (fds && fds[rank] >= 0) {
            close(fds[rank]);
            fds[rank] = -1;
        }
    }
    free(parts);
    return code;
}
