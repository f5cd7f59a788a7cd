/* fast_calls.c - how do hvd.allreduce_, hvd.allreduce_async_ and hvd.synchronize reach the core without Python's
 * checks?
 *
 * A collective of a few bytes takes the core half a microsecond. The checks of its arguments in Python take six: a
 * dozen attributes of the tensor, a tuple of the arguments and a dictionary. A training loop repeats its calls, so
 * known_calls.c remembers each with the request that Python made of it, and plain_tensor.c reads the tensor in one
 * call. All else goes to Python's own function, which has all errors: the first calls of their kind, tensors that are
 * not plain, names that are in flight.
 *
 * WHAT HOLDS THE MEMORY? The caller's frame holds the tensor, but `tensor.data = other` in another thread drops its
 * storage. A small call keeps the GIL for GIL_NS, in which no other thread runs Python. After that, and for a
 * larger tensor from the start, a Flight (hvdlite/_core/inflight.py) holds the storage and the GIL is free. A Flight is
 * taken before the request is submitted, and no line of Python runs between a submission and the Flight's attributes,
 * so no exception of a signal handler can lose it.
 *
 * An asynchronous call returns the handle that Python's function returns, a DirectHandle, so Python does all the rest
 * with it. `synchronize` completes it here if it ends within GIL_NS and no other thread waits for it.
 *
 * All state is under the GIL: a free-threaded Python uses its own functions (hvdlite/torch/ops/fast_calls.py).
 */
#include "python.h"

enum { SMALL_BYTES = 32768, GIL_NS = 20000, WAIT_NS = 50000000 };

static PyObject *run_python(const struct hvd_py_args *given)
{
    return PyObject_VectorcallDict(hvd_py.own[given->function], given->args, (size_t)given->words + 1, NULL);
}

/* Python has run this call for the second time: asks what its request is. An exception here is not the caller's. */
static void learn(const struct hvd_py_args *given, const struct hvd_py_form *form)
{
    PyObject *args[2 + HVD_PY_WORDS_MAX] = {PyLong_FromLong(given->function)};
    for (Py_ssize_t i = 0; i <= given->words; i++)
        args[1 + i] = given->args[i];
    PyObject *pair = args[0] ? PyObject_VectorcallDict(hvd_py.find, args, (size_t)(2 + given->words), NULL) : NULL;
    struct hvd_py_call *call = pair ? hvd_py_call_find(given, form) : NULL; /* now: Python may have replaced it */
    Py_XDECREF(args[0]);
    if (call && !call->request && !(call->refused = pair == Py_None)) {
        call->request = PyTuple_GetItem(pair, 0);
        Py_INCREF(call->request);
        call->native = PyLong_AsVoidPtr(PyTuple_GetItem(pair, 1));
        call->name = PyObject_GetAttr(call->request, hvd_py_word[HVD_PY_NAME]);
        if (call->name == Py_None)
            Py_CLEAR(call->name);
    }
    Py_XDECREF(pair);
    PyErr_Clear();
}

static bool is_true(PyObject *answer)
{
    bool yes = answer == Py_True;
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    return yes;
}

/* What DLPack does not tell is asked once for each tensor object and its memory. NULL: it does not fit. */
static struct hvd_py_call *fitting(struct hvd_py_call *call, const struct hvd_py_args *given,
                                   const struct hvd_py_tensor *tensor)
{
    PyObject *args[] = {given->args[0]};
    if (call->checked && call->data == tensor->data && PyWeakref_GetObject(call->checked) == args[0])
        return call;
    if (!is_true(PyObject_VectorcallDict(hvd_py.fits, args, 1, NULL)))
        return NULL;
    call = hvd_py_call_find(given, &tensor->form); /* Python may have replaced it */
    if (!call || !call->request)
        return NULL;
    Py_XDECREF(call->checked);
    call->checked = PyWeakref_NewRef(args[0], NULL);
    call->data = tensor->data;
    PyErr_Clear();
    return call;
}

/* Whether it must be refused or swept by Python first: its name is in flight, or another collective was abandoned. */
static bool obstructed(const struct hvd_py_call *call)
{
    return PyObject_Size(hvd_py.abandoned) != 0 ||
           (call->name && PyDict_Size(hvd_py.in_flight) && PyDict_GetItemWithError(hvd_py.in_flight, call->name));
}

/* The result of Python's function; or NULL with call->request set, which can be submitted for `tensor`. */
static PyObject *unless_known(const struct hvd_py_args *given, struct hvd_py_tensor *tensor, struct hvd_py_call *call)
{
    PyObject *type = (PyObject *)Py_TYPE(given->args[0]);
    bool plain =
        type && (type == hvd_py.tensor || type == hvd_py.parameter) && hvd_py_tensor_look(given->args[0], tensor);
    struct hvd_py_call *known = plain ? hvd_py_call_find(given, &tensor->form) : NULL;
    bool again = known && !known->request && !known->refused;
    call->request = NULL;
    if (known && known->request && !obstructed(known) && (known = fitting(known, given, tensor))) {
        *call = *known; /* another thread may replace it when the GIL is free */
        Py_INCREF(call->request);
        return NULL;
    }
    PyErr_Clear();
    PyObject *result = run_python(given);
    if (result && again)
        learn(given, &tensor->form);
    return result;
}

/* Sets the exception of a failed collective. */
static void raise_error(int code, const char *text)
{
    PyObject *args[] = {PyLong_FromLong(code), PyBytes_FromString(text)};
    PyObject *error = args[0] && args[1] ? PyObject_VectorcallDict(hvd_py.error_of, args, 2, NULL) : NULL;
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(args[0]);
    Py_XDECREF(args[1]);
}

/* Submits and waits. False: an exception is set. */
static bool run(const struct hvd_py_call *call, PyObject *tensor, const struct hvd_py_tensor *at)
{
    char text[HVD_TEXT_MAX];
    struct hvd_py_flight flight;
    bool small = at->bytes <= SMALL_BYTES;
    uintptr_t data = (uintptr_t)at->data;
    PyObject *storage = small ? NULL : hvd_py_storage(tensor), *done = NULL;
    if ((!small && !storage) || !hvd_py_flight_take(&flight)) {
        Py_XDECREF(storage);
        return false;
    }
    PyThreadState *state = small ? NULL : PyEval_SaveThread();
    int code = hvd_run(call->native, data, data, HVD_QUIET, small ? GIL_NS : WAIT_NS, flight.owner, text, sizeof text);
    if (!small)
        PyEval_RestoreThread(state);
    if (code != HVD_AGAIN) {
        hvd_py_flight_give(flight);
        Py_XDECREF(storage);
        if (code != HVD_OK)
            raise_error(code, text);
        return code == HVD_OK;
    }
    if (!storage)
        storage = hvd_py_storage(tensor);
    if (storage) {
        hvd_py_slot_set(flight.object, HVD_PY_KEEP, storage);
        hvd_py_slot_set(flight.object, HVD_PY_REQUEST, call->request);
        done = PyObject_VectorcallDict(hvd_py.wait, &flight.object, 1, NULL); /* has the flight from now on */
    }
    Py_XDECREF(storage);
    Py_XDECREF(done);
    Py_DECREF(flight.object);
    return done != NULL;
}

/* The core has overwritten the tensor: autograd shall notice. An inference tensor has no version. */
static void written(PyObject *tensor)
{
    PyObject *one = PyTuple_New(1), *done = NULL;
    if (one) {
        Py_INCREF(tensor);
        PyTuple_SetItem(one, 0, tensor);
        done = PyObject_VectorcallDict(hvd_py.increment_version, &one, 1, NULL);
        Py_DECREF(one);
    }
    if (!done)
        PyErr_Clear();
    Py_XDECREF(done);
}

static PyObject *allreduce_(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    struct hvd_py_args given = {args, nargs - 1, HVD_PY_ALLREDUCE};
    struct hvd_py_tensor tensor;
    struct hvd_py_call call;
    PyObject *result = unless_known(&given, &tensor, &call);
    if (!call.request)
        return result;
    bool well = run(&call, args[0], &tensor);
    Py_DECREF(call.request);
    if (!well)
        return NULL;
    written(args[0]);
    Py_INCREF(args[0]);
    return args[0];
}

/* A DirectHandle of a flight that is about to begin. */
static PyObject *handle_of(PyObject *flight, PyObject *tensor)
{
    PyObject *handle = PyType_GenericAlloc((PyTypeObject *)hvd_py.handle, 0);
    if (handle) {
        hvd_py_slot_set(handle, HVD_PY_FLIGHT, flight);
        hvd_py_slot_set(handle, HVD_PY_ERROR, Py_None);
        hvd_py_slot_set(handle, HVD_PY_ADAPTER, hvd_py.adapter);
        hvd_py_slot_set(handle, HVD_PY_IN_PLACE, Py_True);
        hvd_py_slot_set(handle, HVD_PY_RESULT, tensor);
    }
    return handle;
}

static PyObject *submit(const struct hvd_py_call *call, PyObject *tensor, void *data)
{
    char text[HVD_TEXT_MAX];
    struct hvd_py_flight flight;
    PyObject *storage = hvd_py_storage(tensor), *handle = NULL;
    if (!storage || !hvd_py_flight_take(&flight)) {
        Py_XDECREF(storage);
        return NULL;
    }
    hvd_py_slot_set(flight.object, HVD_PY_KEEP, storage);
    hvd_py_slot_set(flight.object, HVD_PY_REQUEST, call->request);
    if (!call->name || PyDict_SetItem(hvd_py.in_flight, call->name, flight.object) == 0)
        handle = handle_of(flight.object, tensor);
    Py_DECREF(storage);
    Py_DECREF(flight.object);
    if (!handle)
        return NULL;
    uintptr_t at = (uintptr_t)data;
    int code = hvd_run(call->native, at, at, HVD_SOON, 0, flight.owner, text, sizeof text);
    if (code == HVD_AGAIN)
        return handle;
    Py_DECREF(handle); /* and so its flight is given back */
    raise_error(code, text);
    return NULL;
}

static PyObject *allreduce_async_(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    struct hvd_py_args given = {args, nargs - 1, HVD_PY_ALLREDUCE_ASYNC};
    struct hvd_py_tensor tensor;
    struct hvd_py_call call;
    PyObject *result = unless_known(&given, &tensor, &call);
    if (!call.request)
        return result;
    result = submit(&call, args[0], tensor.data);
    Py_DECREF(call.request);
    return result;
}

/* With the flight's turn: true if the collective has ended well within GIL_NS, and its handle has its result. */
static bool finish(PyObject *handle, struct hvd_py_flight flight)
{
    char text[HVD_TEXT_MAX];
    if (!flight.owner->handle)
        return false;
    int code = hvd_finish(flight.owner, GIL_NS, text, sizeof text);
    if (code == HVD_AGAIN)
        return false;
    if (code != HVD_OK) { /* the core tells why only once: the handle keeps it, and Python's function raises it */
        raise_error(code, text);
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        if (error)
            hvd_py_slot_set(handle, HVD_PY_ERROR, error);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    } else {
        written(hvd_py_slot(handle, HVD_PY_RESULT));
    }
    hvd_py_slot_set(handle, HVD_PY_FLIGHT, Py_None);
    return hvd_py_flight_complete(flight) && code == HVD_OK;
}

/* Whether a DirectHandle's collective has ended well, and the handle has its result. Never an exception. */
static bool finished(PyObject *handle)
{
    struct hvd_py_flight flight = {hvd_py_slot(handle, HVD_PY_FLIGHT), NULL};
    bool well = false;
    if (flight.object && flight.object != Py_None) {
        Py_INCREF(flight.object);
        flight.owner = PyLong_AsVoidPtr(hvd_py_slot(flight.object, HVD_PY_ADDRESS));
        PyObject *take[] = {hvd_py_slot(flight.object, HVD_PY_TURN), Py_False};
        if (is_true(PyObject_VectorcallMethod(hvd_py_word[HVD_PY_ACQUIRE], take, 2, NULL))) {
            well = finish(handle, flight);
            PyErr_Clear();
            Py_XDECREF(PyObject_VectorcallMethod(hvd_py_word[HVD_PY_RELEASE], take, 1, NULL));
        }
        Py_DECREF(flight.object);
    }
    PyErr_Clear();
    return well;
}

static PyObject *synchronize(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    struct hvd_py_args given = {args, nargs - 1, HVD_PY_SYNCHRONIZE};
    if (nargs == 1 && (PyObject *)Py_TYPE(args[0]) == hvd_py.handle && finished(args[0])) {
        PyObject *result = hvd_py_slot(args[0], HVD_PY_RESULT);
        Py_INCREF(result);
        return result;
    }
    return run_python(&given);
}

static PyMethodDef methods[HVD_PY_FUNCTIONS] = {
    {"allreduce_", (PyCFunction)(void (*)(void))allreduce_, METH_FASTCALL, NULL},
    {"allreduce_async_", (PyCFunction)(void (*)(void))allreduce_async_, METH_FASTCALL, NULL},
    {"synchronize", (PyCFunction)(void (*)(void))synchronize, METH_FASTCALL, NULL}};

/* needs: the tuple of what `hvd_py` has, then DLPack's capsule. The tuple of the three functions; NULL: an exception.
 * Called once. Their caller gives at least the tensor or the handle. */
__attribute__((visibility("default"))) PyObject *hvd_py_fast_calls(PyObject *needs)
{
    PyObject **into = &hvd_py.tensor;
    Py_ssize_t count = sizeof hvd_py / sizeof *into;
    Py_INCREF(needs); /* for ever */
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(into[i] = PyTuple_GetItem(needs, i)))
            return NULL;
    PyObject *capsule = PyTuple_GetItem(needs, count), *made = PyTuple_New(HVD_PY_FUNCTIONS);
    if (!capsule || !made || !hvd_py_words_load() || !hvd_py_slots_load() || !hvd_py_tensor_load(capsule))
        return NULL;
    for (int i = 0; i < HVD_PY_FUNCTIONS; i++) {
        PyObject *function = PyCFunction_NewEx(&methods[i], NULL, NULL);
        if (!function || PyTuple_SetItem(made, i, function))
            return NULL;
    }
    return made;
}
