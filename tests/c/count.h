/* count.h - how many instructions does this take? Sections of a count_*.c program, counted by valgrind's callgrind.
 *
 * tests/tools/counts.py starts the program under callgrind and divides what it counted between begin and end by
 * `times`, which the program prints. Only the thread that began is counted. Without valgrind the sections do nothing,
 * so a count program also runs by itself, as a check that it works.
 */
#ifndef HVD_TEST_COUNT_H
#define HVD_TEST_COUNT_H

#include <stdio.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#define CALLGRIND_TOGGLE_COLLECT
#define CALLGRIND_ZERO_STATS
#define CALLGRIND_DUMP_STATS_AT(name) (void)(name)
#endif

static inline void count_begin(void)
{
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
    CALLGRIND_TOGGLE_COLLECT;
}

/* name: without spaces. */
static inline void count_end(const char *name, int times)
{
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
    printf("COUNT %s %d\n", name, times);
    fflush(stdout);
}

#endif
