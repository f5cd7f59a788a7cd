/* test_trace.c - the ring with many writers, the table of names when it overflows, and where a record may be written.
 */
#define _GNU_SOURCE
#include "crew.h"

#include "trace/json_string.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WRITERS = 4, EACH = 60000, RING = 256 };

static struct hvd_trace_ring ring;
static struct hvd_trace_names names;
static _Atomic int writing;

static void the_newest_come_in_order(void)
{
    struct hvd_event events[100];
    uint64_t from = 0, lost = 0;
    CHECK(hvd_trace_open(&ring, 33) == HVD_OK && ring.mask == 63);
    for (uint32_t i = 0; i < 40; i++)
        hvd_trace_add_at(&ring, i, HVD_TRACE_submit, i, 7);
    CHECK(hvd_trace_read(&ring, &from, events, 30, &lost) == 30 && from == 30 && events[29].tag == 29 && lost == 0);
    for (uint32_t i = 40; i < 140; i++)
        hvd_trace_add_at(&ring, i, HVD_TRACE_submit, i, 7);
    CHECK(hvd_trace_copy(&ring, events, 100) == 64 && events[0].tag == 76 && events[63].tag == 139);
    CHECK(hvd_trace_copy(&ring, events, 3) == 3 && events[0].tag == 137 && hvd_trace_copy(&ring, events, -1) == 0);
    CHECK(hvd_trace_read(&ring, &from, events, 100, &lost) == 64 && from == 140 && events[0].tag == 76 && lost == 46);
    atomic_store(&ring.slot[0].value, 8); /* torn */
    CHECK(hvd_trace_copy(&ring, events, 100) == 63);
    hvd_trace_close(&ring);
}

/* What an event says of itself can be checked. */
static void *write_many(void *self)
{
    uint32_t writer = (uint32_t)(uintptr_t)self;
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t tag = writer * EACH + i;
        hvd_trace_add_at(&ring, tag * 3u, tag % 5, tag, (uint64_t)tag * tag);
    }
    atomic_fetch_sub(&writing, 1);
    return NULL;
}

static void check_all(const struct hvd_event *events, int count)
{
    for (int i = 0; i < count; i++) {
        uint64_t tag = events[i].tag;
        CHECK(events[i].time_ns == (uint32_t)(tag * 3u) && events[i].what == tag % 5 && events[i].value == tag * tag);
    }
}

static void what_is_torn_is_left_out(void)
{
    pthread_t thread[WRITERS];
    struct hvd_event events[RING];
    uint64_t from = 0, lost = 0, read = 0;
    CHECK(hvd_trace_open(&ring, RING) == HVD_OK);
    atomic_store(&writing, WRITERS);
    for (uintptr_t i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&thread[i], NULL, write_many, (void *)i) == 0);
    while (atomic_load(&writing)) {
        check_all(events, hvd_trace_copy(&ring, events, RING));
        int count = hvd_trace_read(&ring, &from, events, RING, &lost);
        check_all(events, count);
        read += (uint64_t)count;
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(thread[i], NULL);
    read += (uint64_t)hvd_trace_read(&ring, &from, events, RING, &lost);
    CHECK(from == WRITERS * EACH && read + lost == from && hvd_trace_copy(&ring, events, RING) == RING);
    hvd_trace_close(&ring);
}

static void *name_many(void *self)
{
    uint32_t seed = (uint32_t)(uintptr_t)self;
    for (uint32_t i = 0; i < 20000; i++) {
        char name[64], text[HVD_NAME_MAX + 1] = "";
        int set = -1, length = snprintf(name, sizeof name, "layer.%u.weight", (i * 7919 + seed) % 12000);
        uint32_t number = hvd_trace_number(&names, (int)(i % 3), name, (size_t)length);
        CHECK(number && number < HVD_TRACE_UNNAMED);
        if (hvd_trace_text(&names, number, &set, text)) /* unless another thread has taken its place */
            CHECK(!strcmp(text, name) && set == (int)(i % 3));
    }
    return NULL;
}

static void names_come_back_or_nothing(void)
{
    pthread_t thread[WRITERS];
    struct hvd_error error = {0};
    char text[HVD_NAME_MAX + 1], other[HVD_NAME_MAX + 1], huge[600];
    int set;
    CHECK_CODE(hvd_trace_names_open(&names, &error), HVD_OK, error.text);
    static const char *const some[] = {"", "a", "weight", "12345678", "bias.of.9", "one.and.another"};
    uint32_t number[HVD_COUNT_OF(some)];
    for (size_t i = 0; i < HVD_COUNT_OF(some); i++)
        number[i] = hvd_trace_number(&names, 5, some[i], strlen(some[i]));
    for (size_t i = 0; i < HVD_COUNT_OF(some); i++) {
        CHECK(hvd_trace_number(&names, 5, some[i], strlen(some[i])) == number[i]);
        CHECK(hvd_trace_text(&names, number[i], &set, text) && !strcmp(text, some[i]) && set == 5);
    }
    CHECK(hvd_trace_number(&names, 6, "a", 1) != number[1]);
    memset(huge, 'h', sizeof huge);
    uint32_t long_one = hvd_trace_number(&names, 0, huge, sizeof huge);
    CHECK(hvd_trace_text(&names, long_one, &set, text) && strlen(text) == HVD_NAME_MAX);
    CHECK(!hvd_trace_text(&names, 0, &set, other) && !hvd_trace_text(&names, HVD_TRACE_UNNAMED | 3, &set, other));
    for (uintptr_t i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&thread[i], NULL, name_many, (void *)i) == 0);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(thread[i], NULL);
    hvd_trace_names_close(&names);
}

/* Names of a model differ in a few letters, often the last ones: all are known, and none has taken another's place. */
static void names_that_differ_little_have_places_of_their_own(void)
{
    static const struct {
        const char *form;
        int count;
    } list[] = {{"allreduce.w%d", 100},          {"allreduce.g%d", 300},
                {"allreduce.grad_%d", 161},      {"allreduce.%04d", 1000},
                {"allreduce.loss_%d", 1000},     {"allreduce.noname.0.%d", 320},
                {"layer%d.weight", 500},         {"%d", 1000},
                {"allreduce.grad.%04d", 1000},   {"model.%d.attn.bias", 1000},
                {"DistOpt.allreduce.p.%d", 161}, {"%d.of.a.long.list.of.names", 1000}};
    char name[HVD_NAME_MAX + 1], text[HVD_NAME_MAX + 1];
    struct hvd_error error = {0};
    for (size_t l = 0; l < HVD_COUNT_OF(list); l++) {
        int known = 0, places = 0, set;
        CHECK_CODE(hvd_trace_names_open(&names, &error), HVD_OK, error.text);
        for (int turn = 0; turn < 2; turn++)
            for (int i = 0; i < list[l].count; i++) {
                snprintf(name, sizeof name, list[l].form, i);
                uint32_t number = hvd_trace_number(&names, 0, name, strlen(name));
                known += hvd_trace_text(&names, number, &set, text) && !strcmp(text, name);
            }
        CHECK_CODE(known, 2 * list[l].count, list[l].form);
        for (int i = 0; i < HVD_TRACE_NAMES; i++)
            places += atomic_load(&names.entry[i].hash) != 0;
        CHECK_CODE(places, list[l].count, list[l].form);
        hvd_trace_names_close(&names);
    }
}

static int dump_in(const char *folder, bool guarded, char *text)
{
    struct hvd_options options = crew_options(0, 1);
    options.trace_dir = folder;
    options.trace_guarded = guarded;
    char refused[HVD_TEXT_MAX];
    CHECK_CODE(hvd_init(&options, NULL, NULL, refused, sizeof refused), HVD_OK, refused);
    int code = hvd_dump(NULL, HVD_WHY_ASKED, text, HVD_TEXT_MAX);
    hvd_shutdown(-1);
    return code;
}

static void a_record_goes_where_nobody_else_is(void)
{
    char base[] = "/tmp/test_trace.XXXXXX", parent[64], folder[80], file[120], text[HVD_TEXT_MAX];
    CHECK(mkdtemp(base));
    snprintf(parent, sizeof parent, "%s/all", base);
    snprintf(folder, sizeof folder, "%s/job", parent);
    CHECK_CODE(dump_in(NULL, false, text), HVD_EINVAL, text);
    CHECK_CODE(dump_in(folder, true, text), HVD_OK, text);
    snprintf(file, sizeof file, "%s/rank-0.flight.json", folder);
    CHECK(!strcmp(text, file) && access(file, R_OK) == 0);
    CHECK(chmod(parent, 0755) == 0 && dump_in(folder, true, text) == HVD_EINIT && strstr(text, "mode 0700"));
    CHECK(dump_in(folder, false, text) == HVD_OK); /* whoever names it may have it so */
    CHECK(unlink(file) == 0 && rmdir(folder) == 0 && rmdir(parent) == 0);
    CHECK(symlink("/tmp", parent) == 0 && dump_in(folder, true, text) == HVD_EINIT && strstr(text, "no link"));
    CHECK(unlink(parent) == 0 && mkdir(parent, 0700) == 0 && symlink("/tmp", folder) == 0);
    CHECK(dump_in(folder, true, text) == HVD_EINIT);
    CHECK(unlink(folder) == 0 && rmdir(parent) == 0);
    snprintf(file, sizeof file, "%s/file", base);
    FILE *made = fopen(file, "w");
    CHECK(made && fclose(made) == 0 && dump_in(file, false, text) == HVD_EINIT && strstr(text, "Not a directory"));
    CHECK(unlink(file) == 0 && rmdir(base) == 0);
}

static void a_letter_is_what_unicode_says(void)
{
    static const struct {
        const char *text;
        int bytes;
    } some[] = {
        {"a", 1},
        {"\xc3\xa9", 2},
        {"\xe2\x82\xac", 3},
        {"\xed\x9f\xbf", 3},
        {"\xf0\x9f\x98\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4},
        {"\x80", 0},
        {"\xc0\x80", 0},
        {"\xc1\xbf", 0},
        {"\xc3", 0},
        {"\xc3z", 0},
        {"\xe0\x9f\xbf", 0},
        {"\xed\xa0\x80", 0},
        {"\xe2\x82", 0},
        {"\xf0\x8f\xbf\xbf", 0},
        {"\xf4\x90\x80\x80", 0},
        {"\xf0\x9f\x98", 0},
        {"\xf5\x80\x80\x80", 0},
        {"\xff", 0},
    };
    for (size_t i = 0; i < HVD_COUNT_OF(some); i++)
        CHECK(hvd_json_letter(some[i].text) == some[i].bytes);
    char text[100] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    CHECK(file);
    hvd_json_text(file, "q\"\\\n\x7f\xc3\xa9\xc3");
    CHECK(fclose(file) == 0 && !strcmp(text, "\"q\\\"\\\\\\u000a\\u007f\xc3\xa9\\ufffd\""));
}

static void put(int in, const char *name, uint64_t job, const char *rest)
{
    int fd = openat(in, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 &&
          dprintf(fd, "{\"format\":\"hvdlite-flight-1\",\"job\":\"%016x\",\"epoch\":1,%s}", (unsigned)job, rest) > 0);
    close(fd);
}

static bool is_of(int in, const char *name, uint64_t job)
{
    char text[200] = "", wanted[40];
    int fd = openat(in, name, O_RDONLY);
    if (fd < 0)
        return false;
    CHECK(read(fd, text, sizeof text - 1) > 0);
    close(fd);
    snprintf(wanted, sizeof wanted, "\"job\":\"%016x\"", (unsigned)job);
    return strstr(text, wanted) != NULL;
}

/* Job 1 fails, 2 to 9 go well: the newest and job 1 are there, and the oldest of the others have made room. */
static void what_another_life_has_left_is_kept(void)
{
    char folder[] = "/tmp/test_trace.XXXXXX", name[20];
    CHECK(mkdtemp(folder));
    int in = open(folder, O_RDONLY | O_DIRECTORY);
    put(in, "f", 1, "\"why\":\"abort\",\"failure\":{}");
    hvd_rotate_in(in, "f", 1, 1); /* its own */
    CHECK(faccessat(in, "f.1", F_OK, 0) && is_of(in, "f", 1));
    for (uint64_t job = 2; job <= 9; job++) {
        hvd_rotate_in(in, "f", job, 1);
        CHECK(faccessat(in, "f", F_OK, 0) && is_of(in, "f.1", job - 1));
        put(in, "f", job, "\"why\":\"asked\",\"failure\":null");
    }
    CHECK(is_of(in, "f.1", 8) && is_of(in, "f.2", 7) && is_of(in, "f.4", 5) && is_of(in, "f.5", 1));
    CHECK(faccessat(in, "f.6", F_OK, 0));
    hvd_rotate_in(in, "f", 9, 2); /* the same job's next init */
    CHECK(is_of(in, "f.1", 9) && is_of(in, "f.5", 1));
    CHECK(symlinkat("f.1", in, "f") == 0);
    hvd_rotate_in(in, "f", 10, 1);
    CHECK(is_of(in, "f.1", 9) && unlinkat(in, "f", 0) == 0);
    int fd = openat(in, "f", O_WRONLY | O_CREAT, 0600); /* somebody else's */
    CHECK(write(fd, "notes", 5) == 5 && close(fd) == 0);
    hvd_rotate_in(in, "f", 10, 1);
    CHECK(faccessat(in, "f", F_OK, 0) == 0 && is_of(in, "f.1", 9) && unlinkat(in, "f", 0) == 0);
    for (int i = 1; i <= 5; i++) {
        snprintf(name, sizeof name, "f.%d", i);
        CHECK(unlinkat(in, name, 0) == 0);
    }
    close(in);
    CHECK(rmdir(folder) == 0);
}

int main(void)
{
    crew_deadline(120);
    the_newest_come_in_order();
    what_is_torn_is_left_out();
    names_come_back_or_nothing();
    names_that_differ_little_have_places_of_their_own();
    a_record_goes_where_nobody_else_is();
    a_letter_is_what_unicode_says();
    what_another_life_has_left_is_kept();
    return 0;
}
