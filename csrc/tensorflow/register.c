/* register.c - what does TensorFlow know of us? Four ops, and for which devices there are kernels.
 *
 *   HvdStart, HvdFinish   a collective (kernel.c)
 *   HvdGate               a Finish that others come after: it is stateful, or TensorFlow's optimizers would make
 * nothing of a node whose result nobody takes HvdAsk() -> number    rank, size and the like when the graph runs, not
 * when it was traced
 *
 * Kernels for a GPU have all that they touch in the memory of the CPU: TensorFlow copies tensors there and back.
 *
 * There is none for XLA, and a function that was traced long before
 * another is compiled calls nothing of ours that could say so. What XLA says itself is that it found no kernel - and,
 * where there is one for other dtypes, all attributes of the node. So HvdStart and HvdAsk have a kernel for XLA whose
 * dtype no tensor of ours has, and an attribute that says what to do. A kernel that failed with a text would be a worse
 * answer: where XLA chooses what to compile, it would choose us.
 */
#include "tensorflow.h"

#include <stdlib.h>

/* TensorFlow shows up to 80 letters. */
#define NOT_FOR_XLA "collectives cannot be compiled by XLA yet: pass jit_compile=False" HVD_ENDS(248)

static void *ask_create(struct tf_construction *node)
{
    int64_t *what = calloc(1, sizeof *what);
    struct tf_status *status = hvd_tf.TF_NewStatus();
    hvd_tf.TF_OpKernelConstruction_GetAttrInt64(node, "what", what, status);
    if (hvd_tf.TF_GetCode(status))
        hvd_tf.TF_OpKernelConstruction_Failure(node, status);
    hvd_tf.TF_DeleteStatus(status);
    return what;
}

static void ask_compute(void *kernel, struct tf_run *run)
{
    int answer = hvd_tf_core.place ? hvd_tf_core.place((int)*(int64_t *)kernel) : HVD_ESTATE;
    if (answer < 0) {
        char text[HVD_TEXT_MAX] = "";
        hvd_tf_core.wait(0, 0, text, sizeof text); /* says why there is no engine */
        hvd_tf_fail(run, TF_FAILED_PRECONDITION, text);
        return;
    }
    struct tf_status *status = hvd_tf.TF_NewStatus();
    struct tf_tensor *output = hvd_tf.TF_AllocateOutput(run, 0, TF_INT32, NULL, 0, sizeof(int32_t), status);
    if (hvd_tf.TF_GetCode(status)) {
        hvd_tf.TF_OpKernelContext_Failure(run, status);
    } else {
        *(int32_t *)hvd_tf.TF_TensorData(output) = answer;
        hvd_tf.TF_DeleteTensor(output);
    }
    hvd_tf.TF_DeleteStatus(status);
}

static void any_shape(struct tf_shapes *shapes, struct tf_status *status)
{
    hvd_tf.TF_ShapeInferenceContextSetUnknownShape(shapes, status);
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static void define(const char *name, bool stateful, const char *const *attributes, const char *const *inputs,
                   const char *const *outputs, struct tf_status *status)
{
    struct tf_op_builder *op = hvd_tf.TF_NewOpDefinitionBuilder(name);
    for (; *attributes; attributes++)
        hvd_tf.TF_OpDefinitionBuilderAddAttr(op, *attributes);
    for (; *inputs; inputs++)
        hvd_tf.TF_OpDefinitionBuilderAddInput(op, *inputs);
    for (; *outputs; outputs++)
        hvd_tf.TF_OpDefinitionBuilderAddOutput(op, *outputs);
    if (stateful)
        hvd_tf.TF_OpDefinitionBuilderSetIsStateful(op, true);
    hvd_tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, any_shape);
    if (!hvd_tf.TF_GetCode(status))
        hvd_tf.TF_RegisterOpDefinition(op, status);
}

/* arguments: those that are to be in the CPU's memory, for a kernel of a GPU. */
static void provide(const char *op, struct tf_kernel_builder *kernel, const char *const *arguments,
                    struct tf_status *status)
{
    for (; *arguments; arguments++)
        hvd_tf.TF_KernelBuilder_HostMemory(kernel, *arguments);
    if (!hvd_tf.TF_GetCode(status))
        hvd_tf.TF_RegisterKernelBuilder(op, kernel, status);
}

/* For tensors that there are none of: see above. */
static void provide_not(const char *op, struct tf_kernel_builder *kernel, struct tf_status *status)
{
    hvd_tf.TF_KernelBuilder_TypeConstraint(kernel, "T", TF_RESOURCE, status);
    provide(op, kernel, LIST(NULL), status);
}

static struct tf_kernel_builder *start(const char *device)
{
    return hvd_tf.TF_NewKernelBuilder("HvdStart", device, hvd_tf_start_create, hvd_tf_start_compute,
                                      hvd_tf_start_delete);
}

static struct tf_kernel_builder *finish(const char *op, const char *device)
{
    return hvd_tf.TF_NewAsyncKernelBuilder(op, device, NULL, hvd_tf_finish_compute, NULL);
}

void hvd_tf_register(struct tf_status *status)
{
    define("HvdStart", true,
           LIST("T: type", "key: string", "kind: int", "op: int = 0", "root: int = 0", "prescale: int",
                "postscale: int", "process_set: int = 0", "group: int = 0", "members: int = 0", "place: int = 0",
                "places: int = 1", "peer: int = 0", "order: int = 0", "list: string = ''",
                "xla: string = '" NOT_FOR_XLA "'"),
           LIST("x: T", "splits: int64"), LIST("handle: int64", "memory: T"), status);
    define("HvdFinish", false, LIST("T: type"), LIST("handle: int64"), LIST("y: T", "rows: int64"), status);
    define("HvdGate", true, LIST("T: type"), LIST("handle: int64"), LIST("y: T", "rows: int64"), status);
    define("HvdAsk", true, LIST("what: int", "T: type = DT_INT32", "xla: string = '" NOT_FOR_XLA "'"), LIST(NULL),
           LIST("answer: int32"), status);
    for (int gpu = 0; gpu < 2; gpu++) {
        const char *xla = gpu ? "XLA_GPU_JIT" : "XLA_CPU_JIT";
        provide_not(
            "HvdStart",
            hvd_tf.TF_NewKernelBuilder("HvdStart", xla, hvd_tf_start_create, hvd_tf_start_compute, hvd_tf_start_delete),
            status);
        provide_not("HvdAsk", hvd_tf.TF_NewKernelBuilder("HvdAsk", xla, ask_create, ask_compute, free), status);
    }
    provide("HvdStart", start("CPU"), LIST(NULL), status);
    provide("HvdFinish", finish("HvdFinish", "CPU"), LIST(NULL), status);
    provide("HvdGate", finish("HvdGate", "CPU"), LIST(NULL), status);
    provide("HvdAsk", hvd_tf.TF_NewKernelBuilder("HvdAsk", "CPU", ask_create, ask_compute, free), LIST(NULL), status);
}

void hvd_tf_register_gpu(struct tf_status *status)
{
    provide("HvdStart", start("GPU"), LIST("x", "splits", "handle", "memory"), status);
    provide("HvdFinish", finish("HvdFinish", "GPU"), LIST("handle", "y", "rows"), status);
    provide("HvdGate", finish("HvdGate", "GPU"), LIST("handle", "y", "rows"), status);
    provide("HvdAsk", hvd_tf.TF_NewKernelBuilder("HvdAsk", "GPU", ask_create, ask_compute, free), LIST("answer"),
            status);
}
