/* stub.h - a GPU that is none: libcuda.so.1 and libnccl.so.2 in one library that the tests build.
 *
 * Device memory is the process's own; a stream is a thread that works off what was put there, in order, so that what
 * would deadlock on a GPU deadlocks here, and what is asked too early is not there yet. Collectives really run, between
 * threads or processes, over a file that all ranks map, whose name is in the unique id. Calls
 * that tests ask for are counted, and can be told to fail: stub_fail("ncclAllReduce", 3, 5): the third call from now;
 * the 0th: all, until the code is 0.
 */
#ifndef HVD_TESTS_STUB_H
#define HVD_TESTS_STUB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STUB_DEVICES 8
#define EXPORT       __attribute__((visibility("default")))

/* For tests, by dlsym. The nth call from now on (1: the next) of this function returns this code. */
void stub_fail(const char *name, int nth, int code);
int stub_calls(const char *name); /* so far */
/* For tests that stand in for a framework: a stream, and an event of it that is reached when stub_open_gate is called.
 */
void *stub_gate(void);
void stub_open_gate(void *event);

/* Inside. Counts a call; 0, or the code with which it shall fail. */
int stub_called(const char *name);
#define CALLED(name)                     \
    do {                                 \
        int failed_ = stub_called(name); \
        if (failed_)                     \
            return failed_;              \
    } while (0)
/* Of a call that must not be made while a graph is captured: 0, or the code with which it is refused. */
int stub_unsafe(void);
/* Blocks until everything is done that was put on this device's streams: as freeing memory does. */
void stub_drain(int device);
/* On the stream's thread, after all that was put there before. `run` frees `self`. */
void stub_put(void *stream, void (*run)(void *self), void *self);
void stub_count(const char *name, int more); /* counts something else than a call; stub_calls tells */
bool stub_current(int *device);              /* has this thread a current context, and whose? */

#endif
