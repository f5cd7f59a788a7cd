/* values.c - where do the values of a work lie while MPI has them?
 *
 * MPI wants contiguous memory. A tensor that travels alone has it: it is worked on where its result is wanted. Several
 * tensors of one bucket, and a rank that wants no result, use the plane's buffer, which grows to the largest work seen
 * and is packed here. A rank that has joined packs what changes nothing.
 */
#include "state.h"

#include <stdlib.h>
#include <string.h>

int hvd_mpi_reserve(struct hvd_mpi_plane *plane, unsigned char **area, size_t *has, uint64_t bytes,
                    struct hvd_error *error)
{
    if (bytes <= *has)
        return HVD_OK;
    free(*area);
    *has = 0;
    *area = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE));
    if (!*area)
        return hvd_fail_rank(error, HVD_ENOMEM, plane->posts.rank,
                             HVD951 "rank %d: no memory for %llu bytes of a bucket", plane->posts.rank,
                             (unsigned long long)bytes);
    *has = bytes;
    return HVD_OK;
}

void hvd_mpi_pack(const struct hvd_mpi_plane *plane, const struct hvd_work *work, unsigned char *to)
{
    for (uint32_t i = 0; i < work->pieces; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        size_t bytes = piece->count * plane->element_bytes;
        if (bytes && !piece->in)
            for (uint64_t k = 0; k < piece->count; k++) /* joined */
                hvd_op_identity(plane->scale.op, work->dtype, to + k * plane->element_bytes);
        else if (bytes && piece->in != to)
            memmove(to, piece->in, bytes);
        to += bytes;
    }
}

int hvd_mpi_choose_values(struct hvd_mpi_plane *plane, const struct hvd_work *work, uint64_t bytes,
                          struct hvd_error *error)
{
    int code = HVD_OK;
    if (work->pieces == 1 && work->piece[0].out) {
        plane->values = work->piece[0].out;
    } else {
        code = hvd_mpi_reserve(plane, &plane->buffer, &plane->buffer_bytes, bytes, error);
        plane->values = plane->buffer;
    }
    return code;
}
