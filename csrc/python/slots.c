/* slots.c - how does C read and write the attributes of a DirectHandle and a Flight?
 *
 * Both classes have __slots__, so each attribute is a pointer in the object. Its place is not part of Python's API. It
 * is found once: an object of the class gets a new object as this attribute, whose address is then searched in it. So a
 * handle costs no lookup of names. A Python that stored attributes otherwise would leave the place unknown, and its own
 * functions run (hvdlite/torch/ops/fast_calls.py).
 *
 * The handles of fast_calls.c are of a subclass of DirectHandle, whose end is here: only one that was not synchronized
 * has something to do then.
 */
#include "python.h"

static const char *const text_of[HVD_PY_SLOTS] = {"_flight", "_adapter", "_in_place", "_error", "_result",
                                                  "request", "keep",     "free",      "turn",   "address"};
static Py_ssize_t place[HVD_PY_SLOTS]; /* in pointers */

static PyObject **slot_of(PyObject *object, int slot)
{
    return (PyObject **)object + place[slot];
}

PyObject *hvd_py_slot(PyObject *object, int slot)
{
    return *slot_of(object, slot);
}

void hvd_py_slot_set(PyObject *object, int slot, PyObject *value)
{
    PyObject **at = slot_of(object, slot), *old = *at;
    Py_INCREF(value);
    *at = value;
    Py_XDECREF(old);
}

/* object: of the class, with no other attributes. */
static bool find(PyObject *object, Py_ssize_t pointers, int slot)
{
    PyObject *marker = PyList_New(0);
    bool well = marker && PyObject_SetAttrString(object, text_of[slot], marker) == 0;
    place[slot] = 0;
    for (Py_ssize_t i = 1; well && i < pointers; i++)
        if (((PyObject **)object)[i] == marker)
            place[slot] = i;
    well = well && place[slot] && PyObject_SetAttrString(object, text_of[slot], Py_None) == 0 &&
           hvd_py_slot(object, slot) == Py_None;
    Py_XDECREF(marker);
    return well;
}

static bool find_all(PyObject *class, int first, int end)
{
    PyObject *size = PyObject_GetAttrString(class, "__basicsize__");
    PyObject *object = size ? PyType_GenericAlloc((PyTypeObject *)class, 0) : NULL;
    bool well = object != NULL;
    for (int i = first; well && i < end; i++)
        well = find(object, PyLong_AsSsize_t(size) / (Py_ssize_t)sizeof(PyObject *), i);
    if (object && !well && !PyErr_Occurred())
        PyErr_SetString(PyExc_ImportError, "this Python keeps the attributes of __slots__ elsewhere");
    Py_XDECREF(object);
    Py_XDECREF(size);
    return well;
}

static void handle_ends(PyObject *handle)
{
    PyObject *flight = hvd_py_slot(handle, HVD_PY_FLIGHT), *type, *error, *trace;
    if (!flight || flight == Py_None)
        return;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = PyObject_VectorcallDict(hvd_py.handle_end, &handle, 1, NULL);
    if (!done)
        PyErr_WriteUnraisable(handle);
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

bool hvd_py_slots_load(void)
{
    static PyType_Slot ends[] = {{Py_tp_finalize, (void *)handle_ends}, {0, NULL}};
    static PyType_Spec spec = {"hvdlite.HandleEnd", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                               ends};
    if (!find_all(hvd_py.handle, 0, HVD_PY_OF_FLIGHT) || !find_all(hvd_py.flight, HVD_PY_OF_FLIGHT, HVD_PY_SLOTS))
        return false;
    PyObject *end = PyType_FromSpec(&spec);
    hvd_py.handle = end ? PyObject_CallFunction((PyObject *)&PyType_Type, "s(OO){s()}", "DirectHandle", end,
                                                hvd_py.handle, "__slots__")
                        : NULL;
    Py_XDECREF(end);
    return hvd_py.handle != NULL;
}
