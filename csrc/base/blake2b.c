/* blake2b.c - BLAKE2b as RFC 7693 has it, with a key: see blake2b.h.
 *
 * Why this one? It is a MAC by itself when it has a key (no HMAC around it), Python's standard library has it, so that
 * both ends of the store's connection can be in either language, and plain C is fast enough: some 3 cycles a byte. A
 * block of 128 bytes is mixed into eight words by twelve rounds; the key is the first block. The last block is told
 * from others by a flag, so it is kept until it is known whether more comes.
 *
 * Deliberately not here: hashing without a key, other lengths of keys and tags, and encryption.
 */
#include "blake2b.h"

#include <string.h>

enum { WORDS = 16, BLOCK = WORDS * 8, ROUNDS = 12 };

static const uint64_t start[8] = {
    UINT64_C(0x6a09e667f3bcc908), UINT64_C(0xbb67ae8584caa73b), UINT64_C(0x3c6ef372fe94f82b),
    UINT64_C(0xa54ff53a5f1d36f1), UINT64_C(0x510e527fade682d1), UINT64_C(0x9b05688c2b3e6c1f),
    UINT64_C(0x1f83d9abfb41bd6b), UINT64_C(0x5be0cd19137e2179),
};

/* Which words of the block a round takes, in order; the last two rounds are as the first two. */
static const uint8_t order[ROUNDS][WORDS] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

/* Numbers of the hash are little-endian; that of a message, as all that crosses the store's connection, big-endian. */
static uint64_t read_word(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? word : __builtin_bswap64(word);
}

static inline uint64_t turned(uint64_t word, int by)
{
    return word >> by | word << (64 - by);
}

static inline __attribute__((always_inline)) void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}

static void compress(struct hvd_mac *mac, const unsigned char *block, bool last)
{
    uint64_t v[WORDS], m[WORDS];
    for (int i = 0; i < 8; i++) {
        v[i] = mac->state[i];
        v[i + 8] = start[i];
    }
    v[12] ^= mac->bytes; /* its upper half stays 0: no message is that long */
    v[14] = last ? ~v[14] : v[14];
    for (int i = 0; i < WORDS; i++)
        m[i] = read_word(block + 8 * i);
#pragma GCC unroll 12 /* so that which word goes where is known when this is compiled: twice as fast */
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *s = order[round];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        mac->state[i] ^= v[i] ^ v[i + 8];
}

void hvd_mac_begin(struct hvd_mac *mac, const unsigned char *key)
{
    memcpy(mac->state, start, sizeof start);
    mac->state[0] ^= UINT64_C(0x01010000) ^ HVD_KEY_BYTES << 8 ^ HVD_TAG_BYTES;
    mac->bytes = 0;
    memset(mac->block, 0, sizeof mac->block);
    memcpy(mac->block, key, HVD_KEY_BYTES);
    mac->fill = BLOCK;
}

void hvd_mac_add(struct hvd_mac *mac, const void *bytes, size_t count)
{
    const unsigned char *from = bytes;
    while (count) {
        if (mac->fill == BLOCK) { /* more comes, so it is not the last */
            mac->bytes += BLOCK;
            compress(mac, mac->block, false);
            mac->fill = 0;
        }
        for (; mac->fill == 0 && count > BLOCK; from += BLOCK, count -= BLOCK) {
            mac->bytes += BLOCK;
            compress(mac, from, false);
        }
        size_t part = count < BLOCK - mac->fill ? count : BLOCK - mac->fill;
        memcpy(mac->block + mac->fill, from, part);
        mac->fill += part;
        from += part;
        count -= part;
    }
}

void hvd_mac_end(struct hvd_mac *mac, unsigned char *tag)
{
    mac->bytes += mac->fill;
    memset(mac->block + mac->fill, 0, BLOCK - mac->fill);
    compress(mac, mac->block, true);
    for (size_t i = 0; i < HVD_TAG_BYTES; i++)
        tag[i] = (unsigned char)(mac->state[i / 8] >> 8 * (i % 8));
}

void hvd_mac_tag(const unsigned char *key, uint64_t number, const void *message, size_t bytes, unsigned char *tag)
{
    struct hvd_mac mac;
    unsigned char head[8];
    for (int i = 0; i < 8; i++)
        head[i] = (unsigned char)(number >> (56 - 8 * i));
    hvd_mac_begin(&mac, key);
    hvd_mac_add(&mac, head, sizeof head);
    hvd_mac_add(&mac, message, bytes);
    hvd_mac_end(&mac, tag);
}

bool hvd_mac_same(const unsigned char *tag, const unsigned char *other)
{
    unsigned char differ = 0;
    for (size_t i = 0; i < HVD_TAG_BYTES; i++)
        differ |= tag[i] ^ other[i];
    return differ == 0;
}
