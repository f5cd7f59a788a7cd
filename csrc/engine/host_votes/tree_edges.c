/* tree_edges.c - which hosts are next to each other in the tree of a set's votes?
 *
 * Hosts are counted in the order of their first ranks in the set; host i is below host (i - 1) / 2, so the tree is as
 * flat as a binary one can be, and both ends of an edge find it by themselves. Python asks here, too, whom a rank needs
 * a stream to (hvd_vote_peers). Only arithmetic.
 */
#include "vote_tree.h"

/* Hosts in the order of their first ranks: leader[i] is the first rank of the i-th. Returns how many. */
int hvd_tree_leaders(const int *host_of, int size, int *leader, int *index_of)
{
    int hosts = 0;
    for (int rank = 0; rank < size; rank++) {
        int host = 0;
        while (host < hosts && host_of[leader[host]] != host_of[rank])
            host++;
        if (host == hosts)
            leader[hosts++] = rank;
        index_of[rank] = host;
    }
    return hosts;
}

/* The neighbours of host `at` in a tree of so many. */
int hvd_tree_neighbours(int at, int hosts, int *near)
{
    int count = 0;
    if (at > 0)
        near[count++] = (at - 1) / 2;
    for (int below = 2 * at + 1; below <= 2 * at + 2; below++)
        if (below < hosts)
            near[count++] = below;
    return count;
}

/* The neighbour of host `at` by which host `to`, another one, is reached. */
int hvd_tree_toward(int at, int to)
{
    while (to > at && (to - 1) / 2 != at)
        to = (to - 1) / 2;
    return to > at ? to : (at - 1) / 2;
}

int hvd_vote_peers(const int *host_of, int size, int rank, int *peers)
{
    int leader[HVD_RANKS_MAX], index_of[HVD_RANKS_MAX];
    if (size < 1 || size > HVD_RANKS_MAX || rank < 0 || rank >= size)
        return HVD_EINVAL;
    int hosts = hvd_tree_leaders(host_of, size, leader, index_of);
    if (leader[index_of[rank]] != rank)
        return 0;
    int count = hvd_tree_neighbours(index_of[rank], hosts, peers);
    for (int i = 0; i < count; i++)
        peers[i] = leader[peers[i]];
    return count;
}

/* Ranks on the other side of the edge from host `at` to its neighbour `near`. */
int hvd_tree_behind(const int *index_of, int size, int at, int near)
{
    int below = near > at ? near : at, count = 0;
    for (int rank = 0; rank < size; rank++) {
        int host = index_of[rank];
        while (host > below)
            host = (host - 1) / 2;
        count += host == below;
    }
    return near > at ? count : size - count;
}
