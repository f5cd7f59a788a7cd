/* bucket.h - buckets for plane tests: scattered pieces with known values, and what must come out of them.
 *
 * Values are small whole numbers with a period of 61 elements, a prime, so that a block that lands a cache line, a
 * slice or a segment off its place is seen; what must come out is computed by the rules of kernel.h from the numbers
 * alone.
 */
#ifndef HVD_TEST_BUCKET_H
#define HVD_TEST_BUCKET_H

#include "seat.h"

#define HVD_BUCKET_PERIOD 61

enum hvd_bucket_shape { HVD_BUCKET_ONE, HVD_BUCKET_FEW, HVD_BUCKET_MANY, HVD_BUCKET_SHAPES }; /* pieces */
/* Of alltoall and reducescatter, which have one piece, the shape says how much goes from a rank to another. */
enum hvd_bucket_pattern {
    HVD_BUCKET_EVEN,
    HVD_BUCKET_UNEVEN,
    HVD_BUCKET_ONE_CELL,
    HVD_BUCKET_SILENT_RANK,
    HVD_BUCKET_LOPSIDED,
    HVD_BUCKET_PATTERNS
};
/* Rooted, of an allreduce: nobody but the root takes the result; also with one of the others. */
enum hvd_bucket_place { HVD_BUCKET_IN_PLACE, HVD_BUCKET_OUT_OF_PLACE, HVD_BUCKET_PLACES, HVD_BUCKET_ROOTED = 2 };

struct hvd_bucket {
    struct hvd_work work;
    struct hvd_piece *piece;
    uint64_t *count_of;
    unsigned char *memory, *inputs; /* all pieces with guards between; a copy of it as it was before */
    size_t bytes;
    void *lender; /* plane memory: opened plane and its table; NULL: malloc */
    const struct hvd_plane *plane;
    int rank, size;
    uint64_t joined; /* bitmap of ranks that have joined */
};

/* What rank has in position i, and what op makes of all active ranks' values, as elements at `to`. */
void hvd_bucket_value(int dtype, int op, int rank, uint64_t i, void *to);
void hvd_bucket_expect(const struct hvd_bucket *bucket, uint64_t i, void *to);

/* Make a work of about `count` elements for this rank: of each piece; allgather: of each rank, ragged; alltoall: from
 * each rank to each. `lender`: an opened plane whose memory is to be used, or NULL. */
void hvd_bucket_make(struct hvd_bucket *bucket, const struct hvd_work *like, uint64_t count, int shape, int place,
                     int rank, int size, uint64_t joined, const struct hvd_plane *plane, void *lender);
int hvd_bucket_shapes(int kind); /* how many there are */
/* A sum of float32 in place, of one piece. */
struct hvd_work hvd_bucket_sum(struct hvd_piece *piece, void *memory, uint64_t count);
/* Ends the test if an output, an input or a guard is not what it must be; then frees. */
void hvd_bucket_check(struct hvd_bucket *bucket);
/* Makes one in private memory, has the seat's plane work on it, or the one for the rest, and checks it. The first adds
 * to hvd_bucket_works. */
extern _Atomic long hvd_bucket_works;
void hvd_bucket_do(struct hvd_seat *seat, const struct hvd_work *like, uint64_t count, int shape, int place,
                   uint64_t joined);

#endif
