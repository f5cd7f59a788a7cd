/* blake2b.h - a tag that shows that bytes come from who has the key, and that nobody has changed them.
 *
 * Keyed BLAKE2b (RFC 7693) with tags of 16 bytes: Python's hashlib.blake2b(bytes, key=key, digest_size=16). Frames
 * between engine and store carry it (engine/state/store_frames.c), and records of signed streams (link/signed.c). Each
 * direction of a connection has a key of its own, and each message its number there. Nothing is hidden by it.
 */
#ifndef HVD_BASE_BLAKE2B_H
#define HVD_BASE_BLAKE2B_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HVD_KEY_BYTES ((size_t)32) /* a connection has two, HVD_KEY_PAIR_BYTES */
#define HVD_TAG_BYTES ((size_t)16)

struct hvd_mac {
    uint64_t state[8], bytes; /* bytes: that went into the state */
    unsigned char block[128];
    size_t fill;
};

void hvd_mac_begin(struct hvd_mac *mac, const unsigned char *key);
void hvd_mac_add(struct hvd_mac *mac, const void *bytes, size_t count);
void hvd_mac_end(struct hvd_mac *mac, unsigned char *tag);
/* Of a message with a number, which is in the tag as 8 big-endian bytes before it: so one that is repeated, left out or
 * moved is seen as well. */
void hvd_mac_tag(const unsigned char *key, uint64_t number, const void *message, size_t bytes, unsigned char *tag);
/* In a time that tells nothing of where two tags differ. */
bool hvd_mac_same(const unsigned char *tag, const unsigned char *other);

#endif
