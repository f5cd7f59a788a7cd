/* capture.c - is a stream being captured into a graph, and what spoils that, as CUDA has it: while a capture in the
 * global mode is under way, no thread may ask for memory, for an event or for whether one is reached, unless it has
 * said that its calls have nothing to do with graphs (relaxed); the capture is invalid then, and the call refused.
 * There is one capture at a time, and no graph is made. See stub.h.
 */
#include "stub.h"

#include <stdatomic.h>

enum { RELAXED = 2, UNSUPPORTED = 900, INVALIDATED = 901 };

static void *_Atomic captured;
static _Atomic bool invalid;
static _Thread_local int mode_of_thread;

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = mode_of_thread;
    stub_called("cuThreadExchangeStreamCaptureMode");
    mode_of_thread = *mode;
    *mode = before;
    return 0;
}

EXPORT int cuStreamBeginCapture_v2(void *stream, int mode)
{
    atomic_store(&invalid, false);
    return mode != 0 || atomic_exchange(&captured, stream);
}

EXPORT int cuStreamEndCapture(void *stream, void **graph)
{
    *graph = NULL;
    if (atomic_exchange(&captured, NULL) != stream)
        return 1;
    return atomic_load(&invalid) ? INVALIDATED : 0;
}

int stub_unsafe(void)
{
    if (!atomic_load(&captured) || mode_of_thread == RELAXED)
        return 0;
    atomic_store(&invalid, true);
    return UNSUPPORTED;
}
