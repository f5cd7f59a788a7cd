/* test_fuzz.c - the targets of fuzz.h without libFuzzer: the inputs that tests/fuzz/ keeps, and mutations of them.
 *
 *     test_fuzz                              all targets, some thousand inputs each, the same in every run
 *     test_fuzz votes 1000000 [SEED]         one target, so many mutations
 *     test_fuzz votes --hex 8101ff           one input
 *
 * An input that fails is printed by whoever finds it: before each one it is kept in `last`, and a handler of abort and
 * of exit writes it in hex.
 */
#include "check.h"
#include "fuzz.h"
#include "ranks.h"

#include <string.h>

enum { INPUT_MAX = 1024, KEPT_MAX = 2048 };

#if defined(__SANITIZE_THREAD__)
#define INPUTS 300 /* there are no threads here */
#elif defined(__SANITIZE_ADDRESS__)
#define INPUTS 4000
#else
#define INPUTS 10000
#endif

struct entry {
    size_t count;
    uint8_t bytes[INPUT_MAX];
};

static struct entry kept[KEPT_MAX], last;
static uint32_t entries;
static const struct fuzz_target *target;
static bool playing;

static void tell(void)
{
    if (!playing)
        return;
    fprintf(stderr, "the input: test_fuzz %s --hex ", target->name);
    for (size_t i = 0; i < last.count; i++)
        fprintf(stderr, "%02x", last.bytes[i]);
    fputc('\n', stderr);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
void __sanitizer_set_death_callback(void (*callback)(void));
#else
static void __sanitizer_set_death_callback(void (*callback)(void)) {}
#endif

static void read_hex(struct entry *entry, const char *hex)
{
    entry->count = 0;
    for (unsigned byte; entry->count < INPUT_MAX && sscanf(hex, "%2x", &byte) == 1; hex += 2)
        entry->bytes[entry->count++] = (uint8_t)byte;
}

/* One input a line, in hex; a line that begins with '#' says something. */
static void read_kept(void)
{
    char path[4096], line[2 * INPUT_MAX + 2];
    snprintf(path, sizeof path, "%.*s/../fuzz/%s.txt", (int)(strrchr(__FILE__, '/') - __FILE__), __FILE__,
             target->name);
    FILE *file = fopen(path, "r");
    CHECK(file, "%s", path);
    for (entries = 0; entries < KEPT_MAX && fgets(line, sizeof line, file);)
        if (line[0] != '#')
            read_hex(&kept[entries++], line);
    fclose(file);
    CHECK(entries > 0, "%s keeps nothing", path);
}

static void play(const struct entry *entry)
{
    uint8_t *exact = malloc(entry->count + !entry->count);
    memcpy(exact, entry->bytes, entry->count);
    target->play((struct fuzz_input){exact, entry->count});
    free(exact);
}

static void cut_in(struct entry *entry, size_t at, const struct entry *other, size_t from, size_t count)
{
    size_t tail = entry->count - at;
    count = count < INPUT_MAX - entry->count ? count : INPUT_MAX - entry->count;
    memmove(entry->bytes + at + count, entry->bytes + at, tail);
    memcpy(entry->bytes + at, other->bytes + from, count);
    entry->count += count;
}

static void mutate(struct entry *entry, uint64_t *seed)
{
    size_t at = entry->count ? ranks_below(seed, (uint32_t)entry->count) : 0;
    const struct entry *other = &kept[ranks_below(seed, entries)];
    size_t from = other->count ? ranks_below(seed, (uint32_t)other->count) : 0;
    size_t most = entry->count - at, piece = most ? 1 + ranks_below(seed, (uint32_t)(most < 32 ? most : 32)) : 0;
    switch (entry->count ? ranks_below(seed, 6) : 5) {
    case 0:
        entry->bytes[at] ^= (uint8_t)(1 << ranks_below(seed, 8));
        break;
    case 1:
        entry->bytes[at] = (uint8_t)ranks_random(seed);
        break;
    case 2:
        entry->bytes[at] = ranks_below(seed, 2) ? 0xff : (uint8_t)(entry->bytes[at] + 1);
        break;
    case 3: /* without a piece */
        memmove(entry->bytes + at, entry->bytes + at + piece, most - piece);
        entry->count -= piece;
        break;
    case 4: { /* a piece twice */
        struct entry copy = *entry;
        cut_in(entry, at, &copy, at, piece);
        break;
    }
    default: /* a piece of another */
        cut_in(entry, at, other, from, 1 + ranks_below(seed, 32) % (other->count - from + !other->count));
    }
}

static void fuzz(uint64_t inputs, uint64_t seed)
{
    read_kept();
    playing = true;
    for (uint64_t i = 0; i < entries + inputs; i++) {
        last = kept[i < entries ? i : ranks_below(&seed, entries)];
        for (uint32_t times = i < entries ? 0 : 1 + ranks_below(&seed, 5); times > 0; times--)
            mutate(&last, &seed);
        play(&last);
    }
    playing = false;
    printf("%s: %u inputs kept, %llu mutations\n", target->name, entries, (unsigned long long)inputs);
}

int main(int argc, char **argv)
{
    atexit(tell);
    __sanitizer_set_death_callback(tell);
    if (argc < 3) {
        for (target = fuzz_targets; target->name; target++)
            fuzz(INPUTS, 1);
        return 0;
    }
    target = fuzz_target_named(argv[1]);
    CHECK(target, "no target is called %s", argv[1]);
    if (argc > 3 && strcmp(argv[2], "--hex") == 0) {
        read_hex(&last, argv[3]);
        playing = true;
        play(&last);
        playing = false;
        return 0;
    }
    fuzz(strtoull(argv[2], NULL, 10), argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
    return 0;
}
