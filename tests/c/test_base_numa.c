/* test_base_numa.c - which memory node a rank's memory prefers, on machines that are made of files, and on this one.
 */
#define _GNU_SOURCE
#include "check.h"
#include "base/shared_memory.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char folder[] = P_tmpdir "/hvdlite-nodes-XXXXXX";

static void node(int number, const char *cpus)
{
    char path[128];
    snprintf(path, sizeof path, "%s/node%d", folder, number);
    CHECK(mkdir(path, 0700) == 0 || errno == EEXIST, "%s: %s", path, strerror(errno));
    snprintf(path, sizeof path, "%s/node%d/cpulist", folder, number);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(cpus, file) >= 0 && fclose(file) == 0, "%s", path);
}

static void no_node(int number)
{
    char path[128];
    snprintf(path, sizeof path, "%s/node%d/cpulist", folder, number);
    unlink(path);
    snprintf(path, sizeof path, "%s/node%d", folder, number);
    rmdir(path);
}

static int home_of(int first, int last)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (int cpu = first; cpu <= last; cpu++)
        CPU_SET(cpu, &cpus);
    return hvd_node_of(folder, &cpus);
}

static void a_pinned_rank_has_a_node_and_another_has_none(void)
{
    CHECK(home_of(0, 0) == -1, "no nodes at all");
    node(0, "0-3,8-11\n");
    CHECK(home_of(1, 2) == -1, "with one node there is nothing to prefer");
    node(2, "4-7,12-15\n");
    node(3, "\n"); /* memory without a processor */
    CHECK(home_of(1, 2) == 0 && home_of(9, 9) == 0, "inside node 0");
    CHECK(home_of(4, 7) == 2 && home_of(15, 15) == 2, "inside node 2");
    CHECK(home_of(3, 4) == -1 && home_of(0, 15) == -1, "in both");
    CHECK(home_of(16, 16) == -1 && home_of(1, 0) == -1, "in none");
    node(2, "four to seven");
    CHECK(home_of(4, 4) == -1 && home_of(8, 8) == 0, "a file that makes no sense is no node's");
}

static void memory_prefers_the_node_it_is_told(void)
{
    struct hvd_error error = {0};
    int fd = hvd_memory_create(2 * HVD_PAGE, HVD_MEMORY_BEST, &error), policy = -1;
    char *memory = fd >= 0 ? hvd_memory_map(fd, 2 * HVD_PAGE, &error) : NULL;
    CHECK(memory, "%s", error.text);
    CHECK(!hvd_memory_prefer(memory, HVD_PAGE, -1) && !hvd_memory_prefer(memory, HVD_PAGE, 1000), "no such node");
    if (!hvd_memory_prefer(memory, HVD_PAGE, 0)) {
        printf("mbind is refused here (%s)\n", strerror(errno));
    } else if (syscall(SYS_get_mempolicy, &policy, NULL, 0ul, memory, 2ul /* of an address */) == 0) {
        CHECK(policy == 1, "policy %d of memory that prefers a node", policy);
        CHECK(syscall(SYS_get_mempolicy, &policy, NULL, 0ul, memory + HVD_PAGE, 2ul) == 0 && policy != 1,
              "the page after it has policy %d", policy);
    }
    hvd_memory_huge(memory, 2 * HVD_PAGE);
    memory[0] = memory[HVD_PAGE] = 1;
    hvd_memory_unmap(memory, 2 * HVD_PAGE);
    close(fd);
}

int main(void)
{
    CHECK(mkdtemp(folder), "%s", folder);
    a_pinned_rank_has_a_node_and_another_has_none();
    memory_prefers_the_node_it_is_told();
    for (int number = 0; number < 4; number++)
        no_node(number);
    CHECK(rmdir(folder) == 0, "%s: %s", folder, strerror(errno));
    printf("node of this process: %d\n", hvd_memory_node());
    return 0;
}
