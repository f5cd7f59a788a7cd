/* test_blake2b.c - tags: those that Python's hashlib makes of the same bytes, in whatever pieces the bytes come.
 *
 * The answers are of hashlib.blake2b(bytes, key=bytes(range(32)), digest_size=16) with
 * bytes = bytes((7 * i + i // 256) % 256 for i in range(LENGTH)).
 */
#include "check.h"
#include "base/blake2b.h"
#include "ranks.h"

#include <string.h>

enum { LONGEST = 65536 };

static const struct {
    size_t length;
    const char *tag;
} known[] = {
    {0, "3daf97bce7888fd59773c66bf647459c"},    {1, "cb0f7736a53974236661585b8842dd8c"},
    {8, "eec656128d0d6ce8a9b264c80bf9007d"},    {120, "a8d8f9115cd874a7941d6d0ba528c723"},
    {127, "56c50fc8ab3ba8e49d9a5be7ae0dffdd"},  {128, "bd11151f0fa75b9ddb73aed7a8680701"},
    {129, "481db86c5fab9fc21aced4004fe4b561"},  {255, "d418df9c502d7ee9256e32f199a5150d"},
    {256, "71092e03bb62daf3e9c7f20e112850a9"},  {257, "d5b04046eb5d9f30baed9261f8a11787"},
    {1000, "5a869e6e883fc260384a1c8639eeaa41"}, {65536, "b6583ec5e19807c460b4024bb8485d25"},
};

static unsigned char key[HVD_KEY_BYTES], bytes[LONGEST];

static void read_tag(const char *hex, unsigned char *tag)
{
    for (size_t i = 0; i < HVD_TAG_BYTES; i++) {
        unsigned byte = 0;
        CHECK(sscanf(hex + 2 * i, "%2x", &byte) == 1, "%s", hex);
        tag[i] = (unsigned char)byte;
    }
}

/* In pieces of `piece` bytes, or of up to so many by chance. */
static void tag_of(size_t length, uint32_t piece, uint64_t *seed, unsigned char *tag)
{
    struct hvd_mac mac;
    hvd_mac_begin(&mac, key);
    for (size_t at = 0; at < length;) {
        size_t part = seed ? ranks_below(seed, piece + 1) : piece;
        part = part < length - at ? part : length - at;
        hvd_mac_add(&mac, bytes + at, part);
        at += part;
    }
    hvd_mac_end(&mac, tag);
}

static void every_length_in_every_piece(void)
{
    static const uint32_t pieces[] = {1, 2, 7, 63, 64, 127, 128, 129, 255, 256, 257, 1000, LONGEST};
    uint64_t seed = 1;
    unsigned char want[HVD_TAG_BYTES], tag[HVD_TAG_BYTES];
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        read_tag(known[k].tag, want);
        for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
            tag_of(known[k].length, pieces[p], NULL, tag);
            CHECK(memcmp(tag, want, sizeof tag) == 0, "%zu bytes in pieces of %u", known[k].length, pieces[p]);
            tag_of(known[k].length, pieces[p], &seed, tag);
            CHECK(memcmp(tag, want, sizeof tag) == 0, "%zu bytes in pieces of up to %u", known[k].length, pieces[p]);
        }
    }
}

/* hashlib.blake2b(struct.pack(">Q", 0x0102030405060708) + bytes[:200], ...) */
static void a_message_has_its_number(void)
{
    unsigned char want[HVD_TAG_BYTES], tag[HVD_TAG_BYTES];
    read_tag("1db24afd1fa6b290398692d0e2183428", want);
    hvd_mac_tag(key, UINT64_C(0x0102030405060708), bytes, 200, tag);
    CHECK(memcmp(tag, want, sizeof tag) == 0, "a number and 200 bytes");
    hvd_mac_tag(key, UINT64_C(0x0102030405060709), bytes, 200, tag);
    CHECK(memcmp(tag, want, sizeof tag) != 0, "another number");
}

/* Of what goes in, each bit changes the tag; of two tags, each bit is compared. */
static void each_bit_counts(void)
{
    unsigned char one[HVD_TAG_BYTES], other[HVD_TAG_BYTES];
    hvd_mac_tag(key, 3, bytes, 150, one);
    for (size_t bit = 0; bit < 8 * (size_t)150; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        hvd_mac_tag(key, 3, bytes, 150, other);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(!hvd_mac_same(one, other), "bit %zu of the message", bit);
    }
    for (size_t bit = 0; bit < 8 * HVD_KEY_BYTES; bit++) {
        key[bit / 8] ^= (unsigned char)(1 << bit % 8);
        hvd_mac_tag(key, 3, bytes, 150, other);
        key[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(!hvd_mac_same(one, other), "bit %zu of the key", bit);
    }
    memcpy(other, one, sizeof other);
    CHECK(hvd_mac_same(one, other), "equal tags");
    for (size_t bit = 0; bit < 8 * HVD_TAG_BYTES; bit++) {
        other[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(!hvd_mac_same(one, other), "bit %zu of the tag", bit);
        other[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

int main(void)
{
    for (size_t i = 0; i < sizeof key; i++)
        key[i] = (unsigned char)i;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(7 * i + i / 256);
    every_length_in_every_piece();
    a_message_has_its_number();
    each_bit_counts();
    return 0;
}
