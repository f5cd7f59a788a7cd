/* end.c - how does a communicator end, in a limited time, also when peers are lost?
 *
 * ncclCommAbort ends what its communicator runs on the device, and then waits for the device: to free its memory it
 * waits for whatever was put there before, of another communicator, too. All sets of a process share one stream. So
 * who aborts one after the other waits in the first abort for a collective that only the second one would end. Hence
 * each is aborted by a thread of its own, which does nothing else; the engine begins all of them (part) before it waits
 * for any (disconnect). That is when the flags are set that end the kernels, so that then all of them come to an end.
 * What does not within a second is left behind, with its memory and its device: the job has failed, and mostly the
 * process ends soon. Meanwhile nothing is called that waits for a device (hvd_cuda_hang). It may be that the device had
 * no more than much to do, as of a host that runs ahead by seconds: who wants it again asks whether it is over by now
 * (recovered). Then all goes on, but for the memory of the communicator, which stays taken.
 *
 * In peace NCCL wants to be told first (ncclCommFinalize), and to say when what it has is on its way: in its
 * non-blocking manner that is asked for, not waited for. ncclCommDestroy may wait for the other ranks of the host, who
 * come in another order or have left; so that is a thread's, too, and whom the others let wait, aborts. A communicator
 * that never was connected has nothing to finish, and is aborted.
 *
 * The thread touches only what is in its struct, which the last one frees. It gets no signals: those are Python's.
 */
#include "state.h"

#include "../../base/wait.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define ABORTING_NS  1000000000u
#define FINISHING_NS 3000000000u /* what was sent is on its way, and others are at the same */
#define DRAINING_NS  1000000000u /* a device takes microseconds, unless another set or a crowded host holds it up */
#define LAST_NS      500000000u  /* for a thread that is ready to end, and has not had a processor yet */
#define AGAIN_NS     50000000u   /* for an event on a stream on which nothing is left */

struct hvd_nccl_end {
    const struct hvd_cuda *cuda;
    const struct hvd_nccl *nccl;
    void *ctx, *comm;
    bool abort, threaded;
    pthread_t thread;
    uint64_t until_ns; /* to finish; then it is aborted */
    _Atomic uint32_t over, references;
    struct hvd_nccl_device *device; /* of one that is left behind */
    struct hvd_gpu_event *mark;     /* behind all that lies there; NULL: its abort is not over */
    struct hvd_nccl_end *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hvd_nccl_end *behind;

static void drop(struct hvd_nccl_end *end)
{
    if (atomic_fetch_sub(&end->references, 1) == 1)
        free(end);
}

/* All that this rank has in the communicator is done; false: an error, or the time is up. */
static bool finished(const struct hvd_nccl_end *end)
{
    int state = HVD_NCCL_IN_PROGRESS;
    if (!hvd_nccl_going(end->nccl->CommFinalize(end->comm)))
        return false;
    while (end->nccl->CommGetAsyncError(end->comm, &state) == HVD_NCCL_SUCCESS && state == HVD_NCCL_IN_PROGRESS &&
           hvd_now_ns() < end->until_ns)
        usleep(100);
    return state == HVD_NCCL_SUCCESS;
}

static void *run(void *self)
{
    struct hvd_nccl_end *end = self;
    int mode;
    bool entered = hvd_cuda_enter(end->cuda, end->ctx, &mode) == 0;
    if (!end->abort && finished(end))
        end->nccl->CommDestroy(end->comm);
    else
        end->nccl->CommAbort(end->comm);
    if (entered)
        hvd_cuda_leave(end->cuda, mode);
    atomic_store(&end->over, 1);
    hvd_futex_wake(&end->over, 1);
    drop(end);
    return NULL;
}

static void begin(struct hvd_nccl_plane *plane, bool abort)
{
    sigset_t block, before;
    struct hvd_nccl_end *end = calloc(1, sizeof *end);
    HVD_ASSERT(end);
    *end = (struct hvd_nccl_end){.cuda = plane->cuda,
                                 .nccl = plane->nccl,
                                 .ctx = plane->device->ctx,
                                 .comm = plane->comm,
                                 .abort = abort,
                                 .until_ns = hvd_now_ns() + FINISHING_NS,
                                 .references = 2};
    plane->end = end;
    plane->comm = NULL;
    sigfillset(&block);
    pthread_sigmask(SIG_SETMASK, &block, &before);
    end->threaded = pthread_create(&end->thread, NULL, run, end) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!end->threaded)
        run(end);
}

void hvd_nccl_part(struct hvd_nccl_plane *plane, bool abort)
{
    if (!plane->device || plane->parted)
        return;
    abort = abort || !plane->connected;
    plane->parted = true;
    plane->aborted = abort && plane->comm; /* else it has put nothing on the device */
    plane->part_until_ns = hvd_now_ns() + (abort ? 0 : FINISHING_NS) + ABORTING_NS;
    if (plane->comm)
        begin(plane, abort);
}

/* Of the communicator's end; asked once. False: it is left behind. */
static bool over(struct hvd_nccl_plane *plane)
{
    struct hvd_nccl_end *end = plane->end;
    uint64_t now = hvd_now_ns(), until_ns = plane->part_until_ns;
    if (until_ns < now + LAST_NS && !hvd_cuda_hangs()) /* it was parted long ago, and nobody has looked since */
        until_ns = now + LAST_NS;
    while (end && !atomic_load(&end->over) && (now = hvd_now_ns()) < until_ns)
        hvd_futex_wait(&end->over, 0, until_ns - now);
    bool ended = end && atomic_load(&end->over);
    if (end && end->threaded && ended)
        pthread_join(end->thread, NULL);
    else if (end && end->threaded)
        pthread_detach(end->thread);
    return !end || ended;
}

static bool reached(const struct hvd_gpu_event *mark, uint64_t patience_ns)
{
    uint64_t until_ns = hvd_now_ns() + patience_ns;
    int code = HVD_AGAIN;
    while (mark && (code = hvd_gpu_event_reached(mark, NULL)) == HVD_AGAIN && hvd_now_ns() < until_ns)
        usleep(50);
    return code == HVD_OK;
}

/* After an abort: has the device come to the end of what was put there? What it has not, may yet be touched. */
static bool drained(struct hvd_nccl_device *device)
{
    struct hvd_gpu_event *mark = hvd_nccl_device_mark(device, NULL);
    bool is = reached(mark, DRAINING_NS);
    if (mark)
        hvd_gpu_event_drop(mark);
    return is;
}

static void leave_behind(struct hvd_nccl_plane *plane)
{
    struct hvd_nccl_end *end = plane->end;
    pthread_mutex_lock(&lock);
    end->device = plane->device;
    end->next = behind;
    behind = end;
    hvd_cuda_hang();
    pthread_mutex_unlock(&lock);
}

static bool is_over_now(struct hvd_nccl_end *end, uint64_t patience_ns)
{
    int mode;
    if (!end->mark && atomic_load(&end->over) && hvd_cuda_enter(end->cuda, end->ctx, &mode) == 0) {
        end->mark = hvd_nccl_device_mark(end->device, NULL);
        hvd_cuda_leave(end->cuda, mode);
    }
    return reached(end->mark, patience_ns);
}

bool hvd_nccl_recovered(bool patient)
{
    pthread_mutex_lock(&lock);
    for (struct hvd_nccl_end **at = &behind; *at;) {
        struct hvd_nccl_end *end = *at;
        if (!is_over_now(end, patient ? AGAIN_NS : 0)) {
            at = &end->next;
            continue;
        }
        *at = end->next;
        hvd_gpu_event_drop(end->mark);
        hvd_nccl_device_drop(end->device);
        drop(end);
        hvd_cuda_recover();
    }
    pthread_mutex_unlock(&lock);
    return !hvd_cuda_hangs();
}

void hvd_nccl_disconnect(struct hvd_nccl_plane *plane)
{
    if (!plane->device)
        return;
    bool ended = over(plane) && !hvd_cuda_hangs(), entered = ended && hvd_nccl_enter(plane, NULL) == HVD_OK;
    if (plane->aborted && entered)
        ended = drained(plane->device);
    if (ended && entered)
        hvd_nccl_free_memory(plane);
    if (entered)
        hvd_nccl_leave(plane);
    if (!ended && plane->aborted)
        leave_behind(plane);
    else if (plane->end)
        drop(plane->end);
    if (plane->last)
        hvd_gpu_event_drop(plane->last);
    plane->end = NULL;
    plane->last = NULL;
    plane->multiplied = -1;
    if (ended)
        hvd_nccl_device_drop(plane->device);
    plane->device = NULL;
}
