/* validate.c - local mistakes in a request.
 *
 * What is wrong with a request by itself is found at submit, before anyone else hears of it, and the job goes on:
 * an unknown dtype or op, memory that is not there, a root that is no rank of the set, a scalar where rows are meant,
 * splits that do not fit. What ranks disagree on is not seen here: the coordinator tells that. The texts keep the words
 * of Horovod where a script may look for them, and name the tensor.
 */
#include "engine.h"

#include <stdio.h>

#include "../kernel/adasum.h"

/* A macro, so that it costs something only where it is told. */
#define NAME_OF(request) HVD_SHOWN((request)->name ? (request)->name : "(unnamed)")

/* Which of the two memories must this rank give, unless the tensor is empty? */
static bool lacks_memory(const struct hvd_membership *membership, const struct hvd_request *request)
{
    switch (request->kind) {
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
        return !request->input;
    case HVD_REDUCE:
        return !request->input || (request->root == membership->rank && !request->output);
    case HVD_REDUCESCATTER: /* of fewer rows than ranks, the last ranks get none */
        return !request->input || (request->dims[0] > membership->rank && !request->output);
    case HVD_SEND:
        return request->root == membership->rank ? !request->input : !request->output;
    default:
        return !request->input || !request->output;
    }
}

static int check_tensor(const struct hvd_membership *membership, const struct hvd_request *request,
                        struct hvd_error *error)
{
    int bytes = hvd_dtype_bytes(request->dtype);
    if (bytes == 0)
        return hvd_fail(error, HVD_ETYPE, HVD202 "tensor '%.200s': dtype %d is not supported", NAME_OF(request),
                        request->dtype);
    if (request->ndim < 0 || request->ndim > HVD_DIMS_MAX)
        return hvd_fail(error, HVD_EINVAL, HVD251 "tensor '%.200s' has %d dimensions; at most %d are supported",
                        NAME_OF(request), request->ndim, HVD_DIMS_MAX);
    int64_t total = bytes;
    for (int i = 0; i < request->ndim; i++)
        if (request->dims[i] < 0 || __builtin_mul_overflow(total, request->dims[i] ? request->dims[i] : 1, &total))
            return hvd_fail(error, HVD_EINVAL, HVD251 "tensor '%.200s': dimension %d is %lld", NAME_OF(request), i,
                            (long long)request->dims[i]);
    bool empty = false;
    for (int i = 0; i < request->ndim; i++)
        empty |= request->dims[i] == 0;
    if (!empty && lacks_memory(membership, request))
        return hvd_fail(error, HVD_EINVAL, HVD251 "tensor '%.200s' has no memory", NAME_OF(request));
    return HVD_OK;
}

static int check_reduction(const struct hvd_membership *membership, const struct hvd_request *request,
                           struct hvd_error *error)
{
    if (request->op == HVD_OP_adasum && membership->size > HVD_LOCAL_MAX)
        return hvd_fail(
            error, HVD_EINVAL,
            HVD252 "%s of '%.200s': Adasum supports at most %d ranks in this version of hvdlite, but the process set "
                   "has %d: sum over the ranks of a host first, or use Average",
            hvd_engine_kind(request->kind), NAME_OF(request), HVD_LOCAL_MAX, membership->size);
    const char *why = request->kind == HVD_ALLREDUCE && request->op == HVD_OP_adasum
                          ? hvd_adasum_check(request->dtype)
                          : hvd_reduce_check(request->op, request->dtype, request->prescale, request->postscale);
    if (why)
        return hvd_fail(error, hvd_dtype_bytes(request->dtype) ? HVD_EINVAL : HVD_ETYPE, HVD252 "%s of '%.200s': %s",
                        hvd_engine_kind(request->kind), NAME_OF(request), why);
    return HVD_OK;
}

/* Kinds that cut the tensor along its first dimension need one. */
static int check_rows(const struct hvd_request *request, const char *verb, struct hvd_error *error)
{
    if (request->ndim < 1)
        return hvd_fail(error, HVD_EINVAL,
                        HVD210 "%s of '%.200s': a scalar has no first dimension to %s along; reshape it to (1,)",
                        hvd_engine_kind(request->kind), NAME_OF(request), verb);
    return HVD_OK;
}

static int check_rank(const struct hvd_membership *membership, const struct hvd_request *request, int rank,
                      const char *what, struct hvd_error *error)
{
    if (rank < 0 || rank >= membership->size)
        return hvd_fail(error, HVD_EINVAL, HVD216 "%s of '%.200s': %s %d is not one of 0 to %d",
                        hvd_engine_kind(request->kind), NAME_OF(request), what, rank, membership->size - 1);
    return HVD_OK;
}

static int check_splits(const struct hvd_membership *membership, const struct hvd_request *request,
                        struct hvd_error *error)
{
    int64_t rows = request->dims[0], sum = 0;
    if (!request->splits || request->even)
        return rows % membership->size == 0
                   ? HVD_OK
                   : hvd_fail(
                         error, HVD_EINVAL,
                         HVD209
                         "alltoall of '%.200s': splits not provided, but first dimension of tensor (%lld) is not an "
                         "even multiple of the number of workers (%d)",
                         NAME_OF(request), (long long)rows, membership->size);
    if (request->splits_count != membership->size)
        return hvd_fail(error, HVD_EINVAL,
                        HVD209
                        "alltoall of '%.200s': Number of entries in splits does not equal number of workers (%d, and "
                        "the process set has %d ranks)",
                        NAME_OF(request), request->splits_count, membership->size);
    for (int rank = 0; rank < membership->size; rank++)
        if (request->splits[rank] < 0)
            return hvd_fail(error, HVD_EINVAL,
                            HVD209 "alltoall of '%.200s': splits must not be negative (%lld for rank %d)",
                            NAME_OF(request), (long long)request->splits[rank], rank);
        else if (__builtin_add_overflow(sum, request->splits[rank], &sum) || sum > rows)
            return hvd_fail(error, HVD_EINVAL,
                            HVD209
                            "alltoall of '%.200s': Sum of splits entries is greater than the first dimension of tensor "
                            "(%lld rows)",
                            NAME_OF(request), (long long)rows);
    return HVD_OK;
}

static int check_send(const struct hvd_membership *membership, const struct hvd_request *request,
                      struct hvd_error *error)
{
    int code = check_rank(membership, request, request->root, "the sender's rank", error);
    if (code == HVD_OK)
        code = check_rank(membership, request, request->peer, "the receiver's rank", error);
    if (code != HVD_OK)
        return code;
    if (request->root == request->peer)
        return hvd_fail(error, HVD_EINVAL,
                        HVD217 "send of '%.200s': rank %d would send to itself; copy the tensor instead",
                        NAME_OF(request), request->root);
    if (!request->name)
        return hvd_fail(error, HVD_EINVAL,
                        HVD257 "send from rank %d to rank %d: a send needs a name that is the same on both ranks",
                        request->root, request->peer);
    if (request->group)
        return hvd_fail(error, HVD_EINVAL, HVD257 "send of '%.200s': it cannot be in a group", NAME_OF(request));
    if (membership->rank != request->root && membership->rank != request->peer)
        return hvd_fail(error, HVD_EINVAL, HVD257 "send of '%.200s' from rank %d to rank %d: rank %d cannot take part",
                        NAME_OF(request), request->root, request->peer, membership->rank);
    return HVD_OK;
}

/* What is special about the kind; HVD_AGAIN: and a tensor has to be checked, too. */
static int check_kind(const struct hvd_membership *membership, const struct hvd_request *request,
                      struct hvd_error *error)
{
    int code;
    switch (request->kind) {
    case HVD_BARRIER:
    case HVD_JOIN:
        return HVD_OK;
    case HVD_ALLREDUCE:
        code = check_reduction(membership, request, error);
        break;
    case HVD_REDUCE:
        code = check_rank(membership, request, request->root, "root rank", error);
        code = code == HVD_OK ? check_reduction(membership, request, error) : code;
        break;
    case HVD_REDUCESCATTER:
        code = check_rows(request, "scatter", error);
        code = code == HVD_OK ? check_reduction(membership, request, error) : code;
        break;
    case HVD_ALLGATHER:
        code = check_rows(request, "gather", error);
        break;
    case HVD_ALLTOALL:
        code = check_rank(membership, request, request->root, "root rank", error);
        code = code == HVD_OK ? check_rows(request, "split", error) : code;
        code = code == HVD_OK ? check_splits(membership, request, error) : code;
        break;
    case HVD_BROADCAST:
        code = check_rank(membership, request, request->root, "root rank", error);
        break;
    case HVD_SEND:
        code = check_send(membership, request, error);
        break;
    default:
        return hvd_fail(error, HVD_EINVAL, HVD901 "'%.200s': collective %d is not supported", NAME_OF(request),
                        request->kind);
    }
    return code == HVD_OK ? HVD_AGAIN : code;
}

/* What cannot be done on devices, whatever lies there. */
static int check_device(const struct hvd_request *request, struct hvd_error *error)
{
    if (request->device == 0)
        return HVD_OK;
    if (request->device < 0 || request->kind == HVD_BARRIER || request->kind == HVD_JOIN)
        return hvd_fail(error, HVD_EINVAL, HVD901 "%s of '%.200s': %d is no device", hvd_engine_kind(request->kind),
                        NAME_OF(request), request->device - 1);
    return HVD_OK;
}

int hvd_request_check(const struct hvd_membership *membership, const struct hvd_request *request,
                      struct hvd_error *error)
{
    if (request->group && request->group_count < 1)
        return hvd_fail(error, HVD_EINVAL, HVD901 "tensor '%.200s': a group needs a count", NAME_OF(request));
    int code = check_device(request, error);
    if (code == HVD_OK)
        code = check_kind(membership, request, error);
    return code == HVD_AGAIN ? check_tensor(membership, request, error) : code;
}

static int not_a_member(const struct hvd_engine *engine, const struct hvd_request *request,
                        const struct hvd_set_record *record, struct hvd_error *error)
{
    char list[160] = "";
    size_t length = 0;
    for (int i = 0; i < record->count && length < sizeof list - 16; i++)
        length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", i ? ", " : "", record->ranks[i]);
    return hvd_fail(
        error, HVD_EINVAL,
        HVD214 "%s of '%.200s': Rank %d is not a member of the provided process set. Process set %d has the rank%s "
               "%s: only they may use it",
        hvd_engine_kind(request->kind), NAME_OF(request), engine->options.rank, request->process_set,
        record->count == 1 ? "" : "s", list);
}

int hvd_set_look_up(struct hvd_engine *engine, const struct hvd_request *request, struct hvd_membership *membership,
                    struct hvd_error *error)
{
    int number = request->process_set;
    *membership = (struct hvd_membership){.rank = engine->options.rank, .size = engine->options.size};
    if (number == 0)
        return HVD_OK;
    int code = HVD_OK;
    bool open = false;
    if (number > 0 && number < HVD_SETS_MAX) {
        pthread_mutex_lock(&engine->records_lock);
        const struct hvd_set_record *record = &engine->record[number];
        open = record->open;
        *membership = (struct hvd_membership){.rank = record->rank, .size = record->count, .life = record->life};
        if (open && record->rank < 0)
            code = not_a_member(engine, request, record, error);
        pthread_mutex_unlock(&engine->records_lock);
    }
    if (!open)
        return hvd_fail(error, HVD_EINVAL, HVD213 "%s of '%.200s': process set %d does not exist (any more)",
                        hvd_engine_kind(request->kind), NAME_OF(request), number);
    return code;
}

struct hvd_signature hvd_set_sign(const struct hvd_request *request)
{
    int kind = request->kind;
    bool reduces = kind == HVD_ALLREDUCE || kind == HVD_REDUCE || kind == HVD_REDUCESCATTER;
    struct hvd_signature signature;
    memset(&signature, 0, sizeof signature);
    signature.kind = kind;
    signature.op = reduces ? request->op : 0;
    signature.dtype = kind == HVD_BARRIER ? 0 : request->dtype + (request->device ? HVD_SIGNED_ON_DEVICE : 0);
    signature.ndim = request->ndim;
    bool rooted = kind == HVD_BROADCAST || kind == HVD_REDUCE || kind == HVD_SEND || kind == HVD_ALLTOALL;
    signature.root = rooted ? request->root : 0;
    signature.peer = kind == HVD_SEND ? request->peer : 0;
    signature.priority = request->priority;
    signature.group = request->group;
    signature.not_finite = reduces ? request->not_finite : 0;
    signature.group_count = request->group ? (uint32_t)request->group_count : 0;
    signature.prescale = reduces ? request->prescale : 1.0;
    signature.postscale = reduces ? request->postscale : 1.0;
    memcpy(signature.dims, request->dims, sizeof signature.dims[0] * (size_t)request->ndim);
    if ((kind == HVD_ALLGATHER || kind == HVD_ALLTOALL) && !request->even)
        signature.dims[0] = 0;
    return signature;
}
