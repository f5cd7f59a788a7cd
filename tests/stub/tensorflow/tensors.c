/* tensors.c - tensors of a TensorFlow that is none, in the CPU's memory or a GPU's. See framework.h. */
#include "framework.h"

#include <stdlib.h>
#include <string.h>

static _Atomic int tensors;
static void *(*give_on_gpu)(size_t bytes);
static void (*take_on_gpu)(void *memory, size_t bytes);
static char nothing[1];

void framework_gpu(void *(*give)(size_t bytes), void (*take)(void *memory, size_t bytes))
{
    give_on_gpu = give;
    take_on_gpu = take;
}

static void drop(void *data, size_t bytes, void *arg)
{
    (void)bytes, (void)arg;
    free(data);
}

struct tf_tensor *TF_NewTensor(int dtype, const int64_t *dim, int dims, void *data, size_t bytes,
                               void (*give_back)(void *, size_t, void *), void *arg)
{
    struct tf_tensor *tensor = calloc(1, sizeof *tensor);
    *tensor = (struct tf_tensor){.users = 1, .dtype = dtype, .dims = dims, .data = data, .bytes = bytes};
    if (dims)
        memcpy(tensor->dim, dim, sizeof *dim * (size_t)dims);
    tensor->drop = give_back;
    tensor->arg = arg;
    atomic_fetch_add(&tensors, 1);
    return tensor;
}

struct tf_tensor *framework_tensor(int dtype, int dims, const int64_t *dim, size_t element_bytes)
{
    for (int i = 0; i < dims; i++)
        element_bytes *= (size_t)dim[i];
    return TF_NewTensor(dtype, dim, dims, calloc(1, element_bytes + 1), element_bytes, drop, NULL);
}

static void drop_on_gpu(void *data, size_t bytes, void *arg)
{
    (void)arg;
    if (data != nothing)
        take_on_gpu(data, bytes);
}

/* Of no elements: an address of the CPU's, as TensorFlow has it. */
struct tf_tensor *framework_gpu_tensor(int dtype, int dims, const int64_t *dim, size_t element_bytes)
{
    for (int i = 0; i < dims; i++)
        element_bytes *= (size_t)dim[i];
    return TF_NewTensor(dtype, dim, dims, element_bytes ? give_on_gpu(element_bytes) : nothing, element_bytes,
                        drop_on_gpu, NULL);
}

int framework_tensors(void)
{
    return atomic_load(&tensors);
}

static size_t element_of(int dtype)
{
    return dtype == TF_UINT8 ? 1 : dtype == TF_UINT16 ? 2 : dtype == TF_INT64 ? 8 : 4;
}

struct tf_tensor *TF_AllocateTemp(struct tf_run *run, int dtype, const int64_t *dim, int dims,
                                  struct tf_allocation *where, struct tf_status *status)
{
    (void)run;
    if (framework_refuses("TF_AllocateTemp", status) || where->struct_size != sizeof *where)
        return NULL;
    return (where->on_host ? framework_tensor : framework_gpu_tensor)(dtype, dims, dim, element_of(dtype));
}

struct tf_tensor *TF_AllocateOutput(struct tf_run *run, int i, int dtype, const int64_t *dim, int dims, size_t bytes,
                                    struct tf_status *status)
{
    (void)bytes;
    if (framework_refuses("TF_AllocateOutput", status))
        return NULL;
    bool on_host = !run->kernel || framework_on_host(run->kernel, i ? "rows" : "y");
    struct tf_tensor *tensor = (on_host ? framework_tensor : framework_gpu_tensor)(dtype, dims, dim, element_of(dtype));
    TF_SetOutput(run, i, tensor, status);
    return tensor;
}

void TF_DeleteTensor(struct tf_tensor *tensor)
{
    if (atomic_fetch_sub(&tensor->users, 1) > 1)
        return;
    if (tensor->drop)
        tensor->drop(tensor->data, tensor->bytes, tensor->arg);
    free(tensor);
    atomic_fetch_sub(&tensors, 1);
}

int TF_TensorType(const struct tf_tensor *tensor)
{
    return tensor->dtype;
}

int TF_NumDims(const struct tf_tensor *tensor)
{
    return tensor->dims;
}

int64_t TF_Dim(const struct tf_tensor *tensor, int i)
{
    return tensor->dim[i];
}

size_t TF_TensorByteSize(const struct tf_tensor *tensor)
{
    return tensor->bytes;
}

static void *memory_of(const struct tf_tensor *tensor)
{
    return tensor->data;
}

/* A name that is TensorFlow's own. */
void *TF_TensorData(const struct tf_tensor *tensor) __attribute__((alias("memory_of")));
