/* calls.c - what does a work become, in NCCL's words?
 *
 * The tensors of a bucket are calls of one group, each where it lies, of which NCCL makes few launches. What the ranks
 * give unevenly becomes a group of simpler calls: an allgather of different rows a broadcast from each rank, a
 * reducescatter of uneven shares a reduce to each, an alltoall sends and receives.
 *
 * What is left of the scale (prescale, average and postscale, one factor) every rank's values are multiplied with,
 * before they are added, by NCCL: that is its way, and one rounding more than ours.
 * Integers with a scale, and products and extremes with one, it does not compute as we do: hvd_nccl_computes says no,
 * and the tensors go another way. So it is with sums of floats in deterministic mode, whose order follows from NCCL's
 * choice of algorithm; and with scaled sums of float8, for a third is 0.34 there.
 *
 * In NCCL's non-blocking manner every call may answer that it goes on in the background, also one inside a group: that
 * is no failure, and the rest of the group follows it. Nothing is on the stream for certain before NCCL says that
 * nothing goes on any more.
 *
 * Who has joined gives what changes nothing, from memory of the plane's own; there go results, too, that nobody wants.
 */
#include "state.h"

#include <string.h>

static int type_of(int dtype)
{
    switch (dtype) {
    case HVD_DTYPE_uint8:
    case HVD_DTYPE_bool:
        return HVD_NCCL_UINT8;
    case HVD_DTYPE_int8:
        return HVD_NCCL_INT8;
    case HVD_DTYPE_int32:
        return HVD_NCCL_INT32;
    case HVD_DTYPE_int64:
        return HVD_NCCL_INT64;
    case HVD_DTYPE_float16:
        return HVD_NCCL_FLOAT16;
    case HVD_DTYPE_float32:
        return HVD_NCCL_FLOAT32;
    case HVD_DTYPE_float64:
        return HVD_NCCL_FLOAT64;
    case HVD_DTYPE_bfloat16:
        return HVD_NCCL_BFLOAT16;
    case HVD_DTYPE_float8_e4m3fn:
        return HVD_NCCL_FLOAT8_E4M3;
    case HVD_DTYPE_float8_e5m2:
        return HVD_NCCL_FLOAT8_E5M2;
    default:
        return -1;
    }
}

static struct hvd_scale scale_of(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    return hvd_scale_fold(work->op, work->dtype, work->active ? work->active : plane->size, work->divide_by,
                          work->prescale, work->postscale);
}

bool hvd_nccl_computes(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    if (work->kind != HVD_ALLREDUCE && work->kind != HVD_REDUCESCATTER)
        return true;
    struct hvd_scale scale = scale_of(plane, work);
    bool floats = hvd_is_float(work->dtype);
    bool scaled = scale.factor != 1.0 || scale.first != 1.0 || scale.divide != 1;
    bool extreme = scale.op == HVD_OP_min || scale.op == HVD_OP_max;
    if (type_of(work->dtype) < 0 || (scaled && (!floats || scale.op != HVD_OP_sum)))
        return false;
    if (floats && hvd_dtype_bytes(work->dtype) == 1 && (scaled || !plane->adds_float8))
        return false;
    return !floats || extreme || plane->any_order || plane->size < 2;
}

/* NCCL's number for the sum of values times the factor; made once for each factor in a row. */
static int multiplied(struct hvd_nccl_plane *plane, int dtype, double factor, int *op, struct hvd_error *error)
{
    if (plane->multiplied < 0 || plane->factor != factor || plane->factor_dtype != dtype) {
        struct hvd_scale scale = {.op = HVD_OP_sum, .divide = 1, .factor = factor, .first = 1.0};
        uint64_t one = 0, scalar = 0;
        const void *source = &one;
        hvd_op_identity(HVD_OP_product, dtype, &one);
        hvd_reduce(dtype, &scale, &scalar, &source, 1, 1);
        if (plane->multiplied >= 0)
            plane->nccl->RedOpDestroy(plane->multiplied, plane->comm);
        plane->multiplied = -1;
        int result = plane->nccl->RedOpCreatePreMulSum(&plane->multiplied, &scalar, type_of(dtype),
                                                       HVD_NCCL_SCALAR_HOST, plane->comm);
        if (!hvd_nccl_going(result))
            return hvd_nccl_refused(plane, result, "scale a sum", error);
        if (plane->multiplied < 0)
            return HVD_AGAIN;
        plane->factor = factor;
        plane->factor_dtype = dtype;
    }
    *op = plane->multiplied;
    return HVD_OK;
}

static int choose_op(struct hvd_nccl_plane *plane, const struct hvd_work *work, int *op, struct hvd_error *error)
{
    struct hvd_scale scale = scale_of(plane, work);
    bool logical = work->dtype == HVD_DTYPE_bool;
    *op = HVD_NCCL_SUM;
    if (scale.op == HVD_OP_max || (logical && scale.op == HVD_OP_sum))
        *op = HVD_NCCL_MAX;
    else if (scale.op == HVD_OP_min || (logical && scale.op == HVD_OP_product))
        *op = HVD_NCCL_MIN;
    else if (scale.op == HVD_OP_product)
        *op = HVD_NCCL_PRODUCT;
    else if (scale.factor != 1.0)
        return multiplied(plane, work->dtype, scale.factor, op, error);
    return HVD_OK;
}

static int cuda_call(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

/* Memory of the plane's own: `count` elements that change nothing, and behind them room for as many. */
static int identities(struct hvd_nccl_plane *plane, const struct hvd_work *work, uint64_t count,
                      struct hvd_error *error)
{
    int code = hvd_nccl_reserve(plane, 2 * count * (size_t)hvd_dtype_bytes(work->dtype), error);
    return code == HVD_OK ? hvd_nccl_fill(plane, work, plane->scratch.at, count, error) : code;
}

/* Before the group: what has to be waited for, and memory for who lacks some. */
static int prepare(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    uint64_t lacking = 0;
    int code = HVD_OK;
    if (work->vacant)
        code =
            cuda_call(plane->cuda->StreamWaitEvent(plane->device->stream, work->vacant, 0), "wait for memory", error);
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        if (work->ready && work->ready[i])
            code = cuda_call(plane->cuda->StreamWaitEvent(plane->device->stream, work->ready[i], 0),
                             "wait for a tensor", error);
        bool wants = !work->rooted || work->rooted - 1 == plane->rank;
        if ((!piece->in || (!piece->out && wants)) && piece->count > lacking)
            lacking = piece->count;
    }
    if (code == HVD_OK && !plane->before && !(plane->before = hvd_nccl_device_mark(plane->device, error)))
        code = error->code;
    if (code == HVD_OK && lacking && work->kind == HVD_ALLREDUCE)
        code = identities(plane, work, lacking, error);
    return code;
}

static int reduce_all(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op)
{
    int result = HVD_NCCL_SUCCESS;
    const void *nothing = (const void *)plane->scratch.at;
    void *away = (void *)(plane->scratch.at + plane->scratch.bytes / 2);
    for (uint32_t i = 0; i < work->pieces && hvd_nccl_going(result); i++) {
        const struct hvd_piece *piece = &work->piece[i];
        const void *in = piece->in ? piece->in : nothing;
        void *out = piece->out ? piece->out : away; /* of a reduce that is not for this rank, NCCL leaves it alone */
        int type = type_of(work->dtype);
        if (piece->count && work->rooted)
            result = plane->nccl->Reduce(in, out, piece->count, type, op, work->rooted - 1, plane->comm,
                                         plane->device->stream);
        else if (piece->count)
            result = plane->nccl->AllReduce(in, out, piece->count, type, op, plane->comm, plane->device->stream);
    }
    return result;
}

static int broadcast(struct hvd_nccl_plane *plane, const struct hvd_work *work, size_t bytes)
{
    int result = HVD_NCCL_SUCCESS;
    for (uint32_t i = 0; i < work->pieces && hvd_nccl_going(result); i++) {
        const struct hvd_piece *piece = &work->piece[i];
        if (piece->count)
            result = plane->nccl->Broadcast(piece->in, piece->out, piece->count * bytes, HVD_NCCL_UINT8, work->root,
                                            plane->comm, plane->device->stream);
    }
    return result;
}

/* Of one piece: the parts of each rank, to all. */
static int gather(struct hvd_nccl_plane *plane, const struct hvd_piece *piece, const uint64_t *counts, size_t bytes)
{
    unsigned char *to = piece->out;
    int result = HVD_NCCL_SUCCESS;
    bool even = true;
    for (int rank = 0; rank < plane->size; rank++)
        even = even && counts[rank] == counts[0];
    if (even)
        return counts[0] ? plane->nccl->AllGather(piece->in, to, counts[0] * bytes, HVD_NCCL_UINT8, plane->comm,
                                                  plane->device->stream)
                         : result;
    for (int rank = 0; rank < plane->size && hvd_nccl_going(result); rank++) {
        if (counts[rank])
            result = plane->nccl->Broadcast(rank == plane->rank ? piece->in : to, to, counts[rank] * bytes,
                                            HVD_NCCL_UINT8, rank, plane->comm, plane->device->stream);
        to += counts[rank] * bytes;
    }
    return result;
}

static int scatter(struct hvd_nccl_plane *plane, const struct hvd_work *work, size_t bytes, int op)
{
    const struct hvd_piece *piece = &work->piece[0];
    const unsigned char *from = piece->in;
    int result = HVD_NCCL_SUCCESS, type = type_of(work->dtype);
    bool even = true;
    for (int rank = 0; rank < plane->size; rank++)
        even = even && work->count_of[rank] == work->count_of[0];
    if (even)
        return work->count_of[0] ? plane->nccl->ReduceScatter(from, piece->out, work->count_of[0], type, op,
                                                              plane->comm, plane->device->stream)
                                 : result;
    for (int rank = 0; rank < plane->size && hvd_nccl_going(result); rank++) {
        if (work->count_of[rank])
            result = plane->nccl->Reduce(from, piece->out, work->count_of[rank], type, op, rank, plane->comm,
                                         plane->device->stream);
        from += work->count_of[rank] * bytes;
    }
    return result;
}

static int exchange(struct hvd_nccl_plane *plane, const struct hvd_work *work, size_t bytes)
{
    const unsigned char *from = work->piece[0].in;
    unsigned char *to = work->piece[0].out;
    size_t size = (size_t)plane->size, mine = (size_t)plane->rank;
    int result = HVD_NCCL_SUCCESS;
    for (size_t other = 0; other < size && hvd_nccl_going(result); other++) {
        uint64_t gives = work->count_of[mine * size + other] * bytes,
                 gets = work->count_of[other * size + mine] * bytes;
        if (gives)
            result = plane->nccl->Send(from, gives, HVD_NCCL_UINT8, (int)other, plane->comm, plane->device->stream);
        if (gets && hvd_nccl_going(result))
            result = plane->nccl->Recv(to, gets, HVD_NCCL_UINT8, (int)other, plane->comm, plane->device->stream);
        from += gives;
        to += gets;
    }
    return result;
}

static int calls_of(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op)
{
    size_t bytes = (size_t)hvd_dtype_bytes(work->dtype);
    int result = HVD_NCCL_SUCCESS;
    switch (work->kind) {
    case HVD_ALLREDUCE:
        return reduce_all(plane, work, op);
    case HVD_BROADCAST:
        return broadcast(plane, work, bytes);
    case HVD_REDUCESCATTER:
        return scatter(plane, work, bytes, op);
    case HVD_ALLTOALL:
        return exchange(plane, work, bytes);
    default:
        for (uint32_t i = 0; i < work->pieces && hvd_nccl_going(result); i++)
            result = gather(plane, &work->piece[i], &work->count_of[(size_t)i * (size_t)plane->size], bytes);
        return result;
    }
}

static int group(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op, struct hvd_error *error)
{
    int result = plane->nccl->GroupStart(), ended = HVD_NCCL_SUCCESS;
    if (hvd_nccl_going(result)) {
        result = calls_of(plane, work, op);
        ended = plane->nccl->GroupEnd(); /* also of a group in which a call has failed */
    }
    if (!hvd_nccl_going(result) || !hvd_nccl_going(ended))
        return hvd_nccl_refused(plane, hvd_nccl_going(result) ? ended : result, "start a collective", error);
    return result == HVD_NCCL_SUCCESS && ended == HVD_NCCL_SUCCESS ? HVD_OK : HVD_AGAIN;
}

int hvd_nccl_launch(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    int op = HVD_NCCL_SUM, code = HVD_OK;
    if (work->kind == HVD_ALLREDUCE || work->kind == HVD_REDUCESCATTER)
        code = choose_op(plane, work, &op, error);
    if (code != HVD_OK)
        return code;
    plane->stage = HVD_NCCL_LAUNCHING;
    code = prepare(plane, work, error);
    if (code != HVD_OK)
        return code;
    return group(plane, work, op, error);
}
