/* python.h - what the files of this folder share: Python's C API, and the parts of it that the stable ABI hides.
 *
 * The extension is built once, for the stable ABI of Python 3.9. METH_FASTCALL, PyObject_VectorcallMethod and
 * PyObject_VectorcallDict entered that ABI later. Each CPython since 3.9 exports them with these signatures.
 *
 * The folder implements hvd.allreduce_, hvd.allreduce_async_ and hvd.synchronize of PyTorch tensors for calls that come
 * again (fast_calls.c). plain_tensor.c reads a tensor, known_calls.c remembers calls, flight.c holds memory, slots.c
 * has the attributes of handles.
 */
#ifndef HVD_PYTHON_H
#define HVD_PYTHON_H

#include <Python.h>

#include "../hvdlite.h"

#include <stdbool.h>

#ifndef METH_FASTCALL
#define METH_FASTCALL 0x0080
#endif

PyObject *PyObject_VectorcallMethod(PyObject *name, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *PyObject_VectorcallDict(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwargs);

#define HVD_PY_DIMS_MAX  8
#define HVD_PY_WORDS_MAX 8 /* arguments of a call beside its tensor */

/* Dtype and shape of a tensor, as DLPack has them. No padding: compared and hashed as bytes. */
struct hvd_py_form {
    uint16_t code, bits;
    int32_t ndim;
    int64_t shape[HVD_PY_DIMS_MAX];
};

/* A dense tensor in the CPU's memory. */
struct hvd_py_tensor {
    void *data;
    uint64_t bytes;
    struct hvd_py_form form;
};

/* The arguments of one call, all by position. args[0] is the tensor. */
struct hvd_py_args {
    PyObject *const *args;
    Py_ssize_t words; /* all but the tensor */
    int function;     /* which of the functions of fast_calls.c */
};

/* A call that came before. */
struct hvd_py_call {
    uint64_t hash;
    PyObject *word[HVD_PY_WORDS_MAX];
    Py_ssize_t words;
    int function;
    bool refused;      /* Python has no request for it */
    PyObject *request; /* of hvdlite._core; NULL: it came once */
    PyObject *name;    /* its name while it is in flight; NULL: none */
    const struct hvd_request *native;
    struct hvd_py_form form;
    PyObject *checked; /* a weak reference to the tensor that `storage_check` has accepted, with this memory */
    void *data;
};

/* What Python gives, in the order of the tuple that `hvd_py_fast_calls` gets. */
enum { HVD_PY_ALLREDUCE, HVD_PY_ALLREDUCE_ASYNC, HVD_PY_SYNCHRONIZE, HVD_PY_FUNCTIONS };
struct hvd_py_needs {
    PyObject *tensor, *parameter;     /* the classes that are plain */
    PyObject *own[HVD_PY_FUNCTIONS];  /* Python's functions */
    PyObject *find;                   /* (function, arguments...): (request, address), or None */
    PyObject *fits;                   /* whether a tensor's storage has all its elements, and no negative bit */
    PyObject *take, *wait, *error_of; /* a Flight; waits for one and raises why it failed; (code, text): an exception */
    PyObject *in_flight, *abandoned, *idle;
    PyObject *handle, *adapter;    /* DirectHandle, and then slots.c's subclass; its adapter */
    PyObject *flight, *handle_end; /* the class Flight; DirectHandle.__del__ */
    PyObject *increment_version;
};
extern struct hvd_py_needs hvd_py;

/* slots.c: attributes of a DirectHandle, then of a Flight. slot: borrowed; NULL: it has no value. load: false: an
 * exception. */
enum {
    HVD_PY_FLIGHT,
    HVD_PY_ADAPTER,
    HVD_PY_IN_PLACE,
    HVD_PY_ERROR,
    HVD_PY_RESULT,
    HVD_PY_OF_FLIGHT,
    HVD_PY_REQUEST = HVD_PY_OF_FLIGHT,
    HVD_PY_KEEP,
    HVD_PY_FREE,
    HVD_PY_TURN,
    HVD_PY_ADDRESS,
    HVD_PY_SLOTS
};
bool hvd_py_slots_load(void);
PyObject *hvd_py_slot(PyObject *object, int slot);
void hvd_py_slot_set(PyObject *object, int slot, PyObject *value);

/* Interned names of attributes and methods. */
enum { HVD_PY_ACQUIRE, HVD_PY_RELEASE, HVD_PY_NAME, HVD_PY_UNTYPED_STORAGE, HVD_PY_WORDS };
extern PyObject *hvd_py_word[HVD_PY_WORDS];

/* flight.c. take: false: an exception. give: it holds nothing. complete: as Flight.complete, when its collective is
 * over, forgotten by the core, and its handle has dropped it. storage: what holds a tensor's memory. */
struct hvd_py_flight {
    PyObject *object;
    struct hvd_owner *owner;
};
bool hvd_py_words_load(void);
bool hvd_py_flight_take(struct hvd_py_flight *flight);
void hvd_py_flight_give(struct hvd_py_flight flight);
bool hvd_py_flight_complete(struct hvd_py_flight flight);
PyObject *hvd_py_storage(PyObject *tensor);

/* plain_tensor.c. load: the capsule of DLPack's functions; false: an exception. look: false, and no exception: the
 * tensor is not dense, empty, or not in the CPU's memory. */
bool hvd_py_tensor_load(PyObject *capsule);
bool hvd_py_tensor_look(PyObject *object, struct hvd_py_tensor *tensor);

/* known_calls.c. find: the call with these arguments and such a tensor; NULL: it did not come before, and is
 * remembered, or has unhashable arguments. */
struct hvd_py_call *hvd_py_call_find(const struct hvd_py_args *args, const struct hvd_py_form *form);

#endif
