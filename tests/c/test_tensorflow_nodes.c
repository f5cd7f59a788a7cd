/* test_tensorflow_nodes.c - TensorFlow's nodes over the real core in a world of one: what is registered, collectives of
 * every kind from tensors to tensors, and what TensorFlow is told when something fails.
 *
 * TensorFlow is the one of tests/stub/tensorflow, which this program is linked with; so the constructor of library.c
 * has found it before main begins. (test_tensorflow.c has the threads and the order of starts.)
 */
#define _GNU_SOURCE
#include "../stub/tensorflow/framework.h"
#include "crew.h"

#include <sys/wait.h>
#include <unistd.h>

enum { TF_FLOAT = 1, TF_STRING = 7, MANY_DIMS = 10 };

const char *hvd_tf_attach(void *const *functions, int count, const int *dtypes, int dtypes_count);
int hvd_tf_asynchronous(int block);
int64_t hvd_tf_count(int which);
/* The core's, but for the names that it is told and for a failure that it shall give. */
static char told[HVD_TEXT_MAX];
static int64_t failing;

static void listen_to(const struct hvd_request *request)
{
    hvd_text_copy(told, sizeof told, request->name ? request->name : "");
}

static int64_t core_submit(const struct hvd_request *request, char *text, size_t text_bytes)
{
    listen_to(request);
    hvd_text_copy(text, text_bytes, "as the test wants");
    return failing ? failing : hvd_submit(request, text, text_bytes);
}

static const struct hvd_tf_core core = {.submit = core_submit,
                                        .wait = hvd_wait,
                                        .poll = hvd_poll,
                                        .result = hvd_result,
                                        .forget = hvd_forget,
                                        .rank = hvd_rank,
                                        .size = hvd_size,
                                        .local_rank = hvd_local_rank,
                                        .local_size = hvd_local_size,
                                        .abort = hvd_abort};

static const char *attach(void)
{
    int dtypes[TF_DTYPES];
    void *functions[sizeof core / sizeof(void *)];
    for (int i = 0; i < TF_DTYPES; i++)
        dtypes[i] = i == TF_FLOAT ? HVD_DTYPE_float32 : i == TF_INT64 ? HVD_DTYPE_int64 : -1;
    memcpy(functions, &core, sizeof core);
    return hvd_tf_attach(functions, (int)HVD_COUNT_OF(functions), dtypes, TF_DTYPES);
}

/* ---- a node, and its executions ---- */

struct node {
    int kind, op, root;
    int64_t group, order, process_set;
    double postscale;
    const char *key;
};

static int64_t bits_of(double number)
{
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* The kernel of a start; NULL and the error of the node: it was refused. */
static void *made(const struct node *node, struct tf_construction *construction, int attributes)
{
    const struct framework_attribute all[] = {{"kind", NULL, node->kind},
                                              {"op", NULL, node->op},
                                              {"root", NULL, node->root},
                                              {"prescale", NULL, bits_of(1)},
                                              {"postscale", NULL, bits_of(node->postscale ? node->postscale : 1)},
                                              {"process_set", NULL, node->process_set},
                                              {"group", NULL, node->group},
                                              {"members", NULL, node->group ? 2 : 0},
                                              {"place", NULL, 0},
                                              {"places", NULL, 1},
                                              {"peer", NULL, 0},
                                              {"order", NULL, node->order},
                                              {"key", node->key ? node->key : "", 0},
                                              {"list", "", 0}};
    *construction = (struct tf_construction){all, attributes < 0 ? (int)HVD_COUNT_OF(all) : attributes, 0, ""};
    return framework_kernel("HvdStart", "CPU")->create(construction);
}

static void let_go_of(struct tf_run *run)
{
    struct tf_tensor **all[] = {&run->input[0], &run->input[1], &run->output[0], &run->output[1]};
    for (int i = 0; i < 4; i++) {
        if (*all[i])
            TF_DeleteTensor(*all[i]);
        *all[i] = NULL;
    }
}

static struct tf_tensor *floats(int dims, const int64_t *dim)
{
    struct tf_tensor *tensor = framework_tensor(TF_FLOAT, dims, dim, sizeof(float));
    for (size_t i = 0; i < tensor->bytes / sizeof(float); i++)
        ((float *)tensor->data)[i] = (float)(i + 1);
    return tensor;
}

static struct tf_tensor *splits(int64_t first)
{
    int64_t count = first >= 0;
    struct tf_tensor *tensor = framework_tensor(TF_INT64, 1, &count, sizeof(int64_t));
    if (count)
        *(int64_t *)tensor->data = first;
    return tensor;
}

/* Runs the start of a node; what it takes is given to it. */
static struct tf_run started(const struct node *node, struct tf_tensor *input, struct tf_tensor *split)
{
    struct tf_construction construction;
    void *kernel = made(node, &construction, -1);
    CHECK(kernel && construction.failed == 0);
    struct tf_run run = {.input = {input, split}, .step = 7, .frame = 0xab, .iteration = 1025};
    framework_kernel("HvdStart", "CPU")->compute(kernel, &run);
    framework_kernel("HvdStart", "CPU")->destroy(kernel);
    return run;
}

static int dones;
static void done_is_called(unsigned char *functor)
{
    (void)functor;
    dones++;
}

/* Runs the finish that takes this handle. */
static struct tf_run finished_with(struct tf_tensor *handle)
{
    struct hvd_tf_done done = {.invoke = NULL};
    void (*invoke)(unsigned char *) = done_is_called;
    memcpy(&done.invoke, &invoke, sizeof invoke);
    struct tf_run run = {.input = {handle}, .expects = TF_FLOAT};
    int before = dones;
    framework_kernel("HvdFinish", "CPU")->compute_async(NULL, &run, (struct tf_done *)&done);
    CHECK(dones == before + 1); /* a world of one is at its end when it has begun */
    return run;
}

static struct tf_run finished(struct tf_run *start)
{
    CHECK_CODE(start->failed, 0, start->message);
    struct tf_run run = finished_with(start->output[0]);
    start->output[0] = NULL;
    let_go_of(start);
    return run;
}

static float *values_of(const struct tf_run *run)
{
    CHECK_CODE(run->failed, 0, run->message);
    return run->output[0]->data;
}

static int64_t rows_of(const struct tf_run *run)
{
    return *(int64_t *)run->output[1]->data;
}

/* ---- tests ---- */

static void what_is_registered(void)
{
    struct tf_shapes shapes = {false};
    static const char *const names[] = {"HvdStart", "HvdFinish", "HvdGate", "HvdAsk"};
    for (int i = 0; i < 4; i++) {
        const struct tf_op_builder *op = framework_op(names[i]);
        CHECK(op && op->stateful == (i != 1)); /* a finish that nobody takes is pruned */
        op->shapes(&shapes, NULL);
        CHECK(shapes.unknown);
        CHECK(framework_kernel(names[i], "CPU")->hosted == 0 && !framework_kernel(names[i], "GPU")); /* not known yet */
    }
    CHECK(framework_op("HvdStart")->inputs == 2 && framework_op("HvdStart")->attributes == 16);
    CHECK(framework_kernel("HvdStart", "XLA_GPU_JIT")->constraint == TF_RESOURCE);
    CHECK(framework_kernel("HvdAsk", "XLA_CPU_JIT")->constraint == TF_RESOURCE);
    CHECK(!framework_kernel("HvdFinish", "XLA_CPU_JIT"));
    CHECK(hvd_tf_asynchronous(0) == 1); /* the layout of std::function is what this library believes */
}

static void nothing_runs_before_it_is_attached(void)
{
    struct tf_run run = started(&(struct node){.key = "early"}, floats(0, NULL), splits(-1));
    CHECK(run.failed == TF_FAILED_PRECONDITION && strstr(run.message, "import hvdlite.tensorflow"));
    let_go_of(&run);
    CHECK(strstr(hvd_tf_attach(NULL, 3, NULL, TF_DTYPES), "install hvdlite again"));
    CHECK(strstr(hvd_tf_attach(NULL, (int)(sizeof core / sizeof(void *)), NULL, 2), "install hvdlite again"));
    CHECK(attach() == NULL && attach() == NULL);
    CHECK(framework_kernel("HvdStart", "GPU")->hosted == 3 && framework_kernel("HvdFinish", "GPU")->hosted == 3);
}

static struct tf_run asked(int64_t what)
{
    const struct framework_attribute attribute = {"what", NULL, what};
    struct tf_construction node = {&attribute, 1, 0, ""};
    const struct tf_kernel_builder *ask = framework_kernel("HvdAsk", "CPU");
    struct tf_run run = {.step = 1};
    void *kernel = ask->create(&node);
    ask->compute(kernel, &run);
    ask->destroy(kernel);
    return run;
}

static void asks(bool initialized)
{
    static const int answers[] = {0, 1, 0, 1}; /* rank, size, local rank, local size */
    for (int what = 0; what < 4; what++) {
        struct tf_run run = asked(what);
        CHECK(run.failed == (initialized ? 0 : TF_FAILED_PRECONDITION));
        CHECK(!initialized || *(int32_t *)run.output[0]->data == answers[what]);
        CHECK(initialized || strstr(run.message, "use hvd.init()"));
        let_go_of(&run);
    }
    CHECK(asked(4).failed == TF_FAILED_PRECONDITION && asked(-1).failed == TF_FAILED_PRECONDITION);
    struct tf_construction node = {NULL, 0, 0, ""};
    free(framework_kernel("HvdAsk", "CPU")->create(&node));
    CHECK(node.failed == TF_INVALID_ARGUMENT);
    framework_refuse("TF_AllocateOutput", 0);
    CHECK(asked(0).failed == (initialized ? TF_EXHAUSTED : TF_FAILED_PRECONDITION));
    framework_refuse(NULL, 0);
}

static void every_kind_gives_its_result(void)
{
    int64_t four = 4, many[MANY_DIMS] = {2, 1, 1, 1, 3, 1, 1, 1, 1, 2};
    struct node node = {.kind = HVD_ALLREDUCE, .op = HVD_OP_average, .postscale = 0.5, .key = "sum"};
    struct tf_run start = started(&node, floats(1, &four), splits(-1)), end = finished(&start);
    CHECK(values_of(&end)[3] == 2 && end.output[0]->dim[0] == 4 && !strcmp(told, "sum"));
    let_go_of(&end);
    node = (struct node){.kind = HVD_REDUCESCATTER, .op = HVD_OP_sum, .key = "part"};
    start = started(&node, floats(1, &four), splits(-1)), end = finished(&start);
    CHECK(values_of(&end)[3] == 4 && end.output[0]->dim[0] == 4);
    let_go_of(&end);
    node = (struct node){.kind = HVD_ALLGATHER, .key = "rows"};
    start = started(&node, floats(MANY_DIMS, many), splits(-1)), end = finished(&start);
    CHECK(values_of(&end)[11] == 12 && rows_of(&end) == 2);
    CHECK(end.output[0]->dims == MANY_DIMS && memcmp(end.output[0]->dim, many, sizeof many) == 0);
    let_go_of(&end);
    node.kind = HVD_ALLTOALL;
    start = started(&node, floats(1, &four), splits(4)), end = finished(&start);
    CHECK(values_of(&end)[3] == 4 && rows_of(&end) == 4);
    let_go_of(&end);
    node = (struct node){.kind = HVD_BROADCAST, .key = "same"};
    start = started(&node, floats(MANY_DIMS, many), splits(-1)), end = finished(&start);
    CHECK(values_of(&end)[11] == 12 && end.output[0]->dims == MANY_DIMS);
    let_go_of(&end);
    node = (struct node){.kind = HVD_BARRIER, .key = "never told"};
    start = started(&node, floats(0, NULL), splits(-1)), end = finished(&start);
    CHECK(end.failed == 0 && told[0] == 0 && !end.output[0]);
    let_go_of(&end);
    CHECK(hvd_tf_count(0) == 0 && hvd_tf_count(1) >= 6 && hvd_tf_count(2) >= 1);
}

static void iterations_that_have_no_order_have_names(void)
{
    int64_t one = 1;
    struct node node = {.op = HVD_OP_sum, .key = "loop", .order = HVD_TF_NAMED, .group = 5};
    struct tf_run start = started(&node, floats(1, &one), splits(-1)), end = finished(&start);
    CHECK(!strcmp(told, "loop@ab.1") && values_of(&end)[0] == 1); /* iteration 1025: numbers come again */
    let_go_of(&end);
}

static void what_the_core_says_has_its_class(void)
{
    static const int classes[][2] = {{HVD_EINVAL, TF_INVALID_ARGUMENT},    {HVD_EDUP, TF_INVALID_ARGUMENT},
                                     {HVD_ENAN, TF_INVALID_ARGUMENT},      {HVD_EMISMATCH, TF_FAILED_PRECONDITION},
                                     {HVD_ESTATE, TF_FAILED_PRECONDITION}, {HVD_ETIMEOUT, TF_DEADLINE},
                                     {HVD_ENOMEM, TF_EXHAUSTED},           {HVD_EPEER, TF_UNKNOWN}};
    int64_t one = 1;
    for (size_t i = 0; i < HVD_COUNT_OF(classes); i++)
        for (int kind = HVD_ALLREDUCE; kind <= HVD_ALLGATHER; kind += HVD_ALLGATHER - HVD_ALLREDUCE) {
            struct node node = {.kind = kind, .op = HVD_OP_sum, .key = "bad"};
            failing = classes[i][0];
            struct tf_run start = started(&node, floats(1, &one), splits(-1)), end = finished(&start);
            CHECK(end.failed == classes[i][1] && strstr(end.message, "as the test wants"));
            let_go_of(&end);
        }
    failing = 0;
    struct node node = {.op = HVD_OP_sum, .key = "text"};
    struct tf_run start = started(&node, framework_tensor(TF_STRING, 0, NULL, 4), splits(-1)), end = finished(&start);
    CHECK(end.failed == TF_INVALID_ARGUMENT && strstr(end.message, "'text'"));
    let_go_of(&end);
}

static void what_tensorflow_refuses_fails_the_node(void)
{
    static const struct {
        const char *function;
        int kind, after; /* calls that go well */
        bool starts;
    } cases[] = {{"TF_GetInput", HVD_ALLREDUCE, 0, false},      {"TF_GetInput", HVD_ALLREDUCE, 1, false},
                 {"TF_AllocateTemp", HVD_ALLREDUCE, 0, false},  {"TF_SetOutput", HVD_ALLREDUCE, 1, true},
                 {"TF_AllocateOutput", HVD_ALLGATHER, 0, true}, {"TF_AllocateOutput", HVD_ALLGATHER, 1, true}};
    int64_t two = 2;
    for (size_t i = 0; i < HVD_COUNT_OF(cases); i++) {
        struct node node = {.kind = cases[i].kind, .op = HVD_OP_sum, .key = "refused"};
        framework_refuse(cases[i].function, cases[i].after);
        struct tf_run start = started(&node, floats(1, &two), splits(-1));
        CHECK((start.failed == 0) == cases[i].starts);
        struct tf_run *run = &start, end;
        if (cases[i].starts)
            end = finished(&start), run = &end;
        CHECK(run->failed == TF_EXHAUSTED && strstr(run->message, "refused by the test"));
        framework_refuse(NULL, 0);
        let_go_of(run);
    }
    for (int attributes = 0; attributes < 14; attributes++) {
        struct tf_construction construction;
        void *kernel = made(&(struct node){.key = "x"}, &construction, attributes);
        CHECK(construction.failed == TF_INVALID_ARGUMENT && construction.message[0]);
        framework_kernel("HvdStart", "CPU")->destroy(kernel);
    }
}

static void a_handle_that_was_kept_is_refused(void)
{
    int64_t one = 1, two = 2;
    struct node node = {.op = HVD_OP_sum, .key = "kept"};
    struct tf_run start = started(&node, floats(1, &one), splits(-1));
    struct tf_tensor *copy = framework_tensor(TF_INT64, 1, &two, sizeof(int64_t));
    memcpy(copy->data, start.output[0]->data, sizeof(int64_t) * 2);
    struct tf_run end = finished(&start);
    let_go_of(&end);
    end = finished_with(copy);
    CHECK(end.failed == TF_INVALID_ARGUMENT && strstr(end.message, "kept longer than its step"));
    let_go_of(&end);
}

static void a_result_that_is_gone_is_an_error(void)
{
    char text[HVD_TEXT_MAX];
    int64_t one = 1;
    struct hvd_options options = crew_options(0, 1);
    struct node node = {.kind = HVD_ALLGATHER, .key = "gone"};
    struct tf_run start = started(&node, floats(1, &one), splits(-1));
    hvd_shutdown(-1);
    struct tf_run end = finished(&start);
    CHECK(end.failed == TF_UNKNOWN && strstr(end.message, "shut down before it was fetched"));
    let_go_of(&end);
    CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
}

/* In another process. */
static void a_refusal_is_told_to_python(const char *program)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        setenv("FRAMEWORK_REFUSES", "TF_RegisterOpDefinition", 1);
        execl("/proc/self/exe", program, "refused", (char *)NULL);
        _exit(9);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **words)
{
    char text[HVD_TEXT_MAX];
    struct hvd_options options = crew_options(0, 1);
    crew_deadline(60);
    if (count > 1) {
        const char *trouble = attach();
        return !trouble || !strstr(trouble, "refused by the test [HVD808]") || hvd_tf_core.submit;
    }
    a_refusal_is_told_to_python(words[0]);
    what_is_registered();
    nothing_runs_before_it_is_attached();
    asks(false);
    CHECK_CODE(hvd_init(&options, NULL, NULL, text, sizeof text), HVD_OK, text);
    asks(true);
    every_kind_gives_its_result();
    iterations_that_have_no_order_have_names();
    what_the_core_says_has_its_class();
    what_tensorflow_refuses_fails_the_node();
    a_handle_that_was_kept_is_refused();
    a_result_that_is_gone_is_an_error();
    CHECK(framework_tensors() == 0 && hvd_tf_count(0) == 0);
    hvd_shutdown(-1);
    return 0;
}
