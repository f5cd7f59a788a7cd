/* job.c - has a thread something in the background? NCCL 2.14 to 2.2x has room for one thing there, in each thread that
 * begins some; it ends when its communicator says so, whichever thread asks.
 */
#include "room.h"

enum { THREADS = 1 << 14 };
static _Atomic int jobs[THREADS], threads;
static _Thread_local int thread;

static int mine(void)
{
    if (!thread)
        thread = 1 + atomic_fetch_add(&threads, 1) % (THREADS - 1);
    return thread;
}

bool stub_has_job(void)
{
    return atomic_load(&jobs[mine()]) > 0;
}

void stub_begin_job(struct stub_comm *comm)
{
    if (!comm->job)
        atomic_fetch_add(&jobs[comm->job = mine()], 1);
}

void stub_end_job(struct stub_comm *comm)
{
    if (comm->job)
        atomic_fetch_sub(&jobs[comm->job], 1);
    comm->job = 0;
}
