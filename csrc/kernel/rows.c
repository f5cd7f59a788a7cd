/* rows.c - where do rows of an hvd.ps table lie: the servers of each id, and its slot on this server.
 *
 * One pass over the ids of a message. Messages of ZeroMQ have no alignment, so ids are copied out one by one. The
 * bijection is that of placement.py: multiplications by odd numbers and shifts, modulo 2^bits. A result is always below
 * 2^bits, so a part and an index that follow from it are within their arrays.
 */
#include "../hvdlite.h"

#include <string.h>

static uint64_t mixed(uint64_t x, int bits)
{
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    int half = (bits + 1) / 2;
    x = (x * 0x9E3779B97F4A7C15u) & mask;
    x ^= x >> half;
    x = (x * 0xBF58476D1CE4E5B9u) & mask;
    x ^= x >> half;
    return (x * 0x94D049BB133111EBu) & mask;
}

/* Mixed ids, or 0 where one is no row. */
static int place(const struct hvd_row_places *places, const char *ids, int64_t i, uint64_t *x)
{
    memcpy(x, ids + 8 * i, 8);
    if (*x >= places->rows) /* as such, negative ones are the largest */
        return 0;
    if (places->is_mixed)
        *x = mixed(*x, places->bits);
    return 1;
}

int hvd_row_slots(const struct hvd_row_places *places, const void *ids, int64_t count, int64_t *slots)
{
    uint64_t within = ((uint64_t)1 << places->low) - 1, x;
    for (int64_t i = 0; i < count; i++) {
        if (!place(places, ids, i, &x))
            return 0;
        int64_t base = places->base[x >> places->low];
        if (base < 0)
            return 0;
        slots[i] = base + (int64_t)(x & within);
    }
    int is_known = 1;
    for (int64_t i = 0; i < count; i++) { /* apart: the processor then waits for many of these reads at once */
        slots[i] = (int64_t)places->index[slots[i]] - 1;
        is_known &= slots[i] >= 0;
    }
    return is_known;
}

int hvd_row_owners(const struct hvd_row_places *places, const void *ids, int64_t count, int16_t *owners)
{
    uint64_t x;
    for (int64_t i = 0; i < count; i++) {
        if (!place(places, ids, i, &x))
            return 0;
        for (int k = 0; k < places->replicas; k++)
            *owners++ = places->owners[(x >> places->low) * (uint64_t)places->replicas + (uint64_t)k];
    }
    return 1;
}
