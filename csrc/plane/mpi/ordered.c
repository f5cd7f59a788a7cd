/* ordered.c - sums in rank order over MPI, which only carries: the same bits as every other plane gives.
 *
 * SLICES: a segment of the bucket is cut into one slice for each rank. Every rank gets all contributions to its slice,
 * hvd_reduce combines them in rank order with one rounding, and its result goes to everybody: 2 (n - 1) / n of the
 * bytes per rank, as in the best allreduce. Nobody gives himself anything. Two segments are under way: the
 * contributions to the next one are asked for before this one is combined, so that a slow rank or network finds
 * something to do. A slice is small enough to be combined where it has just been written, in a cache.
 *
 * All of that goes from rank to rank, not by MPI's collectives: whichever it chose, they would wait for each other in
 * phases. Open MPI's non-blocking allreduce goes up and down a tree with the whole tensor if it is in place or there
 * are fewer than four ranks, twice the time of this.
 *
 * WHOLE, for small buckets: everybody gathers everything in one call and combines it, as flat shared memory does.
 */
#include "state.h"

#define SLICE_BYTES   ((uint64_t)512 << 10)
#define SEGMENT_BYTES ((uint64_t)8 << 20) /* at most, with many ranks: twice that is kept */

/* Elements of slice `rank` of so many; how many lie before it. */
static uint64_t slice(const struct hvd_mpi_plane *plane, uint64_t count, int rank)
{
    uint64_t size = (uint64_t)plane->posts.size;
    return count / size + ((uint64_t)rank < count % size);
}

static uint64_t before(const struct hvd_mpi_plane *plane, uint64_t count, int rank)
{
    uint64_t size = (uint64_t)plane->posts.size, more = count % size;
    return count / size * (uint64_t)rank + ((uint64_t)rank < more ? (uint64_t)rank : more);
}

/* Elements of the segment that begins there. */
static uint64_t segment(const struct hvd_mpi_plane *plane, const struct hvd_work *work, uint64_t begin)
{
    uint64_t left = work->count - begin;
    return left < plane->segment ? left : plane->segment;
}

/* Where the others' contributions to the segment that begins there are kept. */
static unsigned char *kept_of(const struct hvd_mpi_plane *plane, uint64_t begin)
{
    return plane->kept + begin / plane->segment % 2 * plane->half_bytes;
}

/* The rank that is so many further; with others going by the same steps nobody is everybody's next. */
static int further(const struct hvd_mpi_plane *plane, int steps)
{
    return (plane->posts.rank + steps + plane->posts.size) % plane->posts.size;
}

/* The contributions of all ranks to this rank's slice of the next segment. */
static int post_contributions(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t count = segment(plane, work, plane->asked), mine = slice(plane, count, plane->posts.rank);
    const unsigned char *from = plane->source + plane->asked * plane->element_bytes;
    unsigned char *to = kept_of(plane, plane->asked);
    int code = HVD_OK;
    for (int i = 1; i < plane->posts.size && code == HVD_OK; i++) {
        int peer = further(plane, -i), place = peer - (peer > plane->posts.rank);
        code = hvd_mpi_post_receive(&plane->posts, to + (uint64_t)place * mine * plane->element_bytes,
                                    mine * plane->element_bytes, peer, error);
    }
    for (int i = 1; i < plane->posts.size && code == HVD_OK; i++) {
        int peer = further(plane, i);
        code = hvd_mpi_post_send(&plane->posts, from + before(plane, count, peer) * plane->element_bytes,
                                 slice(plane, count, peer) * plane->element_bytes, peer, error);
    }
    plane->asked += count;
    return code;
}

void hvd_mpi_combine(const struct hvd_mpi_plane *plane, const struct hvd_work *work, void *to,
                     const unsigned char *from, const void *own, uint64_t count)
{
    const void *source[HVD_RANKS_MAX];
    for (int rank = 0; rank < plane->posts.size; rank++)
        if (own && rank == plane->posts.rank) {
            source[rank] = own;
        } else {
            source[rank] = from;
            from += count * plane->element_bytes;
        }
    if (count)
        hvd_reduce(work->dtype, &plane->scale, to, source, plane->posts.size, count);
}

/* The segment's contributions are here: its results, from each rank those of its slice. */
static int post_results(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t count = segment(plane, work, plane->done), mine = slice(plane, count, plane->posts.rank);
    uint64_t own = (plane->done + before(plane, count, plane->posts.rank)) * plane->element_bytes;
    unsigned char *values = plane->values + plane->done * plane->element_bytes;
    int code = HVD_OK;
    hvd_mpi_combine(plane, work, plane->values + own, kept_of(plane, plane->done), plane->source + own, mine);
    for (int i = 1; i < plane->posts.size && code == HVD_OK; i++) {
        int peer = further(plane, -i);
        code = hvd_mpi_post_receive(&plane->posts, values + before(plane, count, peer) * plane->element_bytes,
                                    slice(plane, count, peer) * plane->element_bytes, peer, error);
    }
    for (int i = 1; i < plane->posts.size && code == HVD_OK; i++)
        code = hvd_mpi_post_send(&plane->posts, plane->values + own, mine * plane->element_bytes, further(plane, i),
                                 error);
    plane->done += count;
    return code;
}

static int begin_slices(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t size = (uint64_t)plane->posts.size;
    uint64_t most = size * SLICE_BYTES < SEGMENT_BYTES ? size * SLICE_BYTES : SEGMENT_BYTES;
    plane->segment = most / plane->element_bytes;
    plane->done = plane->asked = 0;
    plane->half_bytes = (size - 1) * slice(plane, segment(plane, work, 0), 0) * plane->element_bytes;
    int code = hvd_mpi_reserve(plane, &plane->kept, &plane->kept_bytes, 2 * plane->half_bytes, error);
    if (code != HVD_OK)
        return code;
    plane->source = plane->values;
    if (work->pieces == 1 && work->piece[0].in)
        plane->source = work->piece[0].in;
    else
        hvd_mpi_pack(plane, work, plane->values);
    return post_contributions(plane, work, error);
}

int hvd_mpi_ordered_begin(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t bytes = work->count * plane->element_bytes, size = (uint64_t)plane->posts.size;
    int code = hvd_mpi_choose_values(plane, work, bytes, error);
    if (code != HVD_OK || plane->way == HVD_MPI_SLICES)
        return code == HVD_OK ? begin_slices(plane, work, error) : code;
    code = hvd_mpi_reserve(plane, &plane->kept, &plane->kept_bytes, bytes * size, error);
    if (code != HVD_OK)
        return code;
    for (uint64_t rank = 0; rank < size; rank++)
        plane->gets[rank] = bytes;
    hvd_mpi_pack(plane, work, plane->kept + (uint64_t)plane->posts.rank * bytes);
    return hvd_mpi_post_allgather(&plane->posts, plane->kept, plane->gets, error);
}

int hvd_mpi_ordered_go_on(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    if (plane->way == HVD_MPI_WHOLE) {
        hvd_mpi_combine(plane, work, plane->values, plane->kept, NULL, work->count);
        return HVD_OK;
    }
    if (plane->done == work->count)
        return HVD_OK;
    int code = plane->asked < work->count ? post_contributions(plane, work, error) : HVD_OK;
    if (code == HVD_OK)
        code = post_results(plane, work, error);
    return code == HVD_OK ? HVD_AGAIN : code;
}
