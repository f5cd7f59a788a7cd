/* memory_use.c - how much memory of this rank is ours, and what is it for?
 *
 * Counted is what costs memory now, not what is mapped: segments are sparse, so their pages are asked of the kernel
 * (mincore); blocks of alloc and results of ragged collectives are counted where they are made and released. A page
 * that several ranks map is counted by the rank whose part it is, so the sum over the ranks of a host is what the host
 * pays. Of the CPU's memory there is no fusion buffer to count, since buckets are scatter lists over the tensors' own;
 * on devices there is one, counted by its plane for all sets of the process, and blocks for results; and pinned memory
 * for what goes by way of the CPU. Of these the whole is counted, with what was outgrown and is kept (cuda/pinned.c).
 *
 * Asked by any thread at any time: only what lives as long as the engine is looked at, never a process set, which
 * another thread may close meanwhile; what sets use lies in the set space and is counted there as a whole.
 */
#include "engine.h"

static uint64_t resident_of_space(const struct hvd_engine *engine)
{
    const struct hvd_space *space = &engine->space;
    return space->share ? hvd_memory_resident(space->share->map[space->rank], space->share->bytes) : 0;
}

static uint64_t resident_of_records(const struct hvd_engine *engine)
{
    const struct hvd_set *set = engine->global;
    return hvd_memory_resident(set->coord_block, set->coord_block_bytes) +
           atomic_load(&engine->handles.high) * sizeof(struct hvd_slot) +
           hvd_memory_resident(engine->names.entry, sizeof *engine->names.entry * HVD_TRACE_NAMES) +
           (engine->trace.mask + 1) * sizeof(struct hvd_trace_slot) + hvd_steps_bytes(&engine->steps) + sizeof *engine;
}

int64_t hvd_engine_usage(struct hvd_engine *engine, int kind)
{
    uint64_t lanes = 0, arena = 0, devices = 0;
    for (int i = 0; i < engine->global->planes_count; i++) {
        const struct hvd_open_plane *open = &engine->global->planes[i];
        if (open->plane->usage)
            open->plane->usage(open->self, open->plane->device ? &devices : &lanes, &arena);
    }
    switch (kind) {
    case HVD_USAGE_lanes:
        return (int64_t)lanes;
    case HVD_USAGE_arena:
        return (int64_t)arena;
    case HVD_USAGE_devices:
        return (int64_t)(devices + hvd_block_bytes());
    case HVD_USAGE_pinned:
        return (int64_t)hvd_pinned_bytes();
    case HVD_USAGE_results:
        return atomic_load(&engine->handles.result_bytes);
    case HVD_USAGE_boards:
        if (engine->alone)
            return 0;
        return (int64_t)hvd_memory_resident(hvd_host_boards(&engine->host, engine->host.rank),
                                            2 * engine->host.board_bytes);
    case HVD_USAGE_sets:
        return (int64_t)resident_of_space(engine);
    default:
        return (int64_t)resident_of_records(engine);
    }
}
