/* world.c - the rest of the MPI that is none: how it begins and ends, what it says of itself, groups of one rank. */
#include "mpi.h"

#include <stdio.h>
#include <string.h>

static int started, over, level_told = MPICH(3, 4096), freed;

EXPORT void stub_mpi_state(int is_started, int is_over, int level)
{
    started = is_started;
    over = is_over;
    level_told = level;
}

EXPORT int stub_mpi_freed(void)
{
    return freed;
}

EXPORT int MPI_Init_thread(int *count, char ***words, int required, int *level)
{
    CALLED("Init_thread")
    (void)count, (void)words, (void)required;
    started = 1;
    *level = level_told;
    return 0;
}

EXPORT int MPI_Initialized(int *flag)
{
    *flag = started;
    return 0;
}

EXPORT int MPI_Finalized(int *flag)
{
    *flag = over;
    return 0;
}

static int (*at_end)(HANDLE of, int key, void *value, void *more);
static void *attached;

EXPORT int MPI_Comm_create_keyval(int (*copy)(void), int (*drop)(HANDLE, int, void *, void *), int *key, void *more)
{
    (void)copy, (void)more;
    at_end = drop;
    *key = 7;
    return 0;
}

EXPORT int MPI_Comm_set_attr(HANDLE of, int key, void *value)
{
    if ((intptr_t)of != SELF || key != 7)
        return 5;
    attached = value;
    return 0;
}

EXPORT int MPI_Finalize(void)
{
    if (attached)
        at_end(SELF, 7, attached, NULL);
    attached = NULL;
    over = 1;
    return 0;
}

EXPORT int MPI_Query_thread(int *level)
{
    *level = level_told;
    return 0;
}

EXPORT int MPI_Get_library_version(char *text, int *length)
{
    *length = sprintf(text, "%s that is none \tof any release \nsecond line", MPICH("MPICH", "An MPI"));
    return 0;
}

EXPORT int MPI_Error_string(int code, char *text, int *length)
{
    *length = sprintf(text, "the stub's error %d", code);
    return 0;
}

#ifdef ABI_standard
EXPORT int MPI_Abi_get_version(int *major, int *minor)
{
    *major = 1;
    *minor = 0;
    return 0;
}
#endif

EXPORT int MPI_Abort(HANDLE of, int code)
{
    (void)of;
    _Exit(code);
}

EXPORT int MPI_Comm_set_errhandler(HANDLE of, HANDLE handler)
{
    CALLED("Comm_set_errhandler")
    (void)of, (void)handler;
    return 0;
}

EXPORT int MPI_Comm_free(HANDLE *of)
{
    freed++;
    *of = (HANDLE)NULL_COMM;
    return 0;
}

EXPORT int MPI_Comm_group(HANDLE of, HANDLE *group)
{
    CALLED("Comm_group")
    (void)of;
    *group = 1;
    return 0;
}

EXPORT int MPI_Group_incl(HANDLE group, int count, const int *ranks, HANDLE *some)
{
    (void)group, (void)ranks;
    *some = (HANDLE)count;
    return 0;
}

EXPORT int MPI_Group_free(HANDLE *group)
{
    *group = 0;
    return 0;
}

EXPORT int MPI_Comm_create_group(HANDLE of, HANDLE group, int tag, HANDLE *some)
{
    (void)of, (void)tag;
    *some = (HANDLE)stub_mpi_comm((int)group);
    return 0;
}

#define COMBINE(type)                                            \
    for (int i = 0; i < count; i++) {                            \
        type a = ((type *)into)[i], b = ((const type *)from)[i]; \
        ((type *)into)[i] = (type)(op == MAX   ? (b > a ? b : a) \
                                   : op == MIN ? (b < a ? b : a) \
                                   : op == SUM ? a + b           \
                                               : a * b);         \
    }

void stub_mpi_combine(int type, int op, void *into, const void *from, int count)
{
    switch (type) {
    case 0:
        COMBINE(float)
        break;
    case 1:
        COMBINE(double)
        break;
    case 2:
        COMBINE(int32_t)
        break;
    case 3:
        COMBINE(int64_t)
        break;
    case 4:
        COMBINE(int16_t)
        break;
    case 5:
        COMBINE(uint16_t)
        break;
    case 6:
        COMBINE(uint8_t)
        break;
    default:
        COMBINE(int8_t)
    }
}
