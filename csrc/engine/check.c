/* check.c - local mistakes in a request.
 *
 * What is wrong with a request by itself is found at submit, before anyone else hears of it, and the job goes on:
 * an unknown dtype or op, memory that is not there, a root that is no rank of the set, a scalar where rows are meant.
 * What ranks disagree on is not seen here: the coordinator tells that. The texts keep the words of Horovod where a
 * script may look for them, and name the tensor.
 */
#include "engine.h"

#include "../kernel/adasum.h"

static int check_tensor(const struct hvd_request *request, struct hvd_error *error)
{
    const char *name = request->name ? request->name : "(unnamed)";
    int bytes = hvd_dtype_bytes(request->dtype);
    if (bytes == 0)
        return hvd_fail(error, HVD_ETYPE, "tensor '%.200s': dtype %d is not one that hvdlite knows", name,
                        request->dtype);
    if (request->ndim < 0 || request->ndim > HVD_DIMS_MAX)
        return hvd_fail(error, HVD_EINVAL, "tensor '%.200s' has %d dimensions; at most %d are supported", name,
                        request->ndim, HVD_DIMS_MAX);
    int64_t total = bytes;
    for (int i = 0; i < request->ndim; i++)
        if (request->dims[i] < 0 || __builtin_mul_overflow(total, request->dims[i] ? request->dims[i] : 1, &total))
            return hvd_fail(error, HVD_EINVAL, "tensor '%.200s': dimension %d is %lld", name, i,
                            (long long)request->dims[i]);
    bool empty = false;
    for (int i = 0; i < request->ndim; i++)
        empty |= request->dims[i] == 0;
    if (!empty && (!request->input || (request->kind != HVD_ALLGATHER && !request->output)))
        return hvd_fail(error, HVD_EINVAL, "tensor '%.200s' has no memory", name);
    return HVD_OK;
}

int hvd_request_check(const struct hvd_membership *membership, const struct hvd_request *request,
                      struct hvd_error *error)
{
    const char *name = request->name ? request->name : "(unnamed)", *why;
    if (request->group && request->group_count < 1)
        return hvd_fail(error, HVD_EINVAL, "tensor '%.200s': a group needs a count", name);
    switch (request->kind) {
    case HVD_BARRIER:
    case HVD_JOIN:
        return HVD_OK;
    case HVD_ALLREDUCE:
        why = request->kind == HVD_ALLREDUCE && request->op == HVD_OP_adasum
                  ? hvd_adasum_check(request->dtype)
                  : hvd_reduce_check(request->op, request->dtype, request->prescale, request->postscale);
        if (why)
            return hvd_fail(error, hvd_dtype_bytes(request->dtype) ? HVD_EINVAL : HVD_ETYPE,
                            "allreduce of '%.200s': %s", name, why);
        return check_tensor(request, error);
    case HVD_ALLGATHER:
        if (request->ndim < 1)
            return hvd_fail(
                error, HVD_EINVAL,
                "allgather of '%.200s': a scalar has no first dimension to gather along; reshape it to (1,)", name);
        return check_tensor(request, error);
    case HVD_BROADCAST:
        if (request->root < 0 || request->root >= membership->size)
            return hvd_fail(error, HVD_EINVAL, "broadcast of '%.200s': root rank %d is not one of 0 to %d", name,
                            request->root, membership->size - 1);
        return check_tensor(request, error);
    default:
        return hvd_fail(error, HVD_EINVAL, "'%.200s': collective %d is not supported", name, request->kind);
    }
}
