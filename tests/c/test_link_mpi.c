/* test_link_mpi.c - a link of messages, over a stub of MPI in this process: two ranks, played by one thread.
 *
 * The stub keeps what MPI promises (messages between two ranks arrive in order, a receive is matched by its rank and
 * tag) and tells what MPI would forbid: a message longer than its receive, memory that is freed while it has it. Each
 * test has a communicator of its own, which the ranks know by two numbers.
 */
#include "check.h"
#include "link/link.h"
#include "mpi/world.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, BYTE = 77, CALLS_MAX = 4096, BYTES = 100000 };

struct call {
    bool receives, posted, done;
    int rank, peer, tag, count;
    char *memory;
    int came;
};

static struct {
    struct call call[CALLS_MAX];
    int calls, refuse, cancelled, freed;
    bool held; /* nothing arrives */
} stub;
static uintptr_t comm[RANKS] = {100, 101};

static int open_calls(void)
{
    int open = 0;
    for (int i = 0; i < stub.calls; i++)
        open += stub.call[i].posted && !stub.call[i].done;
    return open;
}

static int post(bool receives, const void *memory, int count, int peer, int tag, uintptr_t in, uintptr_t *request)
{
    CHECK(stub.calls < CALLS_MAX && count > 0, "%d calls", stub.calls);
    stub.call[stub.calls] =
        (struct call){receives, true, false, (int)in % RANKS, peer, tag, count, (char *)(uintptr_t)memory, 0};
    *request = (uintptr_t)++stub.calls;
    return stub.refuse;
}

static int isend(const void *values, int count, uintptr_t type, int to, int tag, uintptr_t comm, uintptr_t *request)
{
    CHECK(type == BYTE, "type %d", (int)type);
    return post(false, values, count, to, tag, comm, request);
}

static int irecv(void *values, int count, uintptr_t type, int from, int tag, uintptr_t comm, uintptr_t *request)
{
    CHECK(type == BYTE, "type %d", (int)type);
    return post(true, values, count, from, tag, comm, request);
}

/* The oldest of the other side that fits. */
static void match(struct call *mine)
{
    for (int i = 0; i < stub.calls && !stub.held; i++) {
        struct call *other = &stub.call[i];
        if (other->done || other->receives == mine->receives || other->rank != mine->peer ||
            other->peer != mine->rank || other->tag != mine->tag)
            continue;
        struct call *to = mine->receives ? mine : other, *from = mine->receives ? other : mine;
        CHECK(from->count <= to->count, "%d bytes for a receive of %d", from->count, to->count);
        memcpy(to->memory, from->memory, (size_t)from->count);
        to->came = from->count;
        mine->done = other->done = true;
        return;
    }
}

static int test(uintptr_t *request, int *flag, void *status)
{
    CHECK(*request > 0 && *request <= (uintptr_t)stub.calls, "no request");
    for (int i = 0; i < stub.calls; i++) /* in the order of the calls */
        if (!stub.call[i].done && stub.call[i].receives)
            match(&stub.call[i]);
    *flag = stub.call[*request - 1].done;
    if (status && *flag)
        *(int *)status = stub.call[*request - 1].came;
    return stub.refuse;
}

static int get_count(const void *status, uintptr_t type, int *count)
{
    CHECK(type == BYTE, "type %d", (int)type);
    *count = *(const int *)status;
    return 0;
}

static int comm_free(uintptr_t *given)
{
    stub.freed += *given == comm[0] || *given == comm[1];
    return 0;
}

static int cancel(uintptr_t *request)
{
    stub.call[*request - 1].done = true;
    stub.cancelled++;
    return 0;
}

static int finalized(int *flag)
{
    *flag = 0;
    return 0;
}

static struct hvd_link link[RANKS];
static struct hvd_error error;

static void open_both(void)
{
    struct hvd_mpi *mpi = (struct hvd_mpi *)(uintptr_t)hvd_mpi_loaded();
    *mpi = (struct hvd_mpi){.abi = "stub", .byte = BYTE, .Finalized = finalized};
    mpi->call = (struct hvd_mpi_calls){
        .Isend = isend, .Irecv = irecv, .Test = test, .Cancel = cancel, .Get_count = get_count, .Comm_free = comm_free};
    memset(&stub, 0, sizeof stub);
    error = (struct hvd_error){0};
    for (int rank = 0; rank < RANKS; rank++) {
        comm[rank] += RANKS;
        link[rank].self = (void *)comm[rank];
        CHECK(hvd_link_mpi.open(&link[rank], -1, 1 - rank, &error) == HVD_OK, "%s", error.text);
        CHECK(link[rank].fd == -1 && link[rank].peer == 1 - rank, "fd %d", link[rank].fd);
    }
}

static void end_both(void)
{
    bool all = false;
    for (int i = 0; i < 100 && !all; i++)
        all = hvd_link_mpi.settle(&link[0]) & hvd_link_mpi.settle(&link[1]);
    CHECK(all, "%d calls are open", open_calls());
    CHECK(open_calls() == 0, "%d are left to MPI", open_calls());
    for (int rank = 0; rank < RANKS; rank++)
        hvd_link_mpi.close(&link[rank]);
    CHECK(stub.cancelled == 0, "%d", stub.cancelled);
    for (int rank = 0; rank < RANKS; rank++)
        hvd_mpi_comm_close(comm[rank]);
    CHECK(stub.freed == RANKS, "%d communicators are given back", stub.freed);
}

static char value(int rank, size_t i)
{
    return (char)(i * 31 + i / 251 + (size_t)rank);
}

/* Both ways at once, in pieces of all sizes; more waits than fits. */
static void bytes_arrive_in_order(void)
{
    static char in[RANKS][BYTES], out[RANKS][BYTES];
    size_t sent[RANKS] = {0}, got[RANKS] = {0}, moved;
    bool held_up = false;
    uint32_t random = 7;
    open_both();
    for (int rank = 0; rank < RANKS; rank++)
        for (size_t i = 0; i < BYTES; i++)
            out[rank][i] = value(rank, i);
    while (got[0] < BYTES || got[1] < BYTES) {
        random = random * 1664525u + 1013904223u;
        int rank = random >> 31;
        size_t most = 1 + (random >> 8) % (rank ? 20000 : 300);
        if (random >> 30 & 1) {
            size_t part = BYTES - sent[rank] < most ? BYTES - sent[rank] : most;
            CHECK(hvd_link_mpi.send(&link[rank], out[rank] + sent[rank], part, &moved, &error) == HVD_OK, "%s",
                  error.text);
            held_up |= moved < part;
            CHECK(link[rank].wants_out == (moved < part), "%zu of %zu", moved, part);
            sent[rank] += moved;
        } else {
            size_t part = BYTES - got[rank] < most ? BYTES - got[rank] : most;
            CHECK(hvd_link_mpi.recv(&link[rank], in[rank] + got[rank], part, &moved, &error) == HVD_OK, "%s",
                  error.text);
            got[rank] += moved;
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(memcmp(in[rank], out[1 - rank], BYTES) == 0, "rank %d got something else", rank);
        CHECK(link[rank].counts.bytes_in == BYTES && link[rank].counts.bytes_out == BYTES, "rank %d", rank);
    }
    CHECK(held_up, "nothing ever waited");
    end_both();
}

static void an_end_comes_behind_the_bytes_and_is_answered(void)
{
    char bytes[8];
    size_t moved;
    open_both();
    CHECK(hvd_link_mpi.send(&link[0], "last", 4, &moved, &error) == HVD_OK && moved == 4, "%s", error.text);
    CHECK(!hvd_link_mpi.settle(&link[0]), "it has no answer yet");
    CHECK(hvd_link_mpi.recv(&link[1], bytes, 8, &moved, &error) == HVD_OK && moved == 4, "%zu", moved);
    CHECK(memcmp(bytes, "last", 4) == 0, "%.4s", bytes);
    CHECK(hvd_link_mpi.ended(&link[1], &error) == HVD_EPEER && error.culprit == 0, "%s", error.text);
    for (int twice = 0; twice < 2; twice++) {
        error = (struct hvd_error){0};
        CHECK(hvd_link_mpi.recv(&link[1], bytes, 8, &moved, &error) == HVD_EPEER && link[1].over, "%zu", moved);
        CHECK(strstr(error.text, "rank 0 over MPI has ended (closed by the peer)") != NULL, "%s", error.text);
    }
    CHECK(hvd_link_mpi.send(&link[1], bytes, 4, &moved, &error) == HVD_EPEER && moved == 0, "%zu", moved);
    CHECK(hvd_link_mpi.settle(&link[0]), "the other side has answered by itself");
    end_both();
}

static void what_mpi_refuses_is_the_end(void)
{
    char bytes[8];
    size_t moved;
    open_both();
    stub.refuse = 13;
    CHECK(hvd_link_mpi.recv(&link[0], bytes, 8, &moved, &error) == HVD_EPEER && error.culprit == 1, "%s", error.text);
    CHECK(strstr(error.text, "MPI could not receive votes: error 13") != NULL, "%s", error.text);
    CHECK(hvd_link_mpi.send(&link[1], "x", 1, &moved, &error) == HVD_EPEER && moved == 0, "%zu", moved);
    CHECK(hvd_link_mpi.settle(&link[0]), "there is nothing to wait for");
    stub.refuse = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        (void)hvd_link_mpi.settle(&link[rank]);
        hvd_link_mpi.close(&link[rank]);
    }
    link[0].self = (void *)comm[0];
    stub.refuse = 13;
    CHECK(hvd_link_mpi.open(&link[0], -1, 1, &error) == HVD_EINIT, "it was opened");
}

static void what_is_no_piece_is_refused(void)
{
    const uint32_t heads[][2] = {{0}, {3}, {5}, {4000}, {0x7fffffff}, {0x80000000}, {0x80000001}}; /* and 4 bytes */
    char bytes[8];
    size_t moved;
    for (size_t i = 0; i < HVD_COUNT_OF(heads); i++) {
        uintptr_t request;
        open_both();
        isend(heads[i], 8, BYTE, 0, 2, comm[1], &request);
        error = (struct hvd_error){0};
        CHECK(hvd_link_mpi.recv(&link[0], bytes, 8, &moved, &error) == HVD_EPEER, "%zu bytes", moved);
        CHECK(strstr(error.text, "no piece of votes") != NULL, "%s", error.text);
        for (int rank = 0; rank < RANKS; rank++) {
            (void)hvd_link_mpi.settle(&link[rank]);
            for (int k = 0; k < stub.calls; k++) /* as if it had arrived, or MPI would keep the memory */
                stub.call[k].done = true;
            hvd_link_mpi.close(&link[rank]);
        }
    }
}

/* Of a peer that is gone or slow: the receive is taken back, and what that peer may still send meets no other link, for
 * the communicator is kept. The peer, who has had our last piece, may free it. */
static void a_link_without_an_answer_is_closed_in_time(void)
{
    open_both();
    stub.held = true;
    uint64_t began = hvd_now_ns();
    hvd_link_mpi.close(&link[0]);
    CHECK(stub.cancelled == 1 && hvd_now_ns() - began < 60000000000u, "%d taken back", stub.cancelled);
    hvd_mpi_comm_close(comm[0]);
    CHECK(stub.freed == 0, "the communicator of a link that has not ended is freed");
    stub.held = false;
    (void)hvd_link_mpi.settle(&link[1]); /* takes our last piece; its own leaves, and waits at our side for a receive */
    for (int k = 0; k < stub.calls; k++)
        stub.call[k].done |= !stub.call[k].receives;
    CHECK(hvd_link_mpi.settle(&link[1]), "it has our last piece, and its own has left");
    hvd_link_mpi.close(&link[1]);
    hvd_mpi_comm_close(comm[1]);
    CHECK(stub.freed == 1, "%d", stub.freed);
}

int main(void)
{
    bytes_arrive_in_order();
    an_end_comes_behind_the_bytes_and_is_answered();
    what_mpi_refuses_is_the_end();
    what_is_no_piece_is_refused();
    a_link_without_an_answer_is_closed_in_time();
    return 0;
}
