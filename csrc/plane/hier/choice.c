/* choice.c - when is an allreduce worth three works in a row, and into how many segments is it cut?
 *
 * WHEN. What p2p does at once, hier does inside a host, across and inside again. Both are reckoned with the cost of a
 * message between hosts: p2p with all ranks, of which those of a host share its wire; hier with one rank per host,
 * which has its share of the bytes and of the wire, and two works in shared memory. Of what p2p may send before it is
 * agreed on (plane/p2p/eager_send.h) nothing is taken away.
 *
 * HOW MANY. With more segments, more of the shorter side's work hides behind the longer one's, and each costs the wire
 * a pause: what comes next is not sent before the last has arrived, two ways later. With t for the work of the shorter
 * side on the whole bucket and p for the pause, n segments cost about t / n + n * p beyond the longer side, least at
 * n = sqrt(t / p): one on a long way, many on a short one.
 *
 * All is integer arithmetic on agreed values, so that all ranks come to the same.
 */
#include "state.h"

#include "../p2p/eager_send.h"

#define INSIDE_NS    UINT64_C(50000)       /* of a work inside a host: to wake up, mostly */
#define INSIDE_PS    UINT64_C(500)         /* per byte, of both together: 2 GB/s */
#define LEAST_BYTES  ((uint64_t)512 << 10) /* of a segment */
#define MOST_BYTES   ((uint64_t)1 << 20)   /* by then it is worth it */
#define SEGMENTS_MAX 64
#define GRAIN        ((uint64_t)32 << 10)

static uint64_t cheapest(int size, const int *host_of, uint64_t bytes, struct hvd_cost cost, bool any_order)
{
    struct hvd_shape shape = {.kind = HVD_ALLREDUCE,
                              .size = size,
                              .count = bytes / sizeof(float),
                              .grain = GRAIN / sizeof(float),
                              .host_of = host_of};
    const struct hvd_algo *algo = hvd_algo_choose(&shape, sizeof(float), cost, !any_order);
    return hvd_algo_cost(algo, &shape, sizeof(float), cost);
}

uint64_t hvd_hier_least_bytes(const struct hvd_hier_place *place, int size, bool any_order, struct hvd_cost cost)
{
    struct hvd_cost lane = cost;
    lane.beta_ps = cost.beta_ps * (uint64_t)place->lanes;
    for (uint64_t bytes = 2 * HVD_EARLY_BYTES; bytes < MOST_BYTES; bytes *= 2) {
        uint64_t inside = 2 * INSIDE_NS + bytes * INSIDE_PS / 1000;
        uint64_t across = cheapest(place->hosts, NULL, bytes / (uint64_t)place->lanes, lane, any_order);
        if (inside + across < cheapest(size, place->host_of, bytes, cost, any_order))
            return bytes;
    }
    return MOST_BYTES;
}

uint64_t hvd_hier_segments(const struct hvd_hier_place *place, uint64_t bytes, struct hvd_cost cost)
{
    uint64_t inside_ns = bytes / 1000 * INSIDE_PS, hosts = (uint64_t)place->hosts;
    uint64_t wire_ns = bytes / 1000 * 2 * (hosts - 1) / hosts * cost.beta_ps;
    uint64_t hides_ns = inside_ns < wire_ns ? inside_ns : wire_ns, pause_ns = 2 * cost.alpha_ns + 1;
    uint64_t most = bytes / LEAST_BYTES, n = 1;
    most = most < SEGMENTS_MAX ? most : SEGMENTS_MAX;
    while (n < most && (n + 1) * (n + 1) <= hides_ns / pause_ns)
        n++;
    return n;
}
