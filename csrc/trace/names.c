/* names.c - the table of names: a hash, eight places for each, and no lock.
 *
 * A number is the place in the table beside 18 bits of the hash. A name is looked for in the eight places from its
 * hash on; the first free one is taken by compare-and-swap, and where there is none, one of the eight is taken from
 * another name. Whoever holds the number of that one sees other bits of a hash there, and gets no name.
 *
 * The text is written after the place was taken, in words, while others may read it: a reader makes the hash of what it
 * has read and believes nothing that does not fit. (Of a name longer than HVD_NAME_MAX the beginning is kept, and
 * believed by its length and place.)
 *
 * Cost: some instructions for each 8 bytes of the name; a training loop says the same names again and again, and finds
 * them at the first look.
 */
#include "names.h"

#include "../base/shared_memory.h"

#include <string.h>

#define PLACES     8
#define PLACE_BITS 13
#define CHECK_AT   46 /* bits of the hash from here on stand in a number */
#define TEXT_WORDS HVD_COUNT_OF(((struct hvd_trace_entry *)0)->text)

_Static_assert(1 << PLACE_BITS == HVD_TRACE_NAMES, "a number has so many bits for its place");

int hvd_trace_names_open(struct hvd_trace_names *names, struct hvd_error *error)
{
    names->entry = hvd_memory_private(sizeof *names->entry * HVD_TRACE_NAMES, error);
    return names->entry ? HVD_OK : HVD_ENOMEM;
}

void hvd_trace_names_close(struct hvd_trace_names *names)
{
    if (names->entry)
        hvd_memory_unmap(names->entry, sizeof *names->entry * HVD_TRACE_NAMES);
    names->entry = NULL;
}

static inline uint64_t mix(uint64_t hash, uint64_t word)
{
    return ((hash << 23 | hash >> 41) ^ word) * 0xd6e8feb86659fd93u;
}

/* Never 0. */
static uint64_t hash_of(int set, const char *name, size_t length)
{
    uint64_t hash = mix(0, (uint64_t)set << 32 | length), word = 0;
    size_t at = 0;
    for (; at + 8 <= length; at += 8) {
        memcpy(&word, name + at, 8);
        hash = mix(hash, word);
    }
    if (at < length && length >= 8) { /* the last eight bytes, some of them again */
        memcpy(&word, name + length - 8, 8);
        hash = mix(hash, word);
    } else if (at < length) {
        for (word = 0; at < length; at++)
            word = word << 8 | (unsigned char)name[at];
        hash = mix(hash, word);
    }
    hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u; /* a product's low bits know nothing of its factor's high ones */
    return (hash ^ hash >> 32) | (uint64_t)1 << CHECK_AT;
}

static uint32_t number_of(uint64_t place, uint64_t hash)
{
    return (uint32_t)(hash >> CHECK_AT << PLACE_BITS | place);
}

static void write_entry(struct hvd_trace_entry *entry, int set, const char *name, size_t length)
{
    uint64_t word[TEXT_WORDS] = {0};
    size_t kept = length < HVD_NAME_MAX ? length : HVD_NAME_MAX;
    memcpy(word, name, kept);
    atomic_store_explicit(&entry->set_length, (uint64_t)set << 32 | length, memory_order_relaxed);
    for (size_t i = 0; i * 8 < kept; i++)
        atomic_store_explicit(&entry->text[i], word[i], memory_order_relaxed);
}

uint32_t hvd_trace_number(struct hvd_trace_names *names, int set, const char *name, size_t length)
{
    uint64_t hash = hash_of(set, name, length), place = hash & (HVD_TRACE_NAMES - 1);
    for (uint64_t i = 0; i < PLACES; i++) {
        uint64_t here = (place + i) & (HVD_TRACE_NAMES - 1);
        struct hvd_trace_entry *entry = &names->entry[here];
        uint64_t seen = atomic_load_explicit(&entry->hash, memory_order_relaxed);
        if (seen == 0 && atomic_compare_exchange_strong(&entry->hash, &seen, hash)) {
            write_entry(entry, set, name, length);
            return number_of(here, hash);
        }
        if (seen == hash)
            return number_of(here, hash);
    }
    place = (place + (hash >> PLACE_BITS) % PLACES) & (HVD_TRACE_NAMES - 1);
    atomic_store(&names->entry[place].hash, hash);
    write_entry(&names->entry[place], set, name, length);
    return number_of(place, hash);
}

bool hvd_trace_text(const struct hvd_trace_names *names, uint32_t number, int *set, char text[HVD_NAME_MAX + 1])
{
    const struct hvd_trace_entry *entry = &names->entry[number & (HVD_TRACE_NAMES - 1)];
    uint64_t hash = atomic_load(&entry->hash), word[TEXT_WORDS] = {0};
    if (number == 0 || number >= HVD_TRACE_UNNAMED || hash >> CHECK_AT != number >> PLACE_BITS)
        return false;
    uint64_t set_length = atomic_load_explicit(&entry->set_length, memory_order_relaxed);
    uint64_t length = set_length & UINT32_MAX, kept = length < HVD_NAME_MAX ? length : HVD_NAME_MAX;
    for (uint64_t i = 0; i * 8 < kept; i++)
        word[i] = atomic_load_explicit(&entry->text[i], memory_order_relaxed);
    memcpy(text, word, kept);
    text[kept] = '\0';
    *set = (int)(set_length >> 32);
    return length > HVD_NAME_MAX || hash_of(*set, text, length) == hash;
}
