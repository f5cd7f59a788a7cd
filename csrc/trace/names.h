/* names.h - a tensor's name and set become a small number, which events carry; and back.
 *
 * Any thread asks for a number, any thread asks what a number meant; nobody waits. The table is bounded: when it is
 * full a new name takes the place of an old one, whose number means nothing from then on rather than something else.
 */
#ifndef HVD_TRACE_NAMES_H
#define HVD_TRACE_NAMES_H

#include "../base/base.h"

#include <stdatomic.h>

#define HVD_TRACE_NAMES   8192        /* names at most, a power of two */
#define HVD_TRACE_UNNAMED 0x80000000u /* added to how many without a name came before it in its set */

struct hvd_trace_entry {
    _Atomic uint64_t hash; /* 0: free */
    _Atomic uint64_t set_length;
    _Atomic uint64_t text[HVD_NAME_MAX / 8 + 1];
};

struct hvd_trace_names {
    struct hvd_trace_entry *entry; /* sparse: costs memory as names come */
};

int hvd_trace_names_open(struct hvd_trace_names *names, struct hvd_error *error);
void hvd_trace_names_close(struct hvd_trace_names *names);
/* The number of this name in this set: never 0, and less than HVD_TRACE_UNNAMED. */
uint32_t hvd_trace_number(struct hvd_trace_names *names, int set, const char *name, size_t length);
/* The name behind a number (cut to HVD_NAME_MAX bytes) and its set; false: nobody knows any more. */
bool hvd_trace_text(const struct hvd_trace_names *names, uint32_t number, int *set, char text[HVD_NAME_MAX + 1]);

#endif
