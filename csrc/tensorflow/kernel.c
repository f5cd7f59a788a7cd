/* kernel.c - how do TensorFlow's tensors become a request, and a result a tensor? The two nodes of a collective.
 *
 *   HvdStart(x, splits) -> (handle, memory)   says what is wanted, in attributes; never blocks
 *   HvdFinish(handle) -> (y, rows)            the result; of a ragged collective also the rows that came from each rank
 * (register.c makes them known.)
 *
 * Start is stateful, so that nothing merges, folds or prunes it, and TensorFlow runs the starts of a function in the
 * order of the program: gradients are started in the order in which backward makes them, and travel while it goes on.
 * Finish is stateless and asynchronous: finishes run in whatever order, and none holds a thread.
 * (TF_OpDefinitionBuilderSetIsStateful sets the flag even if it is called with false, so Finish does not call it.)
 *
 * The handle is a tensor of two numbers, the address of the flight and its serial, whose memory is ours: when the last
 * reference to it goes, so does the flight. An allreduce works in the memory of its input where no other node can read
 * that, which is the case of a gradient that goes to its optimizer only: then a step has one copy of its gradients and
 * not two. Other inputs are never written. The result's memory is TensorFlow's, but for ragged results, which the
 * engine allocates and Finish copies.
 */
#include "tensorflow.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT        64   /* what TensorFlow wants of memory that it does not copy */
#define ITERATIONS_NAMED 1024 /* more than any loop runs at once */

void hvd_tf_words_release(struct hvd_tf_words *words)
{
    if (words && atomic_fetch_sub(&words->users, 1) == 1) {
        free(words->key);
        free(words->list);
        free(words);
    }
}

static double number_of(int64_t bits)
{
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static char *text_of(struct tf_construction *node, const char *attribute, struct tf_status *status)
{
    int32_t list = 0, bytes = 0;
    if (!hvd_tf.TF_GetCode(status))
        hvd_tf.TF_OpKernelConstruction_GetAttrSize(node, attribute, &list, &bytes, status);
    char *text = calloc(1, (size_t)(bytes > 0 ? bytes : 0) + 1);
    if (!hvd_tf.TF_GetCode(status) && bytes > 0)
        hvd_tf.TF_OpKernelConstruction_GetAttrString(node, attribute, text, (size_t)bytes, status);
    return text;
}

void *hvd_tf_start_create(struct tf_construction *node)
{
    struct tf_status *status = hvd_tf.TF_NewStatus();
    struct hvd_tf_words *words = calloc(1, sizeof *words);
    int64_t prescale = 0, postscale = 0;
    struct {
        const char *name;
        int64_t *into;
    } numbers[] = {{"kind", &words->kind},           {"op", &words->op},        {"root", &words->root},
                   {"prescale", &prescale},          {"postscale", &postscale}, {"process_set", &words->process_set},
                   {"group", &words->group},         {"place", &words->place},  {"places", &words->places},
                   {"members", &words->group_count}, {"peer", &words->peer},    {"order", &words->order}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0] && !hvd_tf.TF_GetCode(status); i++)
        hvd_tf.TF_OpKernelConstruction_GetAttrInt64(node, numbers[i].name, numbers[i].into, status);
    words->key = text_of(node, "key", status);
    words->list = text_of(node, "list", status);
    if (hvd_tf.TF_GetCode(status))
        hvd_tf.TF_OpKernelConstruction_Failure(node, status);
    hvd_tf.TF_DeleteStatus(status);
    words->prescale = number_of(prescale);
    words->postscale = number_of(postscale);
    words->hash = hvd_tf_hash(words->key);
    words->users = 1;
    return words;
}

void hvd_tf_start_delete(void *words)
{
    hvd_tf_words_release(words);
}

void hvd_tf_fail(struct tf_run *run, int code, const char *text)
{
    struct tf_status *status = hvd_tf.TF_NewStatus();
    hvd_tf.TF_SetStatus(status, code, text);
    hvd_tf.TF_OpKernelContext_Failure(run, status);
    hvd_tf.TF_DeleteStatus(status);
}

/* The class of tf.errors for a code of the core, as in Horovod. */
static int class_of(int code)
{
    switch (code) {
    case HVD_EINVAL:
    case HVD_ETYPE:
    case HVD_EDUP:
    case HVD_EHANDLE:
    case HVD_ENAN: /* as tf.debugging.check_numerics has it */
        return TF_INVALID_ARGUMENT;
    case HVD_EMISMATCH:
    case HVD_ESTATE:
        return TF_FAILED_PRECONDITION;
    case HVD_ETIMEOUT:
        return TF_DEADLINE;
    case HVD_ENOMEM:
        return TF_EXHAUSTED;
    default:
        return TF_UNKNOWN;
    }
}

static void drop(void *memory, size_t bytes, void *flight)
{
    (void)bytes;
    free(memory);
    hvd_tf_flight_drop(flight);
}

/* The tensor that owns the flight becomes the output. */
static void put_handle(struct hvd_tf_flight *flight, struct tf_run *run, struct tf_status *status)
{
    int64_t *memory = aligned_alloc(ALIGNMENT, ALIGNMENT), two = 2;
    memory[0] = (int64_t)(intptr_t)flight;
    memory[1] = (int64_t)flight->serial;
    struct tf_tensor *handle = hvd_tf.TF_NewTensor(TF_INT64, &two, 1, memory, 2 * sizeof *memory, drop, flight);
    hvd_tf.TF_SetOutput(run, 0, handle, status);
    hvd_tf.TF_DeleteTensor(handle);
}

static int64_t place_of(const struct hvd_tf_words *words)
{
    return words->process_set ? words->place : hvd_tf_core.rank();
}

/* The first dimension of this rank's rows of a reducescatter. */
static int64_t share(const struct hvd_tf_words *words, int64_t rows)
{
    int64_t places = words->process_set ? words->places : hvd_tf_core.size();
    return places > 0 ? rows / places + (place_of(words) < rows % places) : rows;
}

static bool sends(const struct hvd_tf_words *words)
{
    return words->kind == HVD_SEND && words->root == place_of(words);
}

/* Memory for a result whose shape is known by now. What is sent is its own result. TensorFlow lends the
 * memory of an input to an output of the same node only, and counts references, so ours is dropped before: this output
 * is Start's second, which no node reads. */
static void prepare_output(struct hvd_tf_flight *flight, struct tf_run *run, struct tf_status *status)
{
    const struct hvd_tf_words *words = flight->words;
    struct tf_tensor *input = flight->input;
    if (sends(words)) {
        hvd_tf.TF_GetInput(run, 0, &flight->output, status);
        return;
    }
    int dims = hvd_tf.TF_NumDims(input);
    int64_t shape[dims + 1];
    for (int i = 0; i < dims; i++)
        shape[i] = hvd_tf.TF_Dim(input, i);
    if (words->kind == HVD_ALLREDUCE) {
        hvd_tf.TF_DeleteTensor(input);
        flight->input = NULL;
        flight->output = hvd_tf.TF_ForwardInputOrAllocateOutput(run, &(int){0}, 1, 1, shape, dims, NULL, status);
        if (!hvd_tf.TF_GetCode(status))
            hvd_tf.TF_GetInput(run, 0, &flight->input, status);
        return;
    }
    if (words->kind == HVD_REDUCESCATTER && dims > 0)
        shape[0] = share(words, shape[0]);
    struct tf_allocation where = {sizeof where, true};
    flight->output = hvd_tf.TF_AllocateTemp(run, hvd_tf.TF_TensorType(input), shape, dims, &where, status);
}

static bool ragged(int64_t kind)
{
    return kind == HVD_ALLGATHER || kind == HVD_ALLTOALL || kind == HVD_JOIN;
}

/* Iterations of a loop that TensorFlow does not order have names of their own, or they would be taken for each other.
 * Frames are numbered alike on every rank; numbers of iterations come again, so that names do. */
static bool name_iteration(struct hvd_tf_flight *flight, struct tf_run *run)
{
    struct hvd_request *request = &flight->request;
    flight->iteration = hvd_tf.TF_GetIterId(run);
    uint64_t frame = hvd_tf.TF_GetFrameId(run);
    int64_t iteration = flight->iteration % ITERATIONS_NAMED;
    size_t bytes = strlen(flight->words->key) + 48;
    if (!(flight->name = malloc(bytes)))
        return false;
    snprintf(flight->name, bytes, "%s@%" PRIx64 ".%" PRId64, flight->words->key, frame, iteration);
    request->name = flight->name;
    if (request->group) {
        request->group = hvd_tf_hash(flight->name + strlen(flight->words->key)) ^ (uint64_t)flight->words->group;
        request->group += request->group == 0;
    }
    return true;
}

/* Its shape, where the core does not keep all of it. */
static bool keep_shape(struct hvd_tf_flight *flight)
{
    int dims = hvd_tf.TF_NumDims(flight->input);
    flight->dims = dims;
    if (dims <= HVD_DIMS_MAX || !ragged(flight->words->kind))
        return true;
    if (!(flight->shape = malloc((size_t)dims * sizeof *flight->shape)))
        return false;
    for (int i = 0; i < dims; i++)
        flight->shape[i] = hvd_tf.TF_Dim(flight->input, i);
    return true;
}

static void fill_request(struct hvd_tf_flight *flight)
{
    const struct hvd_tf_words *words = flight->words;
    struct hvd_request *request = &flight->request;
    struct tf_tensor *input = flight->input;
    bool nothing = words->kind == HVD_JOIN || words->kind == HVD_BARRIER;
    request->name = words->key[0] && !nothing ? words->key : NULL;
    request->kind = (int)words->kind;
    request->op = (int)words->op;
    request->root = (int)words->root;
    request->peer = (int)words->peer;
    request->prescale = words->prescale;
    request->postscale = words->postscale;
    request->process_set = (int)words->process_set;
    request->group = (uint64_t)words->group;
    request->group_count = (int)words->group_count;
    request->quiet = HVD_SOON;
    if (nothing)
        return;
    request->dtype = hvd_tf_dtype[hvd_tf.TF_TensorType(input)];
    int dims = hvd_tf.TF_NumDims(input);
    request->ndim = dims < HVD_DIMS_MAX ? dims : HVD_DIMS_MAX;
    for (int i = 0; i < dims; i++) /* the core shows shapes in errors and needs the first dimension only */
        request->dims[i < HVD_DIMS_MAX ? i : HVD_DIMS_MAX - 1] =
            (i < HVD_DIMS_MAX ? 1 : request->dims[HVD_DIMS_MAX - 1]) * hvd_tf.TF_Dim(input, i);
    request->input = hvd_tf.TF_TensorData(input);
    request->output = flight->output && !sends(words) ? hvd_tf.TF_TensorData(flight->output) : NULL;
    int64_t parts = (int64_t)(hvd_tf.TF_TensorByteSize(flight->splits) / sizeof(int64_t));
    if (parts > 0) {
        request->splits = hvd_tf.TF_TensorData(flight->splits);
        request->splits_count = (int)parts;
    }
}

void hvd_tf_start_compute(void *kernel, struct tf_run *run)
{
    struct hvd_tf_words *words = kernel;
    if (!hvd_tf_core.submit) {
        hvd_tf_fail(run, TF_FAILED_PRECONDITION, "hvdlite is not attached: import hvdlite.tensorflow" HVD_ENDS(808));
        return;
    }
    struct tf_status *status = hvd_tf.TF_NewStatus();
    struct hvd_tf_flight *flight = hvd_tf_flight_new(words);
    if (!flight) {
        hvd_tf.TF_SetStatus(status, TF_EXHAUSTED, "no memory for another collective" HVD_ENDS(951));
    } else {
        hvd_tf.TF_GetInput(run, 0, &flight->input, status);
        if (!hvd_tf.TF_GetCode(status))
            hvd_tf.TF_GetInput(run, 1, &flight->splits, status);
        if (!hvd_tf.TF_GetCode(status) && !ragged(words->kind) && words->kind != HVD_BARRIER)
            prepare_output(flight, run, status);
        if (!hvd_tf.TF_GetCode(status)) {
            fill_request(flight);
            flight->step = hvd_tf.TF_StepId(run);
            if (!keep_shape(flight) || (words->order == HVD_TF_NAMED && !name_iteration(flight, run)))
                hvd_tf.TF_SetStatus(status, TF_EXHAUSTED, "no memory for another collective" HVD_ENDS(951));
        }
        if (hvd_tf.TF_GetCode(status)) {
            flight->code = HVD_ENOMEM;
            flight->over = true;
            hvd_tf_flight_drop(flight);
        } else {
            if (words->kind != HVD_ALLREDUCE)
                hvd_tf.TF_SetOutput(run, 1, flight->input, status); /* older TensorFlows want every output */
            put_handle(flight, run, status); /* the run holds it, so the flight lives until Start is over */
            hvd_tf_flight_start(flight);
        }
    }
    if (hvd_tf.TF_GetCode(status))
        hvd_tf.TF_OpKernelContext_Failure(run, status);
    hvd_tf.TF_DeleteStatus(status);
}

/* What the engine holds becomes output 0. */
static void copy_result(const struct hvd_tf_flight *flight, const struct hvd_output *result, struct tf_run *run,
                        struct tf_status *status)
{
    int dims = flight->dims;
    int64_t shape[dims + 1];
    for (int i = 0; i < dims; i++)
        shape[i] = i == 0 ? result->rows : flight->shape ? flight->shape[i] : flight->request.dims[i];
    struct tf_tensor *output = hvd_tf.TF_AllocateOutput(run, 0, hvd_tf.TF_ExpectedOutputDataType(run, 0), shape, dims,
                                                        (size_t)result->bytes, status);
    if (hvd_tf.TF_GetCode(status))
        return;
    if (result->bytes > 0 && hvd_tf.TF_TensorByteSize(output) == (size_t)result->bytes)
        memcpy(hvd_tf.TF_TensorData(output), result->data, (size_t)result->bytes);
    hvd_tf.TF_DeleteTensor(output);
}

static void put_rows(const int64_t *rows, int64_t count, struct tf_run *run, struct tf_status *status)
{
    struct tf_tensor *output =
        hvd_tf.TF_AllocateOutput(run, 1, TF_INT64, &count, 1, (size_t)count * sizeof *rows, status);
    if (hvd_tf.TF_GetCode(status))
        return;
    if (count > 0)
        memcpy(hvd_tf.TF_TensorData(output), rows, (size_t)count * sizeof *rows);
    hvd_tf.TF_DeleteTensor(output);
}

void hvd_tf_deliver(struct hvd_tf_flight *flight, struct tf_run *run)
{
    if (flight->code != HVD_OK) {
        hvd_tf_fail(run, class_of(flight->code),
                    flight->text && flight->text[0] ? flight->text : "the collective failed" HVD_ENDS(951));
        return;
    }
    struct tf_status *status = hvd_tf.TF_NewStatus();
    struct hvd_output result = {0};
    int64_t none[HVD_DIMS_MAX] = {0};
    if (flight->output) {
        hvd_tf.TF_SetOutput(run, 0, flight->output, status);
    } else if (ragged(flight->words->kind)) {
        if (hvd_tf_core.result(flight->native, &result) != HVD_OK)
            hvd_tf.TF_SetStatus(status, TF_UNKNOWN,
                                "the result is gone: hvdlite was shut down before it was fetched" HVD_ENDS(457));
        else
            copy_result(flight, &result, run, status);
    }
    if (!hvd_tf.TF_GetCode(status))
        put_rows(result.rows_of ? result.rows_of
                 : result.size  ? &result.rows
                                : none,
                 result.rows_of ? result.size : 1, run, status);
    if (hvd_tf.TF_GetCode(status))
        hvd_tf.TF_OpKernelContext_Failure(run, status);
    hvd_tf.TF_DeleteStatus(status);
}

void hvd_tf_finish_compute(void *kernel, struct tf_run *run, struct tf_done *done)
{
    (void)kernel;
    struct tf_status *status = hvd_tf.TF_NewStatus();
    struct tf_tensor *handle = NULL;
    hvd_tf.TF_GetInput(run, 0, &handle, status);
    const int64_t *two = handle ? hvd_tf.TF_TensorData(handle) : NULL;
    struct hvd_tf_flight *flight = two ? (struct hvd_tf_flight *)(intptr_t)two[0] : NULL;
    uint64_t serial = two ? (uint64_t)two[1] : 0;
    if (handle)
        hvd_tf.TF_DeleteTensor(handle); /* the run holds it until `done` */
    hvd_tf.TF_DeleteStatus(status);
    int over = flight ? hvd_tf_flight_over(flight, serial, run, done) : -1;
    if (over == 0)
        return;
    if (over > 0)
        hvd_tf_deliver(flight, run);
    else
        hvd_tf_fail(run, TF_INVALID_ARGUMENT,
                    "the handle of a collective was copied, or kept longer than its step" HVD_ENDS(218));
    hvd_tf.TF_RunAsyncOpKernelDoneCallback(done);
}
