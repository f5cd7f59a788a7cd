/* wait.c - the thread of ours: it waits for all flights, and calls whoever waits for them.
 *
 * It is a framework thread to the core. It sleeps on the oldest and looks at the others now and then: in what order
 * things end is not known, and the one that ends may be what lets another rank go on with the oldest.
 *
 * How long a Finish may wait can be bounded (as in hvdlite/_core/wait_limit.py): the thread looks which has waited too
 * long and fails the job, after which all flights end. A join may wait.
 */
#include "inflight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_MS 2

static struct hvd_tf_air *const air = &hvd_tf_air;

static void take_out(struct hvd_tf_queue *queue, struct hvd_tf_flight **place)
{
    struct hvd_tf_flight *flight = *place;
    *place = flight->next;
    if (queue->end == &flight->next)
        queue->end = place;
}

int64_t hvd_tf_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The core is done with it: its outcome. Results that the engine holds stay there until the flight is recycled. */
static void collect(struct hvd_tf_flight *flight)
{
    if (flight->native > 0) {
        char text[HVD_TEXT_MAX];
        text[0] = 0;
        flight->code = hvd_tf_core.wait(flight->native, 0, text, sizeof text);
        if (flight->code != HVD_OK)
            flight->text = strdup(text);
        if (flight->code != HVD_OK && strstr(text, "another rank has joined")) /* Horovod's class for it */
            flight->code = HVD_ESTATE;
        if (flight->output || flight->code != HVD_OK) {
            hvd_tf_core.forget(flight->native);
            flight->native = 0;
        }
    }
    hvd_tf_let_go(&flight->input);
    hvd_tf_let_go(&flight->splits);
}

static void call(struct hvd_tf_waiter *waiter)
{
    struct hvd_tf_done done = waiter->done;
    free(waiter);
    hvd_tf.TF_RunAsyncOpKernelDoneCallback((struct tf_done *)&done);
    if (done.manage)
        done.manage(&done, &done, 3);
}

/* It has ended, and is in no list: tells whoever waits. */
void hvd_tf_land(struct hvd_tf_flight *flight)
{
    collect(flight);
    if (hvd_tf_list_asks(flight)) {
        pthread_mutex_lock(&air->lock);
        hvd_tf_append(&air->flying, flight);
        pthread_mutex_unlock(&air->lock);
        hvd_tf_submit(flight);
        return;
    }
    pthread_mutex_lock(&air->lock);
    flight->over = true;
    struct hvd_tf_waiter *waiters = flight->waiters;
    flight->waiters = NULL;
    bool owned = flight->owned; /* while somebody waits, it is */
    pthread_cond_broadcast(&air->ended);
    pthread_mutex_unlock(&air->lock);
    if (!owned)
        hvd_tf_recycle(flight);
    while (waiters) {
        struct hvd_tf_waiter *waiter = waiters;
        waiters = waiter->next;
        hvd_tf_deliver(flight, waiter->run);
        call(waiter); /* the flight may be gone after the last */
    }
}

/* One whose name is free now: out of `held` and into `flying`, to be submitted. NULL: none. */
static struct hvd_tf_flight *released(void)
{
    struct hvd_tf_flight *found = NULL;
    pthread_mutex_lock(&air->lock);
    for (struct hvd_tf_flight **place = &air->held.first; *place && !found; place = &(*place)->next)
        if (!hvd_tf_in_list(air->flying.first, *place)) {
            found = *place;
            take_out(&air->held, place);
            hvd_tf_append(&air->flying, found);
            if (found->since) /* the wait for its name was for another collective, which is bounded itself */
                found->since = hvd_tf_now_ms();
            break;
        }
    pthread_mutex_unlock(&air->lock);
    return found;
}

/* Those in `flying` that have ended, as a list. */
static struct hvd_tf_flight *arrived(void)
{
    struct hvd_tf_queue list = {NULL, &list.first};
    pthread_mutex_lock(&air->lock);
    for (struct hvd_tf_flight **place = &air->flying.first; *place;) {
        struct hvd_tf_flight *flight = *place;
        bool refused = flight->code != HVD_OK;
        if (refused || (flight->native > 0 && hvd_tf_core.poll(flight->native) != HVD_AGAIN)) {
            take_out(&air->flying, place);
            hvd_tf_append(&list, flight);
        } else {
            place = &flight->next;
        }
    }
    pthread_mutex_unlock(&air->lock);
    return list.first;
}

/* Fails the job if a Finish has waited for longer than it may. */
static void lose_patience(void)
{
    int64_t limit = atomic_load(&air->limit_ms), now = limit ? hvd_tf_now_ms() : 0;
    char why[HVD_TEXT_MAX] = {0};
    pthread_mutex_lock(&air->lock);
    for (struct hvd_tf_flight *flight = air->flying.first; limit && flight && !why[0]; flight = flight->next) {
        if (!flight->since || now - flight->since < limit || flight->words->kind == HVD_JOIN)
            continue;
        const char *name = flight->request.name, *quote = name ? "'" : "";
        flight->since = 0; /* said once */
        snprintf(why, sizeof why,
                 "rank %d has waited %g s for %s%s%.300s%s, which not all ranks have submitted or finished "
                 "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit)" HVD_ENDS(551),
                 hvd_tf_core.rank(), (double)limit / 1000, name ? "tensor " : "a collective", quote, name ? name : "",
                 quote);
    }
    pthread_mutex_unlock(&air->lock);
    if (why[0])
        hvd_tf_core.abort(hvd_tf_core.rank(), HVD_ETIMEOUT, why);
}

/* Blocks until there is something to do; the core's handle of the oldest that was submitted, 0: look around first. */
static int64_t next_to_wait_for(void)
{
    int64_t oldest = 0;
    bool refused = false;
    pthread_mutex_lock(&air->lock);
    for (;;) {
        for (struct hvd_tf_flight *flight = air->flying.first; flight && !oldest && !refused; flight = flight->next) {
            oldest = flight->native;
            refused = flight->code != HVD_OK;
        }
        if (oldest || refused)
            break;
        pthread_cond_wait(&air->news, &air->lock);
    }
    pthread_mutex_unlock(&air->lock);
    return oldest;
}

void *hvd_tf_serve(void *nothing)
{
    (void)nothing;
    for (;;) {
        int64_t oldest = next_to_wait_for();
        if (oldest > 0)
            hvd_tf_core.wait(oldest, LOOK_MS, NULL, 0);
        lose_patience();
        struct hvd_tf_flight *list = arrived();
        while (list) {
            struct hvd_tf_flight *flight = list;
            list = flight->next;
            hvd_tf_land(flight);
        }
        for (struct hvd_tf_flight *next; (next = released()) != NULL;)
            hvd_tf_submit(next);
    }
    return NULL;
}
