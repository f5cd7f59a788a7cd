/* fuzz_input.c - see fuzz.h: how an input is read, and what damage it can order. */
#include "fuzz.h"

#include <string.h>

const struct fuzz_target fuzz_targets[] = {
    {"check", fuzz_check},   {"votes", fuzz_votes},   {"tree", fuzz_tree},
    {"stall", fuzz_stall},   {"heads", fuzz_heads},   {"report", fuzz_report},
    {"tagged", fuzz_tagged}, {"signed", fuzz_signed}, {NULL, NULL},
};

const struct fuzz_target *fuzz_target_named(const char *name)
{
    for (const struct fuzz_target *target = fuzz_targets; target->name; target++)
        if (strcmp(target->name, name) == 0)
            return target;
    return NULL;
}

uint32_t fuzz_byte(struct fuzz_input *input)
{
    if (input->left == 0)
        return 0;
    input->left--;
    return *input->at++;
}

uint32_t fuzz_below(struct fuzz_input *input, uint32_t bound)
{
    uint32_t number = fuzz_byte(input);
    if (bound > 256)
        number = number << 8 | fuzz_byte(input);
    return number % bound;
}

size_t fuzz_take(struct fuzz_input *input, void *bytes, size_t count)
{
    size_t taken = count < input->left ? count : input->left;
    if (taken)
        memcpy(bytes, input->at, taken);
    input->at += taken;
    input->left -= taken;
    return taken;
}

/* One act of it; `at` is a multiple of 4 with 4 bytes of room. */
static void damage_once(struct fuzz_input *input, char *bytes, size_t count, size_t at)
{
    static const uint64_t extreme[] = {0, 1, 2, 3, 63, 64, 255, 256, UINT32_MAX, INT64_MAX, UINT64_MAX, 1u << 31};
    uint64_t value = extreme[fuzz_below(input, sizeof extreme / sizeof *extreme)];
    uint32_t word;
    switch (fuzz_byte(input) % 5) {
    case 0:
        bytes[at + fuzz_below(input, 4)] ^= (char)(1 << fuzz_below(input, 8));
        break;
    case 1:
        memcpy(bytes + at, &value, at % 8 || at + 8 > count ? 4 : 8);
        break;
    case 2:
        memcpy(&word, bytes + at, 4);
        word += fuzz_byte(input) - 128;
        memcpy(bytes + at, &word, 4);
        break;
    case 3: {
        size_t from = fuzz_below(input, 65536) % count & ~(size_t)3, piece = 4 * (1 + fuzz_below(input, 40));
        if (from + piece <= count && at + piece <= count)
            memmove(bytes + at, bytes + from, piece);
        break;
    }
    default: {
        size_t piece = 1 + fuzz_below(input, 32);
        fuzz_take(input, bytes + at, at + piece <= count ? piece : count - at);
    }
    }
}

bool fuzz_damage(struct fuzz_input *input, void *bytes, size_t count)
{
    uint32_t times = fuzz_byte(input);
    times = times < 128 || count < 4 ? 0 : 1 + times % 3;
    for (uint32_t i = 0; i < times; i++) {
        size_t reach = count / 4, at = fuzz_below(input, 256);
        if (at >= 200) /* what lies in front matters most */
            at = fuzz_below(input, 65536);
        damage_once(input, bytes, count, at % reach * 4);
    }
    return times > 0;
}
