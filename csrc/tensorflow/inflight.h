/* inflight.h - what inflight.c and wait.c share: the flights that are under way, and the steps of one.
 *
 * A flight is in one of two queues from its start until the thread of ours takes it out, since it has ended: `flying`,
 * submitted or about to be, or `held`, because one of its name is flying. Nodes put flights in, and nobody but the
 * thread takes any out; so it may walk a queue with the lock held from one flight to the next only.
 */
#ifndef HVD_TENSORFLOW_INFLIGHT_H
#define HVD_TENSORFLOW_INFLIGHT_H

#include "tensorflow.h"

#include <pthread.h>
#include <stdatomic.h>

struct hvd_tf_queue {
    struct hvd_tf_flight *first, **end;
};

/* The lock guards the queues, and of flights `waiters` and `since`; nothing of TensorFlow's is called under
 * it. */
extern struct hvd_tf_air {
    pthread_mutex_t lock;
    pthread_cond_t news, ended;
    struct hvd_tf_queue flying, held; /* held: their names are in flight */
    _Atomic int64_t limit_ms;         /* of a wait; 0: none */
} hvd_tf_air;

/* Under the lock. */
void hvd_tf_append(struct hvd_tf_queue *queue, struct hvd_tf_flight *flight);
/* Not under the lock: the core may take its time. */
void hvd_tf_submit(struct hvd_tf_flight *flight);
void hvd_tf_let_go(struct tf_tensor **tensor);
void hvd_tf_recycle(struct hvd_tf_flight *flight);
/* It has ended, and is in no queue: tells whoever waits. */
void hvd_tf_land(struct hvd_tf_flight *flight);
void *hvd_tf_serve(void *nothing);
int64_t hvd_tf_now_ms(void);

#endif
