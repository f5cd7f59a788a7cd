/* test_spans.c - rows of a timeline: what events become, well formed whatever they say, and read back from the ring.
 *
 * Rows are compared with the words that a reader needs; tests/trace/test_trace_spans.py reads them as JSON.
 */
#define _GNU_SOURCE
#include "crew.h"

#include "trace/hash_table.h"
#include "trace/run_queue.h"
#include "trace/spans.h"

#include <stdlib.h>
#include <string.h>

enum { KEYS = 5000, EVENTS = 20000 };

static uint64_t dice = 88172645463325252u;

static uint64_t throw_dice(uint64_t below)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return dice % below;
}

/* Against an array that knows: the keys of a table that grows, and from which others go. */
static void cells_are_there_until_they_are_dropped(void)
{
    static bool there[KEYS + 1];
    struct hvd_cells cells = {0};
    CHECK(!hvd_cells_find(&cells, 1));
    for (int i = 0; i < 200000; i++) {
        uint64_t key = 1 + throw_dice(KEYS);
        struct hvd_cell *cell = hvd_cells_find(&cells, key);
        CHECK((cell != NULL) == there[key] && (!cell || (cell->key == key && cell->lane == (int)key)));
        if (throw_dice(3)) {
            CHECK((cell = hvd_cells_put(&cells, key)));
            cell->lane = (int)key;
        } else if (cell) {
            hvd_cells_drop(&cells, cell);
        }
        there[key] = hvd_cells_find(&cells, key) != NULL;
    }
    uint32_t used = 0;
    for (uint64_t key = 1; key <= KEYS; key++) {
        struct hvd_cell *cell = hvd_cells_find(&cells, key);
        used += cell != NULL;
        CHECK((cell != NULL) == there[key] && (!cell || cell->lane == (int)key));
    }
    CHECK(used == cells.used && used > KEYS / 3 && 2 * cells.used <= cells.count);
    hvd_cells_close(&cells);
}

static void a_queue_is_put_right_where_events_are_missing(void)
{
    struct hvd_queue queue = {0};
    CHECK(hvd_queue_take(&queue, 77) == 77);
    CHECK(hvd_queue_agreed(&queue, 0, 10, 3) && hvd_queue_agreed(&queue, 3, 20, 2));
    CHECK(hvd_queue_take(&queue, 0) == 10 && queue.items == 4);
    CHECK(hvd_queue_agreed(&queue, 2, 30, 1)); /* two have ended, and nobody said so */
    CHECK(hvd_queue_take(&queue, 0) == 20 && hvd_queue_take(&queue, 0) == 20 && hvd_queue_take(&queue, 0) == 30);
    CHECK(hvd_queue_agreed(&queue, (uint64_t)1 << 40, 40, 1) && queue.count == 2); /* so many that nobody saw agreed */
    CHECK(hvd_queue_take(&queue, 0) == 40 && hvd_queue_agreed(&queue, 1, 50, 0));
    CHECK(hvd_queue_take(&queue, 0) == 40 && hvd_queue_take(&queue, 9) == 9);
    for (uint64_t i = 1; i <= 20000; i++) /* as a hostile record has it: ever more are missing in front */
        CHECK(hvd_queue_agreed(&queue, 2 * i - 1, i, 1) && queue.items == 2 * i);
    CHECK(queue.room < 200000 && hvd_queue_take(&queue, 0) == 20000);
    hvd_queue_close(&queue);
    for (uint64_t i = 0; i < 100000; i++) { /* runs that are taken make room */
        CHECK(hvd_queue_agreed(&queue, i % 7, i, 1));
        for (uint64_t before = i % 7; before + 1 > (i + 1) % 7; before--)
            hvd_queue_take(&queue, 0);
    }
    CHECK(queue.room <= 128);
    hvd_queue_close(&queue);
}

static void feed(struct hvd_spans *spans, uint64_t t_ns, int what, uint32_t tag, int set, uint64_t value,
                 const char *by, const char *name)
{
    hvd_spans_feed(spans, &(struct hvd_span_event){t_ns, what, tag, set, value, by, name});
}

/* What there is, as a text; forgotten by then. */
static const char *rows_of(struct hvd_spans *spans)
{
    size_t bytes;
    const char *text = hvd_rows_take(hvd_spans_rows(spans), "", &bytes);
    CHECK(text);
    static _Thread_local char kept[1 << 22];
    CHECK(bytes < sizeof kept);
    memcpy(kept, text, bytes);
    kept[bytes] = '\0';
    return kept;
}

static int count_of(const char *text, const char *words)
{
    int count = 0;
    for (; (text = strstr(text, words)); text += strlen(words))
        count++;
    return count;
}

static void a_tensor_has_horovods_spans(void)
{
    struct hvd_spans *spans = hvd_spans_new(3, "rank 3 (\"h\")", -5000, true);
    CHECK(spans);
    const char *text = rows_of(spans);
    CHECK(!strcmp(text, ",\n{\"ph\":\"M\",\"pid\":3,\"tid\":0,\"name\":\"process_name\",\"args\":"
                        "{\"name\":\"rank 3 (\\\"h\\\")\"}}"
                        ",\n{\"ph\":\"M\",\"pid\":3,\"tid\":0,\"name\":\"process_sort_index\",\"args\":"
                        "{\"sort_index\":3}}"));
    feed(spans, 1000, HVD_TRACE_submit, 7, 0, 4096, "broadcast", "w");
    text = rows_of(spans);
    CHECK_CODE(strstr(text, "\"name\":\"thread_name\",\"args\":{\"name\":\"w\"}") != NULL, 1, text);
    CHECK_CODE(strstr(text, "{\"ph\":\"B\",\"pid\":3,\"tid\":1000,\"ts\":-4.000,\"name\":\"NEGOTIATE_BROADCAST\","
                            "\"args\":{\"bytes\":4096}}") != NULL,
               1, text);
    feed(spans, 6001, HVD_TRACE_round, 1, 0, 0, "", NULL);
    feed(spans, 7000, HVD_TRACE_start, 1, 0, 5000, "shm", NULL);
    feed(spans, 9000, HVD_TRACE_finish, 7, 0, 0, "broadcast", NULL);
    text = rows_of(spans);
    CHECK_CODE(strstr(text, "\"ts\":1.001,\"s\":\"p\",\"name\":\"CYCLE_START\"") != NULL, 1, text);
    CHECK_CODE(strstr(text, "\"ts\":2.000,\"name\":\"SHM_BCAST\",\"args\":{\"bucket_bytes\":5000}}") != NULL, 1, text);
    CHECK_CODE(strstr(text, "\"name\":\"1 tensor, shm\"") && strstr(text, "\"name\":\"QUEUE\""), 1, text);
    CHECK_CODE(count_of(text, "\"ph\":\"E\",\"pid\":3,\"tid\":1000"), 4, text);
    CHECK_CODE(count_of(text, "\"ph\":\"B\",\"pid\":3,\"tid\":1000"), 3, text);
    hvd_spans_end(spans);
    CHECK(rows_of(spans)[0] == '\0'); /* nothing was open */
    feed(spans, 10000, HVD_TRACE_submit, 7, 0, 1, "broadcast", "w");
    feed(spans, 11000, HVD_TRACE_submit, 7, 0, 1, "broadcast", "w"); /* its end was lost */
    text = rows_of(spans);
    CHECK_CODE(!strstr(text, "thread_name") && count_of(text, "\"ph\":\"E\"") == 1, 1, text); /* and it has its lane */
    feed(spans, 12000, HVD_TRACE_end, 7, 0, 5, "broadcast", NULL);
    CHECK(strstr(rows_of(spans), "\"args\":{\"error\":-5}}"));
    feed(spans, 13000, HVD_TRACE_abort, UINT32_MAX, 0, 9, "", NULL); /* nobody's fault */
    CHECK(strstr(rows_of(spans), "\"name\":\"ABORT\",\"args\":{\"rank\":-1,\"error\":-9}}"));
    hvd_spans_free(spans);
    hvd_spans_free(NULL);
}

/* Lanes of what has no name are used again, the last one first; of each kind and set others. */
static void lanes_without_a_name_are_shared(void)
{
    struct hvd_spans *spans = hvd_spans_new(0, "rank 0", 0, false);
    CHECK(spans && rows_of(spans));
    for (int turn = 0; turn < 3; turn++) {
        for (uint32_t i = 0; i < 4; i++)
            feed(spans, 1000 * i, HVD_TRACE_submit, HVD_TRACE_UNNAMED + i, i == 3, 8, "allreduce", "allreduce.noname");
        const char *text = rows_of(spans);
        CHECK_CODE(count_of(text, "thread_name"), turn ? 0 : 4, text);
        CHECK_CODE(turn || strstr(text, "allreduce without a name (set 1)"), 1, text);
        for (int lane = 1000; lane < 1004; lane++) {
            char words[64];
            snprintf(words, sizeof words, "\"tid\":%d,\"ts\"", lane);
            CHECK_CODE(count_of(text, words), 2, text);
        }
        for (uint32_t i = 0; i < 4; i++)
            feed(spans, 9000, HVD_TRACE_end, HVD_TRACE_UNNAMED + i, i == 3, 0, "allreduce", NULL);
        rows_of(spans);
    }
    feed(spans, 9000, HVD_TRACE_submit, HVD_TRACE_UNNAMED, 0, 8, "alltoall", NULL);
    CHECK(strstr(rows_of(spans), "\"tid\":1004"));
    hvd_spans_free(spans);
}

/* A submit that comes into the ring late does not begin before the lane's tensor before it has ended. */
static void who_comes_late_begins_when_the_lane_is_free(void)
{
    struct hvd_spans *spans = hvd_spans_new(0, "rank 0", 0, false);
    CHECK(spans);
    feed(spans, 1000, HVD_TRACE_submit, HVD_TRACE_UNNAMED, 0, 8, "allreduce", NULL);
    feed(spans, 7000, HVD_TRACE_end, HVD_TRACE_UNNAMED, 0, 0, "allreduce", NULL);
    rows_of(spans);
    feed(spans, 6000, HVD_TRACE_submit, HVD_TRACE_UNNAMED + 1, 0, 8, "allreduce", NULL);
    const char *text = rows_of(spans);
    CHECK_CODE(strstr(text, "\"tid\":1000,\"ts\":7.000,\"name\":\"NEGOTIATE_ALLREDUCE\"") != NULL, 1, text);
    hvd_spans_free(spans);
}

/* Events of anybody: whatever they say, each row is whole, and all that has begun has ended at the end. */
static void whatever_comes_rows_are_whole(void)
{
    static const char *const by[] = {"allreduce", "",
                                     "a kind that nobody has heard of, with a name of more than sixty-four letters"};
    static const char *const name[] = {NULL, "\"\\\n\xff", "", "layer.weight"};
    struct hvd_spans *spans = hvd_spans_new(-1, "", INT64_MIN, true);
    uint64_t begun = 0, ended = 0;
    CHECK(spans);
    for (int i = 0; i < EVENTS; i++) {
        uint64_t big = throw_dice(4) ? throw_dice(9) : UINT64_MAX - throw_dice(2);
        feed(spans, throw_dice(4) ? (uint64_t)i : UINT64_MAX / 2, (int)throw_dice(HVD_TRACE_COUNT + 2) - 1,
             (uint32_t)big, (int)throw_dice(258) % (int)(1 + throw_dice(258)) - 1, big, by[throw_dice(3)],
             name[throw_dice(4)]);
        if (i == EVENTS - 1)
            hvd_spans_end(spans);
        const char *text = rows_of(spans);
        for (const char *row = text; (row = strstr(row, ",\n{\"ph\":\"")); row++)
            CHECK_CODE(strchr("BEXiM", row[9]) != NULL && strcspn(row + 1, "}") < 1000, 1, row);
        begun += (uint64_t)count_of(text, "\"ph\":\"B\"");
        ended += (uint64_t)count_of(text, "\"ph\":\"E\"");
    }
    CHECK(begun == ended && begun > EVENTS / 10);
    hvd_spans_free(spans);
}

/* From the ring of an engine, and only what comes after the first look. */
static void it_follows_the_ring(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_follower follower = {0};
    struct hvd_spans *spans = hvd_spans_new(rank, "rank", 0, false);
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float memory[2] = {1, 1};
    CHECK_CODE(engine != NULL && spans != NULL && size == 2, 1, crew_open_error.text);
    struct hvd_request request = crew_sum("before", memory, 1);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    CHECK(hvd_engine_follow(engine, &follower, spans) == 0 && follower.room > 0 && follower.from > 0);
    request = crew_sum("after", memory, 1);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    request = crew_sum(NULL, memory + 1, 1);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    int events = hvd_engine_follow(engine, &follower, spans);
    const char *rows = rows_of(spans);
    CHECK_CODE(events >= 6 && !strstr(rows, "before") && strstr(rows, "\"name\":\"after\""), 1, rows);
    CHECK_CODE(strstr(rows, "allreduce without a name") && count_of(rows, "NEGOTIATE_ALLREDUCE") == 2, 1, rows);
    for (uint64_t i = 0; i < 3 * follower.room; i++)
        hvd_trace_add(&engine->trace, HVD_TRACE_leave, 1, 0);
    for (int some = 1; some > 0;)
        some = hvd_engine_follow(engine, &follower, spans);
    CHECK(follower.lost >= 2 * follower.room && follower.lost <= 3 * follower.room);
    hvd_spans_free(spans);
}

int main(void)
{
    crew_deadline(120);
    cells_are_there_until_they_are_dropped();
    a_queue_is_put_right_where_events_are_missing();
    a_tensor_has_horovods_spans();
    lanes_without_a_name_are_shared();
    who_comes_late_begins_when_the_lane_is_free();
    whatever_comes_rows_are_whole();
    crew_threads(2, it_follows_the_ring);
    return 0;
}
