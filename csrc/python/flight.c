/* flight.c - what holds a tensor's memory while a request is in flight, seen from C?
 *
 * A Flight of hvdlite/_core/inflight.py, as for requests that Python submits. Flights are never freed, only used again.
 * Those that C has used stay here, so that the next call need not ask Python for one. Also here: what
 * csrc/python has of Python, and the interned names of attributes.
 */
#include "python.h"

enum { IDLE_MAX = 256 };

struct hvd_py_needs hvd_py;
PyObject *hvd_py_word[HVD_PY_WORDS];

static const char *const text_of[HVD_PY_WORDS] = {"acquire", "release", "name", "untyped_storage"};
static struct hvd_py_flight idle[IDLE_MAX];
static int idle_count;

bool hvd_py_words_load(void)
{
    for (int i = 0; i < HVD_PY_WORDS; i++)
        if (!(hvd_py_word[i] = PyUnicode_InternFromString(text_of[i])))
            return false;
    return true;
}

bool hvd_py_flight_take(struct hvd_py_flight *flight)
{
    if (idle_count) {
        *flight = idle[--idle_count];
        return true;
    }
    flight->object = PyObject_VectorcallDict(hvd_py.take, NULL, 0, NULL);
    flight->owner = flight->object ? PyLong_AsVoidPtr(hvd_py_slot(flight->object, HVD_PY_ADDRESS)) : NULL;
    return flight->object != NULL;
}

void hvd_py_flight_give(struct hvd_py_flight flight)
{
    if (idle_count < IDLE_MAX) {
        idle[idle_count++] = flight;
        return;
    }
    if (PyList_Append(hvd_py.idle, flight.object) != 0)
        PyErr_Clear(); /* it is not used again */
    Py_DECREF(flight.object);
}

PyObject *hvd_py_storage(PyObject *tensor)
{
    PyObject *args[] = {tensor};
    return PyObject_VectorcallMethod(hvd_py_word[HVD_PY_UNTYPED_STORAGE], args, 1, NULL);
}

bool hvd_py_flight_complete(struct hvd_py_flight flight)
{
    PyObject *request = hvd_py_slot(flight.object, HVD_PY_REQUEST);
    PyObject *name = request ? PyObject_GetAttr(request, hvd_py_word[HVD_PY_NAME]) : NULL;
    bool well = name != NULL;
    if (well && name != Py_None && PyDict_GetItemWithError(hvd_py.in_flight, name) == flight.object)
        well = PyDict_DelItem(hvd_py.in_flight, name) == 0;
    Py_XDECREF(name);
    if (well) {
        hvd_py_slot_set(flight.object, HVD_PY_REQUEST, Py_None);
        hvd_py_slot_set(flight.object, HVD_PY_KEEP, Py_None);
        hvd_py_slot_set(flight.object, HVD_PY_FREE, Py_False);
        Py_INCREF(flight.object);
        hvd_py_flight_give(flight);
    }
    return well;
}
