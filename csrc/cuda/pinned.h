/* pinned.h - memory of the CPU's that devices copy to and from by themselves, as large as was needed so far.
 *
 * For whoever carries tensors down from a device and up again: engine/device/host_staging.c. One owner, with the
 * device current; only the count may be asked by any thread.
 */
#ifndef HVD_CUDA_PINNED_H
#define HVD_CUDA_PINNED_H

#include "cuda.h"

#define HVD_PINNED_OUTGROWN_MAX 64 /* each is larger than the one before by half at least */

struct hvd_pinned {
    unsigned char *at; /* NULL: there is none yet */
    size_t bytes;
    struct {
        void *at;
        size_t bytes;
    } outgrown[HVD_PINNED_OUTGROWN_MAX];
    int outgrown_count;
};

/* At least so many bytes at `at`, unless there are. What was there before stays as it is: a device may be at it. */
int hvd_pinned_reserve(const struct hvd_cuda *cuda, struct hvd_pinned *pinned, size_t bytes, struct hvd_error *error);
/* All of it. Waits for the device, as CUDA does. */
void hvd_pinned_free(const struct hvd_cuda *cuda, struct hvd_pinned *pinned);
uint64_t hvd_pinned_bytes(void); /* of all owners in this process */

#endif
