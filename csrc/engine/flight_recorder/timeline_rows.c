/* timeline_rows.c - what is new in the ring becomes rows of a timeline, without Python: two ranks that write one while
 * they train share their processors with the training, and Python's lock with the user's own thread. In Python an event
 * took 15 us, and training took 1.1 to 1.6 times as long.
 *
 * The ring holds numbers, spans.c wants words: kinds, planes, and names of tensors, each looked up when it comes.
 */
#include "../engine.h"

#include "../../trace/spans.h"

#include <stdio.h>

#define SOME 256  /* events that are copied at once */
#define MOST 8192 /* in one call: as rows a few megabytes */

static void show(const struct hvd_engine *engine, const struct hvd_event *raw, struct hvd_spans *spans)
{
    char name[HVD_NAME_MAX + 1];
    int by = (int)(raw->value >> 56), set;
    struct hvd_span_event event = {.t_ns = raw->time_ns, .what = (int)raw->what, .tag = raw->tag};
    event.set = (int)(raw->value >> HVD_TRACE_REST_BITS & 0xff);
    event.value = raw->value & HVD_TRACE_REST_MAX;
    event.by = raw->what == HVD_TRACE_start ? hvd_engine_carrier(by) : hvd_engine_kind(by);
    if (raw->what == HVD_TRACE_round) {
        event.value &= UINT32_MAX;
    } else if (raw->what == HVD_TRACE_submit || raw->what == HVD_TRACE_wait) { /* else the tag is enough */
        if (raw->tag >= HVD_TRACE_UNNAMED)
            snprintf(name, sizeof name, "%s.noname.%u", event.by, raw->tag - HVD_TRACE_UNNAMED);
        if (raw->tag >= HVD_TRACE_UNNAMED || hvd_trace_text(&engine->names, raw->tag, &set, name))
            event.name = name;
    }
    hvd_spans_feed(spans, &event);
}

int hvd_engine_follow(struct hvd_engine *engine, struct hvd_follower *follower, struct hvd_spans *spans)
{
    struct hvd_event some[SOME];
    int count, all = 0;
    if (!follower->room) {
        follower->from = atomic_load(&engine->trace.next);
        follower->room = engine->trace.mask + 1;
    }
    do {
        count = hvd_trace_read(&engine->trace, &follower->from, some, SOME, &follower->lost);
        for (int i = 0; i < count; i++)
            show(engine, &some[i], spans);
        all += count;
    } while (count == SOME && all < MOST);
    return all;
}
