/* list_mismatch.c - what do the others have where ranks have other lists of tensors?
 *
 * Gradients of an optimizer, or variables that are sent, travel by their places in a list. Ranks whose lists differ
 * would wait for each other's names for ever. So before a list goes an allreduce of no elements under one name, whose
 * shape says how long the list is and what is in it: the coordinator finds the difference like that of any shapes, and
 * what comes after it in the graph is never started. Then the node that failed asks what the others have: all ranks
 * have the same mismatch, so all exchange their lists, and each tells all of them. Where they cannot, since another
 * rank has joined, each shows its own.
 *
 * A list in an attribute is the remedy, a line that says whose list it is and how long, and a line for each entry; the
 * remedy is not sent. Eager calls speak the same way (hvdlite/keras/list_check.py).
 */
#include "tensorflow.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN       4   /* different lists */
#define SHOWN_BYTES 200 /* of each */
#define OTHERS      3   /* lists in a row that are another optimizer's, and count for nothing */

static const char before[] = "allreduce.", asked[] = "allgather.";

/* Of the lists of gradients whose count as steps. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t whose;
static int others; /* 1 and how many of others have come since; 0: none counts yet */

struct line {
    const char *at;
    size_t bytes;
};

static struct line first_line(struct line text)
{
    const char *end = memchr(text.at, '\n', text.bytes);
    return (struct line){text.at, end ? (size_t)(end - text.at) : text.bytes};
}

/* What comes after the first line. */
static struct line after_line(struct line text)
{
    size_t skipped = first_line(text).bytes;
    skipped += skipped < text.bytes;
    return (struct line){text.at + skipped, text.bytes - skipped};
}

static bool same(struct line one, struct line two)
{
    return one.bytes == two.bytes && memcmp(one.at, two.at, one.bytes) == 0;
}

/* What is said of a list but for whose it is. */
static struct line but_for_rank(struct line list)
{
    const char *end = memchr(list.at, ':', list.bytes);
    size_t skipped = end ? (size_t)(end - list.at) : 0;
    return (struct line){list.at + skipped, list.bytes - skipped};
}

/* Both begin with the same entries: how many bytes those are, with an end of line after the last. */
static size_t in_both(struct line one, struct line two)
{
    size_t both = 0;
    for (size_t i = 0; i <= one.bytes && i <= two.bytes; i++) {
        bool one_ends = i == one.bytes || one.at[i] == '\n', two_ends = i == two.bytes || two.at[i] == '\n';
        if (one_ends && two_ends)
            both = i + 1;
        if (i == one.bytes || i == two.bytes || one.at[i] != two.at[i])
            break;
    }
    return both;
}

/* Where there is no room for all it ends between two letters: whoever reads it must find UTF-8. */
static void add(char *text, size_t room, struct line what)
{
    size_t has = strlen(text), bytes = what.bytes < room - has - 1 ? what.bytes : room - has - 1;
    while (bytes && bytes < what.bytes && ((unsigned char)what.at[bytes] & 0xc0) == 0x80)
        bytes--;
    memcpy(text + has, what.at, bytes);
    text[has + bytes] = 0;
}

static void add_text(char *text, size_t room, const char *what)
{
    add(text, room, (struct line){what, strlen(what)});
}

/* "rank 1: 3 gradients (..., bias, kernel, ...)" */
static void add_list(char *text, size_t room, struct line list, size_t skipped)
{
    add_text(text, room, "\n  ");
    add(text, room, first_line(list));
    struct line rest = after_line(list);
    add_text(text, room, skipped ? " (..." : " (");
    skipped = skipped < rest.bytes ? skipped : rest.bytes;
    rest = (struct line){rest.at + skipped, rest.bytes - skipped};
    size_t end = strlen(text) + SHOWN_BYTES;
    for (bool more = skipped > 0; rest.bytes; more = true, rest = after_line(rest)) {
        add_text(text, room, more ? ", " : "");
        if (strlen(text) > end) {
            add_text(text, room, "...");
            break;
        }
        add(text, room, first_line(rest));
    }
    add_text(text, room, ")");
}

static void begin(const struct hvd_tf_flight *flight, char *text, size_t room)
{
    const char *key = flight->words->key + sizeof before - 1;
    size_t bytes = strlen(key);
    snprintf(text, room, "rank %d: tensor '", hvd_tf_core.rank());
    add(text, strlen(text) + 1 + SHOWN_BYTES, (struct line){key, bytes});
    add_text(text, room, "': ranks have different lists:");
}

static void end_with_remedy(const struct hvd_tf_flight *flight, char *text, size_t room)
{
    const char *remedy = flight->words->list;
    add_text(text, room, "\n");
    add(text, room, first_line((struct line){remedy, strlen(remedy)}));
}

/* Of this rank's list alone: why the others did not say theirs is in the flight. */
static void tell_own(const struct hvd_tf_flight *flight, char *text, size_t room)
{
    const char *list = flight->words->list;
    begin(flight, text, room);
    add_list(text, room, after_line((struct line){list, strlen(list)}), 0);
    add_text(text, room, "\n  the lists of the other ranks are not available: ");
    const char *why = flight->text ? flight->text : "";
    size_t bytes = strlen(why), code = sizeof HVD_ENDS(305) - 1;
    if (bytes > code && strncmp(why + bytes - code, " [HVD", 5) == 0)
        bytes -= code; /* this text has one of its own */
    add(text, room, (struct line){why, bytes});
    end_with_remedy(flight, text, room);
}

static void tell(const struct hvd_tf_flight *flight, const struct hvd_output *all, char *text, size_t room)
{
    begin(flight, text, room);
    struct line shown[SHOWN];
    int others = 0, count = 0;
    const char *at = all->data;
    for (int i = 0; i < all->size; i++) {
        struct line list = {at, (size_t)all->rows_of[i]};
        at += list.bytes;
        bool known = false;
        for (int k = 0; k < count; k++)
            known = known || same(but_for_rank(shown[k]), but_for_rank(list));
        others += known || count == SHOWN;
        if (!known && count < SHOWN)
            shown[count++] = list;
    }
    size_t skipped = count > 1 ? in_both(after_line(shown[0]), after_line(shown[1])) : 0;
    for (int k = 2; k < count; k++) {
        size_t both = in_both(after_line(shown[0]), after_line(shown[k]));
        skipped = both < skipped ? both : skipped;
    }
    for (int k = 0; k < count; k++)
        add_list(text, room, shown[k], skipped);
    if (others) {
        char more[64];
        snprintf(more, sizeof more, "\n  and %d other rank%s", others, others > 1 ? "s" : "");
        add_text(text, room, more);
    }
    end_with_remedy(flight, text, room);
}

/* The request becomes an allgather of this rank's list, under the name that eager calls give it, too. */
static bool become_the_exchange(struct hvd_tf_flight *flight)
{
    const struct hvd_tf_words *words = flight->words;
    struct line list = after_line((struct line){words->list, strlen(words->list)});
    const char *rest = words->key + sizeof before - 1;
    size_t bytes = strlen(words->key) + 16;
    char *name = malloc(bytes);
    if (!name)
        return false;
    snprintf(name, bytes, "%s%s.names", asked, rest);
    free(flight->name);
    free(flight->text);
    flight->name = name;
    flight->text = NULL;
    flight->code = HVD_OK;
    flight->request = (struct hvd_request){.name = name,
                                           .kind = HVD_ALLGATHER,
                                           .dtype = hvd_tf_dtype[TF_UINT8],
                                           .ndim = 1,
                                           .dims = {(int64_t)list.bytes},
                                           .prescale = 1,
                                           .postscale = 1,
                                           .input = list.at,
                                           .process_set = (int)words->process_set,
                                           .quiet = HVD_SOON};
    if (flight->output)
        hvd_tf.TF_DeleteTensor(flight->output);
    flight->output = NULL;
    return true;
}

/* Not by the end of the job: another rank has joined, and there is no allgather with it. */
static bool refused(const struct hvd_tf_flight *flight)
{
    return flight->code == HVD_EINVAL || flight->code == HVD_EMISMATCH ||
           (flight->code == HVD_ESTATE && flight->text && strstr(flight->text, "another rank has joined"));
}

bool hvd_tf_list_asks(struct hvd_tf_flight *flight)
{
    const struct hvd_tf_words *words = flight->words;
    if (!words->list[0] || strncmp(words->key, before, sizeof before - 1) != 0)
        return false;
    if (!flight->asks)
        return flight->asks = flight->code == HVD_EMISMATCH && become_the_exchange(flight);
    struct hvd_output all;
    static const char code[] = HVD_ENDS(305);
    char text[HVD_TEXT_MAX];
    const size_t room = sizeof text - sizeof code;
    if (flight->code == HVD_OK && hvd_tf_core.result(flight->native, &all) == HVD_OK && all.rows_of)
        tell(flight, &all, text, room);
    else if (refused(flight))
        tell_own(flight, text, room);
    else if (flight->code == HVD_OK)
        snprintf(text, sizeof text, "rank %d: ranks have different lists", hvd_tf_core.rank());
    else
        return false;
    strcat(text, code);
    free(flight->text);
    flight->text = strdup(text);
    flight->code = HVD_EMISMATCH;
    return false;
}

/* "rank 0: 4 gradients" is the second line of such a list. */
static bool of_gradients(const char *list)
{
    static const char noun[] = " gradients";
    const char *line = strchr(list, '\n'), *end = line ? strchr(line + 1, '\n') : NULL;
    size_t length = sizeof noun - 1;
    return end && (size_t)(end - line) > length && strncmp(end - length, noun, length) == 0;
}

/* A graph cannot say that a step is over: nothing in it comes last. But before all averages of an optimizer or a tape
 * goes their list, once an execution, so a step is from one list to the next. It ends before the list is submitted:
 * then what was submitted last in it is the last average, and who comes late with that is seen.
 *
 * Of several optimizers one counts, known by name and list (two tapes have one name), until it has been silent for a
 * while. */
void hvd_tf_list_begins(const struct hvd_tf_flight *flight)
{
    if (!of_gradients(flight->words->list))
        return;
    const int64_t *shape = flight->request.dims; /* says what is in the list */
    uint64_t mine = flight->words->hash ^ ((uint64_t)shape[1] << 32) ^ (uint64_t)shape[2];
    pthread_mutex_lock(&lock);
    bool counts = !others || mine == whose || others > OTHERS;
    others = counts ? 1 : others + 1;
    whose = counts ? mine : whose;
    pthread_mutex_unlock(&lock);
    if (counts)
        hvd_tf_core.step(1, 0);
}

void hvd_tf_lists_anew(void)
{
    pthread_mutex_lock(&lock);
    others = 0;
    pthread_mutex_unlock(&lock);
}
