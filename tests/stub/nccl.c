/* nccl.c - communicators between threads or processes, and what runs when a stream has got to a collective.
 *
 * All ranks of a communicator map one file: a barrier, a slot of each rank for contributions, a box from each rank to
 * each other. A call becomes an item of its group, a group an item of its stream. In non-blocking mode a
 * communicator is connected when all have come, and the second half of all groups is launched later than it is
 * ended, as NCCL may do it: only when it is asked for; and every third group's calls say that they go on in the
 * background, which is no failure. Two ranks on one device are refused as NCCL 2.30 does it, unless its variable allows
 * them.
 *
 * As in NCCL 2.14 to 2.2x a thread has room for one thing in the background: who begins a communicator or a group while
 * what the same thread began for another communicator still goes on, is refused (there it spoils both).
 *
 * An abort sets the flag that ends its own kernels, and then waits for the device: for all that lies on its streams,
 * also of other communicators. Finalizing goes on until all ranks have come to it; a rank that destroys what it has not
 * finalized waits for the others, for ever if they do not come.
 */
#include "room.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define UNSAFE             \
    do {                   \
        if (stub_unsafe()) \
            return 1;      \
    } while (0)

struct id {
    char path[128];
};
struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

static _Thread_local struct {
    int depth;
    struct stub_group *group;
    void *stream;
} now;

/* What a thread has in the background. It ends when its communicator says so, whichever thread asks. */
enum { THREADS = 1 << 14 };
static _Atomic int jobs[THREADS], threads;
static _Thread_local int thread;

static bool has_job(void)
{
    if (!thread)
        thread = 1 + atomic_fetch_add(&threads, 1) % (THREADS - 1);
    return atomic_load(&jobs[thread]) > 0;
}

static void begin_job(struct stub_comm *comm)
{
    if (!comm->job)
        atomic_fetch_add(&jobs[comm->job = thread], 1);
}

static void end_job(struct stub_comm *comm)
{
    if (comm->job)
        atomic_fetch_sub(&jobs[comm->job], 1);
    comm->job = 0;
}

EXPORT int ncclGetVersion(int *version)
{
    const char *said = getenv("STUB_NCCL_VERSION");
    *version = said ? atoi(said) : 22105;
    return 0;
}

EXPORT const char *ncclGetErrorString(int result)
{
    return result == 5 ? "invalid usage" : result == 6 ? "remote process exited or there was a network error" : "oh";
}

EXPORT const char *ncclGetLastError(void *comm)
{
    (void)comm;
    return "the stub was told so";
}

/* Only a name: the ranks that come make the file. */
EXPORT int ncclGetUniqueId(struct id *id)
{
    const char *folder = getenv("TMPDIR");
    uint64_t number = 0;
    CALLED("ncclGetUniqueId");
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return 2;
    snprintf(id->path, sizeof id->path, "%.90s/gpu-stub-%016llx", folder && *folder ? folder : "/tmp",
             (unsigned long long)number);
    return 0;
}

EXPORT int ncclCommInitRankConfig(void **out, int size, struct id id, int rank, const struct config *config)
{
    CALLED("ncclCommInitRankConfig");
    UNSAFE;
    if (config->magic != 0xcafebeef || config->blocking != 0 || size > STUB_RANKS || rank >= size ||
        !stub_current(NULL) || has_job())
        return 5;
    struct stub_comm *comm = calloc(1, sizeof *comm);
    int fd = open(id.path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    comm->room = fd < 0 || ftruncate(fd, sizeof *comm->room) != 0
                     ? MAP_FAILED
                     : mmap(NULL, sizeof *comm->room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (comm->room == MAP_FAILED) {
        free(comm);
        return 2;
    }
    comm->rank = rank;
    comm->size = size;
    comm->users = 1;
    memcpy(comm->path, id.path, sizeof comm->path);
    stub_current(&comm->device);
    atomic_store(&comm->room->device[rank], comm->device);
    atomic_fetch_add(&comm->room->joined, 1);
    begin_job(comm);
    *out = comm;
    return 7;
}

/* All have come: has each a device of its own, or were they told that they may share one? */
static bool crowds(const struct stub_comm *comm)
{
    bool shared = false;
    for (int rank = 0; rank < comm->size; rank++)
        for (int other = 0; other < rank; other++)
            shared |= atomic_load(&comm->room->device[rank]) == atomic_load(&comm->room->device[other]);
    return shared && !getenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

EXPORT int ncclCommGetAsyncError(void *self, int *state)
{
    struct stub_comm *comm = self;
    *state = stub_called("async");
    if (*state)
        return 0;
    *state = atomic_load(&comm->failed);
    if (*state == 0 && atomic_load(&comm->room->joined) < comm->size)
        *state = 7;
    else if (*state == 0 && comm->size > 1 && comm->connecting++ < STUB_ASKS)
        *state = 7;
    else if (*state == 0 && crowds(comm))
        *state = 5;
    else if (*state == 0 && comm->rank == 0 && !comm->unlinked) {
        comm->unlinked = true;
        unlink(comm->path);
    }
    if (*state == 0 && comm->late && comm->asked++ > 1 && !comm->stuck) {
        stub_put(comm->late_stream, stub_run_group, comm->late);
        comm->late = NULL;
    }
    if (comm->late)
        *state = 7;
    if (*state != 7)
        end_job(comm);
    if (*state == 0 && comm->finalizing && atomic_load(&comm->room->finalized) < comm->size)
        *state = atomic_load(&comm->room->aborted) ? 6 : 7;
    return 0;
}

/* As tests/gpu/raw.py makes one: until all have come. */
EXPORT int ncclCommInitRank(void **out, int size, struct id id, int rank)
{
    const struct config config = {.size = sizeof config, .magic = 0xcafebeef, .blocking = 0};
    int state = ncclCommInitRankConfig(out, size, id, rank, &config);
    if (state == 7)
        ((struct stub_comm *)*out)->blocks = true;
    while (state == 7) {
        ncclCommGetAsyncError(*out, &state);
        usleep(50);
    }
    return state;
}

static void drop(struct stub_comm *comm)
{
    if (atomic_fetch_sub(&comm->users, 1) == 1) {
        munmap(comm->room, sizeof *comm->room);
        free(comm);
    }
}

void stub_group_free(struct stub_group *group)
{
    drop(group->comm);
    free(group);
}

static int end_comm(struct stub_comm *comm)
{
    end_job(comm);
    if (comm->late)
        stub_group_free(comm->late);
    if (comm->rank == 0 || atomic_load(&comm->room->joined) < comm->size)
        unlink(comm->path);
    drop(comm);
    return 0;
}

EXPORT int ncclCommFinalize(void *self)
{
    struct stub_comm *comm = self;
    if (comm->finalizing || atomic_load(&comm->room->joined) < comm->size)
        return 5;
    comm->finalizing = true;
    atomic_fetch_add(&comm->room->finalized, 1);
    return 7;
}

EXPORT int ncclCommDestroy(void *self)
{
    struct stub_comm *comm = self;
    UNSAFE;
    atomic_fetch_add(&comm->room->destroyed, 1);
    while (!comm->finalizing && atomic_load(&comm->room->destroyed) < comm->size)
        usleep(50);
    stub_drain(comm->device);
    return end_comm(comm);
}

EXPORT int ncclCommAbort(void *self)
{
    struct stub_comm *comm = self;
    stub_called("ncclCommAbort");
    UNSAFE;
    atomic_store(&comm->aborted, true);
    atomic_fetch_add(&comm->room->aborted, 1);
    if (comm->late)
        stub_group_free(comm->late);
    comm->late = NULL;
    stub_drain(comm->device);
    stub_count("aborts that have ended", 1);
    return end_comm(comm);
}

EXPORT int ncclRedOpCreatePreMulSum(int *op, const void *scalar, int type, int residence, void *self)
{
    struct stub_comm *comm = self;
    if (residence != 1)
        return 5;
    if (comm->ops++ % 2 == 0) /* it was busy: to be asked again */
        return 7;
    *op = STUB_OPS + comm->factors;
    comm->factor[comm->factors++ % STUB_FACTORS] = stub_number(type, scalar);
    return 0;
}

EXPORT int ncclRedOpDestroy(int op, void *comm)
{
    (void)comm;
    return op >= STUB_OPS ? 0 : 5;
}

EXPORT int ncclGroupStart(void)
{
    CALLED("ncclGroupStart");
    if (has_job())
        return 5;
    now.depth++;
    return 0;
}

EXPORT int ncclGroupEnd(void)
{
    struct stub_group *group = now.group;
    int failed = stub_called("ncclGroupEnd");
    if (--now.depth > 0)
        return 0;
    now.group = NULL;
    if (failed || !group) {
        if (group)
            stub_group_free(group);
        return failed;
    }
    struct stub_comm *comm = group->comm;
    if (comm->groups++ % 2 == 1 && !comm->blocks) { /* every second one goes on in the background */
        comm->late = group;
        comm->late_stream = now.stream;
        begin_job(comm);
        comm->asked = 0;
        comm->stuck = stub_called("background") != 0;
        return 7;
    }
    stub_put(now.stream, stub_run_group, group);
    return 0;
}

static int add(const char *name, struct stub_call call, void *self, void *stream)
{
    struct stub_comm *comm = self;
    CALLED(name);
    if (!stub_current(NULL))
        return 5;
    bool alone = now.depth == 0;
    if (alone && has_job())
        return 5;
    if (call.op >= STUB_OPS)
        call.factor = comm->factor[(call.op - STUB_OPS) % STUB_FACTORS];
    if (!now.group) {
        now.group = calloc(1, sizeof *now.group);
        now.group->comm = comm;
        now.stream = stream;
        atomic_fetch_add(&comm->users, 1);
    }
    if (now.group->comm != comm || now.group->calls == STUB_CALLS)
        return 5;
    now.group->call[now.group->calls++] = call;
    if (!alone)
        return comm->groups % 3 == 2 && !comm->blocks ? 7 : 0;
    now.depth = 1;
    return ncclGroupEnd();
}

EXPORT int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream)
{
    stub_count("elements of ncclAllReduce", (int)count);
    return add("ncclAllReduce", (struct stub_call){STUB_ALLREDUCE, in, out, count, type, op, 0, 0}, comm, stream);
}

EXPORT int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, void *comm, void *stream)
{
    return add("ncclReduce", (struct stub_call){STUB_REDUCE, in, out, count, type, op, root, 0}, comm, stream);
}

EXPORT int ncclReduceScatter(const void *in, void *out, size_t gets, int type, int op, void *comm, void *stream)
{
    return add("ncclReduceScatter", (struct stub_call){STUB_SCATTER, in, out, gets, type, op, 0, 0}, comm, stream);
}

EXPORT int ncclAllGather(const void *in, void *out, size_t gives, int type, void *comm, void *stream)
{
    return add("ncclAllGather", (struct stub_call){STUB_GATHER, in, out, gives, type, 0, 0, 0}, comm, stream);
}

EXPORT int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, void *comm, void *stream)
{
    return add("ncclBroadcast", (struct stub_call){STUB_BROADCAST, in, out, count, type, 0, root, 0}, comm, stream);
}

EXPORT int ncclSend(const void *in, size_t count, int type, int to, void *comm, void *stream)
{
    return add("ncclSend", (struct stub_call){STUB_SEND, in, NULL, count, type, 0, to, 0}, comm, stream);
}

EXPORT int ncclRecv(void *out, size_t count, int type, int from, void *comm, void *stream)
{
    return add("ncclRecv", (struct stub_call){STUB_RECEIVE, NULL, out, count, type, 0, from, 0}, comm, stream);
}
