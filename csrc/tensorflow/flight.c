/* flight.c - what becomes of a collective between the node that starts it and the node that finishes it?
 *
 * Start must not block and Finish must not hold a thread, or a graph with more collectives than threads would stand
 * still: some rank's threads would all wait for tensors that nobody has a thread to start. So a flight is owned by the
 * tensor that leads from Start to Finish (its memory has our deallocator: a Finish that the optimizer pruned, or a
 * step that was given up, drops the tensor, and so the flight), and one thread of ours, a framework thread to the core,
 * waits for all of them and calls whoever waits.
 *
 * It sleeps on the oldest and looks at the others now and then: in what order things end is not known, and the one
 * that ends may be what lets another rank go on with the oldest.
 *
 * A name may be started again before it has ended: by the next iteration of a loop, or by the next call of a function
 * whose result nobody wanted. It is held back then, and goes when the first has ended; since starts of one name come in
 * the order of the program on every rank, they meet. Where they do not, the second is an error (order.c).
 *
 * How long a Finish may wait can be bounded (as in _core/patience.py): the thread of ours looks which has waited too
 * long and fails the job, after which all flights end. A join may wait.
 *
 * The lock guards the lists, `waiters` and `since`; nothing of TensorFlow's is called under it.
 */
#include "tensorflow.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_MS 2

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static struct hvd_tf_flight *unused, *flying, **flying_end = &flying, *held, **held_end = &held;
static bool has_thread;
static uint64_t serials;
static int64_t alive, alive_most;
static _Atomic int64_t limit_ms; /* of a wait; 0: none */

static void append(struct hvd_tf_flight *flight, struct hvd_tf_flight ***end)
{
    flight->next = NULL;
    **end = flight;
    *end = &flight->next;
}

static void take_out(struct hvd_tf_flight **place, struct hvd_tf_flight ***end)
{
    struct hvd_tf_flight *flight = *place;
    *place = flight->next;
    if (*end == &flight->next)
        *end = place;
}

struct hvd_tf_flight *hvd_tf_flight_new(struct hvd_tf_words *words)
{
    pthread_mutex_lock(&lock);
    struct hvd_tf_flight *flight = unused;
    if (flight)
        unused = flight->next;
    uint64_t serial = ++serials;
    if (++alive > alive_most)
        alive_most = alive;
    pthread_mutex_unlock(&lock);
    if (!flight && !(flight = malloc(sizeof *flight)))
        return NULL;
    memset(flight, 0, sizeof *flight);
    flight->serial = serial;
    flight->words = words;
    flight->owned = true;
    atomic_fetch_add(&words->users, 1);
    return flight;
}

static void let_go(struct tf_tensor **tensor)
{
    if (*tensor)
        hvd_tf.TF_DeleteTensor(*tensor);
    *tensor = NULL;
}

static void recycle(struct hvd_tf_flight *flight)
{
    let_go(&flight->input);
    let_go(&flight->splits);
    let_go(&flight->output);
    if (flight->native > 0)
        hvd_tf_core.forget(flight->native);
    free(flight->text);
    free(flight->name);
    free(flight->shape);
    hvd_tf_words_release(flight->words);
    flight->text = flight->name = NULL;
    flight->shape = NULL;
    pthread_mutex_lock(&lock);
    flight->serial = 0;
    flight->next = unused;
    unused = flight;
    alive--;
    pthread_mutex_unlock(&lock);
}

void hvd_tf_flight_drop(struct hvd_tf_flight *flight)
{
    pthread_mutex_lock(&lock);
    flight->owned = false;
    bool over = flight->over;
    pthread_mutex_unlock(&lock);
    if (over)
        recycle(flight);
}

/* Not under the lock: the core may take its time. */
static void submit(struct hvd_tf_flight *flight)
{
    char text[HVD_TEXT_MAX];
    int64_t native = hvd_tf_core.submit(&flight->request, text, sizeof text);
    char *why = native > 0 ? NULL : strdup(text);
    pthread_mutex_lock(&lock);
    flight->native = native > 0 ? native : 0;
    flight->code = native > 0 ? HVD_OK : (int)native;
    flight->text = why;
    pthread_cond_signal(&news);
    pthread_mutex_unlock(&lock);
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
    let_go(&flight->input);
    let_go(&flight->splits);
}

/* It has ended, and is in no list: tells whoever waits. */
static void land(struct hvd_tf_flight *flight)
{
    collect(flight);
    if (hvd_tf_list_asks(flight)) {
        pthread_mutex_lock(&lock);
        append(flight, &flying_end);
        pthread_mutex_unlock(&lock);
        submit(flight);
        return;
    }
    pthread_mutex_lock(&lock);
    flight->over = true;
    struct hvd_tf_waiter *waiters = flight->waiters;
    flight->waiters = NULL;
    bool owned = flight->owned; /* while somebody waits, it is */
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
    if (!owned)
        recycle(flight);
    while (waiters) {
        struct hvd_tf_waiter *waiter = waiters;
        waiters = waiter->next;
        hvd_tf_deliver(flight, waiter->run);
        struct hvd_tf_done done = waiter->done;
        free(waiter);
        hvd_tf.TF_RunAsyncOpKernelDoneCallback((struct tf_done *)&done); /* the flight may be gone after the last */
        if (done.manage)
            done.manage(&done, &done, 3);
    }
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One whose name is free now: out of `held` and into `flying`, to be submitted. NULL: none. */
static struct hvd_tf_flight *released(void)
{
    struct hvd_tf_flight *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct hvd_tf_flight **place = &held; *place && !found; place = &(*place)->next)
        if (!hvd_tf_in_list(flying, *place)) {
            found = *place;
            take_out(place, &held_end);
            append(found, &flying_end);
            if (found->since) /* the wait for its name was for another collective, which is bounded itself */
                found->since = now_ms();
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Those in `flying` that have ended, as a list. */
static struct hvd_tf_flight *arrived(void)
{
    struct hvd_tf_flight *list = NULL, **end = &list;
    pthread_mutex_lock(&lock);
    for (struct hvd_tf_flight **place = &flying; *place;) {
        struct hvd_tf_flight *flight = *place;
        bool submitted = flight->native > 0, refused = flight->code != HVD_OK;
        if (refused || (submitted && hvd_tf_core.poll(flight->native) != HVD_AGAIN)) {
            take_out(place, &flying_end);
            append(flight, &end);
        } else {
            place = &flight->next;
        }
    }
    pthread_mutex_unlock(&lock);
    return list;
}

/* Fails the job if a Finish has waited for longer than it may. */
static void lose_patience(void)
{
    int64_t limit = atomic_load(&limit_ms), now = limit ? now_ms() : 0;
    char why[HVD_TEXT_MAX] = {0};
    pthread_mutex_lock(&lock);
    for (struct hvd_tf_flight *flight = flying; limit && flight && !why[0]; flight = flight->next) {
        if (!flight->since || now - flight->since < limit || flight->words->kind == HVD_JOIN)
            continue;
        const char *name = flight->request.name, *quote = name ? "'" : "";
        flight->since = 0; /* said once */
        snprintf(why, sizeof why,
                 "rank %d has waited %g s for %s%s%.300s%s, which not all ranks have submitted or finished "
                 "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit)",
                 hvd_tf_core.rank(), (double)limit / 1000, name ? "tensor " : "a collective", quote, name ? name : "",
                 quote);
    }
    pthread_mutex_unlock(&lock);
    if (why[0])
        hvd_tf_core.abort(hvd_tf_core.rank(), HVD_ETIMEOUT, why);
}

/* Blocks until there is something to do; the core's handle of the oldest that was submitted, 0: look around first. */
static int64_t next_to_wait_for(void)
{
    int64_t oldest = 0;
    bool refused = false;
    pthread_mutex_lock(&lock);
    for (;;) {
        for (struct hvd_tf_flight *flight = flying; flight && !oldest && !refused; flight = flight->next) {
            oldest = flight->native;
            refused = flight->code != HVD_OK;
        }
        if (oldest || refused)
            break;
        pthread_cond_wait(&news, &lock);
    }
    pthread_mutex_unlock(&lock);
    return oldest;
}

static void *serve(void *nothing)
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
            land(flight);
        }
        for (struct hvd_tf_flight *next; (next = released()) != NULL;)
            submit(next);
    }
    return NULL;
}

/* In a world of 1 nobody else is needed: it ends here, and no thread changes hands. */
static void run_alone(struct hvd_tf_flight *flight)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* so that no name is in flight twice */
    flight->request.quiet = HVD_QUIET;
    flight->request.group = 0;
    flight->request.group_count = 0;
    pthread_mutex_lock(&one_at_a_time);
    if (flight->output) { /* by the short way, which is one call */
        char text[HVD_TEXT_MAX];
        int64_t outcome = hvd_tf_core.run(&flight->request, (uintptr_t)flight->request.input,
                                          (uintptr_t)flight->request.output, HVD_QUIET, 50, text, sizeof text);
        flight->native = outcome > 0 ? outcome : 0;
        flight->code = outcome < 0 ? (int)outcome : HVD_OK;
        flight->text = outcome < 0 ? strdup(text) : NULL;
    } else {
        submit(flight);
    }
    while (flight->native > 0 && hvd_tf_core.wait(flight->native, 50, NULL, 0) == HVD_AGAIN)
        ;
    land(flight);
    pthread_mutex_unlock(&one_at_a_time);
}

void hvd_tf_flight_start(struct hvd_tf_flight *flight)
{
    if (hvd_tf_core.size() == 1) {
        run_alone(flight);
        return;
    }
    pthread_mutex_lock(&lock);
    if (!has_thread) {
        pthread_t thread;
        has_thread = pthread_create(&thread, NULL, serve, NULL) == 0 && pthread_detach(thread) == 0;
    }
    bool waits = hvd_tf_in_list(flying, flight) || hvd_tf_in_list(held, flight);
    bool clash = hvd_tf_in_no_order(flying, held, flight);
    if (clash) {
        flight->code = HVD_EDUP;
        flight->text = hvd_tf_say_in_no_order(flight->request.name);
        pthread_cond_signal(&news);
    }
    append(flight, waits && !clash ? &held_end : &flying_end); /* from now on its name is taken */
    pthread_mutex_unlock(&lock);
    if (!waits && !clash)
        submit(flight);
}

int hvd_tf_flight_over(struct hvd_tf_flight *flight, uint64_t serial, struct tf_run *run, struct tf_done *done)
{
    struct hvd_tf_waiter *waiter = hvd_tf_moves ? malloc(sizeof *waiter) : NULL;
    pthread_mutex_lock(&lock);
    bool known = flight->serial == serial && flight->owned; /* memory of flights is never given back */
    if (known && !flight->over && !flight->since && atomic_load(&limit_ms))
        flight->since = now_ms();
    while (known && !waiter && !flight->over)
        pthread_cond_wait(&ended, &lock);
    bool over = flight->over;
    if (known && !over) {
        memcpy(&waiter->done, done, sizeof waiter->done);
        memset(done, 0, sizeof waiter->done);
        waiter->run = run;
        waiter->next = flight->waiters;
        flight->waiters = waiter;
    }
    pthread_mutex_unlock(&lock);
    if (!known || over)
        free(waiter);
    return known ? over : -1;
}

void hvd_tf_flights_bound(double seconds)
{
    atomic_store(&limit_ms, (int64_t)(seconds * 1000));
}

int64_t hvd_tf_flights(int which)
{
    pthread_mutex_lock(&lock);
    int64_t answer = which == 0 ? alive : which == 1 ? (int64_t)serials : alive_most;
    pthread_mutex_unlock(&lock);
    return answer;
}
