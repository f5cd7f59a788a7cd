/* test_mpi_post.c - bytes of any number over an MPI whose counts are small: a stub of MPI in this process.
 *
 * All ranks are played one after the other by one thread. The stub keeps what MPI promises (messages between two ranks
 * arrive in order, collectives meet in the order of their calls) and refuses every count above LIMIT, which stands for
 * INT_MAX. What comes out is compared byte by byte; a call that fails is told.
 */
#include "check.h"
#include "plane/mpi/post.h"

#include <stdlib.h>
#include <string.h>

#define MUST(condition) CHECK(condition, "%d calls", stub.calls)

enum { RANKS = 3, LIMIT = 7, CALLS_MAX = 4096, BYTE = 77, IN_PLACE = 1 };

struct call {
    enum { NONE, SEND, RECEIVE, REDUCE, BROADCAST } kind;
    int rank, peer, count, number; /* number: of this rank's collectives, or of messages between two ranks */
    const char *in;
    char *out;
};

static struct {
    struct call call[CALLS_MAX];
    int calls, collectives[RANKS], messages[RANKS][RANKS][2], refuse;
} stub;

static int rank_of(uintptr_t comm)
{
    return (int)comm - 100;
}

static struct call *post(uintptr_t comm, int kind, int count, uintptr_t *request)
{
    MUST(count >= 0 && count <= LIMIT && stub.calls < CALLS_MAX);
    struct call *call = &stub.call[stub.calls++];
    *call = (struct call){.kind = kind, .rank = rank_of(comm), .count = count};
    if (kind > RECEIVE)
        call->number = stub.collectives[call->rank]++;
    *request = (uintptr_t)stub.calls;
    return call;
}

static int isend(const void *values, int count, uintptr_t type, int to, int tag, uintptr_t comm, uintptr_t *request)
{
    struct call *call = post(comm, SEND, count, request);
    MUST(type == BYTE && tag >= 0 && to != call->rank);
    call->in = values;
    call->peer = to;
    call->number = stub.messages[call->rank][to][0]++;
    return stub.refuse;
}

static int irecv(void *values, int count, uintptr_t type, int from, int tag, uintptr_t comm, uintptr_t *request)
{
    struct call *call = post(comm, RECEIVE, count, request);
    MUST(type == BYTE && tag >= 0);
    call->out = values;
    call->peer = from;
    call->number = stub.messages[from][call->rank][1]++;
    return 0;
}

static int iallreduce(const void *in, void *out, int count, uintptr_t type, uintptr_t op, uintptr_t comm,
                      uintptr_t *request)
{
    struct call *call = post(comm, REDUCE, count, request);
    MUST(type == 5 && op == 6);
    call->in = in == (const void *)IN_PLACE ? out : in;
    call->out = out;
    return 0;
}

static int ibcast(void *values, int count, uintptr_t type, int root, uintptr_t comm, uintptr_t *request)
{
    struct call *call = post(comm, BROADCAST, count, request);
    MUST(type == BYTE);
    call->out = values;
    call->peer = root;
    return 0;
}

static int ialltoallv(const void *in, const int *gives, const int *from, uintptr_t type, void *out, const int *gets,
                      const int *at, uintptr_t out_type, uintptr_t comm, uintptr_t *request)
{
    struct call *call = post(comm, SEND, gives[0] + gets[0], request);
    MUST(type == BYTE && out_type == BYTE);
    call->in = in;
    call->out = out;
    return 0;
}

static struct call *other(const struct call *mine, int kind, int rank)
{
    for (int i = 0; i < stub.calls; i++) {
        struct call *call = &stub.call[i];
        if ((int)call->kind == kind && call->rank == rank && call->number == mine->number &&
            (kind > RECEIVE || call->peer == mine->rank))
            return call;
    }
    return NULL;
}

/* Receives, and the last rank of a collective, do the work when they are tested. */
static int test(uintptr_t *request, int *flag, void *status)
{
    struct call *call = &stub.call[*request - 1];
    *flag = status == NULL;
    if (call->kind == RECEIVE) {
        struct call *from = other(call, SEND, call->peer);
        *flag = from != NULL;
        MUST(!from || from->count == call->count);
        if (from)
            memcpy(call->out, from->in, (size_t)call->count);
    } else if (call->kind == REDUCE || call->kind == BROADCAST) {
        struct call *all[RANKS];
        for (int rank = 0; rank < RANKS; rank++)
            *flag = *flag && (all[rank] = other(call, call->kind, rank)) != NULL;
        for (int i = 0; *flag && call->rank == RANKS - 1 && i < call->count; i++) {
            char sum = 0;
            for (int rank = 0; rank < RANKS; rank++)
                sum = (char)(sum + (call->kind == REDUCE ? all[rank]->in[i]
                                    : rank == call->peer ? all[rank]->out[i]
                                                         : 0));
            for (int rank = 0; rank < RANKS; rank++)
                all[rank]->out[i] = sum;
        }
    }
    return 0;
}

static const struct hvd_mpi mpi = {.abi = "stub",
                                   .byte = BYTE,
                                   .in_place = (void *)IN_PLACE,
                                   .call = {.Isend = isend,
                                            .Irecv = irecv,
                                            .Iallreduce = iallreduce,
                                            .Ibcast = ibcast,
                                            .Ialltoallv = ialltoallv,
                                            .Test = test}};
static struct hvd_mpi_posts posts[RANKS];
static struct hvd_error error;

static void open_all(void)
{
    memset(&stub, 0, sizeof stub);
    for (int rank = 0; rank < RANKS; rank++) {
        MUST(hvd_mpi_posts_open(&posts[rank], (uintptr_t)(100 + rank), rank, RANKS, &error) == HVD_OK);
        posts[rank].mpi = &mpi;
        posts[rank].most = LIMIT;
    }
}

static void settle_all(void)
{
    bool all = false;
    for (int i = 0; i < 100 && !all; i++) {
        all = true;
        for (int rank = 0; rank < RANKS; rank++) {
            bool progress = false;
            all &= hvd_mpi_settle(&posts[rank], &progress, &error) == HVD_OK;
        }
    }
    MUST(all);
    for (int rank = 0; rank < RANKS; rank++)
        hvd_mpi_posts_close(&posts[rank]);
}

static char value(int rank, int i)
{
    return (char)(rank * 31 + i * 7 + 1);
}

static void allreduce_and_broadcast_go_in_parts(void)
{
    enum { COUNT = 3 * LIMIT + 2 };
    char in[RANKS][COUNT], out[RANKS][COUNT], sent[RANKS][COUNT];
    open_all();
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < COUNT; i++)
            in[rank][i] = sent[rank][i] = value(rank, i);
    for (int rank = 0; rank < RANKS; rank++) /* the first in place */
        MUST(hvd_mpi_post_allreduce(&posts[rank], in[rank], rank ? out[rank] : in[rank], COUNT, 1, 5, 6, &error) ==
             HVD_OK);
    for (int rank = 0; rank < RANKS; rank++)
        MUST(hvd_mpi_post_broadcast(&posts[rank], sent[rank], COUNT, 1, &error) == HVD_OK);
    settle_all();
    MUST(stub.collectives[0] == 8);
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < COUNT; i++) {
            MUST(sent[rank][i] == value(1, i));
            MUST((rank ? out : in)[rank][i] == (char)(value(0, i) + value(1, i) + value(2, i)));
        }
}

static void allgather_goes_rank_by_rank(void)
{
    const uint64_t bytes[RANKS] = {LIMIT + 3, 0, 2 * LIMIT};
    char all[RANKS][3 * LIMIT + 3];
    open_all();
    memset(all, 0, sizeof all);
    for (int rank = 0; rank < RANKS; rank++) {
        int at = rank == 2 ? LIMIT + 3 : 0;
        for (int i = 0; i < (int)bytes[rank]; i++)
            all[rank][at + i] = value(rank, i);
        MUST(hvd_mpi_post_allgather(&posts[rank], all[rank], bytes, &error) == HVD_OK);
    }
    settle_all();
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < 3 * LIMIT + 3; i++)
            MUST(all[rank][i] == (i < LIMIT + 3 ? value(0, i) : value(2, i - LIMIT - 3)));
}

static uint64_t cell(int from, int to)
{
    return (uint64_t)(from * 5 + to * 3); /* nothing from 0 to 0; up to 16: three parts */
}

static void alltoall_goes_rank_by_rank(void)
{
    char in[RANKS][64], out[RANKS][64];
    uint64_t gives[RANKS][RANKS], gets[RANKS][RANKS];
    open_all();
    for (int rank = 0; rank < RANKS; rank++) {
        int at = 0;
        for (int to = 0; to < RANKS; to++) {
            gives[rank][to] = cell(rank, to);
            gets[rank][to] = cell(to, rank);
            for (int i = 0; i < (int)cell(rank, to); i++)
                in[rank][at++] = value(rank * RANKS + to, i);
        }
        MUST(hvd_mpi_post_alltoall(&posts[rank], in[rank], gives[rank], out[rank], gets[rank], 39, &error) == HVD_OK);
    }
    settle_all();
    for (int rank = 0; rank < RANKS; rank++)
        for (int from = 0, at = 0; from < RANKS; from++)
            for (int i = 0; i < (int)cell(from, rank); i++)
                MUST(out[rank][at++] == value(from * RANKS + rank, i));
}

/* Open MPI takes equal addresses for IN_PLACE, even where nothing lies there. */
static void who_has_no_part_in_an_exchange_gives_two_addresses(void)
{
    uint64_t none[RANKS] = {0};
    char nothing[1];
    open_all();
    MUST(hvd_mpi_post_alltoall(&posts[1], nothing, none, nothing, none, 5, &error) == HVD_OK);
    MUST(stub.calls == 1 && stub.call[0].in != stub.call[0].out && stub.call[0].in != (const void *)IN_PLACE);
    settle_all();
}

static void a_refused_call_is_told(void)
{
    uint64_t gives[RANKS] = {0, 9, 0}, gets[RANKS] = {0};
    char in[9] = "", out[9];
    struct hvd_error why = {0};
    open_all();
    stub.refuse = 13;
    MUST(hvd_mpi_post_alltoall(&posts[0], in, gives, out, gets, 9, &why) == HVD_EINTERNAL && why.culprit == 0);
    MUST(strstr(why.text, "rank 0: MPI could not send: error 13") != NULL);
    for (int rank = 0; rank < RANKS; rank++)
        hvd_mpi_posts_close(&posts[rank]);
}

int main(void)
{
    allreduce_and_broadcast_go_in_parts();
    allgather_goes_rank_by_rank();
    alltoall_goes_rank_by_rank();
    who_has_no_part_in_an_exchange_gives_two_addresses();
    a_refused_call_is_told();
    return 0;
}
