/* What waits for the collectives of TensorFlow's graphs, without TensorFlow: flights, their order, lists, the limit.
 *
 * TensorFlow's functions and the core's are tables, and here they are ours: a tensor is nothing, `done` counts, and a
 * collective ends when the test says so. The thread that waits is the real one.
 */
#include "check.h"
#include "tensorflow/tensorflow.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REQUESTS     256
#define HOLDS(claim) CHECK(claim, "see above")

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static struct {
    struct hvd_request request;
    char name[64];
    int code; /* HVD_AGAIN: under way */
    const char *text;
} core[REQUESTS + 1];
static int64_t submitted;
static int aborted, dones, deleted;
static int fails[REQUESTS]; /* what TF_SetStatus was told, in order */
static char last_text[HVD_TEXT_MAX];
static int failures;
static char result; /* every flight's output tensor */

/* Blocks until what another thread does has been done. Under the lock. */
#define UNTIL(reached)                                                            \
    do {                                                                          \
        struct timespec end;                                                      \
        clock_gettime(CLOCK_REALTIME, &end);                                      \
        end.tv_sec += 60;                                                         \
        while (!(reached))                                                        \
            HOLDS(pthread_cond_timedwait(&moved, &lock, &end) == 0 || (reached)); \
    } while (0)

static int64_t core_submit(const struct hvd_request *request, char *text, size_t text_bytes)
{
    pthread_mutex_lock(&lock);
    int64_t handle = ++submitted;
    HOLDS(handle <= REQUESTS);
    core[handle].request = *request;
    core[handle].code = HVD_AGAIN;
    snprintf(core[handle].name, sizeof core[handle].name, "%s", request->name ? request->name : "");
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return handle;
}

static int core_poll(int64_t handle)
{
    pthread_mutex_lock(&lock);
    int answer = core[handle].code == HVD_AGAIN ? HVD_AGAIN : HVD_OK;
    pthread_mutex_unlock(&lock);
    return answer;
}

static int core_wait(int64_t handle, int timeout_ms, char *text, size_t text_bytes)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += timeout_ms * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    while (core[handle].code == HVD_AGAIN && pthread_cond_timedwait(&moved, &lock, &end) == 0)
        ;
    int code = core[handle].code;
    if (text)
        snprintf(text, text_bytes, "%s", core[handle].text ? core[handle].text : "");
    pthread_mutex_unlock(&lock);
    return code;
}

static const char lists[] = "rank 0: 3 gradients\na\nb\ncrank 1: 2 gradients\na\nbrank 2: 3 gradients\na\nb\nc";

static int core_result(int64_t handle, struct hvd_output *output)
{
    static const int64_t rows_of[3] = {25, 23, 25};
    *output = (struct hvd_output){(void *)(uintptr_t)lists, 73, 73, rows_of, 3};
    return HVD_OK;
}

static int core_forget(int64_t handle)
{
    return HVD_OK;
}

static int core_rank(void)
{
    return 0;
}

static int core_size(void)
{
    return 3;
}

static int core_abort(int culprit, int code, const char *reason)
{
    pthread_mutex_lock(&lock);
    HOLDS(culprit == 0 && code == HVD_ETIMEOUT && strstr(reason, "has waited") != NULL);
    aborted++;
    for (int64_t i = 1; i <= submitted; i++)
        if (core[i].code == HVD_AGAIN) {
            core[i].code = HVD_ETIMEOUT;
            core[i].text = "given up";
        }
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return HVD_OK;
}

/* The submission of this name that is under way, 0: none. Under the lock. */
static int64_t under_way(const char *name)
{
    for (int64_t i = 1; i <= submitted; i++)
        if (core[i].code == HVD_AGAIN && strcmp(core[i].name, name) == 0)
            return i;
    return 0;
}

static void end_with(const char *name, int code, const char *text)
{
    pthread_mutex_lock(&lock);
    UNTIL(under_way(name));
    int64_t handle = under_way(name);
    core[handle].text = text;
    core[handle].code = code;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static struct tf_status *new_status(void)
{
    return NULL;
}
static void delete_status(struct tf_status *status) {}
static int get_code(const struct tf_status *status)
{
    return 0;
}
static void set_status(struct tf_status *status, int code, const char *text)
{
    pthread_mutex_lock(&lock);
    fails[failures++] = code;
    snprintf(last_text, sizeof last_text, "%s", text);
    pthread_mutex_unlock(&lock);
}
static void failure(struct tf_run *run, struct tf_status *status) {}
static void set_output(struct tf_run *run, int i, const struct tf_tensor *tensor, struct tf_status *status) {}
static struct tf_tensor *no_output(struct tf_run *run, int i, int dtype, const int64_t *dims, int count, size_t bytes,
                                   struct tf_status *status)
{
    static int64_t rows[8];
    HOLDS(count == 1);
    return (struct tf_tensor *)rows;
}
static void *tensor_data(const struct tf_tensor *tensor)
{
    return (void *)(uintptr_t)tensor;
}
static void delete_tensor(struct tf_tensor *tensor)
{
    pthread_mutex_lock(&lock);
    deleted += tensor == (struct tf_tensor *)&result;
    pthread_mutex_unlock(&lock);
}
static _Atomic int64_t steps;
static int64_t core_step(int found, int64_t optimizer_ns)
{
    HOLDS(found == 1 && optimizer_ns == 0);
    return ++steps;
}
static void run_done(struct tf_done *done)
{
    pthread_mutex_lock(&lock);
    dones++;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static void begin(void)
{
    hvd_tf = (struct hvd_tf_functions){.TF_NewStatus = new_status,
                                       .TF_DeleteStatus = delete_status,
                                       .TF_GetCode = get_code,
                                       .TF_SetStatus = set_status,
                                       .TF_OpKernelContext_Failure = failure,
                                       .TF_SetOutput = set_output,
                                       .TF_AllocateOutput = no_output,
                                       .TF_TensorData = tensor_data,
                                       .TF_DeleteTensor = delete_tensor,
                                       .TF_RunAsyncOpKernelDoneCallback = run_done};
    hvd_tf_core = (struct hvd_tf_core){.submit = core_submit,
                                       .wait = core_wait,
                                       .poll = core_poll,
                                       .result = core_result,
                                       .forget = core_forget,
                                       .rank = core_rank,
                                       .size = core_size,
                                       .abort = core_abort,
                                       .step = core_step};
    hvd_tf_moves = true;
}

static struct hvd_tf_words *words_of(const char *key, int64_t order, const char *list)
{
    struct hvd_tf_words *words = calloc(1, sizeof *words);
    words->users = 1;
    words->order = order;
    words->key = strdup(key);
    words->list = strdup(list);
    words->hash = hvd_tf_hash(key);
    return words;
}

/* A node starts; its words are its own. */
static struct hvd_tf_flight *start(const char *key, int64_t order, int64_t step, const char *list)
{
    struct hvd_tf_words *words = words_of(key, order, list);
    struct hvd_tf_flight *flight = hvd_tf_flight_new(words);
    hvd_tf_words_release(words);
    flight->request = (struct hvd_request){.name = words->key, .kind = HVD_ALLREDUCE, .ndim = 3};
    flight->request.dims[2] = (int64_t)hvd_tf_hash(list); /* what is in it */
    flight->output = (struct tf_tensor *)&result;
    flight->step = step;
    hvd_tf_flight_start(flight);
    return flight;
}

/* Its Finish runs and its handle goes: the code that TensorFlow is told, 0: it is well. */
static int finish(struct hvd_tf_flight *flight)
{
    struct hvd_tf_done done = {.invoke = NULL};
    pthread_mutex_lock(&lock);
    int before = dones, failed = failures;
    pthread_mutex_unlock(&lock);
    int over = hvd_tf_flight_over(flight, flight->serial, NULL, (struct tf_done *)&done);
    HOLDS(over >= 0);
    if (over)
        hvd_tf_deliver(flight, NULL);
    pthread_mutex_lock(&lock);
    if (!over)
        UNTIL(dones > before);
    int code = failures > failed ? fails[failures - 1] : 0;
    pthread_mutex_unlock(&lock);
    hvd_tf_flight_drop(flight);
    return code;
}

static void test_a_second_start_waits_for_the_end_of_the_first(void)
{
    struct hvd_tf_flight *one = start("again", HVD_TF_ORDERED, 1, ""), *two = start("again", HVD_TF_ORDERED, 1, "");
    pthread_mutex_lock(&lock);
    int64_t first = under_way("again");
    pthread_mutex_unlock(&lock);
    HOLDS(first > 0);
    end_with("again", HVD_OK, NULL);
    HOLDS(finish(one) == 0);
    pthread_mutex_lock(&lock);
    UNTIL(under_way("again") > first);
    pthread_mutex_unlock(&lock);
    end_with("again", HVD_OK, NULL);
    HOLDS(finish(two) == 0);
    HOLDS(hvd_tf_flights(0) == 0);
}

static void test_without_order_a_name_starts_once_in_a_step(void)
{
    for (int step = 2; step < 4; step++) {
        struct hvd_tf_flight *one = start("once", HVD_TF_ONCE, step, "");
        end_with("once", HVD_OK, NULL);
        HOLDS(finish(one) == 0);
        HOLDS(finish(start("once", HVD_TF_ONCE, step, "")) == TF_INVALID_ARGUMENT);
        HOLDS(strstr(last_text, "rank 0: tensor 'once'") && strstr(last_text, "a name of its own"));
    }
    HOLDS(hvd_tf_flights(0) == 0);
}

static void test_what_nobody_waits_for_is_forgotten(void)
{
    int before = deleted;
    hvd_tf_flight_drop(start("unwanted", HVD_TF_ORDERED, 5, ""));
    HOLDS(hvd_tf_flights(0) == 1);
    end_with("unwanted", HVD_OK, NULL);
    struct hvd_tf_flight *next = start("wanted", HVD_TF_ORDERED, 5, "");
    end_with("wanted", HVD_OK, NULL);
    HOLDS(finish(next) == 0); /* by the thread that had the other before it */
    CHECK(hvd_tf_flights(0) == 0 && deleted == before + 2, "%d alive, %d deleted", (int)hvd_tf_flights(0),
          deleted - before);
}

static void test_ranks_with_other_lists_exchange_them(void)
{
    struct hvd_tf_flight *flight =
        start("allreduce.mine.list", HVD_TF_ORDERED, 6, "do so\nrank 0: 3 gradients\na\nb\nc");
    end_with("allreduce.mine.list", HVD_EMISMATCH, "ranks disagree");
    end_with("allgather.mine.list.names", HVD_OK, NULL);
    HOLDS(finish(flight) == TF_FAILED_PRECONDITION);
    HOLDS(strcmp(last_text, "rank 0: tensor 'mine.list': ranks have different lists:\n  rank 0: 3 gradients (..., c)\n"
                            "  rank 1: 2 gradients (...)\n  and 1 other rank\ndo so [HVD305]") == 0);
    HOLDS(hvd_tf_flights(0) == 0);
}

/* With a rank that has joined there is no allgather; and where the job ends, that is the error. */
static void test_who_cannot_ask_shows_its_own_list(void)
{
    static const char why[] = "it is not possible while another rank has joined";
    struct hvd_tf_flight *flight = start("allreduce.mine.list", HVD_TF_ORDERED, 8, "do so\nrank 0: 2 gradients\na\nb");
    end_with("allreduce.mine.list", HVD_EMISMATCH, "ranks disagree");
    end_with("allgather.mine.list.names", HVD_EINVAL, why);
    HOLDS(finish(flight) == TF_FAILED_PRECONDITION);
    HOLDS(strcmp(last_text,
                 "rank 0: tensor 'mine.list': ranks have different lists:\n  rank 0: 2 gradients (a, b)\n"
                 "  the lists of the other ranks are not available: it is not possible while another rank has joined\n"
                 "do so [HVD305]") == 0);
    flight = start("allreduce.mine.list", HVD_TF_ORDERED, 9, "do so\nrank 0: 2 gradients\na\nb");
    end_with("allreduce.mine.list", HVD_EMISMATCH, "ranks disagree");
    end_with("allgather.mine.list.names", HVD_EPEER, "rank 2 has died");
    HOLDS(finish(flight) == TF_UNKNOWN && strcmp(last_text, "rank 2 has died") == 0);
    HOLDS(hvd_tf_flights(0) == 0);
}

/* How many steps there are when the core has a list. */
static int64_t steps_at(const char *key, const char *list)
{
    struct hvd_tf_flight *flight = start(key, HVD_TF_ORDERED, 8, list);
    int64_t found = steps;
    end_with(key, HVD_OK, NULL);
    HOLDS(finish(flight) == 0);
    return found;
}

/* Of two optimizers the first counts, until the other has come alone for a while; in the next life of the job, too. */
static void test_before_a_list_of_gradients_a_step_ends(void)
{
    static const char a[] = "do so\nrank 0: 2 gradients\na\nb", b[] = "do so\nrank 0: 3 gradients\na\nb\nc";
    static const char tape[] = "allreduce.tape.list", other[] = "allreduce.other.list";
    for (int life = 0; life < 2; life++) {
        hvd_tf_flights_bound(0);
        int64_t before = steps_at("x", "");
        HOLDS(steps_at("allreduce.v.list", "do so\nrank 0: 2 variables\nmy gradients\nb") == before);
        const char *first = life ? b : a, *second = life ? a : b;
        HOLDS(steps_at(tape, first) == before + 1 && steps_at(tape, second) == before + 1);
        HOLDS(steps_at(tape, first) == before + 2 && steps_at(tape, second) == before + 2);
        HOLDS(steps_at(other, first) == before + 2 && steps_at(tape, first) == before + 3);
        for (int i = 0; i < 3; i++)
            HOLDS(steps_at(tape, second) == before + 3);
        HOLDS(steps_at(tape, second) == before + 4 && steps_at(tape, second) == before + 5);
    }
    HOLDS(hvd_tf_flights(0) == 0);
}

static void test_nobody_waits_longer_than_the_limit(void)
{
    struct hvd_tf_flight *waiting[3];
    const char *names[] = {"x", "y", "z"};
    for (int i = 0; i < 3; i++)
        waiting[i] = start(names[i], HVD_TF_ORDERED, 7, "");
    hvd_tf_flights_bound(0.05);
    for (int i = 0; i < 3; i++)
        HOLDS(finish(waiting[i]) == TF_DEADLINE);
    hvd_tf_flights_bound(0);
    HOLDS(aborted == 1 && hvd_tf_flights(0) == 0);
}

int main(void)
{
    begin();
    test_a_second_start_waits_for_the_end_of_the_first();
    test_without_order_a_name_starts_once_in_a_step();
    test_what_nobody_waits_for_is_forgotten();
    test_ranks_with_other_lists_exchange_them();
    test_who_cannot_ask_shows_its_own_list();
    test_before_a_list_of_gradients_a_step_ends();
    test_nobody_waits_longer_than_the_limit();
    return 0;
}
