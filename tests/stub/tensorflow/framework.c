/* framework.c - the functions of a TensorFlow that is none. See framework.h. */
#include "framework.h"

#include <stdlib.h>
#include <string.h>

enum { OPS = 8, KERNELS = 32 };

static struct tf_op_builder op[OPS];
static struct tf_kernel_builder kernel[KERNELS];
static int ops, kernels, ops_known, kernels_known, refused_after;
static const char *refused;

__attribute__((constructor)) static void begin(void)
{
    refused = getenv("FRAMEWORK_REFUSES");
}

void framework_refuse(const char *function, int after)
{
    refused = function;
    refused_after = after;
}

bool framework_refuses(const char *function, struct tf_status *status)
{
    if (!refused || strcmp(refused, function) != 0 || refused_after-- > 0)
        return false;
    TF_SetStatus(status, TF_EXHAUSTED, "refused by the test");
    return true;
}

struct tf_status *TF_NewStatus(void)
{
    return calloc(1, sizeof(struct tf_status));
}

void TF_DeleteStatus(struct tf_status *status)
{
    free(status);
}

int TF_GetCode(const struct tf_status *status)
{
    return status->code;
}

const char *TF_Message(const struct tf_status *status)
{
    return status->message;
}

void TF_SetStatus(struct tf_status *status, int code, const char *text)
{
    status->code = code;
    strncpy(status->message, text, sizeof status->message - 1);
}

/* ---- what is registered ---- */

const struct tf_op_builder *framework_op(const char *name)
{
    for (int i = 0; i < ops_known; i++)
        if (strcmp(op[i].name, name) == 0)
            return &op[i];
    return NULL;
}

const struct tf_kernel_builder *framework_kernel(const char *of, const char *device)
{
    for (int i = 0; i < kernels_known; i++)
        if (strcmp(kernel[i].op, of) == 0 && strcmp(kernel[i].device, device) == 0)
            return &kernel[i];
    return NULL;
}

const struct tf_kernel_builder *framework_kernel_for(const char *of, const char *device, int dtype)
{
    const struct tf_kernel_builder *best = NULL;
    for (int i = 0; i < kernels_known; i++)
        if (strcmp(kernel[i].op, of) == 0 && strcmp(kernel[i].device, device) == 0 &&
            (!kernel[i].constraint || kernel[i].constraint == dtype) && (!best || kernel[i].priority > best->priority))
            best = &kernel[i];
    return best;
}

bool framework_on_host(const struct tf_kernel_builder *of, const char *argument)
{
    bool is = strcmp(of->device, "GPU") != 0;
    for (int i = 0; i < of->hosted; i++)
        is = is || strcmp(of->on_host[i], argument) == 0;
    return is;
}

struct tf_op_builder *TF_NewOpDefinitionBuilder(const char *name)
{
    strncpy(op[ops].name, name, sizeof op[ops].name - 1);
    return &op[ops++];
}

void TF_RegisterOpDefinition(struct tf_op_builder *builder, struct tf_status *status)
{
    (void)builder;
    if (!framework_refuses("TF_RegisterOpDefinition", status))
        ops_known = ops;
}

void TF_OpDefinitionBuilderAddAttr(struct tf_op_builder *builder, const char *text)
{
    builder->attributes += text[0] != 0;
}

void TF_OpDefinitionBuilderAddInput(struct tf_op_builder *builder, const char *text)
{
    builder->inputs += text[0] != 0;
}

void TF_OpDefinitionBuilderAddOutput(struct tf_op_builder *builder, const char *text)
{
    builder->outputs += text[0] != 0;
}

void TF_OpDefinitionBuilderSetIsStateful(struct tf_op_builder *builder, bool is)
{
    builder->stateful = true; /* whatever it is called with: so is TensorFlow's */
    (void)is;
}

void TF_OpDefinitionBuilderSetShapeInferenceFunction(struct tf_op_builder *builder,
                                                     void (*shapes)(struct tf_shapes *, struct tf_status *))
{
    builder->shapes = shapes;
}

static void set_unknown_shape(struct tf_shapes *shapes, struct tf_status *status)
{
    (void)status;
    shapes->unknown = true;
}

static struct tf_kernel_builder *new_kernel(const char *of, const char *device,
                                            void *(*create)(struct tf_construction *), void (*destroy)(void *))
{
    struct tf_kernel_builder *builder = &kernel[kernels++];
    strncpy(builder->op, of, sizeof builder->op - 1);
    strncpy(builder->device, device, sizeof builder->device - 1);
    builder->create = create;
    builder->destroy = destroy;
    return builder;
}

struct tf_kernel_builder *TF_NewKernelBuilder(const char *of, const char *device,
                                              void *(*create)(struct tf_construction *),
                                              void (*compute)(void *, struct tf_run *), void (*destroy)(void *))
{
    struct tf_kernel_builder *builder = new_kernel(of, device, create, destroy);
    builder->compute = compute;
    return builder;
}

struct tf_kernel_builder *TF_NewAsyncKernelBuilder(const char *of, const char *device,
                                                   void *(*create)(struct tf_construction *),
                                                   void (*compute)(void *, struct tf_run *, struct tf_done *),
                                                   void (*destroy)(void *))
{
    struct tf_kernel_builder *builder = new_kernel(of, device, create, destroy);
    builder->compute_async = compute;
    return builder;
}

void TF_RegisterKernelBuilder(const char *of, struct tf_kernel_builder *builder, struct tf_status *status)
{
    (void)of, (void)builder, (void)status;
    kernels_known = kernels;
}

void TF_KernelBuilder_HostMemory(struct tf_kernel_builder *builder, const char *argument)
{
    strncpy(builder->on_host[builder->hosted++], argument, sizeof builder->on_host[0] - 1);
}

void TF_KernelBuilder_Priority(struct tf_kernel_builder *builder, int32_t priority)
{
    builder->priority = priority;
}

void TF_KernelBuilder_TypeConstraint(struct tf_kernel_builder *builder, const char *attribute, int dtype,
                                     struct tf_status *status)
{
    (void)attribute, (void)status;
    builder->constraint = dtype;
}

/* ---- a node ---- */

static const struct framework_attribute *attribute(const struct tf_construction *node, const char *name,
                                                   struct tf_status *status)
{
    for (int i = 0; i < node->attributes; i++)
        if (strcmp(node->attribute[i].name, name) == 0)
            return &node->attribute[i];
    TF_SetStatus(status, TF_INVALID_ARGUMENT, name);
    return NULL;
}

void TF_OpKernelConstruction_GetAttrSize(struct tf_construction *node, const char *name, int32_t *list, int32_t *bytes,
                                         struct tf_status *status)
{
    const struct framework_attribute *found = attribute(node, name, status);
    *list = -1;
    *bytes = found && found->text ? (int32_t)strlen(found->text) : -1;
}

void TF_OpKernelConstruction_GetAttrString(struct tf_construction *node, const char *name, char *text, size_t bytes,
                                           struct tf_status *status)
{
    const struct framework_attribute *found = attribute(node, name, status);
    if (found)
        memcpy(text, found->text, bytes);
}

void TF_OpKernelConstruction_GetAttrInt64(struct tf_construction *node, const char *name, int64_t *number,
                                          struct tf_status *status)
{
    const struct framework_attribute *found = attribute(node, name, status);
    if (found)
        *number = found->number;
}

void TF_OpKernelConstruction_Failure(struct tf_construction *node, struct tf_status *status)
{
    node->failed = status->code;
    memcpy(node->message, status->message, sizeof node->message);
}

/* ---- a run ---- */

int64_t TF_StepId(struct tf_run *run)
{
    return run->step;
}

uint64_t TF_GetFrameId(struct tf_run *run)
{
    return run->frame;
}

int64_t TF_GetIterId(struct tf_run *run)
{
    return run->iteration;
}

void TF_GetInput(struct tf_run *run, int i, struct tf_tensor **tensor, struct tf_status *status)
{
    if (framework_refuses("TF_GetInput", status))
        return;
    atomic_fetch_add(&run->input[i]->users, 1);
    *tensor = run->input[i];
}

void TF_SetOutput(struct tf_run *run, int i, const struct tf_tensor *tensor, struct tf_status *status)
{
    if (framework_refuses("TF_SetOutput", status))
        return;
    run->output[i] = (struct tf_tensor *)(uintptr_t)tensor;
    atomic_fetch_add(&run->output[i]->users, 1);
}

static void fail_run(struct tf_run *run, struct tf_status *status)
{
    run->failed = status->code;
    memcpy(run->message, status->message, sizeof run->message);
}

static int expected_dtype(struct tf_run *run, int i)
{
    return i == 0 ? run->expects : TF_INT64;
}

void TF_RunAsyncOpKernelDoneCallback(struct tf_done *done)
{
    struct hvd_tf_done *function = (struct hvd_tf_done *)done;
    void (*invoke)(unsigned char *functor);
    memcpy(&invoke, &function->invoke, sizeof invoke);
    invoke(function->functor);
}

/* By the name of libstdc++'s, which says that a std::function is its own. */
void _ZSt25__throw_bad_function_callv(void);
void _ZSt25__throw_bad_function_callv(void)
{
    abort();
}

/* Names that are TensorFlow's own. */
#define IS(function) __attribute__((alias(#function)))
void TF_ShapeInferenceContextSetUnknownShape(struct tf_shapes *shapes, struct tf_status *status) IS(set_unknown_shape);
void TF_OpKernelContext_Failure(struct tf_run *run, struct tf_status *status) IS(fail_run);
int TF_ExpectedOutputDataType(struct tf_run *run, int i) IS(expected_dtype);
