/* capture.c - which streams are being captured into a graph, and what spoils that, as CUDA has it: while a capture in
 * the global mode is under way, no thread may ask for memory, for an event or for whether one is reached, unless it has
 * said that its calls have nothing to do with graphs (relaxed); the capture is invalid then, and the call refused.
 * A captured stream cannot wait for what was recorded outside. No graph is made. See stub.h.
 */
#include "stub.h"

#include <pthread.h>
#include <string.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED, CAPTURES = 8 };
enum { UNSUPPORTED = 900, INVALIDATED = 901, ISOLATION = 905 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *stream; /* NULL: none */
    int mode;
    pthread_t thread;
    bool invalid;
} captures[CAPTURES];
static _Thread_local int mode_of_thread;

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = mode_of_thread;
    stub_called("cuThreadExchangeStreamCaptureMode");
    mode_of_thread = *mode;
    *mode = before;
    return 0;
}

static int find(const void *stream)
{
    int i = 0;
    while (i < CAPTURES && captures[i].stream != stream)
        i++;
    return i;
}

EXPORT int cuStreamBeginCapture_v2(void *stream, int mode)
{
    int code = 1;
    pthread_mutex_lock(&lock);
    int i = find(NULL);
    if (i < CAPTURES && find(stream) == CAPTURES) {
        captures[i].stream = stream;
        captures[i].mode = mode;
        captures[i].thread = pthread_self();
        captures[i].invalid = false;
        code = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuStreamEndCapture(void *stream, void **graph)
{
    int code = 1;
    pthread_mutex_lock(&lock);
    int i = find(stream);
    if (i < CAPTURES) {
        code = captures[i].invalid ? INVALIDATED : 0;
        captures[i].stream = NULL;
    }
    pthread_mutex_unlock(&lock);
    *graph = NULL;
    return code;
}

int stub_unsafe(void)
{
    int code = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES && mode_of_thread != RELAXED; i++) {
        bool mine = captures[i].stream && pthread_equal(captures[i].thread, pthread_self());
        if (captures[i].stream && ((mine && captures[i].mode != RELAXED) ||
                                   (!mine && captures[i].mode == GLOBAL && mode_of_thread == GLOBAL))) {
            captures[i].invalid = true;
            code = UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int stub_isolated(const void *stream)
{
    pthread_mutex_lock(&lock);
    int i = stream ? find(stream) : CAPTURES;
    if (i < CAPTURES)
        captures[i].invalid = true;
    pthread_mutex_unlock(&lock);
    return i < CAPTURES ? ISOLATION : 0;
}
