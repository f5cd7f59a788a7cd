/* rank_status.c - what does this rank say of itself, and what can be seen of one that says nothing?
 *
 * What waits is known to the turn. The Python stack is not: it is taken by a handler that Python has installed for a
 * real-time signal (faulthandler, which needs no lock of Python's), and that writes into a file without a name. This
 * process's own engine thread sends that signal, to the main thread, so it works on every host, and while a library
 * holds Python's lock. A main thread that the kernel does not let go says nothing; after STACK_NS nobody waits for it.
 *
 * A rank that does not answer is looked at from outside by the leader of its host: /proc says whether its process is
 * stopped, waits for a device, or is gone.
 *
 * What finds no room on the list is in the filter all the same, and who asks for a request has it on the list. Names
 * are escaped here, once for all reports, and the earliest submitted have room for theirs first: they are what is
 * shown.
 *
 * The slot of what was submitted last may serve another request by now, such as one of those that no user knows of
 * (HVD_ASIDE). So its number is kept, by which the trace knows its name.
 */
#define _GNU_SOURCE
#include "rank_status.h"

#include "../engine.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACK_NS 300000000u
#define HASHES   4 /* 8,192 bits: of 161 requests one in 30,000 others seems to be there, of 1,000 one in 45 */

static uint64_t fold(struct hvd_key key)
{
    return key.high ^ (key.low * 0x9e3779b97f4a7c15u);
}

static uint32_t waited_ms(const struct hvd_engine *engine, const struct hvd_slot *slot, uint64_t now_ns)
{
    uint64_t since = hvd_stall_since(engine, slot);
    return slot->since_ns && since < now_ns ? (uint32_t)((now_ns - since) / 1000000u) : 0;
}

/* Where the bits of a request are: the first, and how far apart. */
static uint32_t first_bit(uint64_t key, int set, uint32_t *apart)
{
    uint64_t hash = (key ^ ((uint64_t)set << 48)) * 0xff51afd7ed558ccdu;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
    *apart = (uint32_t)(hash >> 32) | 1;
    return (uint32_t)hash;
}

void hvd_account_add(struct hvd_account *account, uint64_t key, int set)
{
    uint32_t apart, bit = first_bit(key, set, &apart);
    for (int i = 0; i < HASHES; i++, bit += apart)
        account->filter[bit / 64 % HVD_FILTER_WORDS] |= (uint64_t)1 << bit % 64;
}

bool hvd_account_may_have(const struct hvd_account *account, uint64_t key, int set)
{
    uint32_t apart, bit = first_bit(key, set, &apart);
    for (int i = 0; i < HASHES; i++, bit += apart)
        if (!(account->filter[bit / 64 % HVD_FILTER_WORDS] >> bit % 64 & 1))
            return false;
    return true;
}

bool hvd_account_in_set(const struct hvd_account *account, int set, int rank)
{
    for (int i = 0; i < HVD_CIRCLES_MAX && set; i++)
        if (account->circle[i].set == set)
            return account->circle[i].members[rank / 64] >> rank % 64 & 1;
    return set == 0;
}

/* The mark of a set, whose members the account tells from now on, if it has room for them. */
static int mark_of(struct hvd_account *account, const struct hvd_set *set)
{
    int mark = HVD_SET_MARK(set->number, set->member[0]), at = 0;
    _Static_assert(HVD_SETS_MAX == 256, "the number of a set has eight bits of its mark");
    if (set->number == 0)
        return 0;
    while (at < HVD_CIRCLES_MAX && account->circle[at].set != mark && account->circle[at].set)
        at++;
    if (at == HVD_CIRCLES_MAX || account->circle[at].set == mark)
        return mark;
    account->circle[at].set = mark;
    for (int i = 0; i < set->size; i++)
        account->circle[at].members[set->member[i] / 64] |= (uint64_t)1 << set->member[i] % 64;
    return mark;
}

static uint32_t rank_of(const struct hvd_entry *entry)
{
    return entry->asked || entry->kind == HVD_JOIN ? UINT32_MAX : entry->waited_ms;
}

/* Must `one` be on the list rather than the other? That this rank has joined, and what somebody asks for, then what is
 * older; of those that a clock cannot tell apart what was submitted first, so that ranks list the same of what is the
 * same. */
static bool rather(const struct hvd_entry *one, const struct hvd_entry *other)
{
    uint32_t mine = rank_of(one), its = rank_of(other);
    return mine != its ? mine > its : one->number < other->number;
}

/* Put a request on the list; where that is full, in the place of the youngest. */
static void note(struct hvd_account *account, const struct hvd_entry *entry, const char **name_of, const char *name)
{
    uint32_t at = account->entries;
    if (entry->kind != HVD_JOIN)
        hvd_account_add(account, entry->key, entry->set);
    if (!hvd_account_in_set(account, entry->set, account->rank)) { /* who else is in it would not be known */
        account->more++;
        return;
    }
    if (at < HVD_ENTRIES_MAX) {
        account->entries++;
    } else {
        account->more++;
        at = 0;
        for (uint32_t i = 1; i < HVD_ENTRIES_MAX; i++)
            if (rather(&account->entry[at], &account->entry[i]))
                at = i;
        if (!rather(entry, &account->entry[at]))
            return;
    }
    account->entry[at] = *entry;
    name_of[at] = name;
}

/* What lies on a device and does not end there. */
static void note_on_devices(struct hvd_engine *engine, struct hvd_account *account, const char **name_of,
                            uint64_t now_ns)
{
    uint32_t oldest_ms = 0;
    for (int i = 0; i < engine->sets; i++) {
        struct hvd_set *set = engine->set[i];
        hvd_watch_look(set, now_ns);
        const struct hvd_watched *first = set->watch.stands_ns ? hvd_watch_first(set) : NULL;
        if (!first)
            continue;
        struct hvd_entry entry = {.key = fold(first->key),
                                  .set = mark_of(account, set),
                                  .kind = (int16_t)first->kind,
                                  .root = first->root,
                                  .peer = first->peer,
                                  .waited_ms = (uint32_t)((now_ns - set->watch.stands_ns) / 1000000u),
                                  .agreed = HVD_ENTRY_ON_DEVICE};
        note(account, &entry, name_of, first->name);
        if (!account->device[0] || entry.waited_ms > oldest_ms)
            hvd_watch_where(set, account->device, sizeof account->device);
        oldest_ms = entry.waited_ms > oldest_ms ? entry.waited_ms : oldest_ms;
    }
}

void hvd_account_submitted(struct hvd_engine *engine, const struct hvd_slot *slot)
{
    if (slot->request.quiet == HVD_ASIDE)
        return;
    engine->last = atomic_load_explicit(&slot->tensor, memory_order_relaxed);
    engine->last_kind = slot->request.kind;
}

static void copy_last(const struct hvd_engine *engine, struct hvd_account *account)
{
    char name[HVD_NAME_MAX + 1];
    int set;
    if (engine->last >= HVD_TRACE_UNNAMED)
        snprintf(account->last, sizeof account->last, "%s without a name", hvd_engine_kind(engine->last_kind));
    else if (hvd_trace_text(&engine->names, engine->last, &set, name))
        snprintf(account->last, sizeof account->last, "'%s'", HVD_SHOWN(name));
}

/* As much as has room, those submitted first before the others; the rest are called "...". */
static void copy_names(struct hvd_account *account, const char *const *name_of)
{
    uint32_t order[HVD_ENTRIES_MAX];
    for (uint32_t i = 0; i < account->entries; i++) {
        uint32_t at = i;
        for (; at > 0 && account->entry[order[at - 1]].number > account->entry[i].number; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    memcpy(account->names + 1, "...", 4);
    for (size_t i = 0, at = 5; i < account->entries; i++) {
        const char *name = hvd_text_shown((char[HVD_NAME_MAX + 1]){0}, HVD_NAME_MAX + 1, name_of[order[i]]);
        size_t length = strlen(name);
        bool fits = at + length < sizeof account->names;
        account->entry[order[i]].name = length == 0 ? 0 : fits ? (uint16_t)at : 1;
        if (length == 0 || !fits)
            continue;
        memcpy(account->names + at, name, length);
        at += length + 1;
    }
}

static void copy_stack(const struct hvd_engine *engine, struct hvd_account *account)
{
    if (engine->options.stack_signal <= 0)
        return;
    ssize_t got = pread(engine->options.stack_fd, account->stack, sizeof account->stack - 1, 0);
    if (got <= 0)
        return;
    account->stack[got] = '\0';
    while (got > 0 && (account->stack[got - 1] & 0xc0) == 0x80)
        got--; /* what may be half a letter is none */
    char *end = strrchr(account->stack, '\n');
    if (end)
        end[1] = '\0';
    else
        account->stack[got] = '\0';
}

void hvd_account_fill(struct hvd_engine *engine, struct hvd_account *account, uint64_t now_ns)
{
    const char *name_of[HVD_ENTRIES_MAX]; /* what a user knows it by; "" without a name */
    uint32_t high = atomic_load(&engine->handles.high);
    memset(account, 0, sizeof *account);
    account->rank = engine->options.rank;
    account->pid = (int32_t)getpid();
    account->state = HVD_RANK_ALIVE;
    for (uint32_t i = 0; i < high; i++) {
        struct hvd_slot *slot = &engine->handles.slot[i];
        const struct hvd_request *request = &slot->request;
        if (!slot->with_turn || request->kind < 0 || request->quiet == HVD_ASIDE)
            continue;
        const struct hvd_set *set = engine->by_number[request->process_set];
        if (!set || set->life != slot->life)
            continue;
        struct hvd_entry entry = {
            .set = mark_of(account, set), .kind = (int16_t)request->kind, .waited_ms = waited_ms(engine, slot, now_ns)};
        if (request->kind != HVD_JOIN) {
            struct hvd_key key;
            if (!hvd_coord_waits(set->coord, i, &key, &entry.number))
                entry.agreed = HVD_ENTRY_AGREED;
            entry.key = fold(key);
            atomic_store(&slot->key, hvd_finding_key(entry.key, entry.set));
            atomic_store(&slot->key_word, atomic_load(&slot->word));
            entry.root = request->root;
            entry.peer = request->peer;
            entry.asked = atomic_load(&slot->excused) == atomic_load(&slot->word);
        }
        note(account, &entry, name_of, request->name ? request->name : "");
    }
    note_on_devices(engine, account, name_of, now_ns);
    copy_names(account, name_of);
    copy_last(engine, account);
    copy_stack(engine, account);
}

const char *hvd_state_words(enum hvd_rank_state state)
{
    static const char *const words[] = {
        [HVD_RANK_ALIVE] = "is alive",
        [HVD_RANK_STOPPED] = "is stopped (by a signal or a debugger)",
        [HVD_RANK_GONE] = "is gone: its process has ended",
        [HVD_RANK_STUCK] = "is stuck in the kernel (a disk, a network file system or a driver)",
        [HVD_RANK_MUTE] = "is not responding",
        [HVD_RANK_LEFT] = "has left the job (its script ended, or it called shutdown)",
        [HVD_RANK_APART] = "cannot be asked whether it has: a rank by which its host was reached has left the job",
        [HVD_RANK_UNHEARD] = "was not heard of: its host does not answer",
    };
    return words[state];
}

int hvd_account_weight(const struct hvd_account *account)
{
    static const int of[] = {[HVD_RANK_STOPPED] = 5, [HVD_RANK_GONE] = 5, [HVD_RANK_STUCK] = 4,
                             [HVD_RANK_UNHEARD] = 3, [HVD_RANK_MUTE] = 2, [HVD_RANK_ALIVE] = 1};
    return account ? of[account->state] + (account->state == HVD_RANK_ALIVE && account->entries == 0)
                   : of[HVD_RANK_UNHEARD];
}

static enum hvd_rank_state state_of(char letter)
{
    switch (letter) {
    case 'T':
    case 't':
        return HVD_RANK_STOPPED;
    case 'Z':
    case 'X':
        return HVD_RANK_GONE;
    case 'D':
        return HVD_RANK_STUCK;
    default:
        return HVD_RANK_MUTE;
    }
}

/* Its number in our namespace of processes, which its pidfd tells; 0: it is gone. */
static int seen_pid(const struct hvd_host *host, int local)
{
    char path[64], line[128];
    int pid = host->pid[local];
    if (host->pidfd[local] < 0)
        return pid;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", host->pidfd[local]);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "Pid: %d", &pid) == 1)
            break;
    if (file)
        fclose(file);
    return pid > 0 ? pid : 0;
}

void hvd_account_other(const struct hvd_engine *engine, int local, struct hvd_account *account)
{
    char path[64], text[512] = "";
    int pid = seen_pid(&engine->host, local);
    memset(account, 0, sizeof *account);
    account->rank = engine->host.member[local];
    account->pid = engine->host.pid[local];
    account->state = HVD_RANK_GONE;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = pid > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0)
        close(fd);
    const char *end = got > 0 ? strrchr(text, ')') : NULL;
    if (end && end[1] == ' ')
        account->state = state_of(end[2]);
}

bool hvd_account_sane(struct hvd_account *account, int ranks)
{
    account->last[sizeof account->last - 1] = account->names[sizeof account->names - 1] = '\0';
    account->stack[sizeof account->stack - 1] = account->names[0] = '\0';
    account->device[sizeof account->device - 1] = '\0';
    if (account->rank < 0 || account->rank >= ranks || account->entries > HVD_ENTRIES_MAX ||
        account->more > HVD_HANDLES_MAX + HVD_SETS_MAX || account->state > HVD_RANK_UNHEARD)
        return false;
    for (uint32_t i = 0; i < account->entries; i++)
        if (account->entry[i].name >= HVD_NAMES_BYTES || account->entry[i].kind < 0 || account->entry[i].set < 0)
            return false;
    return true;
}

bool hvd_finding_sane(struct hvd_finding *finding)
{
    if (finding->keys > HVD_FINDING_KEYS || finding->lines > HVD_FINDING_LINES)
        return false;
    for (uint32_t i = 0; i < finding->keys; i++)
        if (finding->of[i].line >= finding->lines)
            return false;
    for (uint32_t i = 0; i < HVD_FINDING_LINES; i++)
        finding->line[i][HVD_FINDING_BYTES - 1] = '\0';
    return true;
}

uintptr_t hvd_account_handler(int signal)
{
    struct sigaction now;
    return signal > 0 && sigaction(signal, NULL, &now) == 0 ? (uintptr_t)now.sa_handler : (uintptr_t)SIG_DFL;
}

/* A script may have put every signal back to what it does by default, which is to kill, or a handler of its own there:
 * only the one that was there when the engine began is called. Then there is no stack, and nobody is hurt. */
void hvd_account_ask_stack(struct hvd_engine *engine)
{
    int fd = engine->options.stack_fd, signal = engine->options.stack_signal;
    if (signal <= 0)
        return;
    engine->stall.stack_ns = hvd_now_ns();
    engine->stall.stack_bytes = 0;
    uintptr_t handler = engine->stall.stack_handler;
    bool ours = handler != (uintptr_t)SIG_DFL && hvd_account_handler(signal) == handler;
    if (ftruncate(fd, 0) == 0 && lseek(fd, 0, SEEK_SET) == 0 && ours)
        syscall(SYS_tgkill, getpid(), getpid(), signal);
}

bool hvd_account_has_stack(struct hvd_engine *engine, uint64_t now_ns)
{
    struct stat now;
    if (engine->options.stack_signal <= 0 || now_ns > engine->stall.stack_ns + STACK_NS)
        return true;
    if (fstat(engine->options.stack_fd, &now) != 0)
        return true;
    bool whole = now.st_size > 0 && now.st_size == engine->stall.stack_bytes;
    engine->stall.stack_bytes = now.st_size;
    return whole;
}

uint64_t hvd_stall_since(const struct hvd_engine *engine, const struct hvd_slot *slot)
{
    const struct hvd_set *set = engine->by_number[slot->request.process_set];
    struct hvd_key key;
    uint64_t number, moved_ns = 0;
    if (!set || set->life != slot->life)
        return slot->since_ns;
    if (slot->request.kind == HVD_JOIN)
        moved_ns = set->planned_ns;
    else if (!hvd_coord_waits(set->coord, (uint32_t)(slot - engine->handles.slot), &key, &number))
        moved_ns = set->moved_ns;
    return moved_ns > slot->since_ns ? moved_ns : slot->since_ns;
}
