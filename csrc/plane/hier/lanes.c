/* lanes.c - which ranks share a host, and which ones work together across hosts?
 *
 * Ranks are numbered on their host in the order of the set; hosts in the order of their first ranks. Every rank finds
 * the same, from what all know alike. A lane exists only where every host has a rank for it: between hosts each byte
 * then crosses once, and a lane that some host lacks would have to send it twice.
 */
#include "state.h"

#include <string.h>

void hvd_hier_lay_out(const int *host_of, int size, int rank, struct hvd_hier_place *place)
{
    int count[HVD_RANKS_MAX] = {0};
    memset(place, 0, sizeof *place);
    for (int r = 0; r < size; r++) {
        int host = place->hosts;
        for (int other = 0; other < r; other++)
            if (host_of[other] == host_of[r])
                host = place->host_of[other];
        place->hosts += host == place->hosts;
        place->host_of[r] = host;
        place->number_of[r] = count[host]++;
    }
    place->lanes = count[0];
    for (int host = 1; host < place->hosts; host++)
        place->lanes = count[host] < place->lanes ? count[host] : place->lanes;
    place->host = place->host_of[rank];
    place->number = place->number_of[rank];
    place->locals = count[place->host];
    for (int r = 0; r < size; r++) {
        if (place->host_of[r] == place->host)
            place->local[place->number_of[r]] = r;
        if (place->number_of[r] == place->number)
            place->across[place->host_of[r]] = r;
    }
}
