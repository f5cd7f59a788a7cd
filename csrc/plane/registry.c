/* registry.c - which planes this build carries, and what a plane that can do everything can do.
 *
 * The file name is the registration: setup.py and tests/Makefile glob csrc/plane/ for plug-ins and pass
 * their names as -DHVD_PLANE_LIST="X(self) X(shm)". Nobody edits a list.
 */
#include "plane.h"

#include "../hvdlite.h"
#include "../kernel/kernel.h"

#ifndef HVD_PLANE_LIST
#error "build with -DHVD_PLANE_LIST, the names of the files csrc/plane/*.c but for registry.c"
#endif

#define X(name) extern const struct hvd_plane hvd_plane_##name;
HVD_PLANE_LIST
#undef X

const struct hvd_plane *const hvd_planes[] = {
#define X(name) &hvd_plane_##name,
    HVD_PLANE_LIST
#undef X
        NULL};

bool hvd_plane_can_all(void *plane, const struct hvd_work *work)
{
    (void)plane;
    switch (work->kind) {
    case HVD_ALLREDUCE:
    case HVD_REDUCESCATTER:
        return !hvd_reduce_check(work->op, work->dtype, work->prescale, work->postscale);
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
    case HVD_BROADCAST:
    case HVD_BARRIER:
        return true;
    default:
        return false;
    }
}

const char *hvd_plane_name(int i)
{
    for (int k = 0; k <= i; k++)
        if (i < 0 || !hvd_planes[k])
            return NULL;
    return i < 0 ? NULL : hvd_planes[i]->name;
}
