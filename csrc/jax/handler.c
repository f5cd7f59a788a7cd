/* handler.c - how does a compiled program of JAX make a collective?
 *
 * One call of XLA's FFI is one exchange of a whole tree: arguments are its leaves and a token, results as many and a
 * token. The token orders the calls of one program, since XLA runs calls without a data dependency in any order, and at
 * once. The library is compiled against nothing of JAX's and linked to nothing: the structs below are XLA's C ABI 0.x,
 * in which each struct begins with its size and newer versions only append. Python hands over the core's functions.
 *
 * The memory is XLA's and is gone when the handler returns, so it returns only when the core is done with it: a rank
 * that gives up (Ctrl-C, a limit of time) ends the job first. It runs in a thread of XLA's, without Python.
 */
#include "../base/codes.h"
#include "../hvdlite.h"

#include <pthread.h>
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

struct extension {
    size_t size;
    int type;
    struct extension *next;
};
struct version {
    size_t size;
    struct extension *ext;
    int major, minor;
};
struct metadata {
    size_t size;
    struct version version;
    uint32_t traits;
};
struct metadata_extension {
    struct extension base;
    struct metadata *metadata;
};
struct buffer {
    size_t size;
    struct extension *ext;
    int dtype;
    void *data;
    int64_t rank, *dims;
};
struct buffers {
    size_t size;
    struct extension *ext;
    int64_t count;
    int *types;
    struct buffer **at;
};
struct span {
    const char *text;
    size_t bytes;
};
struct scalar {
    int dtype;
    void *value;
};
struct attributes {
    size_t size;
    struct extension *ext;
    int64_t count;
    int *types;
    struct span **names;
    void **at;
};
struct error_args {
    size_t size;
    struct extension *ext;
    const char *text;
    int code;
};
struct run_args {
    size_t size;
    struct extension *ext;
    void *context;
    int64_t id;
};
struct api {
    size_t size;
    struct extension *ext;
    struct version version;
    void *internal;
    void *(*error)(struct error_args *);
    void *others[15]; /* newer versions have all of them, and one more: */
    void *(*run_id)(struct run_args *);
};
struct frame {
    size_t size;
    struct extension *ext;
    const struct api *api;
    void *context;
    int stage;
    struct buffers arguments, results;
    struct attributes attributes;
};
_Static_assert(sizeof(struct version) == 24 && sizeof(struct buffer) == 48 && sizeof(struct attributes) == 48,
               "XLA's FFI, 0.x");
_Static_assert(offsetof(struct frame, arguments) == 40 && offsetof(struct api, error) == 48, "XLA's FFI, 0.x");

enum { METADATA = 1, SCALAR = 3, STRING = 4, INVALID = 3, ABORTED = 10 };
enum { WAIT_MS = 50, LEAVES_MAX = 16384, DTYPES = 64, SETS = 256, SEEN = 64 };

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

/* The last program runs in which a call began without a token of another one before it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int64_t run;
    int hash;
    const char *instance;
} seen[SEEN];

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

static void *attribute(const struct frame *frame, const char *name, int type)
{
    const struct attributes *all = &frame->attributes;
    for (int64_t i = 0; i < all->count; i++)
        if (all->types[i] == type && all->names[i]->bytes == strlen(name) &&
            !memcmp(all->names[i]->text, name, strlen(name)))
            return all->at[i];
    return NULL;
}

static int number(const struct frame *frame, const char *name)
{
    const struct scalar *found = attribute(frame, name, SCALAR);
    return found ? *(const int32_t *)found->value : 0;
}

static double real(const struct frame *frame, const char *name)
{
    const struct scalar *found = attribute(frame, name, SCALAR);
    return found ? *(const double *)found->value : 1.0;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

struct call {
    const struct frame *frame;
    int leaves, count; /* count: requests, one more if the tree is compared */
    int kind, interrupts;
    int64_t since;
    struct hvd_request *requests;
    const struct hvd_request **ask;
    struct hvd_owner *owners;
    char (*names)[HVD_NAME_MAX + 1];
    char text[HVD_TEXT_MAX]; /* what is wrong */
};

/* Is this call one of two in one run of a program that have one name, and no token says which comes first? */
static bool in_no_order(const struct frame *frame, const char *instance)
{
    const struct api *api = frame->api;
    if (!number(frame, "first") || api->size < offsetof(struct api, run_id) + sizeof api->run_id)
        return false;
    struct run_args args = {sizeof args, NULL, frame->context, 0};
    if (api->run_id(&args)) /* an error, which is never freed: it does not happen */
        return false;
    int hash = number(frame, "hash"), at = hash & (SEEN - 1);
    pthread_mutex_lock(&lock);
    bool again = seen[at].run == args.id && seen[at].hash == hash && seen[at].instance != instance;
    seen[at].run = args.id, seen[at].hash = hash, seen[at].instance = instance;
    pthread_mutex_unlock(&lock);
    return again;
}

/* May this call be made? */
static int check(struct call *call)
{
    const struct frame *frame = call->frame;
    const struct span *names = attribute(frame, "names", STRING);
    int set = number(frame, "set"), size = number(frame, "size");
    if (set_serial[set & (SETS - 1)] != number(frame, "serial")) {
        snprintf(call->text, sizeof call->text,
                 "the process set of '%.200s' was removed after this function was compiled: call jax.clear_caches(), "
                 "and it is compiled for the sets that there are" HVD_ENDS(213),
                 call->names[0]);
        return HVD_EINVAL;
    }
    if (!set && core.size() != size && call->kind != HVD_ALLREDUCE && call->kind != HVD_BROADCAST) {
        snprintf(call->text, sizeof call->text,
                 "'%.200s' was compiled for %d ranks, and the job has %d: call jax.clear_caches()" HVD_ENDS(268),
                 call->names[0], size, core.size());
        return HVD_EINVAL;
    }
    if (in_no_order(frame, names->text)) {
        snprintf(call->text, sizeof call->text,
                 "'%.200s' is called twice in one compiled program, and which call comes first may differ between "
                 "ranks: remove jax.jit from the inner function, or give the calls different names" HVD_ENDS(268),
                 call->names[0]);
        return HVD_EINVAL;
    }
    return HVD_OK;
}

static int read_leaf(struct call *call, int i)
{
    const struct frame *frame = call->frame;
    const struct buffer *in = frame->arguments.at[i], *out = frame->results.at[i];
    struct hvd_request *one = &call->requests[i];
    bool ragged = call->kind == HVD_ALLGATHER || call->kind == HVD_ALLTOALL;
    one->dtype = in->dtype < 0 || in->dtype >= DTYPES ? -1 : dtype_of[in->dtype];
    if (one->dtype < 0) {
        snprintf(call->text, sizeof call->text,
                 "'%.200s': XLA's element type %d is not supported: cast it" HVD_ENDS(202), call->names[i], in->dtype);
        return HVD_ETYPE;
    }
    one->root = number(frame, "root"), one->prescale = real(frame, "pre"), one->postscale = real(frame, "post");
    one->input = in->data, one->output = out->data, one->even = ragged;
    one->output_bytes = ragged ? core.dtype_bytes(one->dtype) : 0;
    for (int d = 0; d < out->rank; d++)
        one->output_bytes *= out->dims[d];
    one->ndim = in->rank > HVD_DIMS_MAX ? 1 : (int)in->rank; /* of more dimensions only their product is compared */
    one->dims[0] = 1;
    for (int d = 0; d < in->rank; d++)
        one->dims[one->ndim > 1 ? d : 0] = one->ndim > 1 || in->rank == 1 ? in->dims[d] : one->dims[0] * in->dims[d];
    return HVD_OK;
}

/* A request for each leaf, and one without elements whose shape says what leaves the whole tree has. */
static int read_tree(struct call *call)
{
    const struct frame *frame = call->frame;
    const struct span *names = attribute(frame, "names", STRING);
    const char *at = names->text, *end = at + names->bytes;
    for (int i = 0; i < call->count; i++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop ? stop : end;
        snprintf(call->names[i], sizeof call->names[i], "%.*s", (int)(stop - at), at);
        at = stop < end ? stop + 1 : end;
        struct hvd_request *one = &call->requests[i];
        one->name = call->names[i], one->kind = call->kind, one->op = number(frame, "op");
        one->process_set = number(frame, "set"), one->quiet = i + 1 < call->count ? HVD_QUIET : HVD_NOW;
        call->ask[i] = one;
        int code = i < call->leaves ? read_leaf(call, i) : HVD_OK;
        if (code != HVD_OK)
            return code;
    }
    if (call->count > call->leaves) {
        struct hvd_request *tree = &call->requests[call->leaves];
        tree->kind = HVD_ALLREDUCE, tree->op = number(frame, "sum"), tree->prescale = tree->postscale = 1.0;
        tree->ndim = 3, tree->dims[0] = number(frame, "leaves"), tree->dims[1] = number(frame, "hash");
    }
    return check(call);
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
            call->names[i], (long long)found.bytes, (long long)one->output_bytes);
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
    int code = taken < 0 ? taken : taken < call->count ? HVD_EINVAL : HVD_OK, end;
    taken = taken < 0 ? 0 : taken;
    int leaves = taken < call->leaves ? taken : call->leaves;
    bool ragged = call->kind == HVD_ALLGATHER || call->kind == HVD_ALLTOALL;
    for (int i = 0; ragged && i < leaves; i++) {
        while ((end = core.wait(call->owners[i].handle, WAIT_MS, text, sizeof text)) == HVD_AGAIN)
            look_around(call, call->names[i]);
        if (end == HVD_OK)
            end = fetch(call, i, text, sizeof text);
        core.forget(call->owners[i].handle);
        if (code == HVD_OK && (code = end) != HVD_OK)
            memcpy(call->text, text, sizeof text);
    }
    if (!ragged && leaves) {
        while ((end = core.wait_many(call->owners, leaves, WAIT_MS, text, sizeof text)) == HVD_AGAIN)
            look_around(call, call->names[0]);
        if (code == HVD_OK && (code = end) != HVD_OK)
            memcpy(call->text, text, sizeof text);
    }
    if (taken > leaves) {
        while ((end = tree_differs(call, (int64_t)WAIT_MS * 1000000, text, sizeof text)) == HVD_AGAIN)
            look_around(call, call->names[call->leaves]);
        if (end == HVD_EMISMATCH) /* a rank waits for a leaf that others have not, and cannot do without it */
            core.abort(core.rank(), end, text);
        if (code == HVD_OK && (code = end) != HVD_OK)
            memcpy(call->text, text, sizeof text);
    }
    return code;
}

static int run(struct call *call)
{
    size_t n = (size_t)call->count + 1;
    call->requests = calloc(n, sizeof *call->requests), call->ask = calloc(n, sizeof *call->ask);
    call->owners = calloc(n, sizeof *call->owners), call->names = calloc(n, sizeof *call->names);
    if (!call->requests || !call->ask || !call->owners || !call->names) {
        snprintf(call->text, sizeof call->text, "no memory for the names of %d leaves" HVD_ENDS(951), call->leaves);
        return HVD_ENOMEM;
    }
    int code = read_tree(call);
    return code == HVD_OK ? exchange(call) : code;
}

/* The handler. */
PUBLIC void *hvd_jax_call(const struct frame *frame)
{
    for (struct extension *ext = frame->ext; ext; ext = ext->next)
        if (ext->type == METADATA) { /* XLA asks which API this is made for: the lowest that has all that is read */
            struct metadata *metadata = ((struct metadata_extension *)ext)->metadata;
            metadata->version.major = 0, metadata->version.minor = 1, metadata->traits = 0;
            return NULL;
        }
    int64_t leaves = frame->arguments.count - 1;
    if (frame->size < sizeof *frame || leaves < 1 || leaves > LEAVES_MAX || frame->results.count != leaves + 1 ||
        !attribute(frame, "names", STRING))
        return fail(frame, HVD_EINTERNAL, "hvdlite.jax: this version of XLA calls in an unknown way" HVD_ENDS(901));
    if (core.rank() < 0)
        return fail(frame, HVD_ESTATE,
                    "hvdlite has not been initialized: call hvd.init() before a compiled function runs" HVD_ENDS(101));
    struct call call = {.frame = frame, .leaves = (int)leaves, .kind = number(frame, "kind")};
    call.count = call.leaves + (number(frame, "leaves") > 0);
    call.interrupts = interrupts, call.since = now_ms();
    int hash = number(frame, "hash"), none = 0;
    if (number(frame, "step") && (atomic_compare_exchange_strong(&whose_steps, &none, hash) || none == hash))
        core.step(1, 0);
    int code = run(&call);
    calls++;
    void *error = code == HVD_OK ? NULL : fail(frame, code, call.text);
    free(call.requests), free(call.ask), free(call.owners), free(call.names);
    return error;
}
