/* calls.h - the calls that take handles, for one width of a handle; included by int_handles.c and pointer_handles.c.
 *
 * The core holds every handle as uintptr_t. A library whose handles are ints must get ints and write ints, so each
 * call has a little function here that narrows what goes in and widens what comes out. Included with
 *
 *     HANDLE         int or void *
 *     RESOLVE        the external name of what fills the table
 *
 * A request or communicator that MPI writes goes through a variable of MPI's own width, because the callee writes
 * only so many bytes. What MPI reads before it writes (Test, Comm_free) is put there first.
 */
#include "mpi.h"

#include <dlfcn.h>

#define GIVE(handle) ((HANDLE)(intptr_t)(handle))
#define TAKE(handle) ((uintptr_t)(handle))

/* MPI's own functions, as it has them. */
static struct {
#define X(name, arguments) int(*name) arguments;
    HVD_MPI_HANDLE_CALLS(X, HANDLE)
#undef X
} mpi;

/* What MPI wrote into `made` is handed on even if the call failed: some libraries make null handles then. */
#define MAKING(handle, call)       \
    HANDLE made = GIVE(*(handle)); \
    int code = (call);             \
    *(handle) = TAKE(made);        \
    return code

static int call_Abort(uintptr_t comm, int code)
{
    return mpi.Abort(GIVE(comm), code);
}

static int call_Comm_rank(uintptr_t comm, int *rank)
{
    return mpi.Comm_rank(GIVE(comm), rank);
}

static int call_Comm_size(uintptr_t comm, int *size)
{
    return mpi.Comm_size(GIVE(comm), size);
}

static int call_Comm_set_attr(uintptr_t comm, int key, void *value)
{
    return mpi.Comm_set_attr(GIVE(comm), key, value);
}

static int call_Comm_set_errhandler(uintptr_t comm, uintptr_t handler)
{
    return mpi.Comm_set_errhandler(GIVE(comm), GIVE(handler));
}

static int call_Comm_free(uintptr_t *comm)
{
    MAKING(comm, mpi.Comm_free(&made));
}

static int call_Comm_group(uintptr_t comm, uintptr_t *group)
{
    MAKING(group, mpi.Comm_group(GIVE(comm), &made));
}

static int call_Group_incl(uintptr_t group, int count, const int *ranks, uintptr_t *part)
{
    MAKING(part, mpi.Group_incl(GIVE(group), count, ranks, &made));
}

static int call_Group_free(uintptr_t *group)
{
    MAKING(group, mpi.Group_free(&made));
}

static int call_Comm_create_group(uintptr_t comm, uintptr_t group, int tag, uintptr_t *part)
{
    MAKING(part, mpi.Comm_create_group(GIVE(comm), GIVE(group), tag, &made));
}

/* MPI may write the new communicator when the request completes: that place is the caller's, who has cleared it. An int
 * fills its lower half (little endian), and that half is all that GIVE takes. */
static int call_Comm_idup(uintptr_t comm, uintptr_t *copy, uintptr_t *request)
{
    MAKING(request, mpi.Comm_idup(GIVE(comm), (HANDLE *)(void *)copy, &made));
}

static int call_Iallreduce(const void *in, void *out, int count, uintptr_t type, uintptr_t op, uintptr_t comm,
                           uintptr_t *request)
{
    MAKING(request, mpi.Iallreduce(in, out, count, GIVE(type), GIVE(op), GIVE(comm), &made));
}

static int call_Iallgather(const void *in, int gives, uintptr_t type, void *out, int gets, uintptr_t out_type,
                           uintptr_t comm, uintptr_t *request)
{
    MAKING(request, mpi.Iallgather(in, gives, GIVE(type), out, gets, GIVE(out_type), GIVE(comm), &made));
}

static int call_Iallgatherv(const void *in, int gives, uintptr_t type, void *out, const int *gets, const int *at,
                            uintptr_t out_type, uintptr_t comm, uintptr_t *request)
{
    MAKING(request, mpi.Iallgatherv(in, gives, GIVE(type), out, gets, at, GIVE(out_type), GIVE(comm), &made));
}

static int call_Ialltoallv(const void *in, const int *gives, const int *from, uintptr_t type, void *out,
                           const int *gets, const int *at, uintptr_t out_type, uintptr_t comm, uintptr_t *request)
{
    MAKING(request, mpi.Ialltoallv(in, gives, from, GIVE(type), out, gets, at, GIVE(out_type), GIVE(comm), &made));
}

static int call_Ibcast(void *values, int count, uintptr_t type, int root, uintptr_t comm, uintptr_t *request)
{
    MAKING(request, mpi.Ibcast(values, count, GIVE(type), root, GIVE(comm), &made));
}

static int call_Isend(const void *values, int count, uintptr_t type, int to, int tag, uintptr_t comm,
                      uintptr_t *request)
{
    MAKING(request, mpi.Isend(values, count, GIVE(type), to, tag, GIVE(comm), &made));
}

static int call_Irecv(void *values, int count, uintptr_t type, int from, int tag, uintptr_t comm, uintptr_t *request)
{
    MAKING(request, mpi.Irecv(values, count, GIVE(type), from, tag, GIVE(comm), &made));
}

static int call_Iprobe(int from, int tag, uintptr_t comm, int *flag, void *status)
{
    return mpi.Iprobe(from, tag, GIVE(comm), flag, status);
}

static int call_Cancel(uintptr_t *request)
{
    MAKING(request, mpi.Cancel(&made));
}

static int call_Get_count(const void *status, uintptr_t type, int *count)
{
    return mpi.Get_count(status, GIVE(type), count);
}

static int call_Test(uintptr_t *request, int *flag, void *status)
{
    MAKING(request, mpi.Test(&made, flag, status));
}

const char *RESOLVE(void *library, struct hvd_mpi_calls *calls)
{
#define X(name, arguments)                                      \
    *(void **)(void *)&mpi.name = dlsym(library, "MPI_" #name); \
    if (!mpi.name)                                              \
        return "MPI_" #name;                                    \
    calls->name = call_##name;
    HVD_MPI_HANDLE_CALLS(X, HANDLE)
#undef X
    return NULL;
}
