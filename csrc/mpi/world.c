/* world.c - how does MPI come to run in this process, and how do ranks exchange a few bytes over it?
 *
 * MPI is initialized at most once in the life of a process, and by whoever comes first: mpi4py, the script, or
 * hvd_mpi_start. Who initialized finalizes; nobody finalizes for others. Planes call MPI from whichever thread holds
 * the turn, beside the user's own calls, so less than MPI_THREAD_MULTIPLE is refused instead of being hoped for.
 *
 * Waiting is by MPI_Test with naps that grow to a millisecond, never inside MPI: a rank that does not come must become
 * an error within the caller's limit, and Ctrl-C must get through. What is under way stands in `pending`, because MPI
 * cannot take an operation back: after a time limit its memory is left to it. The one call without a limit makes
 * a communicator of some ranks: MPI has no other.
 *
 * The script may finalize MPI at any time, while the engine thread calls it for nothing (hvd_mpi_linger). MPI_Finalize
 * first deletes what is attached to MPI_COMM_SELF, which is how it tells us: it waits until that call is over then, and
 * there is no other.
 *
 * An MPI gives the number of a communicator that was freed to the next one. Where a message of a peer that was slow may
 * still come, that would be taken for one of the next; so such a communicator is kept for ever.
 */
#include "world.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NAP_FIRST_NS 20000
#define NAP_MOST_NS  1000000
#define TESTS_AWAKE  200 /* before the first nap */
#define KEPT_MAX     256 /* communicators; with more, none is freed any more */

static struct {
    bool started; /* by us */
    bool busy;
    uintptr_t request, comm;
    char *mine, *all;
} pending;

static struct {
    pthread_mutex_t lock; /* held while MPI is called for nothing */
    bool watched, over;
} end = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    pthread_mutex_t lock;
    size_t count;
    uintptr_t comm[KEPT_MAX];
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* MPI's own functions have a handle in front, of a width that is the library's. */
static int copies_nothing(uintptr_t comm, int key, void *more, void *from, void *to, int *copied)
{
    (void)comm, (void)key, (void)more, (void)from, (void)to;
    *copied = 0;
    return 0;
}

static int ends(uintptr_t comm, int key, void *value, void *more)
{
    (void)comm, (void)key, (void)value, (void)more;
    pthread_mutex_lock(&end.lock);
    end.over = true;
    pthread_mutex_unlock(&end.lock);
    return 0;
}

static void watch_for_the_end(void)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    int key;
    if (end.watched)
        return;
    end.watched = true;
    if (mpi->Comm_create_keyval((void (*)(void))copies_nothing, (void (*)(void))ends, &key, NULL) != 0 ||
        mpi->call.Comm_set_attr(mpi->self, key, &end) != 0)
        end.over = true; /* nobody would tell us */
}

int hvd_mpi_start(struct hvd_error *error)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    int started = 0, over = 0, level = -1, code = mpi->Initialized(&started);
    if (code == 0)
        code = mpi->Finalized(&over);
    if (code == 0 && over)
        return hvd_fail(error, HVD_EINIT,
                        HVD125 "MPI was finalized in this process, and cannot be started again: call hvd.init() before "
                               "MPI.Finalize()");
    if (code == 0 && !started) {
        code = mpi->Init_thread(NULL, NULL, mpi->thread_multiple, &level);
        pending.started = code == 0;
    } else if (code == 0) {
        code = mpi->Query_thread(&level);
    }
    if (code)
        return hvd_mpi_failed(code, "start", error);
    if (level >= mpi->thread_multiple) {
        watch_for_the_end();
        return HVD_OK;
    }
    if (started)
        return hvd_fail(
            error, HVD_EINIT,
            HVD667 "MPI was initialized by this script with a thread level below MPI_THREAD_MULTIPLE, which hvdlite "
                   "needs: initialize it with MPI_THREAD_MULTIPLE (mpi4py's default: leave mpi4py.rc.thread_level "
                   "at \"multiple\"), or call hvd.init() before the script does");
    return hvd_fail(error, HVD_EINIT,
                    HVD667 "this MPI (%s) does not offer MPI_THREAD_MULTIPLE, which hvdlite needs: %s", mpi->version,
                    "use one that was built with it");
}

bool hvd_mpi_ours(void)
{
    return pending.started;
}

void hvd_mpi_finish(void)
{
    int over = 0;
    if (pending.started && hvd_mpi_loaded()->Finalized(&over) == 0 && !over)
        hvd_mpi_loaded()->Finalize();
    pending.started = false;
}

static int wait_for(uintptr_t *request, int timeout_ms, const char *what, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    uint64_t until_ns = hvd_now_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    long nap_ns = NAP_FIRST_NS;
    for (int i = 0;; i++) {
        int done = 0, code = mpi->call.Test(request, &done, mpi->status_ignore);
        if (code)
            return hvd_mpi_failed(code, what, error);
        if (done)
            return HVD_OK;
        if (i < TESTS_AWAKE)
            continue;
        if (hvd_now_ns() >= until_ns)
            return HVD_AGAIN;
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL);
        nap_ns = nap_ns * 2 < NAP_MOST_NS ? nap_ns * 2 : NAP_MOST_NS;
    }
}

static int open_some(uintptr_t from, const int *ranks, int count, uintptr_t *made, struct hvd_error *error)
{
    const struct hvd_mpi_calls *call = &hvd_mpi_loaded()->call;
    uintptr_t all = 0, some = 0;
    int code = call->Comm_group(from, &all);
    if (code == 0)
        code = call->Group_incl(all, count, ranks, &some);
    if (code == 0)
        code = call->Comm_create_group(from, some, 0, made);
    if (some)
        call->Group_free(&some);
    if (all)
        call->Group_free(&all);
    return code ? hvd_mpi_failed(code, "make a communicator of some ranks", error) : HVD_OK;
}

int hvd_mpi_comm_open(uintptr_t from, const int *ranks, int count, int timeout_ms, uintptr_t *made,
                      struct hvd_error *error)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    const char *what = "duplicate a communicator";
    int code;
    if (!from)
        from = mpi->world;
    if (ranks) {
        *made = mpi->comm_null;
        code = open_some(from, ranks, count, made, error);
    } else {
        if (!pending.busy) {
            pending.comm = 0;
            code = mpi->call.Comm_idup(from, &pending.comm, &pending.request);
            if (code)
                return hvd_mpi_failed(code, what, error);
            pending.busy = true;
        }
        code = wait_for(&pending.request, timeout_ms, what, error);
        if (code == HVD_AGAIN)
            return code;
        pending.busy = false;
        *made = pending.comm;
    }
    if (code == HVD_OK && (code = mpi->call.Comm_set_errhandler(*made, mpi->errors_return)) != 0)
        return hvd_mpi_failed(code, "set the error handler of a communicator", error);
    return code;
}

void hvd_mpi_comm_keep(uintptr_t comm)
{
    pthread_mutex_lock(&kept.lock);
    if (kept.count < KEPT_MAX)
        kept.comm[kept.count] = comm;
    kept.count++;
    pthread_mutex_unlock(&kept.lock);
}

static bool is_kept(uintptr_t comm)
{
    pthread_mutex_lock(&kept.lock);
    bool found = kept.count > KEPT_MAX;
    for (size_t i = 0; i < kept.count && !found; i++)
        found = kept.comm[i] == comm;
    pthread_mutex_unlock(&kept.lock);
    return found;
}

void hvd_mpi_comm_close(uintptr_t comm)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    int over = 1;
    if (!is_kept(comm) && mpi->abi && mpi->Finalized(&over) == 0 && !over)
        mpi->call.Comm_free(&comm);
}

void hvd_mpi_linger(uintptr_t comm, int peer)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    int found, code = 0;
    pthread_mutex_lock(&end.lock);
    if (!end.over)
        code = mpi->call.Iprobe(peer, 0, comm, &found, mpi->status_ignore);
    pthread_mutex_unlock(&end.lock);
    (void)code; /* the next call that matters says it again */
}

static int begin_allgather(uintptr_t comm, const void *mine, size_t bytes, int size, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    if (bytes * (size_t)size > INT_MAX)
        return hvd_fail(error, HVD_EINVAL, HVD901 "%zu bytes of each rank are too many for an exchange at init", bytes);
    pending.mine = malloc(bytes + 1);
    pending.all = malloc(bytes * (size_t)size + 1);
    if (!pending.mine || !pending.all)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    memcpy(pending.mine, mine, bytes);
    int code = mpi->call.Iallgather(pending.mine, (int)bytes, mpi->byte, pending.all, (int)bytes, mpi->byte, comm,
                                    &pending.request);
    pending.busy = code == 0;
    return code ? hvd_mpi_failed(code, "gather what the ranks say at init", error) : HVD_OK;
}

int hvd_mpi_allgather(uintptr_t comm, const void *mine, size_t bytes, void *all, int timeout_ms,
                      struct hvd_error *error)
{
    int size = 0, code = hvd_mpi_loaded()->call.Comm_size(comm, &size);
    if (code)
        return hvd_mpi_failed(code, "tell the size of a communicator", error);
    code = pending.busy ? HVD_OK : begin_allgather(comm, mine, bytes, size, error);
    if (code == HVD_OK)
        code = wait_for(&pending.request, timeout_ms, "gather what the ranks say at init", error);
    if (code == HVD_AGAIN)
        return code;
    if (code == HVD_OK)
        memcpy(all, pending.all, bytes * (size_t)size);
    pending.busy = false;
    free(pending.mine);
    free(pending.all);
    pending.mine = pending.all = NULL;
    return code;
}
