/* device.c - when may a collective touch tensors on a GPU, and when may TensorFlow touch them again?
 *
 * TensorFlow tells kernels in C neither its stream nor when that has got somewhere, and what is put on it goes on as
 * soon as `done` was called. So both ends of a collective are ours to guard.
 *
 *   The beginning: a *point* (hvd_point), which is reached when all is done that the device has been given so far, on
 * whatever streams. It is made in Start, after the memory of the output was allocated: TensorFlow's allocator gives out
 * memory that is free for the host while kernels launched before still use it, and the point covers these as well as
 * the kernels that make the input. That ranks cannot come to wait for each other in a ring is shown in cuda/begun.c.
 *   The end: `done` is called when the device has done the collective, and not when it lies on a stream. So no stream
 * of TensorFlow's has to wait, and inputs and outputs are given back only then. The thread of flight.c looks; it naps
 * in between, for longer the longer it has waited.
 *
 * A ragged result lies in memory of the core's. Finish allocates an output, whose memory may be in use by kernels that
 * were launched before, too: so the copy waits for another point, and `done` for the copy.
 *
 * A job that failed may leave works on a device which are being aborted, and may still write. Its flights end at once,
 * with the error; their tensors are kept until all that the device had been given by then is done: for ever, if it
 * never is.
 */
#include "flight.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS 50000

enum { TENSORS = 2 };
struct kept {
    struct kept *next;
    struct tf_tensor *tensor[TENSORS];
    void *point; /* NULL: it could not be made */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the lists */
static struct hvd_tf_waiter *copies;
static struct kept *kept;

static bool job_failed(int *code, char *text, size_t text_bytes)
{
    int culprit;
    return hvd_tf_core.failure(&culprit, code, text, text_bytes) == 1;
}

/* Of its tensors; NULL: they are empty, for which TensorFlow shows an address of its own that is on no device. */
static const void *address_of(const struct hvd_tf_flight *flight)
{
    struct tf_tensor *const both[] = {flight->output, flight->input};
    for (int i = 0; i < 2; i++)
        if (both[i] && hvd_tf.TF_TensorByteSize(both[i]) > 0)
            return hvd_tf.TF_TensorData(both[i]);
    return NULL;
}

/* Where there is none, of something else that TensorFlow gives there. */
static const void *memory_of(const struct hvd_tf_flight *flight, struct tf_run *run, struct tf_tensor **made,
                             struct tf_status *status)
{
    struct tf_allocation there = {sizeof there, 0};
    const void *address = address_of(flight);
    int64_t one = 1;
    if (address)
        return address;
    *made = hvd_tf.TF_AllocateTemp(run, hvd_tf.TF_TensorType(flight->input), &one, 1, &there, status);
    return *made && !hvd_tf.TF_GetCode(status) ? hvd_tf.TF_TensorData(*made) : NULL;
}

void hvd_tf_place(struct hvd_tf_flight *flight, struct tf_run *run, struct tf_status *status)
{
    const struct hvd_tf_words *words = flight->words;
    char text[HVD_TEXT_MAX] = "";
    struct tf_tensor *made = NULL;
    /* Who stands before a list has no elements on any rank, and may be met by one that is not in a graph. */
    if (!words->on_device || words->kind == HVD_JOIN || words->kind == HVD_BARRIER || words->list[0])
        return;
    const void *memory = memory_of(flight, run, &made, status);
    int device = hvd_tf.TF_GetCode(status) ? 0 : hvd_tf_core.point(memory, &flight->point, text, sizeof text);
    if (device > 0) {
        flight->request.device = device;
        flight->request.ready = hvd_tf_core.point_event(flight->point);
    } else if (device < 0) {
        hvd_tf.TF_SetStatus(status, TF_FAILED_PRECONDITION, text);
    }
    if (made)
        hvd_tf.TF_DeleteTensor(made);
}

/* Polling what is not launched yet sends what was submitted quietly, so that is done now and then only. */
int hvd_tf_ended(const struct hvd_tf_flight *flight, bool polls)
{
    struct hvd_output ignored;
    int code;
    bool launched = hvd_tf_core.result(flight->native, &ignored) == HVD_OK; /* it lies on a stream then */
    if ((launched || polls) && hvd_tf_core.poll(flight->native) != HVD_AGAIN)
        return HVD_TF_ENDED;
    if (!launched)
        return HVD_TF_AWAY;
    return job_failed(&code, NULL, 0) ? HVD_TF_ENDED : HVD_TF_THERE;
}

/* Its tensors are let go of when the device has done all that it has been given by now. */
static void keep(struct hvd_tf_flight *flight)
{
    struct tf_tensor **all[TENSORS] = {&flight->input, &flight->output};
    const void *memory = address_of(flight);
    struct kept *one = memory ? calloc(1, sizeof *one) : NULL;
    if (!one)
        return;
    for (int i = 0; i < TENSORS; i++) {
        one->tensor[i] = *all[i];
        *all[i] = NULL;
    }
    hvd_tf_core.point(memory, &one->point, NULL, 0);
    pthread_mutex_lock(&lock);
    one->next = kept;
    kept = one;
    pthread_mutex_unlock(&lock);
}

/* Or else it is this tensor's matter, which was begun nowhere. */
static bool ends_more(int code)
{
    return code == HVD_EPEER || code == HVD_EINTERNAL || code == HVD_ETIMEOUT || code == HVD_ESTATE ||
           code == HVD_EINIT;
}

int hvd_tf_collect(struct hvd_tf_flight *flight, char *text, size_t text_bytes)
{
    bool at_it = hvd_tf_core.poll(flight->native) == HVD_AGAIN;
    int code;
    if (flight->output) {
        code = hvd_tf_core.finish(&(struct hvd_owner){.handle = flight->native}, 0, text, text_bytes);
        flight->native = 0;
    } else {
        code = hvd_tf_core.wait(flight->native, 0, text, text_bytes);
    }
    if (at_it || ends_more(code))
        keep(flight);
    hvd_tf_core.point_drop(flight->point);
    flight->point = NULL;
    return code;
}

/* ---- copies ---- */

/* As a flight that is waited for too long; said once. */
static void lose_patience(struct hvd_tf_copy *copy)
{
    int64_t limit = atomic_load(&hvd_tf_air.limit_ms), now = hvd_tf_now_ms();
    char why[HVD_TEXT_MAX];
    copy->since = copy->since ? copy->since : now;
    if (!limit || now - copy->since < limit)
        return;
    copy->since = INT64_MAX;
    snprintf(why, sizeof why,
             "rank %d has waited %g s for the copy of a result on a GPU, which was launched and has not ended there "
             "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit)" HVD_ENDS(553),
             hvd_tf_core.rank(), (double)limit / 1000);
    hvd_tf_core.abort(hvd_tf_core.rank(), HVD_ETIMEOUT, why);
}

/* HVD_OK: it is there, and nothing is left of it. HVD_AGAIN; or the job has failed, and with it the node. */
static int arrive(struct hvd_tf_copy *copy, struct tf_run *run)
{
    char text[HVD_TEXT_MAX] = "";
    int code, reached = hvd_tf_core.point_reached(copy->point);
    bool failed = reached != HVD_OK && job_failed(&code, text, sizeof text);
    if (reached == HVD_AGAIN && !failed) {
        lose_patience(copy);
        return HVD_AGAIN;
    }
    if (reached != HVD_OK)
        hvd_tf_fail(run, TF_UNKNOWN, text[0] ? text : "the copy of a result failed on the GPU" HVD_ENDS(654));
    struct kept *one = reached == HVD_AGAIN ? calloc(1, sizeof *one) : NULL;
    if (one) { /* the copy may still come */
        *one = (struct kept){.tensor = {copy->into}, .point = copy->point};
        pthread_mutex_lock(&lock);
        one->next = kept;
        kept = one;
        pthread_mutex_unlock(&lock);
    } else {
        hvd_tf.TF_DeleteTensor(copy->into);
        hvd_tf_core.point_drop(copy->point);
    }
    return failed ? HVD_EINTERNAL : HVD_OK;
}

static void call(struct hvd_tf_waiter *waiter)
{
    struct hvd_tf_done done = waiter->done;
    free(waiter);
    hvd_tf.TF_RunAsyncOpKernelDoneCallback((struct tf_done *)&done);
    if (done.manage)
        done.manage(&done, &done, 3);
}

void hvd_tf_copy_wait(struct hvd_tf_waiter *waiter)
{
    if (!waiter->copy.point) {
        call(waiter);
        return;
    }
    pthread_mutex_lock(&lock);
    waiter->next = copies;
    copies = waiter;
    pthread_mutex_unlock(&lock);
}

void hvd_tf_copy_await(struct hvd_tf_copy *copy, struct tf_run *run, struct tf_done *done)
{
    struct hvd_tf_waiter *waiter = copy->point && hvd_tf_moves ? malloc(sizeof *waiter) : NULL;
    const struct timespec nap = {0, LOOK_NS};
    if (waiter) {
        *waiter = (struct hvd_tf_waiter){.run = run, .copy = *copy};
        memcpy(&waiter->done, done, sizeof waiter->done);
        memset(done, 0, sizeof waiter->done);
        hvd_tf_copy_wait(waiter);
        hvd_tf_flights_look();
        return;
    }
    while (copy->point && arrive(copy, run) == HVD_AGAIN)
        nanosleep(&nap, NULL);
    hvd_tf.TF_RunAsyncOpKernelDoneCallback(done);
}

static bool is_over(struct kept *one)
{
    if (!one->point || hvd_tf_core.point_reached(one->point) == HVD_AGAIN)
        return false;
    for (int i = 0; i < TENSORS; i++)
        if (one->tensor[i])
            hvd_tf.TF_DeleteTensor(one->tensor[i]);
    hvd_tf_core.point_drop(one->point);
    free(one);
    return true;
}

/* Those of the list that are over are gone: the rest. */
static struct kept *sweep(struct kept *list)
{
    struct kept *rest = NULL;
    while (list) {
        struct kept *one = list;
        list = one->next;
        if (is_over(one))
            continue;
        one->next = rest;
        rest = one;
    }
    return rest;
}

int hvd_tf_copies(void)
{
    pthread_mutex_lock(&lock);
    struct hvd_tf_waiter *waiters = copies;
    struct kept *list = kept;
    copies = NULL;
    kept = NULL;
    pthread_mutex_unlock(&lock);
    int under_way = 0;
    while (waiters) {
        struct hvd_tf_waiter *waiter = waiters;
        waiters = waiter->next;
        if (arrive(&waiter->copy, waiter->run) == HVD_AGAIN) {
            hvd_tf_copy_wait(waiter);
            under_way++;
        } else {
            call(waiter);
        }
    }
    bool remains = false;
    for (struct kept *rest = sweep(list), *next; rest; rest = next) {
        next = rest->next;
        remains = remains || rest->point;
        pthread_mutex_lock(&lock);
        rest->next = kept;
        kept = rest;
        pthread_mutex_unlock(&lock);
    }
    return under_way ? under_way : remains ? -1 : 0;
}
