/* adasum.c - how does a tree of pairwise combinations, with dots at every node, become plane works?
 *
 * Every node of the tree is a linear combination of the ranks' tensors, and its coefficients follow from the dots of
 * the tensors alone (kernel/adasum.c). So no node is ever computed; for each tensor of the bucket on its own:
 *
 *   1. dots: an alltoall gives each rank one slice of everybody's tensor, of which it takes all n * (n + 1) / 2
 *      dots in float64; one float64 sum of these Gram matrices makes them whole.
 *   2. every rank finds the coefficients, the same everywhere, multiplies its tensor by its own, and all are summed.
 *
 * Each element moves twice, whatever the number of ranks is. It is scaled once, by coefficient, prescale and postscale
 * together (Adasum is homogeneous), in float32 or float64, and 16-bit types are rounded once, after the sum. A rank
 * that has joined gives zeros, which no coefficient heeds. In a world of one only the scales are left.
 *
 * The work goes through the bucket in *chunks* of at most CHUNK elements, so a turn stays short and the scratch
 * memory small: 3 to 5 times CHUNK elements, less for a smaller bucket, and the Gram matrices of one *batch* of
 * tensors, GRAM doubles (one tensor's if that is more). A chunk is a part of one tensor or some whole ones; its parts
 * are cut where the tensor's own start says, not the bucket's, and a small tensor's dots are all taken by one rank. So
 * the result has the same bits however tensors are fused.
 *
 * Invariant: stage and position depend on the bucket's counts only, so all ranks ask for the same works. What this
 * file does not do: wait, choose a plane, finish handles.
 */
#include "adasum.h"

#include "../../kernel/adasum.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK (UINT64_C(1) << 18) /* elements */
#define GRAM  (UINT64_C(1) << 16) /* doubles: of one batch */
#define GRAIN 64                  /* elements: smaller slices than this are not worth giving */
#define ALL   (-1)                /* owner: every rank takes a slice */

enum stage { GIVE, TAKE_DOTS, FIND_FACTORS, SCALE, ROUND, DONE };

static void *room_for(void *memory, size_t *room, size_t bytes)
{
    if (*room >= bytes)
        return memory;
    free(memory);
    memory = malloc(bytes);
    HVD_ASSERT(memory);
    *room = bytes;
    return memory;
}

static bool is_narrow(const struct hvd_adasum *adasum)
{
    return hvd_is_narrow(adasum->bucket.dtype);
}

static size_t bytes_of(const struct hvd_adasum *adasum, uint64_t count)
{
    return count * (size_t)hvd_dtype_bytes(adasum->bucket.dtype);
}

/* Part k of the chunk: of which tensor, from where, how long. */
struct part {
    const struct hvd_piece *piece;
    uint32_t tensor;
    uint64_t from, count;
};

static struct part part_of(const struct hvd_adasum *adasum, uint32_t k)
{
    struct part part = {.tensor = adasum->tensor + k, .from = k == 0 ? adasum->from : 0};
    part.piece = &adasum->bucket.piece[part.tensor];
    uint64_t left = part.piece->count - part.from;
    part.count = left < CHUNK ? left : CHUNK;
    return part;
}

static void begin_chunk(struct hvd_adasum *adasum, uint32_t tensor, uint64_t from)
{
    adasum->tensor = tensor;
    adasum->from = from;
    adasum->parts = 0;
    adasum->elements = 0;
    while (adasum->tensor + adasum->parts < adasum->batch_end) {
        struct part part = part_of(adasum, adasum->parts);
        if (adasum->parts > 0 && adasum->elements + part.count > CHUNK)
            break;
        adasum->elements += part.count;
        adasum->parts++;
        if (part.from + part.count < part.piece->count) /* it goes on in the next chunk, which begins with it */
            break;
    }
}

/* The chunk that follows; none are left in the batch if it has no parts. */
static void next_chunk(struct hvd_adasum *adasum)
{
    struct part last = part_of(adasum, adasum->parts - 1);
    if (last.from + last.count < last.piece->count)
        begin_chunk(adasum, last.tensor, last.from + last.count);
    else
        begin_chunk(adasum, adasum->tensor + adasum->parts, 0);
}

/* What of a part is rank's to multiply: elements [begin, end). */
static void slice_of(const struct hvd_adasum *adasum, const struct part *part, int rank, uint64_t *begin, uint64_t *end)
{
    int owner = adasum->owner[part->tensor];
    uint64_t n = (uint64_t)adasum->size, slice = HVD_ALIGN_UP((part->count + n - 1) / n, (uint64_t)16);
    *begin = owner == ALL ? slice * (uint64_t)rank : rank <= owner ? 0 : part->count;
    *end = owner == ALL ? *begin + slice : rank < owner ? 0 : part->count;
    *begin = *begin < part->count ? *begin : part->count;
    *end = *end < part->count ? *end : part->count;
}

/* Who takes what: large tensors are cut for all, small ones go to whoever has least. */
static void share_out(struct hvd_adasum *adasum)
{
    memset(adasum->load, 0, sizeof adasum->load);
    for (uint32_t k = 0; k < adasum->parts; k++) {
        struct part part = part_of(adasum, k);
        int least = 0;
        for (int rank = 1; rank < adasum->size; rank++)
            if (adasum->load[rank] < adasum->load[least])
                least = rank;
        adasum->owner[part.tensor] = part.piece->count < (uint64_t)adasum->size * GRAIN ? least : ALL;
        for (int rank = 0; rank < adasum->size; rank++) {
            uint64_t begin, end;
            slice_of(adasum, &part, rank, &begin, &end);
            adasum->load[rank] += end - begin;
        }
    }
    for (int from = 0; from < adasum->size; from++)
        memcpy(adasum->count_of + from * adasum->size, adasum->load, sizeof *adasum->load * (size_t)adasum->size);
}

/* This rank's chunk, sorted by who takes it. One part of a large tensor lies right as it is. */
static const void *pack(struct hvd_adasum *adasum)
{
    struct part first = part_of(adasum, 0);
    if (adasum->parts == 1 && first.piece->in && adasum->owner[first.tensor] == ALL)
        return (const char *)first.piece->in + bytes_of(adasum, first.from);
    uint64_t at[HVD_LOCAL_MAX], sum = 0;
    adasum->mine = room_for(adasum->mine, &adasum->mine_room, bytes_of(adasum, adasum->elements + 1));
    for (int rank = 0; rank < adasum->size; rank++) {
        at[rank] = sum;
        sum += adasum->load[rank];
    }
    for (uint32_t k = 0; k < adasum->parts; k++) {
        struct part part = part_of(adasum, k);
        for (int rank = 0; rank < adasum->size; rank++) {
            uint64_t begin, end;
            slice_of(adasum, &part, rank, &begin, &end);
            char *to = (char *)adasum->mine + bytes_of(adasum, at[rank]);
            if (begin < end && part.piece->in)
                memcpy(to, (const char *)part.piece->in + bytes_of(adasum, part.from + begin),
                       bytes_of(adasum, end - begin));
            else if (begin < end)
                memset(to, 0, bytes_of(adasum, end - begin)); /* joined */
            at[rank] += end - begin;
        }
    }
    return adasum->mine;
}

static void sum_work(struct hvd_adasum *adasum, struct hvd_work *work, int dtype, uint32_t pieces, uint64_t count)
{
    *work = (struct hvd_work){.kind = HVD_ALLREDUCE,
                              .op = HVD_OP_sum,
                              .dtype = dtype,
                              .divide_by = 1,
                              .prescale = 1,
                              .postscale = 1,
                              .piece = adasum->piece,
                              .pieces = pieces,
                              .count = count};
}

static void give(struct hvd_adasum *adasum, struct hvd_work *work)
{
    share_out(adasum);
    size_t taken = bytes_of(adasum, adasum->load[adasum->rank] * (uint64_t)adasum->size + 1);
    adasum->theirs = room_for(adasum->theirs, &adasum->theirs_room, taken);
    adasum->piece[0] = (struct hvd_piece){pack(adasum), adasum->theirs, adasum->elements};
    *work = (struct hvd_work){.kind = HVD_ALLTOALL,
                              .dtype = adasum->bucket.dtype,
                              .piece = adasum->piece,
                              .pieces = 1,
                              .count = adasum->elements,
                              .count_of = adasum->count_of};
}

static void take_dots(struct hvd_adasum *adasum)
{
    const void *source[HVD_LOCAL_MAX];
    uint64_t at = 0, mine = adasum->load[adasum->rank];
    for (uint32_t k = 0; k < adasum->parts; k++) {
        struct part part = part_of(adasum, k);
        uint64_t begin, end;
        slice_of(adasum, &part, adasum->rank, &begin, &end);
        for (int rank = 0; rank < adasum->size; rank++)
            source[rank] = (const char *)adasum->theirs + bytes_of(adasum, (uint64_t)rank * mine + at);
        hvd_gram_add(adasum->bucket.dtype, source, adasum->size, end - begin,
                     adasum->gram + (part.tensor - adasum->batch) * HVD_GRAM_COUNT(adasum->size));
        at += end - begin;
    }
}

static void sum_gram(struct hvd_adasum *adasum, struct hvd_work *work)
{
    uint64_t count = (adasum->batch_end - adasum->batch) * HVD_GRAM_COUNT(adasum->size);
    adasum->piece[0] = (struct hvd_piece){adasum->gram, adasum->gram, count};
    sum_work(adasum, work, HVD_DTYPE_float64, 1, count);
}

static void find_factors(struct hvd_adasum *adasum)
{
    double coefficient[HVD_LOCAL_MAX] = {1};
    for (uint32_t k = adasum->batch; k < adasum->batch_end; k++) {
        if (adasum->size > 1)
            hvd_adasum_coefficients(adasum->gram + (k - adasum->batch) * HVD_GRAM_COUNT(adasum->size), adasum->size,
                                    coefficient);
        adasum->factor[k] = coefficient[adasum->rank] * adasum->bucket.prescale * adasum->bucket.postscale;
    }
}

/* Floats of 32 and 64 bits are scaled into the output and summed there, narrower ones as floats in scratch memory. */
static void scale(struct hvd_adasum *adasum, struct hvd_work *work)
{
    int dtype = adasum->bucket.dtype;
    float *floats = NULL;
    if (is_narrow(adasum))
        floats = adasum->mine = room_for(adasum->mine, &adasum->mine_room, (adasum->elements + 1) * sizeof *floats);
    for (uint32_t k = 0, at = 0; k < adasum->parts; k++) {
        struct part part = part_of(adasum, k);
        size_t skip = bytes_of(adasum, part.from);
        struct hvd_piece *piece = &adasum->piece[k];
        *piece = (struct hvd_piece){NULL, NULL, part.count};
        if (!part.piece->in)
            continue;
        const void *in = (const char *)part.piece->in + skip;
        double factor = adasum->factor[part.tensor];
        if (floats) {
            piece->out = floats + at;
            hvd_floats_of_narrow(dtype, piece->out, in, part.count, factor);
        } else {
            const struct hvd_scale by = {.op = HVD_OP_sum, .divide = 1, .factor = factor, .first = 1};
            piece->out = (char *)part.piece->out + skip;
            hvd_reduce(dtype, &by, piece->out, &in, 1, part.count);
        }
        piece->in = piece->out;
        at += (uint32_t)part.count;
    }
    sum_work(adasum, work, floats ? HVD_DTYPE_float32 : dtype, adasum->parts, adasum->elements);
    if (!floats)
        work->flags = adasum->bucket.flags;
}

static void round_narrow(struct hvd_adasum *adasum)
{
    for (uint32_t k = 0; k < adasum->parts && is_narrow(adasum); k++) {
        struct part part = part_of(adasum, k);
        if (part.piece->out && part.count > 0)
            hvd_narrow_of_floats(adasum->bucket.dtype, (char *)part.piece->out + bytes_of(adasum, part.from),
                                 adasum->piece[k].out, part.count);
    }
}

static void begin_batch(struct hvd_adasum *adasum, uint32_t tensor)
{
    size_t each = HVD_GRAM_COUNT(adasum->size), most = GRAM / each ? GRAM / each : 1;
    uint32_t left = adasum->bucket.pieces - tensor, tensors = left < most ? left : (uint32_t)most;
    adasum->batch = tensor;
    adasum->batch_end = tensor + tensors;
    adasum->gram = room_for(adasum->gram, &adasum->gram_room, tensors * each * sizeof *adasum->gram);
    memset(adasum->gram, 0, tensors * each * sizeof *adasum->gram);
    adasum->stage = adasum->size > 1 ? GIVE : FIND_FACTORS;
    begin_chunk(adasum, tensor, 0);
}

void hvd_adasum_open(struct hvd_adasum *adasum, const struct hvd_work *bucket, int rank, int size)
{
    size_t tensors = bucket->pieces;
    HVD_ASSERT(tensors > 0 && size <= HVD_LOCAL_MAX);
    adasum->bucket = *bucket;
    adasum->rank = rank;
    adasum->size = size;
    adasum->piece = room_for(adasum->piece, &adasum->piece_room, tensors * sizeof *adasum->piece);
    if (adasum->room < tensors) {
        free(adasum->factor);
        free(adasum->owner);
        adasum->factor = malloc(tensors * sizeof *adasum->factor);
        adasum->owner = malloc(tensors * sizeof *adasum->owner);
        HVD_ASSERT(adasum->factor && adasum->owner);
        adasum->room = tensors;
    }
    adasum->count_of = room_for(adasum->count_of, &adasum->count_room, sizeof(uint64_t) * (size_t)(size * size));
    begin_batch(adasum, 0);
}

int hvd_adasum_next(struct hvd_adasum *adasum, struct hvd_work *work)
{
    if (adasum->stage == TAKE_DOTS) {
        take_dots(adasum);
        next_chunk(adasum);
        adasum->stage = GIVE;
    } else if (adasum->stage == ROUND) {
        round_narrow(adasum);
        next_chunk(adasum);
        adasum->stage = SCALE;
    }
    if (adasum->stage == GIVE && adasum->parts > 0) {
        give(adasum, work);
        adasum->stage = TAKE_DOTS;
        return HVD_AGAIN;
    }
    if (adasum->stage == GIVE) {
        sum_gram(adasum, work);
        adasum->stage = FIND_FACTORS;
        return HVD_AGAIN;
    }
    if (adasum->stage == FIND_FACTORS) {
        find_factors(adasum);
        begin_chunk(adasum, adasum->batch, 0);
        adasum->stage = SCALE;
    }
    if (adasum->stage == SCALE && adasum->parts > 0) {
        scale(adasum, work);
        adasum->stage = ROUND;
        return HVD_AGAIN;
    }
    if (adasum->stage == SCALE && adasum->batch_end < adasum->bucket.pieces) {
        begin_batch(adasum, adasum->batch_end);
        return hvd_adasum_next(adasum, work);
    }
    adasum->stage = DONE;
    return HVD_OK;
}

void hvd_adasum_close(struct hvd_adasum *adasum)
{
    free(adasum->piece);
    free(adasum->factor);
    free(adasum->owner);
    free(adasum->gram);
    free(adasum->count_of);
    free(adasum->mine);
    free(adasum->theirs);
    memset(adasum, 0, sizeof *adasum);
}
