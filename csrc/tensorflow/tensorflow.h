/* tensorflow.h - what the files of this folder share: TensorFlow's C functions, ours, and one collective of a graph.
 *
 * The folder makes a library of its own, hvdlite/tensorflow/_kernels, which TensorFlow loads (tf.load_op_library) and
 * which is linked to nothing: TensorFlow's functions are looked up in the process (library.c), the core's are handed
 * over by Python (hvd_tf_attach), since the core lives in the extension that Python has loaded.
 */
#ifndef HVD_TENSORFLOW_H
#define HVD_TENSORFLOW_H

#include "../base/codes.h"
#include "../hvdlite.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* TensorFlow's types, opaque to us; the numbers are part of its C interface, which does not change. */
struct tf_status;
struct tf_tensor;
struct tf_op_builder;
struct tf_kernel_builder;
struct tf_construction;
struct tf_run; /* one execution of a kernel: TF_OpKernelContext */
struct tf_shapes;
struct tf_done; /* a std::function<void()>: TF_AsyncOpKernelDoneCallback */
enum { TF_INT32 = 3, TF_UINT8 = 4, TF_INT64 = 9, TF_UINT16 = 17, TF_RESOURCE = 20, TF_DTYPES = 64 };
enum { TF_UNKNOWN = 2, TF_INVALID_ARGUMENT = 3, TF_DEADLINE = 4, TF_EXHAUSTED = 8, TF_FAILED_PRECONDITION = 9 };
struct tf_allocation {
    size_t struct_size;
    unsigned char on_host;
};

/* X(result, name, arguments): all that we call. TensorFlow 2.16 and newer have them in libtensorflow_framework. */
#define HVD_TF_FUNCTIONS(X)                                                                                       \
    X(struct tf_status *, TF_NewStatus, (void))                                                                   \
    X(void, TF_DeleteStatus, (struct tf_status *))                                                                \
    X(int, TF_GetCode, (const struct tf_status *))                                                                \
    X(const char *, TF_Message, (const struct tf_status *))                                                       \
    X(void, TF_SetStatus, (struct tf_status *, int, const char *))                                                \
    X(struct tf_op_builder *, TF_NewOpDefinitionBuilder, (const char *))                                          \
    X(void, TF_RegisterOpDefinition, (struct tf_op_builder *, struct tf_status *))                                \
    X(void, TF_OpDefinitionBuilderAddAttr, (struct tf_op_builder *, const char *))                                \
    X(void, TF_OpDefinitionBuilderAddInput, (struct tf_op_builder *, const char *))                               \
    X(void, TF_OpDefinitionBuilderAddOutput, (struct tf_op_builder *, const char *))                              \
    X(void, TF_OpDefinitionBuilderSetIsStateful, (struct tf_op_builder *, bool))                                  \
    X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                      \
      (struct tf_op_builder *, void (*)(struct tf_shapes *, struct tf_status *)))                                 \
    X(void, TF_ShapeInferenceContextSetUnknownShape, (struct tf_shapes *, struct tf_status *))                    \
    X(struct tf_kernel_builder *, TF_NewKernelBuilder,                                                            \
      (const char *, const char *, void *(*)(struct tf_construction *), void (*)(void *, struct tf_run *),        \
       void (*)(void *)))                                                                                         \
    X(struct tf_kernel_builder *, TF_NewAsyncKernelBuilder,                                                       \
      (const char *, const char *, void *(*)(struct tf_construction *),                                           \
       void (*)(void *, struct tf_run *, struct tf_done *), void (*)(void *)))                                    \
    X(void, TF_RegisterKernelBuilder, (const char *, struct tf_kernel_builder *, struct tf_status *))             \
    X(void, TF_RunAsyncOpKernelDoneCallback, (struct tf_done *))                                                  \
    X(void, TF_KernelBuilder_HostMemory, (struct tf_kernel_builder *, const char *))                              \
    X(void, TF_KernelBuilder_Priority, (struct tf_kernel_builder *, int32_t))                                     \
    X(void, TF_KernelBuilder_TypeConstraint, (struct tf_kernel_builder *, const char *, int, struct tf_status *)) \
    X(int64_t, TF_StepId, (struct tf_run *))                                                                      \
    X(uint64_t, TF_GetFrameId, (struct tf_run *))                                                                 \
    X(int64_t, TF_GetIterId, (struct tf_run *))                                                                   \
    X(void, TF_OpKernelConstruction_GetAttrSize,                                                                  \
      (struct tf_construction *, const char *, int32_t *, int32_t *, struct tf_status *))                         \
    X(void, TF_OpKernelConstruction_GetAttrString,                                                                \
      (struct tf_construction *, const char *, char *, size_t, struct tf_status *))                               \
    X(void, TF_OpKernelConstruction_GetAttrInt64,                                                                 \
      (struct tf_construction *, const char *, int64_t *, struct tf_status *))                                    \
    X(void, TF_OpKernelConstruction_Failure, (struct tf_construction *, struct tf_status *))                      \
    X(void, TF_GetInput, (struct tf_run *, int, struct tf_tensor **, struct tf_status *))                         \
    X(void, TF_SetOutput, (struct tf_run *, int, const struct tf_tensor *, struct tf_status *))                   \
    X(void, TF_OpKernelContext_Failure, (struct tf_run *, struct tf_status *))                                    \
    X(int, TF_ExpectedOutputDataType, (struct tf_run *, int))                                                     \
    X(struct tf_tensor *, TF_AllocateTemp,                                                                        \
      (struct tf_run *, int, const int64_t *, int, struct tf_allocation *, struct tf_status *))                   \
    X(struct tf_tensor *, TF_AllocateOutput,                                                                      \
      (struct tf_run *, int, int, const int64_t *, int, size_t, struct tf_status *))                              \
    X(struct tf_tensor *, TF_ForwardInputOrAllocateOutput,                                                        \
      (struct tf_run *, const int *, int, int, const int64_t *, int, int *, struct tf_status *))                  \
    X(struct tf_tensor *, TF_NewTensor,                                                                           \
      (int, const int64_t *, int, void *, size_t, void (*)(void *, size_t, void *), void *))                      \
    X(void, TF_DeleteTensor, (struct tf_tensor *))                                                                \
    X(int, TF_TensorType, (const struct tf_tensor *))                                                             \
    X(int, TF_NumDims, (const struct tf_tensor *))                                                                \
    X(int64_t, TF_Dim, (const struct tf_tensor *, int))                                                           \
    X(size_t, TF_TensorByteSize, (const struct tf_tensor *))                                                      \
    X(void *, TF_TensorData, (const struct tf_tensor *))

#define HVD_TF_MEMBER(result, name, arguments) result(*name) arguments;
struct hvd_tf_functions {
    HVD_TF_FUNCTIONS(HVD_TF_MEMBER)
};
extern struct hvd_tf_functions hvd_tf; /* filled before anything else here runs */

/* The core's functions; all NULL until Python attaches them. */
struct hvd_tf_core {
    int64_t (*submit)(const struct hvd_request *request, char *text, size_t text_bytes);
    int (*wait)(int64_t handle, int timeout_ms, char *text, size_t text_bytes);
    int (*poll)(int64_t handle);
    int (*result)(int64_t handle, struct hvd_output *output);
    int (*forget)(int64_t handle);
    int (*rank)(void);
    int (*size)(void);
    int (*place)(int what);
    int (*abort)(int culprit, int code, const char *reason);
    int64_t (*step)(int found, int64_t optimizer_ns);
};
extern struct hvd_tf_core hvd_tf_core;
extern int hvd_tf_dtype[TF_DTYPES]; /* the core's number of TensorFlow's, -1: none */
extern bool hvd_tf_moves;           /* `done` can be kept and called later; else Finish blocks */

/* How libstdc++ lays out a std::function<void()>. */
struct hvd_tf_done {
    unsigned char functor[16];
    bool (*manage)(void *into, const void *from, int what);
    void *invoke;
};

/* In what order TensorFlow runs starts of one name within a step: that of the program, none (it should run once), or
 * none, in a loop, whose iterations get names of their own. */
enum { HVD_TF_ORDERED, HVD_TF_ONCE, HVD_TF_NAMED };

/* What a node of a graph says: read once, shared by its executions. Counted. */
struct hvd_tf_words {
    _Atomic int users;
    int64_t kind, op, root, peer, process_set, group, group_count, place, places, order;
    double prescale, postscale;
    uint64_t hash; /* of the key */
    char *key;
    char *list; /* not empty: it stands before a list of others, and this is the list (list_mismatch.c) */
};

/* One collective under way. See inflight.c. */
struct hvd_tf_waiter {
    struct hvd_tf_waiter *next;
    struct tf_run *run;
    struct hvd_tf_done done;
};
struct hvd_tf_flight {
    struct hvd_tf_flight *next;
    uint64_t serial; /* of this use of the memory, which is used again and never given back */
    struct hvd_tf_words *words;
    struct tf_tensor *input, *splits, *output; /* output NULL: the engine has it (ragged) */
    struct hvd_request request;
    char *name;              /* the request's, where it is not the node's key */
    int64_t step, iteration; /* which execution of a graph, and of a loop in it where iterations have names */
    int64_t *shape;          /* the input's, if it has more than HVD_DIMS_MAX dimensions */
    int dims;
    int64_t native, since; /* since: when somebody began to wait, in ms; 0: nobody, or waiting has no limit */
    struct hvd_tf_waiter *waiters;
    bool owned, over; /* the handle tensor lives; the collective has ended */
    bool asks;        /* ranks had other lists: now it is the exchange of them */
    int code;
    char *text;
};

/* Any thread. An empty one, owned by the handle tensor that the caller makes. NULL: no memory. */
struct hvd_tf_flight *hvd_tf_flight_new(struct hvd_tf_words *words);
/* Any thread. Its request is filled; submits it, at once or as soon as its name is free. Never blocks, but for a world
 * of 1. What goes wrong is told by its end. */
void hvd_tf_flight_start(struct hvd_tf_flight *flight);
/* Any thread. 1: it is over, and stays as it is while the handle tensor lives. 0: `done` was moved out and will be
 * called from another thread after hvd_tf_deliver. -1: the handle tensor is gone, who asks has a copy of it. */
int hvd_tf_flight_over(struct hvd_tf_flight *flight, uint64_t serial, struct tf_run *run, struct tf_done *done);
/* Any thread. The handle tensor is gone. */
void hvd_tf_flight_drop(struct hvd_tf_flight *flight);
/* A life of the job begins, in which who waits does so for so long at most; 0: any time. */
void hvd_tf_flights_bound(double seconds);
int64_t hvd_tf_flights(int which); /* 0: alive, 1: started since the library was loaded, 2: most alive at once */

/* order.c; under the lock of inflight.c. Is one of this name and process set in the list? */
bool hvd_tf_in_list(const struct hvd_tf_flight *list, const struct hvd_tf_flight *like);
/* Is this start one of several of its name, of which nobody knows which comes first? Remembers it. */
bool hvd_tf_in_no_order(const struct hvd_tf_flight *flying, const struct hvd_tf_flight *held,
                        const struct hvd_tf_flight *like);
char *hvd_tf_say_in_no_order(const char *name); /* the error of it, to be freed */
uint64_t hvd_tf_hash(const char *text);

/* list_mismatch.c; the thread of inflight.c, when a flight has ended. True: ranks have other lists, and it is to be
 * submitted again as their exchange. False: it has really ended; after an exchange with all lists in its text. */
bool hvd_tf_list_asks(struct hvd_tf_flight *flight);
/* list_mismatch.c; any thread. A list is about to be submitted: if it is of gradients, a training step begins. */
void hvd_tf_list_begins(const struct hvd_tf_flight *flight);
void hvd_tf_lists_anew(void); /* any thread: a life of the job begins, in which whose steps count is not known */

/* kernel.c: the kernels, and the error of one. */
void *hvd_tf_start_create(struct tf_construction *node);
void hvd_tf_start_compute(void *kernel, struct tf_run *run);
void hvd_tf_start_delete(void *words);
void hvd_tf_finish_compute(void *kernel, struct tf_run *run, struct tf_done *done);
void hvd_tf_fail(struct tf_run *run, int code, const char *text);
void hvd_tf_words_release(struct hvd_tf_words *words);
/* kernel.c: the outcome of a flight that is over becomes the outputs of Finish, or its error. */
void hvd_tf_deliver(struct hvd_tf_flight *flight, struct tf_run *run);
/* register.c: registers ops, and kernels for the CPU and against XLA; then those for GPUs, whose tensors are
 * in the CPU's memory. */
void hvd_tf_register(struct tf_status *status);
void hvd_tf_register_gpu(struct tf_status *status);

#endif
