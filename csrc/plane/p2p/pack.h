/* pack.h - values between the tensors of a bucket and the one buffer that a run works on.
 *
 * Who copies what, and when? Most algorithms begin in the middle of the buffer, so all of it is packed before a run and
 * unpacked after it. Where a run sends and completes the buffer from its beginning to its end (hvd_p2p_in_order), the
 * run asks for it piece by piece: so the wire waits for no copy of a whole bucket. Nothing is copied where the buffer
 * is the tensor itself.
 */
#ifndef HVD_PLANE_P2P_PACK_H
#define HVD_PLANE_P2P_PACK_H

#include "../shm/scatter_list.h"
#include "run.h"

struct hvd_p2p_bucket {
    const struct hvd_work *work;
    const struct hvd_p2p_run *run;
    struct hvd_scale scale; /* if `scaled`: what the run leaves to be applied */
    bool scaled;
    uint64_t packed, unpacked; /* elements so far; zero before the run, as are the cursors */
    struct hvd_shm_cursor in, out;
};

/* This rank's values into the buffer, where the algorithm expects them; the result into the tensors. */
void hvd_p2p_pack(struct hvd_p2p_bucket *bucket);
void hvd_p2p_unpack(struct hvd_p2p_bucket *bucket);
/* So many elements from the beginning, of which some may have been done before. Not for an allgather's result. */
void hvd_p2p_pack_until(struct hvd_p2p_bucket *bucket, uint64_t elements);
void hvd_p2p_unpack_until(struct hvd_p2p_bucket *bucket, uint64_t elements);

#endif
