/* framework.h - a libtensorflow_framework that is none: what a test asks it, and what its types are here.
 *
 * It has the C functions that csrc/tensorflow/ looks up, keeps what is registered, and runs nothing by itself: a test
 * makes nodes and runs, and calls the kernels as TensorFlow would. Tensors are counted; a function that was named
 * fails.
 */
#ifndef HVD_TEST_FRAMEWORK_H
#define HVD_TEST_FRAMEWORK_H

#include "tensorflow/tensorflow.h"

#include <stdatomic.h>

enum { FRAMEWORK_DIMS = 12, FRAMEWORK_TEXT = 512, FRAMEWORK_ON_HOST = 4 };

struct tf_status {
    int code;
    char message[FRAMEWORK_TEXT];
};

struct tf_tensor {
    _Atomic int users;
    int dtype, dims;
    int64_t dim[FRAMEWORK_DIMS];
    void *data;
    size_t bytes;
    void (*drop)(void *data, size_t bytes, void *arg);
    void *arg;
};

/* Of a node: a number, or a text. */
struct framework_attribute {
    const char *name, *text;
    int64_t number;
};
struct tf_construction {
    const struct framework_attribute *attribute;
    int attributes;
    int failed; /* TensorFlow's code; 0: it is well */
    char message[FRAMEWORK_TEXT];
};

/* One execution of a kernel. */
struct tf_run {
    struct tf_tensor *input[2], *output[2];
    int expects;                            /* the dtype of output 0 */
    const struct tf_kernel_builder *kernel; /* says where outputs are; NULL: the CPU's */
    int64_t step, iteration;
    uint64_t frame;
    int failed;
    char message[FRAMEWORK_TEXT];
};

struct tf_op_builder {
    char name[32];
    bool stateful;
    int attributes, inputs, outputs;
    void (*shapes)(struct tf_shapes *shapes, struct tf_status *status);
};
struct tf_shapes {
    bool unknown;
};
struct tf_kernel_builder {
    char op[32], device[16], on_host[FRAMEWORK_ON_HOST][16];
    int hosted, constraint, priority; /* constraint: the dtype it is for; 0: any */
    void *(*create)(struct tf_construction *node);
    void (*compute)(void *kernel, struct tf_run *run);
    void (*compute_async)(void *kernel, struct tf_run *run, struct tf_done *done);
    void (*destroy)(void *kernel);
};

#define FRAMEWORK_DECLARE(result, name, arguments) result name arguments;
HVD_TF_FUNCTIONS(FRAMEWORK_DECLARE)

/* What was registered; NULL: nothing of this name. */
const struct tf_op_builder *framework_op(const char *name);
const struct tf_kernel_builder *framework_kernel(const char *op, const char *device);
/* The one that a node of this dtype gets; and has it this argument in the CPU's memory? */
const struct tf_kernel_builder *framework_kernel_for(const char *op, const char *device, int dtype);
bool framework_on_host(const struct tf_kernel_builder *kernel, const char *argument);
/* Where memory on a GPU comes from, and goes to. */
void framework_gpu(void *(*give)(size_t bytes), void (*take)(void *memory, size_t bytes));
/* The function of this name fails from now on, once it has been called `after` times; NULL: none does. At the start
 * that is what FRAMEWORK_REFUSES says. */
void framework_refuse(const char *function, int after);
bool framework_refuses(const char *function, struct tf_status *status); /* inside: shall it, this time? */
/* How many tensors live. */
int framework_tensors(void);
struct tf_tensor *framework_tensor(int dtype, int dims, const int64_t *dim, size_t element_bytes);
struct tf_tensor *framework_gpu_tensor(int dtype, int dims, const int64_t *dim, size_t element_bytes);

#endif
