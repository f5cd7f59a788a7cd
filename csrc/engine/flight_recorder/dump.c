/* dump.c - a flight record: what this rank did last, as a file for whoever looks for the reason.
 *
 * One JSON object, `rank-K.flight.json`: who writes and why, what the job failed of, how its clock stands to that of
 * rank 0, what was submitted and is not finished, and the newest events of the ring, oldest first. hvdlite-trace
 * reads those of all ranks together.
 *
 * It is written under another name and then renamed, so that nobody reads half of one; what another life has left under
 * that name is kept (rotation.c). A folder in a place that
 * everyone may write to (`guarded`) is made with mode 0700, and used only if it and its parent are folders of this user
 * that nobody else may enter: what somebody else has put there, a link say, is refused.
 *
 * Requests are looked at without the turn: their slots' atomic words are read between two looks at the state, and
 * what changed meanwhile is left out.
 */
#define _GNU_SOURCE
#include "../engine.h"

#include "../../trace/json_string.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_MAX  65536
#define WAITING_MAX 1000

/* A tensor's name, or what stands for one. */
static void put_tensor(const struct hvd_engine *engine, FILE *file, uint32_t tensor, int kind)
{
    char text[HVD_NAME_MAX + 1];
    int set;
    if (tensor >= HVD_TRACE_UNNAMED)
        fprintf(file, "\"%s.noname.%u\"", hvd_engine_kind(kind), tensor - HVD_TRACE_UNNAMED);
    else if (hvd_trace_text(&engine->names, tensor, &set, text))
        hvd_json_text(file, text);
    else
        fputs("null", file);
}

char *hvd_record_waiting(struct hvd_engine *engine)
{
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    if (!file)
        return NULL;
    int listed = 0;
    fputc('[', file);
    for (uint32_t i = 0; i < atomic_load(&engine->handles.high) && listed < WAITING_MAX; i++) {
        struct hvd_slot *slot = &engine->handles.slot[i];
        uint32_t word = atomic_load(&slot->word);
        uint64_t since_ns = atomic_load_explicit(&slot->submitted_ns, memory_order_acquire);
        uint64_t value = atomic_load_explicit(&slot->submitted, memory_order_relaxed);
        uint32_t tensor = atomic_load_explicit(&slot->tensor, memory_order_relaxed);
        if ((word & 3) != HVD_SLOT_BUSY || since_ns == 0 || atomic_load(&slot->word) != word)
            continue;
        int kind = (int)(value >> 56);
        fprintf(file, "%s{\"name\":", listed++ ? "," : "");
        put_tensor(engine, file, tensor, kind);
        fprintf(file, ",\"kind\":\"%s\",\"set\":%d,\"since_ns\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"watched\":%u}",
                hvd_engine_kind(kind), (int)(value >> HVD_TRACE_REST_BITS & 0xff), since_ns, value & HVD_TRACE_REST_MAX,
                atomic_load(&slot->watched));
    }
    fputc(']', file);
    fclose(file);
    return text;
}

static void put_event(const struct hvd_engine *engine, FILE *file, const struct hvd_event *event)
{
    const char *what = hvd_trace_name((int)event->what);
    int by = (int)(event->value >> 56);
    uint64_t rest = event->value & HVD_TRACE_REST_MAX;
    fprintf(file, "{\"t\":%" PRIu64 ",\"what\":\"%s\",\"tag\":%u,\"set\":%d,", event->time_ns, what ? what : "?",
            event->tag, (int)(event->value >> HVD_TRACE_REST_BITS & 0xff));
    switch (event->what) {
    case HVD_TRACE_round:
        fprintf(file, "\"buckets\":%u,\"value\":%u,\"name\":null}", (unsigned)(rest >> 32), (unsigned)rest);
        break;
    case HVD_TRACE_start:
        fprintf(file, "\"plane\":\"%s\",\"value\":%" PRIu64 ",\"name\":null}", hvd_engine_carrier(by), rest);
        break;
    case HVD_TRACE_abort:
    case HVD_TRACE_leave:
        fprintf(file, "\"value\":%" PRIu64 ",\"name\":null}", rest);
        break;
    default:
        fprintf(file, "\"kind\":\"%s\",\"value\":%" PRIu64 ",\"name\":", hvd_engine_kind(by), rest);
        put_tensor(engine, file, event->tag, by);
        fputc('}', file);
    }
}

static void put_head(struct hvd_engine *engine, FILE *file, uint32_t why)
{
    static const char *const whys[] = {"?", "abort", "error", "asked", "signal"};
    const struct hvd_options *options = &engine->options;
    fprintf(file,
            "{\"format\":\"hvdlite-flight-1\",\"job\":\"%016" PRIx64 "\",\"epoch\":%" PRIu64
            ",\"rank\":%d,\"size\":%d,\"host\":",
            options->job, options->epoch, options->rank, options->size);
    hvd_json_text(file, engine->flight.host);
    fprintf(file, ",\"pid\":%d,\"version\":\"%s\",\"written\":%lld,\"written_ns\":%" PRIu64 ",\"why\":\"%s\",\n",
            (int)getpid(), HVD_VERSION, (long long)time(NULL), hvd_now_ns(), whys[why < HVD_COUNT_OF(whys) ? why : 0]);
    fprintf(file, "\"failure\":");
    if (atomic_load(&engine->failed)) {
        fprintf(file, "{\"rank\":%d,\"code\":%d,\"text\":", engine->failure.culprit, engine->failure.code);
        hvd_json_text(file, engine->failure.text);
        fputc('}', file);
    } else {
        fputs("null", file);
    }
    fprintf(file, ",\"clock\":{\"offset_ns\":%lld,\"error_ns\":", (long long)options->clock_offset_ns);
    if (options->clock_error_ns < 0)
        fputs("null},\n", file);
    else
        fprintf(file, "%lld},\n", (long long)options->clock_error_ns);
}

/* Those that this rank knows of, by number. Sets without a common rank may have the same. */
static void put_sets(struct hvd_engine *engine, FILE *file)
{
    const char *before = "\"sets\":{";
    pthread_mutex_lock(&engine->records_lock);
    for (int number = 1; number < HVD_SETS_MAX; number++) {
        const struct hvd_set_record *record = &engine->record[number];
        if (!record->open)
            continue;
        fprintf(file, "%s\"%d\":", before, number);
        before = ",";
        for (int i = 0; i < record->count; i++)
            fprintf(file, "%c%d", i ? ',' : '[', record->ranks[i]);
        fputc(']', file);
    }
    pthread_mutex_unlock(&engine->records_lock);
    fputs(before[0] == ',' ? "},\n" : "\"sets\":{},\n", file);
}

static int put_record(struct hvd_engine *engine, FILE *file, uint32_t why)
{
    int room = engine->trace.mask < EVENTS_MAX ? (int)engine->trace.mask + 1 : EVENTS_MAX;
    struct hvd_event *events = malloc(sizeof *events * (size_t)room);
    bool failed = atomic_load(&engine->failed);
    char *live = failed && engine->flight.waiting ? NULL : hvd_record_waiting(engine);
    if (!events)
        return ENOMEM;
    int count = hvd_trace_copy(&engine->trace, events, room);
    put_head(engine, file, why);
    put_sets(engine, file);
    fprintf(file, "\"waiting\":%s,\n\"events\":[", live ? live : failed ? engine->flight.waiting : "[]");
    for (int i = 0; i < count; i++) {
        fputs(i ? ",\n" : "\n", file);
        put_event(engine, file, &events[i]);
    }
    fputs("\n]}\n", file);
    free(live);
    free(events);
    return fflush(file) || ferror(file) ? errno : 0;
}

/* A folder of this user that nobody else may enter; -1 and errno, ENOTDIR and EPERM for what is not. */
static int open_own(int parent, const char *name)
{
    struct stat found;
    if (mkdirat(parent, name, 0700) && errno != EEXIST)
        return -1;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &found) || found.st_uid != geteuid() || found.st_mode & 077)) {
        close(fd);
        errno = EPERM;
        return -1;
    }
    return fd;
}

/* The folder, made where it is missing; -1 and errno. */
static int open_folder(const char *folder, bool guarded)
{
    char path[4096];
    int fd;
    hvd_text_copy(path, sizeof path, folder);
    char *last = strrchr(path, '/');
    if (guarded && last && last != path) {
        *last = '\0';
        int parent = open_own(AT_FDCWD, path);
        if (parent < 0)
            return -1;
        fd = open_own(parent, last + 1);
        int kept = errno;
        close(parent);
        errno = kept;
        return fd;
    }
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = '\0';
            mkdir(path, 0777);
            *at = '/';
        }
    mkdir(path, 0777);
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int hvd_record_write(struct hvd_engine *engine, const char *folder, bool guarded, uint32_t why, char *path,
                     size_t path_bytes, struct hvd_error *error)
{
    char name[64], draft[96];
    int rank = engine->options.rank;
    snprintf(name, sizeof name, "rank-%d.flight.json", rank);
    snprintf(draft, sizeof draft, ".%s.%d", name, (int)getpid());
    snprintf(path, path_bytes, "%s/%s", folder, name);
    int in = open_folder(folder, guarded);
    if (in < 0)
        return hvd_fail(error, HVD_EINIT, HVD725 "rank %d cannot write a flight record into %s: %s", rank, folder,
                        errno == EPERM || errno == ELOOP || (guarded && errno == ENOTDIR)
                            ? "it, or its parent, is not a folder of this user alone (mode 0700, no link); remove it, "
                              "or set HVDLITE_TRACE_DIR"
                            : strerror(errno));
    int fd = openat(in, draft, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, guarded ? 0600 : 0666);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    int failed = file ? put_record(engine, file, why) : errno;
    if (file && fclose(file) && !failed)
        failed = errno;
    if (!file && fd >= 0)
        close(fd);
    if (!failed) {
        hvd_rotate_in(in, name, engine->options.job, engine->options.epoch);
        failed = renameat(in, draft, in, name) ? errno : 0;
    }
    if (failed)
        unlinkat(in, draft, 0);
    close(in);
    return failed ? hvd_fail(error, HVD_EINIT, HVD725 "rank %d cannot write %s/%s: %s", rank, folder, name,
                             strerror(failed))
                  : HVD_OK;
}
