/* count_trace.c - instructions of one event, and of finding the number of a tensor's name.
 *
 * The ring is always on, so this is what every rank pays: six events for a collective that is waited for at once, three
 * for a gradient. Beside `submit-to-wait-of-4KB` and `gradient-hook-in-python` it says what share that is.
 */
#include "count.h"
#include "crew.h"

enum { TIMES = 1000 };

int main(void)
{
    static struct hvd_trace_ring ring;
    static struct hvd_trace_names names;
    static const char name[] = "DistributedOptimizer.Allreduce.layer3.1.conv2.weight";
    struct hvd_error error = {0};
    uint32_t number = 0;
    CHECK(hvd_trace_open(&ring, 4096) == HVD_OK && hvd_trace_names_open(&names, &error) == HVD_OK);
    hvd_trace_add(&ring, HVD_TRACE_submit, hvd_trace_number(&names, 0, name, sizeof name - 1), 0);
    count_begin();
    for (int i = 0; i < TIMES; i++)
        hvd_trace_add(&ring, HVD_TRACE_submit, 1, 4096);
    count_end("trace-event", TIMES);
    count_begin();
    for (int i = 0; i < TIMES; i++)
        number |= hvd_trace_number(&names, 0, name, sizeof name - 1);
    count_end("trace-name-of-52-bytes", TIMES);
    CHECK(number);
    hvd_trace_close(&ring);
    hvd_trace_names_close(&names);
    return 0;
}
