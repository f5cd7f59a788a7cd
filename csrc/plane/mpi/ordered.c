/* ordered.c - sums in rank order over MPI, which only carries: the same bits as every other plane gives.
 *
 * SLICES: a segment of the bucket is cut into one slice for each rank. An alltoall brings each rank all contributions
 * to its slice, hvd_reduce combines them in rank order with one rounding, an allgather brings the slices to everybody:
 * 2 (n - 1) / n of the bytes per rank, as in the best allreduce, and memory for one segment beside the values.
 * WHOLE, for small buckets: everybody gathers everything in one call and combines it, as flat shared memory does.
 *
 * Segments follow each other; the next one is not under way while this one is combined.
 */
#include "state.h"

#define SEGMENT_BYTES ((uint64_t)16 << 20) /* of a bucket whose slices are combined at a time */

/* Elements of slice `rank` of so many. */
static uint64_t slice(const struct hvd_mpi_plane *plane, uint64_t count, int rank)
{
    uint64_t size = (uint64_t)plane->posts.size;
    return count / size + ((uint64_t)rank < count % size);
}

static uint64_t segment(const struct hvd_mpi_plane *plane, const struct hvd_work *work)
{
    uint64_t left = work->count - plane->done, most = SEGMENT_BYTES / plane->element_bytes;
    return left < most ? left : most;
}

/* The contributions of all ranks to this rank's slice of the next segment. */
static int post_contributions(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t count = segment(plane, work), mine = slice(plane, count, plane->posts.rank) * plane->element_bytes;
    uint64_t given = count * plane->element_bytes, got = slice(plane, count, 0) * plane->element_bytes;
    got *= (uint64_t)plane->posts.size;
    for (int rank = 0; rank < plane->posts.size; rank++) {
        plane->gives[rank] = slice(plane, count, rank) * plane->element_bytes;
        plane->gets[rank] = mine;
    }
    plane->combining = true;
    return hvd_mpi_post_alltoall(&plane->posts, plane->values + plane->done * plane->element_bytes, plane->gives,
                                 plane->kept, plane->gets, got > given ? got : given, error);
}

/* Combine what all ranks gave, `count` elements of each lying one after the other. */
void hvd_mpi_combine(const struct hvd_mpi_plane *plane, const struct hvd_work *work, void *to, uint64_t count)
{
    const void *source[HVD_LOCAL_MAX];
    for (int rank = 0; rank < plane->posts.size; rank++)
        source[rank] = plane->kept + (uint64_t)rank * count * plane->element_bytes;
    if (count)
        hvd_reduce(work->dtype, &plane->scale, to, source, plane->posts.size, count);
}

static int post_results(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t count = segment(plane, work), before = 0;
    unsigned char *values = plane->values + plane->done * plane->element_bytes;
    for (int rank = 0; rank < plane->posts.size; rank++) {
        plane->gets[rank] = slice(plane, count, rank) * plane->element_bytes;
        before += rank < plane->posts.rank ? plane->gets[rank] : 0;
    }
    hvd_mpi_combine(plane, work, values + before, slice(plane, count, plane->posts.rank));
    plane->done += count;
    plane->combining = false;
    return hvd_mpi_post_allgather(&plane->posts, values, plane->gets, error);
}

int hvd_mpi_ordered_begin(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t bytes = work->count * plane->element_bytes, size = (uint64_t)plane->posts.size;
    uint64_t most = bytes < SEGMENT_BYTES ? bytes : SEGMENT_BYTES;
    uint64_t kept = plane->way == HVD_MPI_WHOLE ? bytes * size : most + size * plane->element_bytes;
    int code = hvd_mpi_choose_values(plane, work, bytes, error);
    if (code == HVD_OK)
        code = hvd_mpi_reserve(plane, &plane->kept, &plane->kept_bytes, kept, error);
    if (code != HVD_OK)
        return code;
    plane->done = 0;
    if (plane->way == HVD_MPI_SLICES) {
        hvd_mpi_pack(plane, work, plane->values);
        return post_contributions(plane, work, error);
    }
    for (uint64_t rank = 0; rank < size; rank++)
        plane->gets[rank] = bytes;
    hvd_mpi_pack(plane, work, plane->kept + (uint64_t)plane->posts.rank * bytes);
    return hvd_mpi_post_allgather(&plane->posts, plane->kept, plane->gets, error);
}

int hvd_mpi_ordered_go_on(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    if (plane->way == HVD_MPI_WHOLE) {
        hvd_mpi_combine(plane, work, plane->values, work->count);
        return HVD_OK;
    }
    if (!plane->combining && plane->done == work->count)
        return HVD_OK;
    int code = plane->combining ? post_results(plane, work, error) : post_contributions(plane, work, error);
    return code == HVD_OK ? HVD_AGAIN : code;
}
