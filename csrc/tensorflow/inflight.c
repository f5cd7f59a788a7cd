/* inflight.c - what becomes of a collective between the node that starts it and the node that finishes it?
 *
 * Start must not block and Finish must not hold a thread, or a graph with more collectives than threads would stand
 * still: some rank's threads would all wait for tensors that nobody has a thread to start. So a flight is owned by the
 * tensor that leads from Start to Finish (its memory has our deallocator: a Finish that the optimizer pruned, or a
 * step that was given up, drops the tensor, and so the flight), and one thread of ours, a framework thread to the core,
 * waits for all of them and calls whoever waits (wait.c).
 *
 * A name may be started again before it has ended: by the next iteration of a loop, or by the next call of a function
 * whose result nobody wanted. It is held back then, and goes when the first has ended; since starts of one
 * name come in the order of the program on every rank, they meet. Where they do not, the second is an error (order.c).
 *
 * In a world of 1 a collective ends in its Start.
 */
#include "inflight.h"

#include <stdlib.h>
#include <string.h>

struct hvd_tf_air hvd_tf_air = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                .news = PTHREAD_COND_INITIALIZER,
                                .ended = PTHREAD_COND_INITIALIZER,
                                .flying = {NULL, &hvd_tf_air.flying.first},
                                .held = {NULL, &hvd_tf_air.held.first}};
static struct hvd_tf_flight *unused;
static bool has_thread;
static struct hvd_tf_air *const air = &hvd_tf_air;
static uint64_t serials;
static int64_t alive, alive_most;

void hvd_tf_append(struct hvd_tf_queue *queue, struct hvd_tf_flight *flight)
{
    flight->next = NULL;
    *queue->end = flight;
    queue->end = &flight->next;
}

struct hvd_tf_flight *hvd_tf_flight_new(struct hvd_tf_words *words)
{
    pthread_mutex_lock(&air->lock);
    struct hvd_tf_flight *flight = unused;
    if (flight)
        unused = flight->next;
    uint64_t serial = ++serials;
    if (++alive > alive_most)
        alive_most = alive;
    pthread_mutex_unlock(&air->lock);
    if (!flight && !(flight = malloc(sizeof *flight)))
        return NULL;
    memset(flight, 0, sizeof *flight);
    flight->serial = serial;
    flight->words = words;
    flight->owned = true;
    atomic_fetch_add(&words->users, 1);
    return flight;
}

void hvd_tf_let_go(struct tf_tensor **tensor)
{
    if (*tensor)
        hvd_tf.TF_DeleteTensor(*tensor);
    *tensor = NULL;
}

void hvd_tf_recycle(struct hvd_tf_flight *flight)
{
    hvd_tf_let_go(&flight->input);
    hvd_tf_let_go(&flight->splits);
    hvd_tf_let_go(&flight->output);
    if (flight->native > 0)
        hvd_tf_core.forget(flight->native);
    free(flight->text);
    free(flight->name);
    free(flight->shape);
    hvd_tf_words_release(flight->words);
    flight->text = flight->name = NULL;
    flight->shape = NULL;
    pthread_mutex_lock(&air->lock);
    flight->serial = 0;
    flight->next = unused;
    unused = flight;
    alive--;
    pthread_mutex_unlock(&air->lock);
}

void hvd_tf_flight_drop(struct hvd_tf_flight *flight)
{
    pthread_mutex_lock(&air->lock);
    flight->owned = false;
    bool over = flight->over;
    pthread_mutex_unlock(&air->lock);
    if (over)
        hvd_tf_recycle(flight);
}

void hvd_tf_submit(struct hvd_tf_flight *flight)
{
    char text[HVD_TEXT_MAX];
    if (flight->words->list[0] && !flight->asks)
        hvd_tf_list_begins(flight);
    int64_t native = hvd_tf_core.submit(&flight->request, text, sizeof text);
    char *why = native > 0 ? NULL : strdup(text);
    pthread_mutex_lock(&air->lock);
    flight->native = native > 0 ? native : 0;
    flight->code = native > 0 ? HVD_OK : (int)native;
    flight->text = why;
    pthread_cond_signal(&air->news);
    pthread_mutex_unlock(&air->lock);
}

/* In a world of 1 nobody else is needed: it ends here, and no thread changes hands. */
static void run_alone(struct hvd_tf_flight *flight)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* so that no name is in flight twice */
    flight->request.quiet = HVD_QUIET;
    flight->request.group = 0;
    flight->request.group_count = 0;
    pthread_mutex_lock(&one_at_a_time);
    hvd_tf_submit(flight);
    while (flight->native > 0 && hvd_tf_core.wait(flight->native, 50, NULL, 0) == HVD_AGAIN)
        ;
    hvd_tf_land(flight);
    pthread_mutex_unlock(&one_at_a_time);
}

void hvd_tf_flight_start(struct hvd_tf_flight *flight)
{
    if (hvd_tf_core.size() == 1) {
        run_alone(flight);
        return;
    }
    pthread_mutex_lock(&air->lock);
    if (!has_thread) {
        pthread_t thread;
        has_thread = pthread_create(&thread, NULL, hvd_tf_serve, NULL) == 0 && pthread_detach(thread) == 0;
    }
    bool waits = hvd_tf_in_list(air->flying.first, flight) || hvd_tf_in_list(air->held.first, flight);
    bool clash = hvd_tf_in_no_order(air->flying.first, air->held.first, flight);
    if (clash) {
        flight->code = HVD_EDUP;
        flight->text = hvd_tf_say_in_no_order(flight->request.name);
        pthread_cond_signal(&air->news);
    }
    hvd_tf_append(waits && !clash ? &air->held : &air->flying, flight); /* from now on its name is taken */
    pthread_mutex_unlock(&air->lock);
    if (!waits && !clash)
        hvd_tf_submit(flight);
}

int hvd_tf_flight_over(struct hvd_tf_flight *flight, uint64_t serial, struct tf_run *run, struct tf_done *done)
{
    struct hvd_tf_waiter *waiter = hvd_tf_moves ? malloc(sizeof *waiter) : NULL;
    pthread_mutex_lock(&air->lock);
    bool known = flight->serial == serial && flight->owned; /* memory of flights is never given back */
    if (known && !flight->over && !flight->since && atomic_load(&air->limit_ms))
        flight->since = hvd_tf_now_ms();
    while (known && !waiter && !flight->over)
        pthread_cond_wait(&air->ended, &air->lock);
    bool over = flight->over;
    if (known && !over) {
        memcpy(&waiter->done, done, sizeof waiter->done);
        memset(done, 0, sizeof waiter->done);
        waiter->run = run;
        waiter->next = flight->waiters;
        flight->waiters = waiter;
    }
    pthread_mutex_unlock(&air->lock);
    if (!known || over)
        free(waiter);
    return known ? over : -1;
}

void hvd_tf_flights_bound(double seconds)
{
    atomic_store(&air->limit_ms, (int64_t)(seconds * 1000));
    hvd_tf_lists_anew();
}

int64_t hvd_tf_flights(int which)
{
    pthread_mutex_lock(&air->lock);
    int64_t answer = which == 0 ? alive : which == 1 ? (int64_t)serials : alive_most;
    pthread_mutex_unlock(&air->lock);
    return answer;
}
