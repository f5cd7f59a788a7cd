/* known_calls.c - has a call with the same arguments and such a tensor come before?
 *
 * A table of calls by a hash of their arguments. Strings are compared by value, since a loop may make a tensor's name
 * anew in each step; all other arguments by identity, which is exact and costs nothing: an equal object that is not
 * the same one only takes the slow path. The table holds references to the arguments.
 *
 * A call has a few places to be in; when they are taken by others, it replaces one of them. So memory is bounded, and
 * calls with a new name each time cost no more than a replacement.
 */
#include "python.h"

#include <stdlib.h>
#include <string.h>

enum { PLACES = 4096, TRIES = 4 };

static struct hvd_py_call *known[PLACES];

static uint64_t mixed(uint64_t hash, uint64_t word)
{
    return (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
}

static bool hash_of(const struct hvd_py_args *args, const struct hvd_py_form *form, uint64_t *hash)
{
    uint64_t sum = mixed((uint64_t)args->words, (uint64_t)args->function);
    for (Py_ssize_t i = 1; i <= args->words; i++) {
        bool is_text = PyUnicode_CheckExact(args->args[i]);
        Py_hash_t own = is_text ? PyObject_Hash(args->args[i]) : 0;
        if (own == -1) {
            PyErr_Clear();
            return false;
        }
        sum = mixed(sum, is_text ? (uint64_t)own : (uint64_t)(uintptr_t)args->args[i]);
    }
    sum = mixed(sum, (uint64_t)form->code << 16 | form->bits);
    for (int i = 0; i < form->ndim; i++)
        sum = mixed(sum, (uint64_t)form->shape[i]);
    *hash = sum ^ sum >> 32;
    return true;
}

static bool same(const struct hvd_py_call *call, uint64_t hash, const struct hvd_py_args *args,
                 const struct hvd_py_form *form)
{
    if (call->hash != hash || call->function != args->function || call->words != args->words ||
        memcmp(&call->form, form, sizeof *form) != 0)
        return false;
    for (Py_ssize_t i = 0; i < call->words; i++) {
        PyObject *mine = call->word[i], *its = args->args[1 + i];
        if (mine != its &&
            !(PyUnicode_CheckExact(mine) && PyUnicode_CheckExact(its) && PyUnicode_Compare(mine, its) == 0))
            return false;
    }
    return true;
}

static void forget(struct hvd_py_call *call)
{
    for (Py_ssize_t i = 0; i < call->words; i++)
        Py_DECREF(call->word[i]);
    Py_XDECREF(call->request);
    Py_XDECREF(call->name);
    Py_XDECREF(call->checked);
    free(call);
}

static void remember(struct hvd_py_call **place, uint64_t hash, const struct hvd_py_args *args,
                     const struct hvd_py_form *form)
{
    struct hvd_py_call *call = calloc(1, sizeof *call), *old = *place;
    if (!call)
        return;
    call->hash = hash;
    call->function = args->function;
    call->words = args->words;
    call->form = *form;
    for (Py_ssize_t i = 0; i < args->words; i++) {
        call->word[i] = args->args[1 + i];
        Py_INCREF(call->word[i]);
    }
    *place = call;
    if (old)
        forget(old); /* last: the end of an argument may run Python, which may come here again */
}

struct hvd_py_call *hvd_py_call_find(const struct hvd_py_args *args, const struct hvd_py_form *form)
{
    uint64_t hash;
    if (args->words > HVD_PY_WORDS_MAX || !hash_of(args, form, &hash))
        return NULL;
    struct hvd_py_call **place = NULL;
    for (uint64_t i = 0; i < TRIES; i++) {
        struct hvd_py_call **here = &known[(hash + i) % PLACES];
        if (*here && same(*here, hash, args, form))
            return *here;
        if (!place && !*here)
            place = here;
    }
    remember(place ? place : &known[(hash + (hash >> 40) % TRIES) % PLACES], hash, args, form);
    return NULL;
}
