/* mpi.c - an MPI that is none: ranks are threads of one process, and whoever comes last does the collective for all.
 *
 * Compiled twice, with handles that are ints (MPICH's ABI) and as wide as pointers (that of MPI 5); which one it says
 * it is follows from that. Handles are numbers of entries in tables. Rank and size of MPI_COMM_WORLD are the calling
 * thread's, told by stub_mpi_rank. A collective meets those of the other ranks that have the same number on the same
 * communicator; messages between two ranks match in their order. Nothing is done while stub_mpi_hold(1) is in force;
 * stub_mpi_fail lets the next call of a name give error 5. With stub_mpi_lazy(1) a broadcast is over for its root when
 * all have come, and for the others not before the root has looked for messages: as where a small message is queued.
 * Everything is under one lock, so it is simple, not fast.
 */
#include "mpi.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define IN_PLACE ((const void *)(intptr_t)MPICH(-1, 1))

enum { COMMS = 4096, CALLS = 1 << 16, RANKS = 8, FIRST = 1 << 20 };
enum kind { FREE, SENT, WANTED, DUP, REDUCE, EXCHANGE, BROADCAST };

struct comm {
    int world, rank, size, number, calls; /* world: the same on all ranks of it */
};
struct call {
    enum kind kind;
    int world, rank, size, number, peer, tag, done, op, type, count, owed; /* owed: by rank + 1 */
    const char *in;
    char *out;
    int from[RANKS], gets[RANKS], at[RANKS]; /* of what goes to each rank, and comes from it */
    HANDLE *made;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm comm[COMMS];
static struct call call[CALLS];
static int comms, calls, oldest, held, lazy, probes;
static char failing[32];
static _Thread_local int my_rank, my_size = 1;

static HANDLE made(int size);

EXPORT void stub_mpi_rank(int rank, int size)
{
    my_rank = rank;
    my_size = size;
}
EXPORT void stub_mpi_hold(int yes)
{
    pthread_mutex_lock(&lock);
    held = yes;
    pthread_mutex_unlock(&lock);
}
EXPORT void stub_mpi_lazy(int yes)
{
    lazy = yes;
}
EXPORT int stub_mpi_probes(void)
{
    return probes;
}
EXPORT void stub_mpi_fail(const char *name)
{
    snprintf(failing, sizeof failing, "%s", name);
}
EXPORT intptr_t stub_mpi_comm(int size) /* of threads: the handle of rank 0, those of the others follow */
{
    pthread_mutex_lock(&lock);
    intptr_t first = (intptr_t)made(size);
    pthread_mutex_unlock(&lock);
    return first;
}
int stub_mpi_fails(const char *name)
{
    if (strcmp(failing, name) != 0)
        return 0;
    failing[0] = '\0';
    return 5;
}
static struct comm *comm_of(HANDLE handle)
{
    static _Thread_local struct comm world;
    if ((intptr_t)handle != WORLD)
        return &comm[(intptr_t)handle - FIRST];
    world = (struct comm){.rank = my_rank, .size = my_size, .calls = world.calls};
    return &world;
}

/* With the lock, which posted() gives back. */
static struct call *post(enum kind kind, HANDLE of, HANDLE *request)
{
    pthread_mutex_lock(&lock);
    struct comm *on = comm_of(of);
    struct call *one = &call[calls % CALLS];
    *one = (struct call){.kind = kind, .world = on->world, .rank = on->rank, .size = on->size};
    one->number = kind == SENT || kind == WANTED ? -1 : on->calls++;
    *request = (HANDLE)(FIRST + calls++ % CALLS);
    return one;
}

static int posted(void)
{
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Of the types that MPI computes with here: the number of its row; the last one stands for all of one byte. */
static const struct {
    int mpich, standard, bytes;
} types[] = {{0x4c00040a, 0x210, 4}, {0x4c00080b, 0x214, 8}, {0x4c000439, 0x250, 4}, {0x4c00083a, 0x258, 8},
             {0x4c000238, 0x248, 2}, {0x4c00023c, 0x249, 2}, {0x4c00013b, 0x241, 1}, {0, 0, 1}};

static int type_of(HANDLE type)
{
    int i = 0;
    while (types[i].mpich && (intptr_t)type != MPICH(types[i].mpich, types[i].standard))
        i++;
    return i;
}

static int op_of(HANDLE op)
{
    return MPICH((int)op - 0x58000001, (int)op == 0x24 ? 3 : 0x23 - (int)op);
}

static void reduce(struct call **of, int size)
{
    static char sum[1 << 22];
    size_t bytes = (size_t)of[0]->count * (size_t)types[of[0]->type].bytes;
    for (int rank = 0; rank < size; rank++)
        if (rank == 0)
            memcpy(sum, of[0]->in, bytes);
        else
            stub_mpi_combine(of[0]->type, of[0]->op, sum, of[rank]->in, of[0]->count);
    for (int rank = 0; rank < size; rank++)
        memcpy(of[rank]->out, sum, bytes);
}

static void exchange(struct call **of, int size)
{
    for (int to = 0; to < size; to++)
        for (int from = 0; from < size; from++)
            if (of[to]->gets[from])
                memmove(of[to]->out + of[to]->at[from], of[from]->in + of[from]->from[to], (size_t)of[to]->gets[from]);
}

/* A communicator of so many ranks: the handle of rank 0, those of the others follow. */
static HANDLE made(int size)
{
    int first = comms;
    for (int rank = 0; rank < size; rank++)
        comm[comms++] = (struct comm){.world = first + 1, .rank = rank, .size = size};
    return (HANDLE)(FIRST + first);
}

static void finish(struct call **of, int size)
{
    if (of[0]->kind == REDUCE)
        reduce(of, size);
    else if (of[0]->kind == EXCHANGE)
        exchange(of, size);
    else if (of[0]->kind == BROADCAST)
        for (int rank = 0; rank < size; rank++)
            memmove(of[rank]->out, of[of[0]->peer]->out, (size_t)of[rank]->count);
    HANDLE first = of[0]->kind == DUP ? made(size) : 0;
    for (int rank = 0; rank < size; rank++) {
        of[rank]->owed = lazy && of[rank]->kind == BROADCAST && rank != of[0]->peer ? of[0]->peer + 1 : 0;
        of[rank]->done = !of[rank]->owed;
        if (of[rank]->kind == DUP)
            *of[rank]->made = first + rank;
    }
}

/* Is this collective's last rank here, or the other end of this message? */
static void meet(struct call *one)
{
    struct call *of[RANKS] = {NULL};
    int come = 0;
    while (oldest < calls && call[oldest % CALLS].kind == FREE)
        oldest++;
    for (int i = oldest; one->number < 0 && &call[i % CALLS] != one; i++) /* messages match in their order */
        if (call[i % CALLS].kind == one->kind && !call[i % CALLS].done && call[i % CALLS].world == one->world &&
            call[i % CALLS].tag == one->tag && call[i % CALLS].rank == one->rank && call[i % CALLS].peer == one->peer) {
            one = &call[i % CALLS];
            break;
        }
    for (int i = oldest; i < calls; i++) {
        struct call *other = &call[i % CALLS];
        if (other->done || other->owed || other->kind == FREE || other->world != one->world)
            continue;
        if (one->number >= 0 && other->number == one->number) {
            of[other->rank] = other;
            come++;
        }
        if (one->number < 0 && other->kind == (one->kind == SENT ? WANTED : SENT) && other->tag == one->tag &&
            other->peer == one->rank && other->rank == one->peer) {
            struct call *sent = one->kind == SENT ? one : other, *wanted = one->kind == SENT ? other : one;
            memcpy(wanted->out, sent->in, (size_t)sent->count);
            wanted->count = sent->count;
            one->done = other->done = 1;
            return;
        }
    }
    if (one->number >= 0 && come == one->size)
        finish(of, one->size);
}

EXPORT int MPI_Test(HANDLE *request, int *flag, void *status)
{
    CALLED("Test")
    pthread_mutex_lock(&lock);
    struct call *one = (intptr_t)*request == NULL_REQUEST ? NULL : &call[(intptr_t)*request - FIRST];
    if (one && !one->done && !one->owed && !held)
        meet(one);
    *flag = !one || one->done;
    if (one && one->done) {
        if ((intptr_t)status > 1)
            memcpy(status, &one->count, sizeof one->count);
        one->kind = FREE;
        *request = (HANDLE)NULL_REQUEST;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT int MPI_Iallreduce(const void *in, void *out, int count, HANDLE type, HANDLE op, HANDLE of, HANDLE *request)
{
    CALLED("Iallreduce")
    struct call *one = post(REDUCE, of, request);
    one->in = in == IN_PLACE ? out : in;
    one->out = out;
    one->count = count;
    one->type = type_of(type);
    one->op = op_of(op);
    return posted();
}

EXPORT int MPI_Iallgather(const void *in, int gives, HANDLE type, void *out, int gets, HANDLE out_type, HANDLE of,
                          HANDLE *request)
{
    CALLED("Iallgather")
    struct call *one = post(EXCHANGE, of, request);
    (void)type, (void)out_type, (void)gets;
    one->in = in;
    one->out = out;
    for (int rank = 0; rank < one->size; rank++) {
        one->gets[rank] = gives;
        one->at[rank] = rank * gives;
    }
    return posted();
}

EXPORT int MPI_Iallgatherv(const void *in, int gives, HANDLE type, void *out, const int *gets, const int *at,
                           HANDLE out_type, HANDLE of, HANDLE *request)
{
    CALLED("Iallgatherv")
    struct call *one = post(EXCHANGE, of, request);
    (void)type, (void)out_type, (void)gives;
    one->in = in == IN_PLACE ? (char *)out + at[one->rank] : in;
    one->out = out;
    memcpy(one->gets, gets, (size_t)one->size * sizeof(int));
    memcpy(one->at, at, (size_t)one->size * sizeof(int));
    return posted();
}

EXPORT int MPI_Ialltoallv(const void *in, const int *gives, const int *from, HANDLE type, void *out, const int *gets,
                          const int *at, HANDLE out_type, HANDLE of, HANDLE *request)
{
    CALLED("Ialltoallv")
    struct call *one = post(EXCHANGE, of, request);
    (void)type, (void)out_type, (void)gives;
    one->in = in;
    one->out = out;
    memcpy(one->from, from, (size_t)one->size * sizeof(int));
    memcpy(one->gets, gets, (size_t)one->size * sizeof(int));
    memcpy(one->at, at, (size_t)one->size * sizeof(int));
    return posted();
}

EXPORT int MPI_Ibcast(void *values, int count, HANDLE type, int root, HANDLE of, HANDLE *request)
{
    CALLED("Ibcast")
    struct call *one = post(BROADCAST, of, request);
    (void)type;
    one->out = values;
    one->count = count;
    one->peer = root;
    return posted();
}

EXPORT int MPI_Isend(const void *values, int count, HANDLE type, int to, int tag, HANDLE of, HANDLE *request)
{
    CALLED("Isend")
    struct call *one = post(SENT, of, request);
    (void)type;
    one->in = values;
    one->count = count;
    one->peer = to;
    one->tag = tag;
    return posted();
}

EXPORT int MPI_Irecv(void *values, int count, HANDLE type, int from, int tag, HANDLE of, HANDLE *request)
{
    CALLED("Irecv")
    struct call *one = post(WANTED, of, request);
    (void)type;
    one->out = values;
    one->count = count;
    one->peer = from;
    one->tag = tag;
    return posted();
}

EXPORT int MPI_Iprobe(int from, int tag, HANDLE of, int *flag, void *status)
{
    (void)from, (void)tag, (void)status;
    pthread_mutex_lock(&lock);
    probes++;
    const struct comm *on = comm_of(of);
    for (int i = oldest; i < calls; i++)
        if (call[i % CALLS].world == on->world && call[i % CALLS].owed == on->rank + 1)
            call[i % CALLS].done = 1;
    *flag = 0;
    return posted();
}

EXPORT int MPI_Cancel(HANDLE *request)
{
    pthread_mutex_lock(&lock);
    call[(intptr_t)*request - FIRST].done = 1;
    return posted();
}

EXPORT int MPI_Get_count(const void *status, HANDLE type, int *count)
{
    (void)type;
    memcpy(count, status, sizeof *count);
    return 0;
}

EXPORT int MPI_Comm_idup(HANDLE of, HANDLE *duplicate, HANDLE *request)
{
    CALLED("Comm_idup")
    struct call *one = post(DUP, of, request);
    one->made = duplicate;
    return posted();
}

EXPORT int MPI_Comm_rank(HANDLE of, int *rank)
{
    *rank = comm_of(of)->rank;
    return 0;
}

EXPORT int MPI_Comm_size(HANDLE of, int *size)
{
    CALLED("Comm_size")
    *size = comm_of(of)->size;
    return 0;
}
