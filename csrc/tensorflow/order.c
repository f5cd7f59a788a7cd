/* order.c - do two starts of one name come in the same order on every rank?
 *
 * Within a step of a graph with automatic control dependencies they come in the order of the program, and steps that do
 * not overlap come one after the other: there a second start waits for the end of the first. Elsewhere the order is
 * chance, on every rank another, and sums would be of tensors that do not belong together:
 *
 *   - while the first is under way, and is of another step or without order;
 *   - within a step of a graph without order, also after the first has ended (a function that is called twice in a
 *     graph of a session): another rank may have run the two the other way round. So where there is no order it is
 *     remembered in which step a name was started last. Iterations of a loop have names of their own, which come again
 *     for a later iteration only.
 *
 * What is remembered is bounded: of names that share a place the one started longest ago is forgotten, and with it the
 * possibility to tell.
 */
#include "tensorflow.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLACES    2048 /* a power of two */
#define NEIGHBORS 4

struct start {
    uint64_t name; /* its hash; 0: nothing yet */
    uint64_t when; /* counts starts */
    int64_t step, iteration;
};

static struct start seen[PLACES][NEIGHBORS];
static uint64_t starts;

uint64_t hvd_tf_hash(const char *text)
{
    uint64_t hash = 14695981039346656037u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 1099511628211u;
    return hash;
}

static bool same_name(const struct hvd_tf_flight *one, const struct hvd_tf_flight *two)
{
    return one->request.name && two->request.name && one->words->hash == two->words->hash &&
           one->words->process_set == two->words->process_set && strcmp(one->request.name, two->request.name) == 0;
}

bool hvd_tf_in_list(const struct hvd_tf_flight *list, const struct hvd_tf_flight *like)
{
    for (; list; list = list->next)
        if (same_name(list, like))
            return true;
    return false;
}

/* One of the list has its handle still, so its step goes on, and it is another step, or one that has no order. */
static bool meets(const struct hvd_tf_flight *list, const struct hvd_tf_flight *like)
{
    for (; list; list = list->next)
        if (same_name(list, like) && list->owned && (list->step != like->step || like->words->order != HVD_TF_ORDERED))
            return true;
    return false;
}

/* Was it started in this step before? */
static bool comes_again(const struct hvd_tf_flight *flight)
{
    uint64_t name = hvd_tf_hash(flight->request.name) + (uint64_t)flight->words->process_set * 0x9e3779b97f4a7c15u;
    name += name == 0;
    struct start *place = seen[(name ^ name >> 32) % PLACES], *oldest = place;
    for (int i = 0; i < NEIGHBORS; i++) {
        if (place[i].name == name) {
            oldest = &place[i];
            break;
        }
        if (place[i].when < oldest->when)
            oldest = &place[i];
    }
    bool again = oldest->name == name && oldest->step == flight->step && flight->iteration <= oldest->iteration;
    *oldest = (struct start){name, ++starts, flight->step, flight->iteration};
    return again;
}

bool hvd_tf_in_no_order(const struct hvd_tf_flight *flying, const struct hvd_tf_flight *held,
                        const struct hvd_tf_flight *like)
{
    if (!like->request.name)
        return false;
    bool again = like->words->order != HVD_TF_ORDERED && comes_again(like);
    return again || meets(flying, like) || meets(held, like);
}

char *hvd_tf_say_in_no_order(const char *name)
{
    char text[HVD_TEXT_MAX];
    snprintf(
        text, sizeof text,
        "rank %d: tensor '%.300s' is started a second time, and no order of the two is the same on all ranks (a name "
        "that is used twice, a tf.function that is called twice in a graph of a session, a loop outside of "
        "tf.function, a function that several threads call): give each call its own name, or make one wait for the "
        "other (in a session, run them one after the other)" HVD_ENDS(352),
        hvd_tf_core.rank(), name);
    return strdup(text);
}
