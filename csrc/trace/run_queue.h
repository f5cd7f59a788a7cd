/* run_queue.h - when were the items agreed that are not finished?
 *
 * Those of one process set, oldest first: they are finished in this order. Many are agreed at once, so the queue holds
 * runs, so many items of one time; a record that tells of a million costs no more memory than one of two.
 */
#ifndef HVD_TRACE_RUN_QUEUE_H
#define HVD_TRACE_RUN_QUEUE_H

#include "../base/base.h"

struct hvd_agreed_run {
    uint64_t t_ns, items;
};

struct hvd_queue {
    struct hvd_agreed_run *run;
    uint32_t first, count, room; /* runs from `first` on, `count` of them */
    uint64_t items;
};

/* `items` are agreed now, when `before` were waiting. Where events are missing, that differs from what the queue holds:
 * then the oldest are forgotten, or are said to have been agreed now. False: no memory. */
bool hvd_queue_agreed(struct hvd_queue *queue, uint64_t before, uint64_t t_ns, uint64_t items);
/* When the oldest was agreed, which is finished now; `otherwise` if it is not known. */
uint64_t hvd_queue_take(struct hvd_queue *queue, uint64_t otherwise);
void hvd_queue_close(struct hvd_queue *queue);

#endif
