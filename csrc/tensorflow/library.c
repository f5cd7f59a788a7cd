/* library.c - how does a library that was compiled against no TensorFlow become a part of the one in this process?
 *
 * tf.load_op_library opens us, and our constructor runs: it finds TensorFlow's C functions where they are loaded
 * already (RTLD_NOLOAD: we never bring one in), and registers ops and kernels. A function that is missing leaves
 * everything unregistered, and hvd_tf_attach says which.
 *
 * One thing is not in the C interface. An asynchronous kernel gets `done`, the address of a std::function<void()> that
 * its caller destroys on return, and is to call it later. So it must be moved out, which in libstdc++ is a copy of its
 * 32 bytes and a cleared source: what its move constructor does. Whether that is the layout is found out here, before
 * anybody relies on it: the library is libstdc++, and TensorFlow calls a function that we lay out ourselves as we
 * believe. If not, `hvd_tf_moves` is false and Finish blocks its thread instead, which is slower and right.
 */
#include "tensorflow.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

struct hvd_tf_functions hvd_tf;
struct hvd_tf_core hvd_tf_core;
int hvd_tf_dtype[TF_DTYPES];
bool hvd_tf_moves;
static const char *trouble = "TensorFlow has not loaded this library" HVD_ENDS(808);
static char trouble_text[256];

static void probe_invoke(unsigned char *functor)
{
    functor[15] = 1; /* the functor is the first thing in it, and may be written */
}

static bool probe_manage(void *into, const void *from, int what)
{
    (void)into, (void)from, (void)what;
    return false;
}

static bool layout_is_known(void *framework)
{
    if (!dlsym(framework, "_ZSt25__throw_bad_function_callv")) /* libstdc++'s, and no other library's */
        return false;
    struct {
        struct hvd_tf_done done;
        unsigned char rest[96]; /* zeros where another layout might look for something to call */
    } probe;
    memset(&probe, 0, sizeof probe);
    void (*invoke)(unsigned char *) = probe_invoke;
    memcpy(&probe.done.invoke, &invoke, sizeof invoke);
    probe.done.manage = probe_manage;
    hvd_tf.TF_RunAsyncOpKernelDoneCallback((struct tf_done *)&probe.done);
    return probe.done.functor[15] == 1;
}

static bool look_up(void *framework)
{
#define HVD_TF_LOOK_UP(result, name, arguments)                                              \
    *(void **)&hvd_tf.name = dlsym(framework, #name);                                        \
    if (!hvd_tf.name) {                                                                      \
        trouble = "this TensorFlow has no function " #name " (2.16 or newer)" HVD_ENDS(808); \
        return false;                                                                        \
    }
    HVD_TF_FUNCTIONS(HVD_TF_LOOK_UP)
    return true;
}

static void has_failed(struct tf_status *status)
{
    if (hvd_tf.TF_GetCode(status)) {
        snprintf(trouble_text, sizeof trouble_text, "%.200s" HVD_ENDS(808), hvd_tf.TF_Message(status));
        trouble = trouble_text;
    }
    hvd_tf.TF_DeleteStatus(status);
}

__attribute__((constructor)) static void begin(void)
{
    static const char *const names[] = {"libtensorflow_framework.so.2", "libtensorflow_framework.so.3",
                                        "libtensorflow_framework.so", NULL};
    void *framework = NULL;
    for (int i = 0; names[i] && !framework; i++)
        framework = dlopen(names[i], RTLD_NOLOAD | RTLD_LAZY);
    if (!framework) {
        trouble = "no libtensorflow_framework is loaded in this process" HVD_ENDS(808);
        return;
    }
    if (!look_up(framework))
        return;
    struct tf_status *status = hvd_tf.TF_NewStatus();
    hvd_tf_register(status);
    trouble = NULL;
    has_failed(status);
    hvd_tf_moves = !trouble && layout_is_known(framework);
}

/* Python, once: the core's functions in the order of struct hvd_tf_core, and dtypes[n]: the core's number of
 * TensorFlow's dtype n. NULL, or what is wrong. */
PUBLIC const char *hvd_tf_attach(void *const *functions, int count, const int *dtypes, int dtypes_count)
{
    static bool attached;
    if (count * sizeof(void *) != sizeof hvd_tf_core || dtypes_count != TF_DTYPES)
        return "this library and the Python around it are of different versions: install hvdlite again" HVD_ENDS(808);
    if (!trouble && !attached) {
        struct tf_status *status = hvd_tf.TF_NewStatus();
        hvd_tf_register_gpu(status);
        has_failed(status);
    }
    if (!trouble) {
        attached = true;
        memcpy(hvd_tf_dtype, dtypes, sizeof hvd_tf_dtype);
        memcpy(&hvd_tf_core, functions, sizeof hvd_tf_core);
    }
    return trouble;
}

/* Whether Finish waits without a thread. `block` 1: from now on it does not, for tests. */
PUBLIC int hvd_tf_asynchronous(int block)
{
    if (block)
        hvd_tf_moves = false;
    return hvd_tf_moves;
}

/* For tests: see hvd_tf_flights. */
PUBLIC int64_t hvd_tf_count(int which)
{
    return hvd_tf_flights(which);
}

/* How many seconds a node waits for a collective at most before the job fails; 0: any time. */
PUBLIC void hvd_tf_bound(double seconds)
{
    hvd_tf_flights_bound(seconds);
}
