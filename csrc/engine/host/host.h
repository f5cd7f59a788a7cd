/* host.h - how the ranks of one host meet, and what they share for the life of an engine. A job may have several hosts,
 * which nothing here knows of, but for the boot allgather, which all ranks of the job take part in.
 *
 * Meeting: local rank 0 listens on an abstract unix socket whose random name it publishes through the boot
 * allgather; the others connect, and both sides check uid, job, epoch and secret. From then on the sockets
 * form a star with one verb, hvd_host_exchange: everybody gives bytes and descriptors, everybody gets all.
 * What is exchanged: eventfds (doorbells), pidfds (each opened on itself: nobody opens a process by
 * number), the control segment, and the segments that planes ask for.
 *
 * Ranks may also be threads of one process (tests): then descriptors and addresses are simply valid
 * everywhere, the boot allgather carries them, and every segment has one mapping (TSan sees races only so).
 */
#ifndef HVD_ENGINE_HOST_HOST_H
#define HVD_ENGINE_HOST_HOST_H

#include "../../base/base.h"
#include "../../base/shared_memory.h"
#include "../../base/wait.h"
#include "../../plane/plane.h"
#include "set_space.h"
#include "engine/stall/rank_status.h"
#include "engine/state/store_frames.h"

#include <stdatomic.h>

/* One rank's place in the control segment. Only that rank writes it, but for asleep.word, which the ringer clears. */
struct hvd_seat {
    struct hvd_asleep asleep;
    struct hvd_round_line line[2]; /* what this rank says in even and odd rounds */
    _Atomic uint64_t posted;       /* the newest round whose vote is that of all hosts, see shm_votes.c */
    char pad[2 * HVD_CACHE_LINE - sizeof(uint64_t)];
    _Atomic int32_t cpu; /* where it submitted or waited last, see progress.c. 0: nowhere yet; CPU k: k + 1 */
    char pad_cpu[2 * HVD_CACHE_LINE - sizeof(int32_t)];
    _Atomic uint32_t left;       /* 1: this rank took its leave; its end is no death */
    _Atomic uint32_t text_ready; /* 1: text holds what this rank, the first witness, knows of the abort */
    char text[HVD_TEXT_MAX];
    char pad_text[2 * HVD_CACHE_LINE - 2 * sizeof(uint32_t)];
};

/* The control segment: header, seats, two boards per rank (rounds of even and odd number), and the desk
 * (rank_status.h). */
struct hvd_control {
    uint64_t magic, job, epoch, nonce;
    uint64_t board_bytes;
    uint32_t wire, size;
    char pad[2 * HVD_CACHE_LINE - 6 * sizeof(uint64_t)];
    _Atomic uint64_t abort; /* 0, or the first abort: see abort.c */
    char pad_abort[2 * HVD_CACHE_LINE - sizeof(uint64_t)];
    struct hvd_seat seat[];
};

struct hvd_host {
    int rank, size;            /* local */
    int job_size;              /* 0: all ranks of the job are on this host */
    int member[HVD_LOCAL_MAX]; /* what the ranks of this host are called in the job */
    bool in_process;
    uint64_t job, epoch;
    uint8_t secret[32];
    struct hvd_report_line store;
    uint64_t deadline_ns; /* for everything that blocks; set before a collective */
    enum hvd_memory_source source;
    hvd_boot_allgather *allgather;
    void *allgather_self;
    /* the rest is set by hvd_host_open */
    struct hvd_control *control;
    struct hvd_share *control_share;
    size_t board_bytes;
    struct hvd_bells bells;
    int pid[HVD_LOCAL_MAX];
    int pidfd[HVD_LOCAL_MAX];  /* -1: own, or refused by the kernel */
    uint64_t verdict_ns;       /* of others than rank 0: until then it is to have spoken, in an exchange */
    int socket[HVD_LOCAL_MAX]; /* rank 0: to everyone; others: [0] only; -1: none */
    struct hvd_error ended;    /* why no exchange can follow: one was left half done, or a rank is lost */
};

/* Meet. Collective, blocks until all are there or host->deadline_ns. The caller has set the fields up to
 * allgather_self. On failure everything is closed again. */
int hvd_host_open(struct hvd_host *host, size_t board_bytes, struct hvd_error *error);
/* Close descriptors and drop the control segment. */
void hvd_host_close(struct hvd_host *host);
/* In a forked child: close all descriptors, touch nothing else. Async-signal-safe. */
void hvd_host_close_in_child(const struct hvd_host *host);

/* Collective: all[rank * bytes] gets every rank's bytes (bytes > 0); fds (NULL: no descriptors travel) gets a
 * duplicate of everyone's descriptor. An `error` that holds a failure already makes all ranks fail with it. */
int hvd_host_exchange(struct hvd_host *host, const void *mine, size_t bytes, void *all, int fd, int *fds,
                      struct hvd_error *error);
/* Collective: every rank gets `bytes` of its own that all map. NULL on failure, then on all ranks. */
struct hvd_share *hvd_host_share(struct hvd_host *host, size_t bytes, struct hvd_error *error);
/* The same, but memory is there only as far as it is touched. *fd: -1, or this rank's own segment (the caller closes
 * it), of which every part must be reserved before it is touched (hvd_memory_reserve). */
struct hvd_share *hvd_host_share_sparse(struct hvd_host *host, size_t bytes, int *fd, struct hvd_error *error);

/* A rank's two boards in the global set, for rounds of even and odd number. */
static inline char *hvd_host_boards(const struct hvd_host *host, int rank)
{
    size_t seats = HVD_ALIGN_UP(sizeof *host->control + sizeof(struct hvd_seat) * (size_t)host->size, (size_t)HVD_PAGE);
    return (char *)host->control + seats + 2 * host->board_bytes * (size_t)rank;
}

static inline struct hvd_inbox *hvd_host_desk(const struct hvd_host *host)
{
    return (struct hvd_inbox *)(void *)hvd_host_boards(host, host->size);
}

/* Parts of meeting as processes, for segments.c only (bootstrap.c). */
int hvd_bootstrap_sockets(struct hvd_host *host, struct hvd_error *error);
int hvd_bootstrap_exchange(struct hvd_host *host, const void *mine, size_t bytes, void *all, int fd, int *fds,
                           struct hvd_error *error);

#endif
