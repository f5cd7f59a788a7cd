/* numa.c - on which memory node should a rank's shared memory lie?
 *
 * On machines with several memory nodes a page lies where it is first touched from, which for shared memory may be a
 * peer: the owner of a tensor in plane memory is usually first, but of an output that nobody has written yet the rank
 * that reduces its slice is. Where a rank's usable CPUs are all of one node (it is pinned, as launchers do), that node
 * is the right one, and the kernel is told so for the whole segment (mbind, as a preference: a full node is no error).
 * A rank that may run anywhere has no right node, and first touch stays the rule. On a machine of one node nothing is
 * done.
 *
 * The nodes are read from sysfs, whose folder is an argument, so that a test can show other machines. Sandboxes often
 * refuse mbind: placement is a wish, and nothing fails for it. The system calls are made raw: no libnuma is needed.
 */
#define _GNU_SOURCE
#include "shared_memory.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NODES_MAX         64
#define PREFERRED         1 /* MPOL_PREFERRED */
#define SYSFS_NODES       "/sys/devices/system/node"
#define LINE_BYTES        8192
#define BITS_OF_NODE_MASK (8 * sizeof(unsigned long))

/* How many of the set's CPUs are in a list like "0-3,8,10-11"; -1 if it is none. */
static int count_listed(const char *list, const cpu_set_t *cpus)
{
    int found = 0;
    while (*list && *list != '\n') {
        char *end;
        long from = strtol(list, &end, 10), until = from;
        if (end == list || from < 0)
            return -1;
        if (*end == '-') {
            list = end + 1;
            until = strtol(list, &end, 10);
            if (end == list)
                return -1;
        }
        for (long cpu = from; cpu <= until && cpu < CPU_SETSIZE; cpu++)
            found += CPU_ISSET((int)cpu, cpus) != 0;
        list = *end == ',' ? end + 1 : end;
        if (*end && *end != ',' && *end != '\n')
            return -1;
    }
    return found;
}

int hvd_node_of(const char *folder, const void *cpus)
{
    const cpu_set_t *set = cpus;
    int usable = CPU_COUNT(set), home = -1, nodes = 0;
    for (int node = 0; node < NODES_MAX; node++) {
        char path[256], line[LINE_BYTES] = "";
        snprintf(path, sizeof path, "%s/node%d/cpulist", folder, node);
        FILE *file = fopen(path, "re");
        if (!file)
            continue;
        bool read = fgets(line, sizeof line, file) != NULL;
        fclose(file);
        nodes++;
        if (read && usable > 0 && count_listed(line, set) == usable)
            home = node;
    }
    return nodes > 1 ? home : -1;
}

int hvd_memory_node(void)
{
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? hvd_node_of(SYSFS_NODES, &cpus) : -1;
}

bool hvd_memory_prefer(void *memory, size_t bytes, int node)
{
    unsigned long mask[NODES_MAX / BITS_OF_NODE_MASK] = {0};
    if (node < 0 || node >= NODES_MAX)
        return false;
    mask[(size_t)node / BITS_OF_NODE_MASK] = 1ul << (size_t)node % BITS_OF_NODE_MASK;
    return syscall(SYS_mbind, memory, bytes, PREFERRED, mask, (unsigned long)NODES_MAX + 1, 0u) == 0;
}

void hvd_memory_huge(void *memory, size_t bytes)
{
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* refused: then it has small pages */
}
