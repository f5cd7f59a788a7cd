/* key_map.c - names to keys, and keys to places.
 *
 * Every submission of a known tensor costs one hash of its name and one look-up, so both are short. The hash
 * is 128 bits wide, in two lanes with different constants: two names of a job that share a key would be taken
 * for one tensor, and at 128 bits that does not happen. It is no defence against somebody who searches for
 * collisions; names come from the user's own program.
 *
 * The map keeps no keys of its own: a cell holds the index of an entry whose first member is the key. It is
 * made with at least twice as many cells as entries, so a probe is short and an empty cell always exists.
 * Deletion shifts later cells back instead of leaving tombstones: a table that lives as long as the job must
 * not silt up.
 */
#include "state.h"

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

struct lanes {
    uint64_t a, b;
};

static const uint64_t odd[6] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3,
                                0x589965cc75374cc3, 0x1d8e4e27c47d124f, 0xeb44accab455d165};

static struct lanes stir(struct lanes lanes, const char *sixteen)
{
    uint64_t word[2];
    memcpy(word, sixteen, sizeof word);
    return (struct lanes){
        fold(lanes.a ^ word[0] ^ odd[2], word[1] ^ odd[3]) + word[0],
        fold(lanes.b ^ word[1] ^ odd[4], word[0] ^ odd[5]) + word[1],
    };
}

struct hvd_key hvd_key_of(uint64_t set, const char *name)
{
    size_t bytes = strlen(name);
    struct lanes lanes = {set ^ odd[0], fold(set ^ odd[1], odd[2])};
    if (bytes >= 16) {
        for (size_t at = 0; at + 16 < bytes; at += 16)
            lanes = stir(lanes, name + at);
        lanes = stir(lanes, name + bytes - 16); /* may overlap: quicker than a short piece */
    } else {
        char padded[16] = {0};
        memcpy(padded, name, bytes);
        lanes = stir(lanes, padded);
    }
    struct hvd_key key = {
        fold(lanes.a ^ bytes, odd[1] ^ lanes.b),
        fold(lanes.b ^ bytes ^ odd[0], odd[3] ^ lanes.a),
    };
    if (key.high == 0)
        key.high = 1; /* 0 is for unnamed requests */
    return key;
}

static uint32_t home(const struct hvd_map *map, struct hvd_key key)
{
    return (uint32_t)(((key.low ^ key.high) * 0x9e3779b97f4a7c15u) >> 32) & map->mask;
}

static struct hvd_key key_at(const struct hvd_map *map, uint32_t index)
{
    struct hvd_key key;
    memcpy(&key, map->entry + index * map->stride, sizeof key);
    return key;
}

uint32_t hvd_map_find(const struct hvd_map *map, struct hvd_key key)
{
    for (uint32_t at = home(map, key);; at = (at + 1) & map->mask) {
        if (map->cell[at] == 0)
            return HVD_NONE;
        struct hvd_key other = key_at(map, map->cell[at] - 1);
        if (other.high == key.high && other.low == key.low)
            return map->cell[at] - 1;
    }
}

void hvd_map_put(struct hvd_map *map, uint32_t index)
{
    uint32_t at = home(map, key_at(map, index));
    while (map->cell[at] != 0)
        at = (at + 1) & map->mask;
    map->cell[at] = index + 1;
}

void hvd_map_drop(struct hvd_map *map, uint32_t index)
{
    uint32_t hole = home(map, key_at(map, index));
    while (map->cell[hole] != index + 1) {
        HVD_ASSERT(map->cell[hole] != 0);
        hole = (hole + 1) & map->mask;
    }
    /* A later cell of the run moves into the hole unless its home lies behind the hole. */
    for (uint32_t at = (hole + 1) & map->mask; map->cell[at] != 0; at = (at + 1) & map->mask) {
        uint32_t from = home(map, key_at(map, map->cell[at] - 1));
        if (((at - from) & map->mask) >= ((at - hole) & map->mask)) {
            map->cell[hole] = map->cell[at];
            hole = at;
        }
    }
    map->cell[hole] = 0;
}

struct hvd_key hvd_key_for(uint64_t set, const char *name, const struct hvd_signature *signature)
{
    /* Sets are numbered below 2^16 and ranks below 2^20: no two sends get the same seed. */
    uint64_t pair = ((uint64_t)(uint32_t)signature->root + 1) << 16 | ((uint64_t)(uint32_t)signature->peer + 1) << 40;
    return hvd_key_of(signature->kind == HVD_SEND ? set ^ pair : set, name);
}
