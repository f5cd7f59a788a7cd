/* pack.c - the copies of a bucket: see pack.h.
 *
 * How is a part of a bucket found? By a cursor for each direction (shm/scatter_list.h), so a part costs no search,
 * however many pieces there are. A piece that nobody here wants, or gives, is passed over like any other. A piece's
 * input may be its output: what is unpacked has been packed, and sent, before.
 */
#include "pack.h"

#include <string.h>

/* A joined rank: the same element everywhere. */
static void fill_identity(const struct hvd_p2p_bucket *bucket, unsigned char *to, uint64_t count)
{
    unsigned char element[16];
    size_t bytes = bucket->run->element_bytes;
    hvd_op_identity(bucket->run->fold.op, bucket->work->dtype, element);
    for (uint64_t i = 0; i < count; i++)
        memcpy(to + i * bytes, element, bytes);
}

void hvd_p2p_pack_until(struct hvd_p2p_bucket *bucket, uint64_t elements)
{
    const struct hvd_p2p_run *run = bucket->run;
    size_t bytes = run->element_bytes;
    uint64_t first = run->shape.kind == HVD_ALLGATHER ? hvd_algo_cut(&run->shape, run->shape.rank) : 0;
    while (bucket->packed < elements) {
        struct hvd_shm_run part =
            hvd_shm_run(bucket->work, &bucket->in, bucket->packed, elements - bucket->packed, bytes);
        unsigned char *to = run->buffer + (first + bucket->packed) * bytes;
        if (!part.in)
            fill_identity(bucket, to, part.count);
        else if ((const void *)part.in != to)
            memmove(to, part.in, part.count * bytes);
        bucket->packed += part.count;
    }
}

void hvd_p2p_pack(struct hvd_p2p_bucket *bucket)
{
    const struct hvd_shape *shape = &bucket->run->shape;
    if (shape->kind != HVD_BROADCAST || shape->root == shape->rank)
        hvd_p2p_pack_until(bucket, bucket->work->count);
}

/* What one piece gets, from the buffer. */
static void fill(const struct hvd_p2p_bucket *bucket, void *to, const void *from, uint64_t count)
{
    const void *source = from;
    if (bucket->scaled)
        hvd_reduce(bucket->work->dtype, &bucket->scale, to, &source, 1, count);
    else if (to != from)
        memmove(to, from, count * bucket->run->element_bytes);
}

void hvd_p2p_unpack_until(struct hvd_p2p_bucket *bucket, uint64_t elements)
{
    const struct hvd_p2p_run *run = bucket->run;
    bool has_it = run->shape.kind == HVD_BROADCAST && run->shape.root == run->shape.rank;
    while (bucket->unpacked < elements) {
        struct hvd_shm_run part =
            hvd_shm_run(bucket->work, &bucket->out, bucket->unpacked, elements - bucket->unpacked, run->element_bytes);
        if (part.out && !(has_it && part.out == part.in))
            fill(bucket, part.out, run->buffer + bucket->unpacked * run->element_bytes, part.count);
        bucket->unpacked += part.count;
    }
}

/* Pieces of an allgather: from every rank's chunk, which holds its part of each piece one after the other. */
static void spread(const struct hvd_p2p_bucket *bucket)
{
    const struct hvd_p2p_run *run = bucket->run;
    const struct hvd_work *work = bucket->work;
    const unsigned char *from = run->buffer;
    for (int rank = 0; rank < run->shape.size; rank++)
        for (uint32_t i = 0; i < work->pieces; i++) {
            const uint64_t *counts = &work->count_of[(size_t)i * (size_t)run->shape.size];
            uint64_t before = 0;
            for (int r = 0; r < rank; r++)
                before += counts[r];
            unsigned char *out = work->piece[i].out;
            if (out && counts[rank])
                fill(bucket, out + before * run->element_bytes, from, counts[rank]);
            from += counts[rank] * run->element_bytes;
        }
}

void hvd_p2p_unpack(struct hvd_p2p_bucket *bucket)
{
    const struct hvd_p2p_run *run = bucket->run;
    const struct hvd_shape *shape = &run->shape;
    if (shape->kind == HVD_ALLGATHER) {
        spread(bucket);
    } else if (shape->kind == HVD_REDUCESCATTER) {
        uint64_t begin = hvd_algo_cut(shape, shape->rank), end = hvd_algo_cut(shape, shape->rank + 1);
        if (end > begin && bucket->work->piece[0].out)
            fill(bucket, bucket->work->piece[0].out, run->buffer + begin * run->element_bytes, end - begin);
    } else if (shape->kind != HVD_ALLTOALL) {
        hvd_p2p_unpack_until(bucket, bucket->work->count);
    }
}
