/* fuzz_heads.c - what comes over a link of plane p2p: messages of a collective, heads that lie, guesses that were
 * wrong.
 *
 * One rank of two to four runs one collective; the input picks kind, algorithm, sizes and the pieces in which bytes
 * move, and damages heads. All memory has exactly the size that the run asked for. Where every head was true the run
 * ends well; where one was not, it names the rank that sent it, and nothing is written beyond.
 */
#include "check.h"
#include "fuzz.h"
#include "plane/p2p/run.h"

#include <string.h>

enum { RANKS_MAX = 4, POLLS = 20000 };

static struct scene {
    struct fuzz_input input;
    struct hvd_p2p_run run;
    struct hvd_link link[RANKS_MAX];
    struct hvd_link *link_of[RANKS_MAX];
    struct hvd_p2p_head head; /* that is coming */
    size_t at;                /* bytes of the message that have come */
    size_t payload;           /* of it */
    bool guess;               /* it is a wrong guess (eager_send.h), to be read past */
    int liar;                 /* who sent a head that was not true, -1: nobody */
    int piece;
} scene;

static int take(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    static volatile uint8_t last;
    *moved = count < (size_t)scene.piece ? count : (size_t)scene.piece;
    last = ((const uint8_t *)bytes)[0] ^ ((const uint8_t *)bytes)[*moved - 1]; /* can they be read? */
    (void)last;
    link->counts.bytes_out += *moved;
    return HVD_OK;
}

/* The message that this step waits for, or a wrong guess before it: heads as they should be, or nearly; then whatever
 * bytes the input has. */
static int give(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    const struct hvd_p2p_run *run = &scene.run;
    size_t head = sizeof scene.head;
    CHECK(run->in.step.from == link->peer, "rank %d is asked for a message of rank %d", link->peer, run->in.step.from);
    size_t at = scene.guess && scene.at >= head ? 0 : scene.at;
    CHECK(run->in.at == at, "%zu bytes have come, not %zu", at, run->in.at);
    if (scene.at == 0) {
        struct hvd_p2p_head due = {run->mark, (uint32_t)run->in.i, 0, run->in.step.recv_count * run->element_bytes};
        scene.head = due;
        fuzz_damage(&scene.input, &scene.head, head);
        scene.guess = scene.head.early == 1 && scene.head.mark != due.mark && scene.head.bytes <= HVD_EARLY_BYTES;
        scene.head.early ^= scene.head.early == 1 && scene.head.mark == due.mark; /* a right guess is the message */
        if (!scene.guess && memcmp(&scene.head, &due, head) != 0)
            scene.liar = link->peer;
        scene.payload = scene.guess ? scene.head.bytes : due.bytes;
    }
    *moved = count < (size_t)scene.piece ? count : (size_t)scene.piece;
    if (scene.at < head) {
        *moved = *moved < head - scene.at ? *moved : head - scene.at;
        memcpy(bytes, (char *)&scene.head + scene.at, *moved);
    } else {
        CHECK(scene.liar < 0, "a message goes on after its head was refused");
        memset(bytes, 0x3f, *moved);
        fuzz_take(&scene.input, bytes, *moved < 8 ? *moved : 8);
    }
    scene.at += *moved;
    if (scene.at == head + scene.payload)
        scene.at = 0;
    link->counts.bytes_in += *moved;
    return HVD_OK;
}

static int goes_on(struct hvd_link *link, struct hvd_error *error)
{
    return HVD_OK;
}

static const struct hvd_link_kind kind = {.name = "fuzz", .send = take, .recv = give, .ended = goes_on};

static const struct hvd_algo *algo_of(uint32_t number, int what, int size)
{
    int count = 0;
    const struct hvd_algo *can[32];
    for (const struct hvd_algo *const *algo = hvd_algos; *algo; algo++)
        if ((*algo)->can(what, size) && count < 32)
            can[count++] = *algo;
    return count ? can[number % (uint32_t)count] : NULL;
}

static void polls(void)
{
    struct hvd_error error = {0};
    bool progress = false;
    int code = HVD_AGAIN;
    for (int poll = 0; code == HVD_AGAIN && poll < POLLS; poll++)
        code = hvd_p2p_step(&scene.run, &progress, &error);
    if (scene.liar < 0)
        CHECK(code == HVD_OK, "%d: %s", code, error.text);
    else
        CHECK(code == HVD_EINTERNAL && error.culprit == scene.liar && strstr(error.text, "another collective"),
              "%d, rank %d: %s", code, error.culprit, error.text);
}

void fuzz_heads(struct fuzz_input input)
{
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLGATHER, HVD_BROADCAST, HVD_REDUCE, HVD_REDUCESCATTER};
    static unsigned char block[HVD_P2P_BLOCK];
    int what = kinds[fuzz_below(&input, HVD_COUNT_OF(kinds))], size = 2 + (int)fuzz_below(&input, RANKS_MAX - 1);
    const struct hvd_algo *algo = algo_of(fuzz_byte(&input), what, size);
    if (!algo)
        return;
    memset(&scene, 0, sizeof scene);
    struct hvd_p2p_run *run = &scene.run;
    *run = (struct hvd_p2p_run){.algo = algo, .dtype = HVD_DTYPE_int32, .element_bytes = 4, .block = block, .mark = 77};
    run->shape = (struct hvd_shape){.kind = what,
                                    .size = size,
                                    .rank = (int)fuzz_below(&input, (uint32_t)size),
                                    .root = (int)fuzz_below(&input, (uint32_t)size),
                                    .count = fuzz_below(&input, 300),
                                    .grain = 1 + fuzz_below(&input, 100)};
    run->hop = run->fold = (struct hvd_scale){.op = HVD_OP_sum, .divide = 1, .factor = 1.0, .first = 1.0};
    for (int rank = 0; rank < size; rank++) {
        scene.link[rank] = (struct hvd_link){.kind = &kind, .peer = rank, .fd = -1};
        snprintf(scene.link[rank].called, sizeof scene.link[rank].called, "rank %d", rank);
        scene.link_of[rank] = rank == run->shape.rank ? NULL : &scene.link[rank];
    }
    size_t kept = hvd_p2p_kept_bytes(algo, &run->shape, run->element_bytes);
    run->link = scene.link_of;
    run->kept = malloc(kept + !kept);
    run->source = run->buffer = calloc(run->shape.count + !run->shape.count, 4);
    scene.liar = -1;
    scene.piece = 9 + 8 * (int)fuzz_below(&input, 128);
    scene.input = input;
    hvd_p2p_begin(run);
    polls();
    free(run->kept);
    free(run->buffer);
}
