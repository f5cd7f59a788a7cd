/* virtual_interrupt.c - a caller is interrupted at any moment: is its memory let alone, and does nothing get lost?
 *
 * Signals end waits, and callers give up waiting, as Python does for an exception of a handler. Then they go on with
 * other collectives and come back later, or want to forget the handle, or leave the job with work in flight. Memory of
 * a request is out of bounds for everybody once its handle is forgotten, or the engine is freed. Other ranks finish
 * what was agreed, or hear which rank has left. Who stays to the end has no handle left.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <unistd.h>

enum { STEPS = 10, WAIT_MS = 10000, LATE_NS = 3 * VIRTUAL_MS, MESSAGES = 20, COUNT_MAX = 4000 };
static uint64_t chosen, delay_ns, last_ns; /* when the last rank had submitted all */
static int leaver = -1, leaves_at, ready;  /* ranks that have */

struct asked {
    struct hvd_request request;
    int64_t handle; /* 0: none any more */
    float *in, *out;
    char name[16];
};

static size_t bytes_of(int size)
{
    return sizeof(float) * COUNT_MAX * (size_t)size;
}

static float value(int rank, int64_t i)
{
    return (float)(16 * (rank + 1) + i % 13);
}

static void poison(struct asked *asked, int size)
{
    virtual_poison(asked->in, bytes_of(size));
    if (asked->out != asked->in)
        virtual_poison(asked->out, bytes_of(size));
    asked->handle = 0;
}

/* Is it the right error, of a rank that has left? */
static void is_left(int code, const char *text)
{
    char words[32];
    const char *why = strstr(text, ": ");
    snprintf(words, sizeof words, "rank %d ", leaver);
    CHECK_CODE(code, HVD_EPEER, text);
    CHECK_CODE(leaver >= 0 && why && strstr(why, words), 1, text);
}

static void check(struct hvd_engine *engine, const struct asked *asked, int size)
{
    const struct hvd_request *request = &asked->request;
    int64_t count = request->dims[0];
    struct hvd_output output = {.data = asked->out};
    if (request->kind == HVD_ALLGATHER)
        CHECK(hvd_engine_result(engine, asked->handle, &output) == HVD_OK && output.rows == count * size);
    const float *out = output.data;
    for (int64_t i = 0; i < count * (request->kind == HVD_ALLGATHER ? size : 1); i++) {
        float right = value(request->kind == HVD_BROADCAST ? request->root : (int)(i / count), i % count);
        for (int rank = 1; rank < size && request->kind == HVD_ALLREDUCE; rank++)
            right += value(rank, i);
        CHECK_CODE(out[i] == right, 1, asked->name);
    }
}

static bool forget(struct hvd_engine *engine, struct asked *asked, int size)
{
    int code = hvd_engine_forget(engine, asked->handle);
    CHECK_CODE(code == HVD_OK || code == HVD_AGAIN, 1, asked->name);
    if (code == HVD_OK)
        poison(asked, size);
    return code == HVD_OK;
}

/* Waits for so long; what is over is looked at and forgotten. */
static void look(struct hvd_engine *engine, struct asked *asked, int size, int wait_ms)
{
    char text[HVD_TEXT_MAX] = "";
    int code = hvd_engine_wait(engine, asked->handle, wait_ms, text, sizeof text);
    if (code == HVD_AGAIN)
        return;
    if (code == HVD_OK)
        check(engine, asked, size);
    else
        is_left(code, text);
    CHECK_CODE(forget(engine, asked, size), 1, asked->name);
}

static void submit(struct hvd_engine *engine, struct asked *asked, int rank, int size, uint64_t *common, uint64_t *own)
{
    static const int64_t counts[] = {1, 3, 300, COUNT_MAX};
    static const int kinds[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_ALLGATHER, HVD_BROADCAST};
    static const int ways[] = {HVD_NOW, HVD_QUIET, HVD_SOON};
    struct hvd_error error = {0};
    int64_t count = counts[virtual_below(common, HVD_COUNT_OF(counts))];
    asked->in = asked->out = virtual_memory(bytes_of(size));
    if (virtual_below(own, 2))
        asked->out = virtual_memory(bytes_of(size));
    for (int64_t i = 0; i < count; i++)
        asked->in[i] = value(rank, i);
    asked->request = crew_sum(asked->name, asked->in, count);
    asked->request.kind = kinds[virtual_below(common, HVD_COUNT_OF(kinds))];
    asked->request.root = (int)virtual_below(common, (unsigned)size);
    asked->request.output = asked->request.kind == HVD_ALLGATHER ? NULL : asked->out;
    asked->request.quiet = ways[virtual_below(own, HVD_COUNT_OF(ways))];
    asked->handle = hvd_engine_submit(engine, &asked->request, &error);
    if (asked->handle < 0) {
        is_left((int)asked->handle, error.text);
        poison(asked, size);
    }
}

/* Each slot that was ever used is free, and can be had again. */
static void all_free(struct hvd_handles *handles)
{
    uint32_t count = 0, high = atomic_load(&handles->high);
    for (uint32_t at = (uint32_t)atomic_load(&handles->free_list); at && count <= high; count++) {
        CHECK(hvd_slot_state(&handles->slot[at - 1]) == HVD_SLOT_FREE);
        at = atomic_load(&handles->slot[at - 1].next);
    }
    CHECK(count == high);
    CHECK(handles->with_turn == 0 && !hvd_handles_queued(handles));
}

static void body(int rank, int size)
{
    struct hvd_error error;
    struct hvd_engine *engine;
    struct asked asked[STEPS] = {0};
    uint64_t common = chosen * 7, own = common + (uint64_t)rank;
    CHECK_CODE(virtual_open(rank, size, 0, chosen % 4, &engine, &error), HVD_OK, error.text);
    int steps = rank == leaver ? leaves_at : STEPS, done = 0;
    for (; done < steps; done++) {
        snprintf(asked[done].name, sizeof asked[done].name, "%d", done);
        submit(engine, &asked[done], rank, size, &common, &own);
        for (int looks = (int)virtual_below(&own, 3); looks > 0; looks--) { /* at this one, or an earlier one */
            struct asked *at = &asked[virtual_below(&own, 2) ? done : (int)virtual_below(&own, (unsigned)done + 1)];
            if (at->handle && virtual_below(&own, 4))
                look(engine, at, size, (int)virtual_below(&own, 4));
            else if (at->handle)
                forget(engine, at, size);
        }
        usleep(virtual_below(&own, 3) ? 0 : virtual_below(&own, 5000));
    }
    uint64_t mine_ns = last_ns = virtual_now();
    ready++;
    for (int i = 0; i < done && rank != leaver; i++) {
        if (asked[i].handle)
            look(engine, &asked[i], size, WAIT_MS);
        mine_ns = mine_ns > last_ns ? mine_ns : last_ns;
        uint64_t late_ns = ready == size ? virtual_now() - mine_ns : 0;
        CHECK_CODE(!asked[i].handle && late_ns < LATE_NS + MESSAGES * delay_ns, 1, asked[i].name);
        virtual_waited(delay_ns ? 0 : late_ns);
    }
    if (rank != leaver)
        all_free(&engine->handles);
    virtual_close(engine);
    for (int i = 0; i < done; i++)
        if (asked[i].handle)
            poison(&asked[i], size);
}

void virtual_interrupt(uint64_t seed, bool weak)
{
    static const int often[] = {0, 2, 5, 20};
    int size, world;
    struct virtual_plan plan = virtual_choose(seed, weak, &chosen, &size, &world);
    plan.interrupted = often[virtual_below(&chosen, HVD_COUNT_OF(often))];
    plan.delay_ns = delay_ns = virtual_below(&chosen, 2) * virtual_below(&chosen, 2 * VIRTUAL_MS);
    if (virtual_below(&chosen, 2)) {
        leaver = (int)virtual_below(&chosen, (unsigned)size);
        leaves_at = (int)virtual_below(&chosen, STEPS + 1);
    }
    virtual_describe("one wait in %d interrupted, rank %d leaves before step %d", plan.interrupted, leaver, leaves_at);
    virtual_begin(&plan);
    virtual_run(size, body);
}
