/* plain_tensor.c - where is the memory of a PyTorch tensor, and what is in it?
 *
 * Each attribute of a tensor that Python reads is an object and some 50 ns. DLPack 1 has a table of C functions, one of
 * which fills a struct with all of them at once (https://dmlc.github.io/dlpack/latest/c_api.html,
 * DLPackExchangeAPI). PyTorch 2.9 and later have the table as torch.Tensor.__dlpack_c_exchange_api__.
 *
 * The struct says nothing of the negative bit and of a storage that is too short; fast_calls.c asks for these.
 */
#include "python.h"

#include <string.h>

enum { DEVICE_CPU = 1, DLPACK_MAJOR = 1 };

/* DLTensor */
struct dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

/* The beginning of DLPackExchangeAPI. */
struct dl_functions {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from_object, *object_from_managed;
    int (*tensor_from_object)(void *object, struct dl_tensor *tensor);
};

static const struct dl_functions *functions;

bool hvd_py_tensor_load(PyObject *capsule)
{
    const struct dl_functions *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found && (found->major != DLPACK_MAJOR || !found->tensor_from_object)) {
        PyErr_SetString(PyExc_ImportError, "another major version of DLPack");
        return false;
    }
    functions = found;
    return found != NULL;
}

bool hvd_py_tensor_look(PyObject *object, struct hvd_py_tensor *tensor)
{
    struct dl_tensor found;
    if (functions->tensor_from_object(object, &found)) {
        PyErr_Clear();
        return false;
    }
    if (found.device_type != DEVICE_CPU || found.lanes != 1 || found.bits < 8 || found.ndim > HVD_PY_DIMS_MAX ||
        !found.data)
        return false;
    int64_t stride = 1;
    tensor->form = (struct hvd_py_form){.code = found.code, .bits = found.bits, .ndim = found.ndim};
    for (int i = found.ndim - 1; i >= 0; i--) {
        int64_t extent = tensor->form.shape[i] = found.shape[i];
        if (extent < 1 || (extent != 1 && found.strides && found.strides[i] != stride))
            return false;
        stride *= extent;
    }
    tensor->data = (char *)found.data + found.byte_offset;
    tensor->bytes = (uint64_t)stride * (found.bits / 8);
    return true;
}
