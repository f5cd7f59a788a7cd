/* names.c - what error texts call things, and how large elements are.
 *
 * The kernel names dtypes and ops, this file names the kinds of collective, and the coordinator, which may look
 * into neither, gets all three as tables indexed by number, with NULL where there is no such number. Each is
 * made from the X-macro rows at compile time, so nothing here is edited when a row is added.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

static const char *const kinds[] = {
    [HVD_ALLREDUCE] = "allreduce",
    [HVD_ALLGATHER] = "allgather",
    [HVD_BROADCAST] = "broadcast",
    [HVD_BARRIER] = "barrier",
    [HVD_JOIN] = "join",
    [HVD_ALLTOALL] = "alltoall",
    [HVD_REDUCESCATTER] = "reducescatter",
    [HVD_REDUCE] = "reduce",
    [HVD_SEND] = "send",
};
static const char *const ops[] = {
#define X(number, name) [number] = #name,
    HVD_OPS(X)
#undef X
};
static const char *const dtypes[] = {
#define X(number, name, bytes) [number] = #name, [number + HVD_SIGNED_ON_DEVICE] = #name,
    HVD_DTYPES(X)
#undef X
};
const uint8_t hvd_engine_bytes_of[] = {
#define X(number, name, bytes) [number] = bytes, [number + HVD_SIGNED_ON_DEVICE] = bytes,
    HVD_DTYPES(X)
#undef X
};

const struct hvd_coord_names hvd_engine_names = {
    .kind = kinds,
    .op = ops,
    .dtype = dtypes,
    .kinds = HVD_COUNT_OF(kinds),
    .ops = HVD_COUNT_OF(ops),
    .dtypes = HVD_COUNT_OF(dtypes),
    .on_device = HVD_SIGNED_ON_DEVICE,
};

const char *hvd_engine_kind(int kind)
{
    if (kind == HVD_ENGINE_SET_OPEN || kind == HVD_ENGINE_SET_CLOSE)
        return "process set";
    return kind >= 0 && kind < hvd_engine_names.kinds && kinds[kind] ? kinds[kind] : "collective";
}

const char *hvd_engine_carrier(int by)
{
    const char *name = by == HVD_TRACE_BY_VOTES ? "votes" : by == HVD_TRACE_BY_CPU ? "cpu" : hvd_plane_name(by);
    return name ? name : "?";
}
