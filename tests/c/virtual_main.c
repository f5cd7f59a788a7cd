/* virtual_main.c - runs a program in virtual time for many seeds, each in a process of its own.
 *
 *   virtual PROGRAM FROM TO [weak]    as many at once as there are CPUs; exit status 1 if one fails
 *   virtual PROGRAM SEED [weak]       one, here, with what was chosen
 *   virtual seeds FILE                those of a file, one after the other
 *
 * Processes are forked when the program is loaded, which costs less than to start it for each seed.
 */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { AT_ONCE = 64, FAILED_MAX = 3, SECONDS_MAX = 120 };
static struct shared {
    _Atomic uint64_t switches, longest_ns;
} *shared;
static char described[256];
static struct program {
    const char *name;
    void (*run)(uint64_t seed, bool weak);
} programs[] = {
#define X(name) {#name, virtual_##name},
    VIRTUAL_PROGRAMS(X)
#undef X
};

void virtual_describe(const char *format, ...)
{
    size_t length = strlen(described);
    va_list list;
    va_start(list, format);
    if (length)
        length += (size_t)snprintf(described + length, sizeof described - length, ", ");
    vsnprintf(described + length, sizeof described - length, format, list);
    va_end(list);
}

void virtual_waited(uint64_t ns)
{
    if (ns > shared->longest_ns)
        shared->longest_ns = ns;
}

static void run(const struct program *program, uint64_t seed, bool weak)
{
    alarm(SECONDS_MAX);
    program->run(seed, weak);
    shared->switches += virtual_switches();
}

struct tally {
    uint64_t seed[AT_ONCE], over, failed;
    pid_t pid[AT_ONCE];
    int running;
};

/* Waits for one of them. */
static void reap(struct tally *tally, const struct program *program, bool weak)
{
    int status, i = 0;
    pid_t pid = wait(&status);
    while (tally->pid[i] != pid)
        i++;
    if (status) {
        fprintf(stderr, "FAILED %s: %s %llu%s\n", WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit",
                program->name, (unsigned long long)tally->seed[i], weak ? " weak" : "");
        tally->failed++;
    }
    tally->pid[i] = 0;
    tally->over++;
    tally->running--;
}

static int run_many(const struct program *program, uint64_t from, uint64_t to, bool weak, bool tells)
{
    struct tally tally = {.running = 0};
    cpu_set_t cpus;
    int at_once = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    at_once = at_once < AT_ONCE ? at_once : AT_ONCE;
    time_t begun = time(NULL);
    for (uint64_t seed = from; seed <= to && tally.failed < FAILED_MAX; seed++) {
        int i = 0;
        while (tally.pid[i])
            i++;
        fflush(NULL);
        tally.seed[i] = seed;
        tally.pid[i] = fork();
        CHECK(tally.pid[i] >= 0);
        if (tally.pid[i] == 0) {
            run(program, seed, weak);
            fflush(NULL);
            _exit(0);
        }
        if (++tally.running == at_once)
            reap(&tally, program, weak);
    }
    while (tally.running)
        reap(&tally, program, weak);
    if (tells)
        printf("%s%s: %llu schedules, %llu failed, %.0f switches in each, longest wait %.3f ms, %lld s\n",
               program->name, weak ? " (weak memory)" : "", (unsigned long long)tally.over,
               (unsigned long long)tally.failed, (double)shared->switches / (double)(tally.over ? tally.over : 1),
               (double)shared->longest_ns / 1e6, (long long)(time(NULL) - begun));
    return tally.failed ? 1 : 0;
}

static const struct program *find(const char *name)
{
    for (size_t i = 0; i < HVD_COUNT_OF(programs); i++)
        if (strcmp(programs[i].name, name) == 0)
            return &programs[i];
    return NULL;
}

/* Lines of a file: PROGRAM SEED [weak], and after # what it has found. */
static int run_seeds(const char *path)
{
    char line[256], name[32], word[16];
    unsigned long long seed;
    FILE *file = fopen(path, "r");
    CHECK(file);
    int failed = 0, all = 0;
    while (fgets(line, sizeof line, file)) {
        word[0] = '\0';
        if (line[0] == '#' || sscanf(line, "%31s %llu %15[a-z]", name, &seed, word) < 2)
            continue;
        CHECK_CODE(find(name) != NULL, 1, line);
        failed |= run_many(find(name), seed, seed, strcmp(word, "weak") == 0, false);
        all++;
    }
    fclose(file);
    printf("%d seeds that found a fault once%s\n", all, failed ? "" : ": none fails");
    return failed;
}

int main(int argc, char **argv)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    if (argc == 3 && strcmp(argv[1], "seeds") == 0)
        return run_seeds(argv[2]);
    bool weak = argc > 2 && strcmp(argv[argc - 1], "weak") == 0;
    argc -= weak;
    const struct program *program = argc > 2 ? find(argv[1]) : NULL;
    if (!program || argc > 4) {
        fprintf(stderr, "usage: virtual PROGRAM FROM TO [weak], virtual PROGRAM SEED [weak], or virtual seeds FILE\n");
        return 2;
    }
    if (argc == 4)
        return run_many(program, strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), weak, true);
    run(program, strtoull(argv[2], NULL, 10), weak);
    printf("%s %s: %s: %llu switches, virtual %.6f s, longest wait %.3f ms\n", argv[1], argv[2], described,
           (unsigned long long)virtual_switches(), (double)virtual_now() / 1e9 - 1, (double)shared->longest_ns / 1e6);
    return 0;
}
