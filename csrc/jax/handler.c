/* handler.c - how does a compiled program of JAX make a collective?
 *
 * One call of XLA's FFI is one exchange of a whole tree: arguments are its leaves and a token, results as many and a
 * token, by which calls stay in the order of the program. The library is compiled against nothing of JAX's (xla.h) and
 * linked to nothing: Python hands over the core's functions.
 *
 * The memory is XLA's and is gone when the handler returns, so it returns only when the core is done with it: a rank
 * that gives up (Ctrl-C, a limit of time) ends the job first. It runs in a thread of XLA's, without Python.
 */
#include "../base/codes.h"
#include "../hvdlite.h"
#include "xla.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PUBLIC __attribute__((visibility("default")))

enum { WAIT_MS = 50, LEAVES_MAX = 16384, DTYPES = 64, SETS = 256 };

/* The core's functions, in the order in which Python hands them over. */
static struct {
    int (*submit_many)(const struct hvd_request *const *, int, struct hvd_owner *, char *, size_t);
    int (*wait_many)(struct hvd_owner *, int, int, char *, size_t);
    int (*finish)(struct hvd_owner *, int64_t, char *, size_t);
    int (*wait)(int64_t, int, char *, size_t);
    int (*result)(int64_t, struct hvd_output *);
    int (*forget)(int64_t);
    int (*abort)(int, int, const char *);
    int (*rank)(void);
    int (*size)(void);
    int64_t (*step)(int, int64_t);
    int (*dtype_bytes)(int);
} core;
static int dtype_of[DTYPES]; /* the core's number of XLA's, -1: none */
static _Atomic int64_t limit_ms, calls;
static _Atomic int set_serial[SETS]; /* which process set has a number now, as it was when a program was traced */
static _Atomic int whose_steps;      /* the tree whose exchange is a training step; 0: not known yet */
static volatile sig_atomic_t interrupts;

/* Python, once: the core's functions, and the core's number of XLA's dtype n. 0, or -1: of different versions. */
PUBLIC int hvd_jax_attach(void *const *functions, int count, const int *dtypes, int dtypes_count)
{
    if (count * sizeof(void *) != sizeof core || dtypes_count != DTYPES)
        return -1;
    memcpy(dtype_of, dtypes, sizeof dtype_of);
    memcpy(&core, functions, sizeof core);
    return 0;
}

/* A life of the job begins, in which a call waits so long at most; 0: any time. */
PUBLIC void hvd_jax_limit(double seconds)
{
    limit_ms = (int64_t)(seconds * 1000);
    whose_steps = 0;
}

/* A number of a process set means this one from now on; 0: none. */
PUBLIC void hvd_jax_set(int number, int serial)
{
    set_serial[number & (SETS - 1)] = serial;
}

/* For tests: how many calls there were. */
PUBLIC int64_t hvd_jax_calls(void)
{
    return calls;
}

/* Python's handler of SIGINT only sets a flag, at which the main thread does not look while it waits in XLA. */
static struct sigaction before;
static void on_interrupt(int number, siginfo_t *info, void *context)
{
    interrupts++;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else
        before.sa_handler(number);
}

/* Chains ours before a handler of SIGINT, unless it is there. */
PUBLIC void hvd_jax_watch(void)
{
    struct sigaction now, ours = {.sa_sigaction = on_interrupt, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (sigaction(SIGINT, NULL, &now) || now.sa_sigaction == on_interrupt || now.sa_handler == SIG_DFL ||
        now.sa_handler == SIG_IGN)
        return;
    before = now;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGINT, &ours, NULL);
}

static void *fail(const struct frame *frame, int code, const char *text)
{
    /* Python makes an error of this class of it. */
    static const char *const classes[] = {
        [-HVD_EINVAL] = "HvdArgumentError", [-HVD_ETYPE] = "HvdArgumentError",
        [-HVD_EDUP] = "HvdArgumentError",   [-HVD_EMISMATCH] = "HvdMismatchError",
        [-HVD_EPEER] = "HvdPeerLostError",  [-HVD_ETIMEOUT] = "HvdTimeoutError",
        [-HVD_ENOMEM] = "MemoryError",      [-HVD_ESTATE] = "HvdNotInitializedError",
        [-HVD_EFORK] = "HvdForkError",      [-HVD_ENAN] = "HvdNotFiniteError",
    };
    const char *name = -code < (int)(sizeof classes / sizeof *classes) ? classes[-code] : NULL;
    char whole[HVD_TEXT_MAX + 64];
    snprintf(whole, sizeof whole, "%s: %s", name ? name : "HorovodInternalError", text);
    bool invalid = code == HVD_EINVAL || code == HVD_ETYPE || code == HVD_EMISMATCH || code == HVD_EDUP;
    struct error_args args = {sizeof args, NULL, whole, invalid ? INVALID : ABORTED};
    return frame->api->error(&args);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* What Python has compiled into a call (hvdlite/jax/graph.py). */
struct terms {
    int kind, op, root, set, serial, size;
    int leaves, hash; /* of the whole tree; leaves 0: it is not compared here */
    int sum;          /* the op of that comparison */
    int step;         /* whether it is a training step */
    double prescale, postscale;
    const struct span *names; /* a line for each leaf, then one for the comparison */
};

struct call {
    const struct frame *frame;
    struct terms terms;
    int leaves, count; /* count: requests, one more if the tree is compared */
    bool ragged;
    int interrupts; /* before it began: what a script has caught then is no reason to give up */
    int64_t since;
    struct hvd_request *requests;
    const struct hvd_request **ask;
    struct hvd_owner *owners;
    char *names;             /* each with its end */
    char text[HVD_TEXT_MAX]; /* what is wrong */
};

static void read_terms(const struct frame *frame, struct terms *terms)
{
    terms->kind = number(frame, "kind"), terms->op = number(frame, "op"), terms->root = number(frame, "root");
    terms->set = number(frame, "set") & (SETS - 1), terms->serial = number(frame, "serial");
    terms->size = number(frame, "size"), terms->leaves = number(frame, "leaves"), terms->hash = number(frame, "hash");
    terms->sum = number(frame, "sum"), terms->step = number(frame, "step");
    terms->prescale = real(frame, "pre"), terms->postscale = real(frame, "post");
    terms->names = attribute(frame, "names", STRING);
}

/* May this call be made? */
static int check(struct call *call)
{
    const struct terms *terms = &call->terms;
    bool of_size = terms->kind != HVD_ALLREDUCE && terms->kind != HVD_BROADCAST;
    if (set_serial[terms->set] != terms->serial)
        snprintf(call->text, sizeof call->text,
                 "the process set of '%.200s' was removed after this function was compiled: call jax.clear_caches(), "
                 "and it is compiled for the sets that there are" HVD_ENDS(213),
                 call->names);
    else if (!terms->set && of_size && core.size() != terms->size)
        snprintf(call->text, sizeof call->text,
                 "'%.200s' was compiled for %d ranks, and the job has %d: call jax.clear_caches()" HVD_ENDS(268),
                 call->names, terms->size, core.size());
    else
        return HVD_OK;
    return HVD_EINVAL;
}

static int read_leaf(struct call *call, int i)
{
    const struct buffer *in = call->frame->arguments.at[i], *out = call->frame->results.at[i];
    struct hvd_request *one = &call->requests[i];
    one->dtype = in->dtype < 0 || in->dtype >= DTYPES ? -1 : dtype_of[in->dtype];
    if (one->dtype < 0) {
        snprintf(call->text, sizeof call->text,
                 "'%.200s': XLA's element type %d is not supported: cast it" HVD_ENDS(202), one->name, in->dtype);
        return HVD_ETYPE;
    }
    one->root = call->terms.root, one->prescale = call->terms.prescale, one->postscale = call->terms.postscale;
    one->input = in->data, one->output = out->data, one->even = call->ragged;
    one->output_bytes = core.dtype_bytes(one->dtype);
    for (int d = 0; d < out->rank; d++)
        one->output_bytes *= out->dims[d];
    if (in->rank <= HVD_DIMS_MAX) {
        one->ndim = (int)in->rank;
        memcpy(one->dims, in->dims, (size_t)in->rank * sizeof *in->dims);
        return HVD_OK;
    }
    one->ndim = 1, one->dims[0] = 1; /* dimensions are only compared */
    for (int d = 0; d < in->rank; d++)
        one->dims[0] *= in->dims[d];
    return HVD_OK;
}

/* A request for each leaf, and one without elements whose shape says what leaves the whole tree has. */
static int read_tree(struct call *call)
{
    const struct terms *terms = &call->terms;
    memcpy(call->names, terms->names->text, terms->names->bytes);
    const char *name = call->names;
    for (char *at = call->names; at < call->names + terms->names->bytes; at++)
        if (*at == '\n')
            *at = 0;
    int code = check(call);
    for (int i = 0; i < call->count && code == HVD_OK; i++) {
        struct hvd_request *one = &call->requests[i];
        call->ask[i] = one;
        one->name = name, one->kind = terms->kind, one->op = terms->op, one->process_set = terms->set;
        one->quiet = HVD_QUIET; /* it is waited for at once */
        if (i < call->leaves)
            code = read_leaf(call, i);
        if (name + strlen(name) < call->names + terms->names->bytes)
            name += strlen(name) + 1;
    }
    if (call->count > call->leaves) {
        struct hvd_request *tree = &call->requests[call->leaves];
        tree->kind = HVD_ALLREDUCE, tree->op = terms->sum, tree->prescale = tree->postscale = 1.0;
        tree->ndim = 3, tree->dims[0] = terms->leaves, tree->dims[1] = terms->hash;
    }
    return code;
}

/* How the exchange ended, or HVD_AGAIN. */
static int tree_differs(struct call *call, int64_t wait_ns, char *text, size_t text_bytes)
{
    if (call->count == call->leaves)
        return HVD_OK;
    char found[HVD_TEXT_MAX];
    int code = core.finish(&call->owners[call->leaves], wait_ns, found, sizeof found);
    if (code == HVD_EMISMATCH) {
        char *ending = strstr(found, " [HVD");
        if (ending)
            *ending = 0;
        snprintf(text, text_bytes,
                 "the ranks gave trees of different leaves; None is no leaf. Give the same structure on all ranks. "
                 "(%.1500s Numbers are of leaves, and of their names.)" HVD_ENDS(301),
                 found);
    } else if (code < 0)
        snprintf(text, text_bytes, "%s", found);
    return code;
}

/* It is taking long. A rank that gives up ends the job, and then all handles end. */
static void look_around(struct call *call, const char *what)
{
    char why[HVD_TEXT_MAX];
    int code = HVD_OK;
    if (interrupts != call->interrupts) { /* since it began: what a script has caught before is no reason */
        snprintf(why, sizeof why,
                 "rank %d was interrupted (Ctrl-C) while a compiled function waited for '%.200s'" HVD_ENDS(459),
                 core.rank(), what);
        code = HVD_EPEER;
    } else if (limit_ms && now_ms() - call->since > limit_ms) {
        snprintf(why, sizeof why, "rank %d has waited %lld ms for '%.200s' in a compiled function" HVD_ENDS(551),
                 core.rank(), (long long)(now_ms() - call->since), what);
        code = HVD_ETIMEOUT;
    } else {
        int found = tree_differs(call, 0, why, sizeof why);
        code = found == HVD_EMISMATCH ? found : HVD_OK;
    }
    if (code != HVD_OK)
        core.abort(core.rank(), code, why);
}

/* allgather and alltoall: the result lies where it shall unless a rank has joined, which gives no rows. */
static int fetch(struct call *call, int i, char *text, size_t text_bytes)
{
    const struct hvd_request *one = &call->requests[i];
    struct hvd_output found;
    int code = core.result(call->owners[i].handle, &found);
    if (code == HVD_OK && found.bytes != one->output_bytes) {
        snprintf(
            text, text_bytes,
            "'%.200s': %lld bytes came where the compiled program has room for %lld: inside jit all ranks give the "
            "same number of rows, and none has joined" HVD_ENDS(268),
            one->name, (long long)found.bytes, (long long)one->output_bytes);
        return HVD_EMISMATCH;
    }
    if (code == HVD_OK && found.data != one->output)
        memcpy(one->output, found.data, (size_t)found.bytes);
    return code;
}

static int exchange(struct call *call)
{
    char text[HVD_TEXT_MAX] = "";
    int taken = core.submit_many(call->ask, call->count, call->owners, call->text, sizeof call->text);
    int code = taken < 0 ? taken : taken < call->count ? HVD_EINVAL : HVD_OK, end = HVD_OK;
    int leaves = taken < 0 ? 0 : taken < call->leaves ? taken : call->leaves;
    for (int i = 0; i < (call->ragged ? leaves : leaves > 0); i++) {
        do {
            end = call->ragged ? core.wait(call->owners[i].handle, WAIT_MS, text, sizeof text)
                               : core.wait_many(call->owners, leaves, WAIT_MS, text, sizeof text);
            if (end == HVD_AGAIN)
                look_around(call, call->requests[i].name);
        } while (end == HVD_AGAIN);
        if (call->ragged && end == HVD_OK)
            end = fetch(call, i, text, sizeof text);
        if (call->ragged)
            core.forget(call->owners[i].handle);
        if (code == HVD_OK && (code = end) != HVD_OK)
            memcpy(call->text, text, sizeof text);
    }
    if (taken > call->leaves) {
        while ((end = tree_differs(call, (int64_t)WAIT_MS * 1000000, text, sizeof text)) == HVD_AGAIN)
            look_around(call, call->requests[call->leaves].name);
        if (end == HVD_EMISMATCH) /* a rank waits for a leaf that others have not, and cannot do without it */
            core.abort(core.rank(), end, text);
        if (code == HVD_OK && (code = end) != HVD_OK)
            memcpy(call->text, text, sizeof text);
    }
    return code;
}

static int run(struct call *call)
{
    size_t n = (size_t)call->count;
    call->requests = calloc(n, sizeof *call->requests), call->ask = calloc(n, sizeof *call->ask);
    call->owners = calloc(n, sizeof *call->owners), call->names = calloc(call->terms.names->bytes + 1, 1);
    if (!call->requests || !call->ask || !call->owners || !call->names) {
        snprintf(call->text, sizeof call->text, "no memory for the names of %d leaves" HVD_ENDS(951), call->leaves);
        return HVD_ENOMEM;
    }
    int code = read_tree(call);
    return code == HVD_OK ? exchange(call) : code;
}

/* Does XLA ask which API this is made for? The lowest that has all that is read. */
static bool tells(const struct frame *frame)
{
    for (struct extension *ext = frame->ext; ext; ext = ext->next)
        if (ext->type == METADATA) {
            struct metadata *metadata = ((struct metadata_extension *)ext)->metadata;
            metadata->version.major = 0, metadata->version.minor = 1, metadata->traits = 0;
            return true;
        }
    return false;
}

/* Stands before and after each call of the handler, with a token of XLA's; see hvdlite/jax/order.py. */
PUBLIC void *hvd_jax_order(const struct frame *frame)
{
    tells(frame);
    return NULL;
}

/* The same in the interface of XLA that has tokens in all versions. */
PUBLIC void hvd_jax_old_order(void *out, const void **in)
{
    (void)out, (void)in;
}

/* The handler. */
PUBLIC void *hvd_jax_call(const struct frame *frame)
{
    if (tells(frame))
        return NULL;
    struct call call = {.frame = frame, .since = now_ms(), .interrupts = interrupts};
    int64_t leaves = frame->arguments.count - 1;
    if (frame->size >= sizeof *frame)
        read_terms(frame, &call.terms);
    if (!call.terms.names || leaves < 1 || leaves > LEAVES_MAX || frame->results.count != leaves + 1)
        return fail(frame, HVD_EINTERNAL, "hvdlite.jax: this version of XLA calls in an unknown way" HVD_ENDS(901));
    if (core.rank() < 0)
        return fail(frame, HVD_ESTATE,
                    "hvdlite has not been initialized: call hvd.init() before a compiled function runs" HVD_ENDS(101));
    call.leaves = (int)leaves, call.count = call.leaves + (call.terms.leaves > 0);
    call.ragged = call.terms.kind == HVD_ALLGATHER || call.terms.kind == HVD_ALLTOALL;
    int none = 0;
    if (call.terms.step &&
        (atomic_compare_exchange_strong(&whose_steps, &none, call.terms.hash) || none == call.terms.hash))
        core.step(1, 0);
    int code = run(&call);
    calls++;
    void *error = code == HVD_OK ? NULL : fail(frame, code, call.text);
    free(call.requests), free(call.ask), free(call.owners), free(call.names);
    return error;
}
