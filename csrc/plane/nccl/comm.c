/* comm.c - how do the ranks of a set come to a communicator, and what is said when they cannot?
 *
 * On which device a rank works is known when its first tensor comes. Then every rank says hello: its device, its NCCL,
 * and rank 0 the number by which NCCL's ranks find each other; or why it has none of that. From what all have said each
 * decides the same: a rank without NCCL, two ranks on one device (NCCL would hang or refuse), or two versions of NCCL
 * mean that this set does without, and the error names who and what to do. A rank that has joined before its first
 * tensor has no device yet, and none is guessed for it, since it may use another one later; nor does it load anything
 * yet, for which files to take is told with its first tensor. Then all say hello again before the next work.
 *
 * The communicator is begun by the first work, in NCCL's non-blocking way, so that a rank that never comes costs a
 * limited time and not the engine. It is the work that begins it and not the greeting, because NCCL 2.14 to 2.2x keeps
 * what goes on in the background in memory of the calling thread: a second communicator that the same thread begins, or
 * calls, before the first is through, spoils both. Works begin one after the other, in one order on all ranks, each
 * when the one before lies on the stream (engine/device/order.c). What is left open there: those versions
 * (group.cc: ncclGroupJobMain, ncclAsyncJobs) let the background read the queues of the thread that began it, and a
 * thread of the caller's may begin it while it waits. Should that thread have what it waited for before another set's
 * communicator is connected, and end or call NCCL for somebody else (torch.distributed), that spoils both. Later
 * versions keep the job on the heap.
 *
 * NCCL lets ranks share a device from 2.30 on if its own variable says so (SHARING), and only then is it tried: without
 * NVIDIA's MPS such ranks take turns on the device, and the way by the CPU may well be faster. Slices of one device
 * (MIG) differ in their uuids and not in their PCI place; versions before that compare the latter, among the ranks of a
 * host.
 *
 * In non-blocking mode every call may go on in the background: hvd_nccl_settled asks for that, and for errors that came
 * since. Since 2.22 NCCL lets the ranks connect when it needs that, in the first collective that goes some way; so
 * whatever goes on there is given the time that a start may take, and no more. What the user still computes on the
 * device in front of it does not count: NCCL may have to wait for that, to get memory or a place in the queue. An error
 * names this rank, its device by number, uuid and PCI place, and NCCL's version and file.
 */
#include "state.h"

#include <stdio.h>
#include <string.h>

#define SHARING       "NCCL_MULTI_RANK_GPU_ENABLE"
#define SHARING_SINCE 23000
#define BLOCKING      "NCCL_COMM_BLOCKING"
#define FLOAT8_SINCE  22400

static struct hvd_nccl_hello hello_of(const unsigned char *all, int rank)
{
    struct hvd_nccl_hello hello;
    memcpy(&hello, all + (size_t)rank * HVD_HELLO_BYTES, sizeof hello);
    hello.text[sizeof hello.text - 1] = hello.pci[sizeof hello.pci - 1] = '\0';
    return hello;
}

static bool on_one_host(const struct hvd_nccl_plane *plane, int one, int other)
{
    return !plane->host_of || plane->host_of[one] == plane->host_of[other];
}

static void uuid_text(const struct hvd_cuda_uuid *uuid, char text[33])
{
    for (int i = 0; i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", uuid->bytes[i]);
}

/* Two ranks of one communicator: can they? */
static int hear_two(const struct hvd_nccl_plane *plane, const unsigned char *all, int first, int second,
                    struct hvd_error *error)
{
    struct hvd_nccl_hello one = hello_of(all, first), other = hello_of(all, second);
    char version[2][32], uuid[2][33];
    hvd_nccl_version(one.version, version[0], sizeof version[0]);
    hvd_nccl_version(other.version, version[1], sizeof version[1]);
    if (one.version != other.version)
        return hvd_fail_rank(error, HVD_EINIT, second,
                             HVD658
                             "rank %d has NCCL %s and rank %d has NCCL %s: install the same framework on all hosts",
                             first, version[0], second, version[1]);
    bool same = memcmp(&other.uuid, &one.uuid, sizeof one.uuid) == 0;
    bool slices = !same && strcmp(other.pci, one.pci) == 0 && on_one_host(plane, first, second);
    bool newer = one.version >= SHARING_SINCE;
    if (newer ? !same || (one.shares && other.shares) : !same && !slices)
        return HVD_OK;
    uuid_text(&one.uuid, uuid[0]);
    uuid_text(&other.uuid, uuid[1]);
    if (slices)
        return hvd_fail_rank(error, HVD_EINIT, second,
                             HVD659
                             "ranks %d and %d use slices of the same GPU (PCI %s, uuids %s and %s), and NCCL %s "
                             "treats slices (MIG) as one device: give each rank its own GPU, or use NCCL 2.30 or "
                             "later",
                             first, second, other.pci, uuid[0], uuid[1], version[0]);
    return hvd_fail_rank(error, HVD_EINIT, second,
                         HVD659
                         "ranks %d and %d use the same GPU (device %d, uuid %s, PCI %s), which NCCL %s does not support"
                         "%s: give each its own, with torch.cuda.set_device(hvd.local_rank())",
                         first, second, other.ordinal, uuid[0], other.pci, version[0],
                         newer ? " unless " SHARING "=1 is set for all ranks" : "");
}

static int hear_all(struct hvd_nccl_plane *plane, const unsigned char *all, struct hvd_error *error)
{
    int code = HVD_OK;
    bool all_know = true;
    plane->adds_float8 = true;
    for (int rank = 0; rank < plane->size; rank++) {
        struct hvd_nccl_hello one = hello_of(all, rank);
        plane->adds_float8 &= one.adds_float8 != 0;
        all_know &= one.ordinal >= 0;
        if (one.code != HVD_OK)
            return hvd_fail_rank(error, HVD_EINIT, rank, HVD660 "rank %d cannot use NCCL: %s", rank, one.text);
    }
    for (int rank = 0; rank < plane->size && all_know && code == HVD_OK; rank++)
        for (int before = 0; before < rank && code == HVD_OK; before++)
            code = hear_two(plane, all, before, rank, error);
    return all_know ? code : HVD_AGAIN;
}

static bool adds_float8(const struct hvd_nccl_plane *plane, int version)
{
    enum { COMPUTE_CAPABILITY_MAJOR = 75 };
    int major = 0;
    return version >= FLOAT8_SINCE &&
           plane->cuda->DeviceGetAttribute(&major, COMPUTE_CAPABILITY_MAJOR, plane->device->handle) == 0 && major >= 9;
}

void hvd_nccl_say_hello(struct hvd_nccl_plane *plane, const struct hvd_work *first, void *mine)
{
    struct hvd_nccl_hello hello = {.code = HVD_OK, .shares = plane->shares_gpus};
    struct hvd_error error = {0};
    /* -1: it had no tensor on one. Then nothing is loaded, for the files that the user or the framework names are known
     * with the first of them. */
    hello.ordinal = first->device - 1;
    plane->cuda = first->device ? hvd_cuda_load(&error) : NULL;
    plane->nccl = NULL;
    if (plane->cuda && plane->nccl_blocks) /* the variable wins over what a program asks for */
        hvd_fail(&error, HVD_EINIT,
                 HVD661 BLOCKING "=1 makes the calls of NCCL block, so a lost rank would hang the job: unset it");
    else if (plane->cuda)
        plane->nccl = hvd_nccl_load(&error);
    if (plane->nccl && !plane->device) /* it may have said hello before */
        plane->device = hvd_nccl_device_take(hello.ordinal, &error);
    if (plane->device) {
        hello.version = plane->nccl->version;
        hello.adds_float8 = adds_float8(plane, hello.version);
        hello.uuid = plane->device->uuid;
        memcpy(hello.pci, plane->device->pci, sizeof hello.pci);
    }
    if (plane->device && plane->rank == 0 && hvd_nccl_enter(plane, &error) == HVD_OK) {
        int result = plane->numbered ? HVD_NCCL_SUCCESS : plane->nccl->GetUniqueId(&plane->id);
        plane->numbered = result == HVD_NCCL_SUCCESS;
        if (!plane->numbered)
            hvd_nccl_refused(plane, result, "begin a communicator", &error);
        hvd_nccl_leave(plane);
        hello.id = plane->id;
    }
    hello.code = error.code;
    hvd_text_copy(hello.text, sizeof hello.text, error.text);
    memset(mine, 0, HVD_HELLO_BYTES);
    memcpy(mine, &hello, sizeof hello);
}

void hvd_nccl_where(const struct hvd_nccl_plane *plane, char *text, size_t text_bytes)
{
    char uuid[33], version[32] = "";
    uuid_text(&plane->device->uuid, uuid);
    if (plane->nccl)
        hvd_nccl_version(plane->nccl->version, version, sizeof version);
    snprintf(text, text_bytes, "device %d, uuid %s, PCI %s%s%s%s%.120s%s", plane->device->ordinal, uuid,
             plane->device->pci, plane->nccl ? ", NCCL " : "", version, plane->nccl ? " (" : "",
             plane->nccl ? plane->nccl->path : "", plane->nccl ? ")" : "");
}

int hvd_nccl_refused(const struct hvd_nccl_plane *plane, int result, const char *what, struct hvd_error *error)
{
    struct hvd_error words = {0};
    char uuid[33];
    uuid_text(&plane->device->uuid, uuid);
    hvd_nccl_failed(result, plane->comm, what, &words);
    return hvd_fail(error, HVD_EINTERNAL, HVD657 "%.1200s [rank %d of its set, device %d, uuid %s, PCI %s]", words.text,
                    plane->rank, plane->device->ordinal, uuid, plane->device->pci);
}

int hvd_nccl_hear(struct hvd_nccl_plane *plane, const void *all, struct hvd_error *error)
{
    plane->connected = false;
    plane->id = hello_of(all, 0).id;
    return hear_all(plane, all, error);
}

int hvd_nccl_connect(struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    if (plane->comm)
        return HVD_OK;
    struct hvd_nccl_config config = {
        .size = sizeof config, .magic = HVD_NCCL_MAGIC, .version = HVD_NCCL_CONFIG_VERSION, .blocking = 0};
    int result = plane->nccl->CommInitRankConfig(&plane->comm, plane->size, plane->id, plane->rank, &config);
    return hvd_nccl_going(result) ? HVD_OK : hvd_nccl_refused(plane, result, "begin a communicator", error);
}

static int too_late(const struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    char place[240];
    hvd_nccl_where(plane, place, sizeof place);
    return hvd_fail(
        error, HVD_ETIMEOUT,
        HVD662 "NCCL has not connected the %d ranks of this set%s within %.0f s (rank %d of it waits, on %s): see "
               "what NCCL_DEBUG=INFO says, or set NCCL_SOCKET_IFNAME",
        plane->size, plane->connected ? " for a collective" : "", (double)plane->timeout_ns / 1e9, plane->rank, place);
}

/* By what the work that is being launched waits for on the device. */
static bool held_up(const struct hvd_nccl_plane *plane)
{
    return plane->before && hvd_gpu_event_reached(plane->before, NULL) == HVD_AGAIN;
}

int hvd_nccl_settled(struct hvd_nccl_plane *plane, const char *what, struct hvd_error *error)
{
    int state = HVD_NCCL_SUCCESS;
    int result = plane->nccl->CommGetAsyncError(plane->comm, &state);
    if (result != HVD_NCCL_SUCCESS)
        state = result;
    if (state != HVD_NCCL_IN_PROGRESS) {
        plane->since_ns = 0;
        return state == HVD_NCCL_SUCCESS ? HVD_OK : hvd_nccl_refused(plane, state, what, error);
    }
    uint64_t now = hvd_now_ns();
    plane->since_ns = plane->since_ns ? plane->since_ns : now;
    if (!plane->timeout_ns || now - plane->since_ns <= plane->timeout_ns)
        return HVD_AGAIN;
    if (!held_up(plane))
        return too_late(plane, error);
    plane->since_ns = now;
    return HVD_AGAIN;
}

int hvd_nccl_settle(struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    if (!plane->last)
        return HVD_OK;
    int code = hvd_gpu_event_reached(plane->last, error), settled = hvd_nccl_settled(plane, "do a collective", error);
    if (settled < 0)
        return settled;
    if (code == HVD_OK) {
        hvd_gpu_event_drop(plane->last);
        plane->last = NULL;
    }
    return code;
}
