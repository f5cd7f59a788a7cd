/* comm.c - how do the ranks of a set come to a communicator, and what is said when they cannot?
 *
 * On which device a rank works is known when its first tensor comes. Then every rank says hello: its device, its NCCL,
 * and rank 0 the number by which NCCL's ranks find each other; or why it has none of that. From what all have said each
 * decides the same: a rank without NCCL, two ranks on one device (NCCL would hang or refuse), or two versions of NCCL
 * mean that this set does without, and the error names who and what to do. Otherwise the communicator is begun, in
 * NCCL's non-blocking way, so that a rank that never comes costs a limited time and not the engine. On two levels
 * (levels.c) each host's ranks have one of their own: then that is asked of ranks of one host only, each host's first
 * rank says the number, and a rank that is alone on its host needs no NCCL.
 *
 * NCCL lets ranks share a device from 2.30 on if its own variable says so (SHARING), and only then is it tried: without
 * NVIDIA's MPS such ranks take turns on the device, and the way by the CPU may well be faster.
 *
 * In non-blocking mode every call may go on in the background: hvd_nccl_settled asks for that, and for errors that came
 * since. An error names this rank, its device by number, uuid and PCI place, and NCCL's version and file.
 */
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SHARING       "NCCL_MULTI_RANK_GPU_ENABLE"
#define SHARING_SINCE 23000
#define DRAINING_NS   100000000u /* a device that was aborted takes microseconds, unless another set holds it up */

static struct hvd_nccl_hello hello_of(const unsigned char *all, int rank)
{
    struct hvd_nccl_hello hello;
    memcpy(&hello, all + (size_t)rank * HVD_HELLO_BYTES, sizeof hello);
    hello.text[sizeof hello.text - 1] = hello.pci[sizeof hello.pci - 1] = '\0';
    return hello;
}

static bool together(const struct hvd_nccl_plane *plane, int one, int other)
{
    return !plane->levels || plane->levels->place.host_of[one] == plane->levels->place.host_of[other];
}

static void uuid_text(const struct hvd_cuda_uuid *uuid, char text[33])
{
    for (int i = 0; i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", uuid->bytes[i]);
}

/* Two ranks of one communicator: can they? */
static int hear_two(const unsigned char *all, int first, int second, struct hvd_error *error)
{
    struct hvd_nccl_hello one = hello_of(all, first), other = hello_of(all, second);
    char version[2][32], uuid[33];
    hvd_nccl_version(one.version, version[0], sizeof version[0]);
    hvd_nccl_version(other.version, version[1], sizeof version[1]);
    if (one.version != other.version)
        return hvd_fail_rank(error, HVD_EINIT, second,
                             "rank %d has NCCL %s and rank %d has NCCL %s: install the same framework on all hosts",
                             first, version[0], second, version[1]);
    if (memcmp(&other.uuid, &one.uuid, sizeof one.uuid) != 0 ||
        (one.version >= SHARING_SINCE && one.shares && other.shares))
        return HVD_OK;
    uuid_text(&one.uuid, uuid);
    return hvd_fail_rank(error, HVD_EINIT, second,
                         "ranks %d and %d use the same GPU (device %d, uuid %s, PCI %s), which NCCL %s does not support"
                         "%s: give each its own, with torch.cuda.set_device(hvd.local_rank())",
                         first, second, other.ordinal, uuid, other.pci, version[0],
                         one.version >= SHARING_SINCE ? " unless " SHARING "=1 is set for all ranks" : "");
}

static int hear_all(struct hvd_nccl_plane *plane, const unsigned char *all, struct hvd_error *error)
{
    int code = HVD_OK;
    plane->all_scale = true;
    for (int rank = 0; rank < plane->size && code == HVD_OK; rank++) {
        struct hvd_nccl_hello one = hello_of(all, rank);
        plane->all_scale &= one.packs != 0;
        if (one.code != HVD_OK)
            return hvd_fail_rank(error, HVD_EINIT, rank, "rank %d cannot use NCCL: %s", rank, one.text);
        for (int before = 0; before < rank && code == HVD_OK; before++)
            if (together(plane, before, rank))
                code = hear_two(all, before, rank, error);
    }
    return code;
}

void hvd_nccl_say_hello(struct hvd_nccl_plane *plane, const struct hvd_work *first, void *mine)
{
    struct hvd_nccl_hello hello = {.code = HVD_OK, .shares = plane->shares_gpus};
    struct hvd_error error = plane->levels ? plane->levels->refused : (struct hvd_error){0};
    plane->cuda = hvd_cuda_load(&error);
    hello.ordinal = first->device ? first->device - 1 : hvd_nccl_device_usual(plane->local_rank);
    plane->nccl = plane->cuda && !plane->lonely ? hvd_nccl_load(&error) : NULL;
    if (plane->nccl || (plane->cuda && plane->lonely))
        plane->device = hvd_nccl_device_take(hello.ordinal, &error);
    if (plane->device) {
        hello.version = plane->nccl ? plane->nccl->version : 0;
        hello.packs = plane->device->module != NULL;
        hello.uuid = plane->device->uuid;
        memcpy(hello.pci, plane->device->pci, sizeof hello.pci);
    }
    if (plane->device && plane->nccl && plane->comm_rank == 0 && hvd_nccl_enter(plane, &error) == HVD_OK) {
        int result = plane->nccl->GetUniqueId(&hello.id);
        if (result != HVD_NCCL_SUCCESS)
            hvd_nccl_refused(plane, result, "begin a communicator", &error);
        hvd_nccl_leave(plane);
    }
    hello.code = error.code;
    hvd_text_copy(hello.text, sizeof hello.text, error.text);
    memset(mine, 0, HVD_HELLO_BYTES);
    memcpy(mine, &hello, sizeof hello);
}

int hvd_nccl_refused(const struct hvd_nccl_plane *plane, int result, const char *what, struct hvd_error *error)
{
    struct hvd_error words = {0};
    char uuid[33];
    uuid_text(&plane->device->uuid, uuid);
    hvd_nccl_failed(result, plane->comm, what, &words);
    return hvd_fail(error, HVD_EINTERNAL, "%.1200s [rank %d of its set, device %d, uuid %s, PCI %s]", words.text,
                    plane->rank, plane->device->ordinal, uuid, plane->device->pci);
}

int hvd_nccl_connect(struct hvd_nccl_plane *plane, const void *all, struct hvd_error *error)
{
    int code = hear_all(plane, all, error);
    plane->connected = plane->lonely;
    if (code != HVD_OK || plane->lonely)
        return code;
    code = hvd_nccl_enter(plane, error);
    if (code != HVD_OK)
        return code;
    struct hvd_nccl_hello zero = hello_of(all, plane->levels ? plane->levels->place.local[0] : 0);
    struct hvd_nccl_config config = {
        .size = sizeof config, .magic = HVD_NCCL_MAGIC, .version = HVD_NCCL_CONFIG_VERSION, .blocking = 0};
    int result = plane->nccl->CommInitRankConfig(&plane->comm, plane->comm_size, zero.id, plane->comm_rank, &config);
    if (result != HVD_NCCL_SUCCESS && result != HVD_NCCL_IN_PROGRESS)
        hvd_nccl_refused(plane, result, "begin a communicator", error);
    hvd_nccl_leave(plane);
    plane->since_ns = hvd_now_ns();
    plane->connected = false;
    if (error->code != HVD_OK) /* the others do not know: the first work tells them */
        plane->failed = *error;
    return HVD_OK;
}

int hvd_nccl_settled(struct hvd_nccl_plane *plane, const char *what, struct hvd_error *error)
{
    int state = HVD_NCCL_SUCCESS;
    if (plane->lonely)
        return HVD_OK;
    int result = plane->nccl->CommGetAsyncError(plane->comm, &state);
    if (result != HVD_NCCL_SUCCESS)
        state = result;
    if (state == HVD_NCCL_SUCCESS)
        return HVD_OK;
    if (state != HVD_NCCL_IN_PROGRESS)
        return hvd_nccl_refused(plane, state, what, error);
    if (!plane->connected && plane->timeout_ns && hvd_now_ns() - plane->since_ns > plane->timeout_ns)
        return hvd_fail(
            error, HVD_ETIMEOUT,
            "NCCL has not connected the %d ranks of this set%s within %.0f s (rank %d of it waits, on device "
            "%d): see what NCCL_DEBUG=INFO says, or set NCCL_SOCKET_IFNAME",
            plane->comm_size, plane->levels ? " on this host" : "", (double)plane->timeout_ns / 1e9, plane->comm_rank,
            plane->device->ordinal);
    return HVD_AGAIN;
}

int hvd_nccl_settle(struct hvd_nccl_plane *plane, struct hvd_error *error)
{
    if (!plane->last)
        return HVD_OK;
    int code = hvd_mark_reached(plane->last, error), settled = hvd_nccl_settled(plane, "do a collective", error);
    if (settled < 0)
        return settled;
    if (code == HVD_OK) {
        hvd_mark_drop(plane->last);
        plane->last = NULL;
        hvd_nccl_free_retired(plane);
    }
    return code;
}

/* After an abort: has the device come to the end of what was put there? What it has not, may yet be touched. */
static bool drained(struct hvd_nccl_plane *plane)
{
    uint64_t until_ns = hvd_now_ns() + DRAINING_NS;
    struct hvd_mark *mark = hvd_nccl_device_mark(plane->device, NULL);
    int code = HVD_AGAIN;
    while (mark && (code = hvd_mark_reached(mark, NULL)) == HVD_AGAIN && hvd_now_ns() < until_ns)
        usleep(50);
    if (mark)
        hvd_mark_drop(mark);
    return code == HVD_OK;
}

void hvd_nccl_disconnect(struct hvd_nccl_plane *plane, bool abort)
{
    if (!plane->device)
        return;
    if (hvd_nccl_enter(plane, NULL) == HVD_OK) {
        if (plane->comm && abort) {
            plane->nccl->CommAbort(plane->comm);
        } else if (plane->comm) {
            hvd_nccl_deregister(plane);
            plane->nccl->CommDestroy(plane->comm);
        }
        if (!abort || drained(plane)) /* else the memory is left behind: the job has failed, and soon ends */
            hvd_nccl_free_memory(plane);
        hvd_nccl_leave(plane);
    }
    if (plane->last)
        hvd_mark_drop(plane->last);
    plane->comm = plane->last = NULL;
    plane->multiplied = -1;
    hvd_nccl_device_drop(plane->device);
    plane->device = NULL;
}
