/* pack.c - the copies of a bucket: see pack.h.
 *
 * How is a part of a bucket found? A place in it goes from piece to piece and never back, so a part costs no search,
 * however many pieces there are. A piece that nobody here wants, or gives, is passed over like any other. A piece's
 * input may be its output: what is unpacked has been packed, and sent, before.
 */
#include "pack.h"

#include "../plane.h"

#include <string.h>

/* The next part of a piece, of what lies before `end`. NULL: there is none. */
static const struct hvd_piece *next_part(const struct hvd_work *work, struct hvd_p2p_place *place, uint64_t end,
                                         uint64_t *count)
{
    while (place->piece < work->pieces && place->at == work->piece[place->piece].count) {
        place->piece++;
        place->at = 0;
    }
    if (place->piece == work->pieces || place->done >= end)
        return NULL;
    uint64_t left = work->piece[place->piece].count - place->at;
    *count = left < end - place->done ? left : end - place->done;
    return &work->piece[place->piece];
}

static void pass(struct hvd_p2p_place *place, uint64_t count)
{
    place->at += count;
    place->done += count;
}

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
    struct hvd_p2p_place *place = &bucket->packed;
    uint64_t first = run->shape.kind == HVD_ALLGATHER ? hvd_algo_cut(&run->shape, run->shape.rank) : 0, count;
    const struct hvd_piece *piece;
    for (; (piece = next_part(bucket->work, place, elements, &count)); pass(place, count)) {
        unsigned char *to = run->buffer + (first + place->done) * run->element_bytes;
        const unsigned char *from = piece->in;
        if (!from)
            fill_identity(bucket, to, count);
        else if (from + place->at * run->element_bytes != to)
            memmove(to, from + place->at * run->element_bytes, count * run->element_bytes);
    }
}

void hvd_p2p_pack(struct hvd_p2p_bucket *bucket)
{
    const struct hvd_shape *shape = &bucket->run->shape;
    if (shape->kind != HVD_BROADCAST || shape->root == shape->rank)
        hvd_p2p_pack_until(bucket, UINT64_MAX);
}

/* What one piece gets, from the buffer. */
static void fill(const struct hvd_p2p_bucket *bucket, void *to, const unsigned char *from, uint64_t count)
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
    struct hvd_p2p_place *place = &bucket->unpacked;
    bool has_it = run->shape.kind == HVD_BROADCAST && run->shape.root == run->shape.rank;
    const struct hvd_piece *piece;
    for (uint64_t count; (piece = next_part(bucket->work, place, elements, &count)); pass(place, count))
        if (piece->out && !(has_it && piece->out == piece->in))
            fill(bucket, (unsigned char *)piece->out + place->at * run->element_bytes,
                 run->buffer + place->done * run->element_bytes, count);
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
        hvd_p2p_unpack_until(bucket, UINT64_MAX);
    }
}
