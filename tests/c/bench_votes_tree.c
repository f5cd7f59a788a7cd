/* bench_votes_tree.c - what do votes cost as the job grows? Figures of sim_hosts.h, one line for each number of ranks
 * and each kind of step, with commas between; examples/benchmarks/votes_tree.py draws them.
 *
 *     bench_votes_tree [most ranks]        10,000 by default, in hosts of 8
 */
#include "sim_hosts.h"

#include <stdio.h>
#include <stdlib.h>

#define TENSORS   161 /* of a ResNet-50 */
#define SPREAD_NS 100000000u

static void tell(const struct sim_hosts *sim, int ranks, const char *what, struct sim_step step)
{
    printf("%d,%d,%d,%s,%llu,%llu,%llu,%llu,%.1f\n", ranks, sim_hosts_count(sim), sim_hosts_deepest(sim), what,
           (unsigned long long)step.rounds, (unsigned long long)step.messages, (unsigned long long)step.bytes,
           (unsigned long long)step.most_bytes, (double)step.after_ns / 1e3);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const int sizes[] = {2, 4, 8, 16, 64, 256, 1024, 4096, 10000};
    int most = argc > 1 ? atoi(argv[1]) : 10000;
    puts("ranks,hosts,edges across,step,rounds,messages,bytes,bytes of the busiest host,us after the last submission");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && sizes[i] <= most; i++) {
        int ranks = sizes[i];
        struct sim_hosts *sim = sim_hosts_open(ranks, ranks < 16 ? ranks / 2 : 8, TENSORS, 1);
        tell(sim, ranks, "first", sim_hosts_step(sim, 0, false));
        tell(sim, ranks, "second", sim_hosts_step(sim, 0, false));
        for (int k = 0; k < 2; k++)
            sim_hosts_step(sim, 0, false);
        tell(sim, ranks, "learned", sim_hosts_step(sim, 0, false));
        tell(sim, ranks, "learned over 100 ms", sim_hosts_step(sim, SPREAD_NS, false));
        tell(sim, ranks, "mismatch", sim_hosts_step(sim, 0, true));
        sim_hosts_close(sim);
    }
    return 0;
}
