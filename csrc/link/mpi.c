/* mpi.c - a link whose bytes are messages of an MPI: for votes between hosts that no stream of ours joins.
 *
 * How does a stream become of messages? What is sent is cut into pieces with a head that says how long they are, so
 * that one receive for the longest is always posted and nothing need be asked about what came; MPI keeps the order of
 * messages between two ranks. A piece is small enough to leave at once on every MPI (what is larger waits for the other
 * side to call MPI, and that calls once in a millisecond). What is sent is copied: MPI has the bytes until it says so.
 *
 * MPI has no descriptor to sleep on and moves nothing unless it is called: `fd` is -1, and whoever uses the link asks
 * again and again (deferred_wake.c). It has no end of a stream either: the end is a piece of its own, and who gets one
 * answers with his. So when both have gone nothing is left under way, which a communicator that is made next might take
 * for its own. A peer that dies says nothing: MPI's own errors, if it has any, or the silence of the peer tell of it.
 *
 * Nothing can be taken back that MPI has begun but a receive. What is not done when a link is closed, in a job that has
 * failed, stays with MPI, memory and all. And a link that ends without the peer's last piece, because that peer was
 * slow, keeps its communicator from being freed: the piece comes later.
 */
#define _GNU_SOURCE
#include "link.h"

#include "../mpi/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TAG        2    /* plane mpi, on the same communicator, has 1 */
#define PIECE_MAX  3968 /* with the head below what any MPI sends without asking: 4 KiB and its own head */
#define AWAY_MAX   16
#define LAST       0x80000000u
#define CLOSE_MS   1000
#define CANCEL_MS  50
#define NAP_NS     20000
#define NAP_MAX_NS 1000000
#define STATUS_MAX 16 /* ints; an MPI_Status has 5 in MPICH's ABI, 6 in Open MPI's, 8 in the standard one */
#define HEAD_BYTES ((int)offsetof(struct piece, bytes))

struct piece {
    uint32_t count; /* of bytes, or LAST */
    char bytes[PIECE_MAX];
};

struct messages {
    const struct hvd_mpi *mpi;
    uintptr_t comm, receiving, away[AWAY_MAX];
    int oldest, sending;        /* of `out`, a ring */
    bool posted;                /* a receive is under way */
    bool settling, said, ended; /* ours has left, the peer's has come */
    const char *broken;         /* why nothing goes any more; NULL */
    char why[160];
    uint32_t has, taken; /* of `in` */
    struct piece in, out[AWAY_MAX];
};

static int lost(struct hvd_link *link, struct hvd_error *error)
{
    const struct messages *by = link->self;
    link->over = true;
    return hvd_fail_rank(error, HVD_EPEER, link->peer, HVD450 "the connection to %s over MPI has ended (%s)",
                         link->called, by->broken ? by->broken : "closed by the peer");
}

/* A call of MPI's has failed, or not. */
static bool works(struct messages *by, int code, const char *what)
{
    struct hvd_error error = {0};
    if (code == 0)
        return true;
    hvd_mpi_failed(code, what, &error);
    hvd_text_copy(by->why, sizeof by->why, error.text);
    by->broken = by->broken ? by->broken : by->why;
    return false;
}

static bool done(struct messages *by, uintptr_t *request, const char *what)
{
    int flag = 0;
    return works(by, by->mpi->call.Test(request, &flag, by->mpi->status_ignore), what) && flag;
}

static void post(struct messages *by, int peer)
{
    int bytes = (int)sizeof by->in;
    by->posted = works(by, by->mpi->call.Irecv(&by->in, bytes, by->mpi->byte, peer, TAG, by->comm, &by->receiving),
                       "receive votes");
}

/* Places of pieces that have left are free again. */
static void reap(struct messages *by)
{
    while (by->sending && done(by, &by->away[by->oldest], "send votes")) {
        by->oldest = (by->oldest + 1) % AWAY_MAX;
        by->sending--;
    }
}

static bool say(struct messages *by, int peer, uint32_t head, const void *bytes, size_t count)
{
    int place = (by->oldest + by->sending) % AWAY_MAX;
    struct piece *piece = &by->out[place];
    piece->count = head;
    if (count)
        memcpy(piece->bytes, bytes, count);
    int length = HEAD_BYTES + (int)count;
    if (!works(by, by->mpi->call.Isend(piece, length, by->mpi->byte, peer, TAG, by->comm, &by->away[place]),
               "send votes"))
        return false;
    by->sending++;
    return true;
}

static void say_last(struct messages *by, int peer)
{
    reap(by);
    if (!by->said && !by->broken && by->sending < AWAY_MAX)
        by->said = say(by, peer, LAST, NULL, 0);
}

/* The piece that is received: how long the message was, whatever its head says. */
static bool has_come(struct messages *by, int *length)
{
    _Alignas(8) int status[STATUS_MAX] = {0};
    int flag = 0;
    return works(by, by->mpi->call.Test(&by->receiving, &flag, status), "receive votes") && flag &&
           works(by, by->mpi->call.Get_count(status, by->mpi->byte, length), "tell the length of votes");
}

/* True: there are bytes to be taken. */
static bool pull(struct hvd_link *link)
{
    struct messages *by = link->self;
    if (by->taken < by->has)
        return true;
    if (by->broken || by->ended)
        return false;
    if (!by->posted)
        post(by, link->peer);
    int length = 0;
    if (!by->posted || !has_come(by, &length))
        return false;
    by->posted = false;
    by->taken = by->has = 0;
    if (length == HEAD_BYTES && by->in.count == LAST) {
        by->ended = true;
        say_last(by, link->peer);
    } else if (length <= HEAD_BYTES || by->in.count != (uint32_t)(length - HEAD_BYTES)) {
        by->broken = "it sent what is no piece of votes; please report this";
    } else {
        by->has = by->in.count;
    }
    return by->has > 0;
}

static int messages_open(struct hvd_link *link, int fd, int peer, struct hvd_error *error)
{
    uintptr_t comm = (uintptr_t)link->self;
    struct messages *by = fd < 0 && hvd_mpi_loaded()->abi ? calloc(1, sizeof *by) : NULL;
    *link = (struct hvd_link){.kind = &hvd_link_mpi, .peer = peer, .fd = -1, .self = by};
    snprintf(link->called, sizeof link->called, "rank %d", peer);
    if (!by)
        return hvd_fail_rank(error, HVD_EINIT, peer, HVD115 "no memory, or no MPI, for votes to rank %d", peer);
    by->mpi = hvd_mpi_loaded();
    by->comm = comm;
    post(by, peer);
    if (!by->broken)
        return HVD_OK;
    hvd_fail_rank(error, HVD_EINIT, peer, HVD115 "no votes to rank %d: %s", peer, by->broken);
    free(by);
    link->self = NULL;
    return HVD_EINIT;
}

static int messages_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct messages *by = link->self;
    *moved = 0;
    reap(by);
    while (*moved < count && !by->broken && !by->ended && !by->said && by->sending < AWAY_MAX) {
        size_t part = count - *moved < PIECE_MAX ? count - *moved : PIECE_MAX;
        if (say(by, link->peer, (uint32_t)part, (const char *)bytes + *moved, part))
            *moved += part;
    }
    link->counts.bytes_out += *moved;
    link->wants_out = *moved < count;
    return *moved == 0 && (by->broken || by->ended) ? lost(link, error) : HVD_OK;
}

static int messages_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct messages *by = link->self;
    *moved = 0;
    reap(by);
    while (*moved < count && pull(link)) {
        size_t part = by->has - by->taken < count - *moved ? by->has - by->taken : count - *moved;
        memcpy((char *)bytes + *moved, by->in.bytes + by->taken, part);
        by->taken += (uint32_t)part;
        *moved += part;
    }
    link->counts.bytes_in += *moved;
    return *moved == 0 && count && (by->broken || by->ended) ? lost(link, error) : HVD_OK;
}

/* An end behind bytes that nobody has taken is not seen: votes are read at all times. */
static int messages_ended(struct hvd_link *link, struct hvd_error *error)
{
    const struct messages *by = link->self;
    (void)pull(link);
    return by->ended || by->broken ? lost(link, error) : HVD_OK;
}

static void messages_give_up_after(struct hvd_link *link, int ms, bool unread)
{
    (void)link, (void)ms, (void)unread; /* MPI takes no such wish */
}

static bool messages_unheard(struct hvd_link *link, int ms)
{
    (void)link, (void)ms; /* and gives no such answer */
    return false;
}

static bool messages_settle(struct hvd_link *link)
{
    struct messages *by = link->self;
    by->settling = true;
    say_last(by, link->peer);
    while (pull(link))
        by->taken = by->has;
    return by->broken || (by->ended && by->said && by->sending == 0);
}

/* Asks again until it is so, or the time is up. */
static bool within(struct hvd_link *link, int ms, bool (*so)(struct hvd_link *link))
{
    uint64_t until_ns = hvd_now_ns() + (uint64_t)ms * 1000000u;
    for (long nap_ns = NAP_NS; !so(link); nap_ns = nap_ns < NAP_MAX_NS ? 2 * nap_ns : nap_ns) {
        if (hvd_now_ns() >= until_ns)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL);
    }
    return true;
}

static bool is_taken_back(struct hvd_link *link)
{
    struct messages *by = link->self;
    by->posted = by->posted && !done(by, &by->receiving, "take a receive back");
    reap(by);
    return !by->posted && by->sending == 0;
}

static void messages_close(struct hvd_link *link)
{
    struct messages *by = link->self;
    int over = 1;
    link->self = NULL;
    if (!by || by->mpi->Finalized(&over) != 0 || over)
        return; /* what MPI has had of it, it may still have */
    link->self = by;
    if (!by->settling)
        within(link, CLOSE_MS, messages_settle);
    if (!by->ended)
        hvd_mpi_comm_keep(by->comm);
    if (by->posted)
        works(by, by->mpi->call.Cancel(&by->receiving), "take a receive back");
    bool free_now = within(link, CANCEL_MS, is_taken_back);
    link->self = NULL;
    if (free_now)
        free(by);
}

const struct hvd_link_kind hvd_link_mpi = {"mpi",          messages_open,          messages_send,    messages_recv,
                                           messages_ended, messages_give_up_after, messages_unheard, messages_settle,
                                           messages_close};
