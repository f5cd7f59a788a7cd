/* crew.h - ranks for engine tests: threads of this process, or forked processes.
 *
 * A test's body reads as one rank's program. Threads meet through boot_memory.h, processes through a shared page
 * with a barrier. Both worlds are bounded by an alarm that ends the whole test with a message.
 */
#ifndef HVD_TEST_CREW_H
#define HVD_TEST_CREW_H

#include "engine/engine.h"
#include "kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

#define CHECK_CODE(got, want, text)                                                                                 \
    do {                                                                                                            \
        int crew_got = (int)(got);                                                                                  \
        if (crew_got != (want)) {                                                                                   \
            fprintf(stderr, "%s:%d: %s gave %d, not %d: %s\n", __FILE__, __LINE__, #got, crew_got, (want), (text)); \
            abort();                                                                                                \
        }                                                                                                           \
    } while (0)

/* The i-th kind of world from here on; its name, NULL past the end. 0: ranks of one host, in shared memory. */
const char *crew_world(int i);
/* The first kind with several hosts: of one rank each; then of 2, 1 and the rest, with signed votes; then two with
 * ranks by turns and all signed. */
enum { CREW_HOSTS = 2 };
extern int crew_peer_timeout_ms;
extern int crew_store_fd[HVD_LOCAL_MAX];                /* a rank's connection to a store; 0: none */
extern int crew_nan_guard;                              /* HVD_GUARD_* */
extern int crew_warn_ms, crew_limit_ms, crew_report_fd; /* of collectives that wait; 0 (fd: -1): none */
extern uint64_t crew_alpha_ns; /* of a message between hosts, as if it were so; 0: it is measured */

typedef void crew_body(struct hvd_engine *engine, int rank, int size);

/* End the process with a message if it is still there after so many seconds. */
void crew_deadline(int seconds);
struct hvd_options crew_options(int rank, int size);
/* hvd_engine_open with the options and streams of this kind of world; life: 0, and one more each time in a process. */
int crew_open(int rank, int size, int life, hvd_boot_allgather *allgather, void *self, bool in_process,
              struct hvd_engine **engine, struct hvd_error *error);
/* Run the body on `size` threads, each with an engine of its own, then leave and stop all. */
void crew_threads(int size, crew_body *body);
/* Fork `size` processes that open an engine and run the body; then leave, stop, exit 0. Fills status[rank] as
 * waitpid does. `before` (may be NULL) runs in the child before the engine is opened. */
void crew_processes(int size, crew_body *body, void (*before)(int rank), int *status);
/* In a process crew: the outcome of opening the engine is given to the body as engine == NULL on failure. */
extern struct hvd_error crew_open_error;
extern pid_t crew_pid[HVD_LOCAL_MAX];
extern int crew_shared_memory; /* as in hvd_options */
/* A barrier of all ranks, each once at a time, that does not go through the engine. */
void crew_meet(void);

/* hvd_engine_set_open with the streams that this kind of world has; of all ranks: the next life and, returned, the
 * lowest number that is free. */
int crew_set_open(struct hvd_engine *engine, const int *ranks, int count, struct hvd_error *error);
int crew_set_open_as(struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                     struct hvd_error *error);

/* Shorthands of a rank's program. sum: an allreduce of float32 in place. */
struct hvd_request crew_sum(const char *name, float *memory, int64_t count);
int64_t crew_begin(struct hvd_engine *engine, const struct hvd_request *request); /* ends the test if it is refused */
/* Waits up to 20 s and forgets nothing; on a device until the collective lies on a stream. The code, or HVD_AGAIN. */
int crew_wait_only(struct hvd_engine *engine, int64_t handle, char *text);
void crew_barrier(struct hvd_engine *engine);
int64_t crew_submit(struct hvd_engine *engine, int kind, const char *name, int op, int dtype, const void *in, void *out,
                    int64_t count, struct hvd_error *error);
int crew_wait(struct hvd_engine *engine, int64_t handle,
              char *text); /* waits up to 20 s, forgets on success or failure */

#endif
