/* comm.c - how do the ranks of a set come to a communicator, and what is said when they cannot?
 *
 * On which device a rank works is known when its first tensor comes. Then every rank says hello: its device, its NCCL,
 * and rank 0 the number by which NCCL's ranks find each other; or why it has none of that. From what all have said each
 * decides the same: a rank without NCCL, two ranks on one device (NCCL would hang or refuse), or two versions of NCCL
 * mean that this set does without, and the error names who and what to do. Otherwise the communicator is begun, in
 * NCCL's non-blocking way, so that a rank that never comes costs a limited time and not the engine.
 *
 * In non-blocking mode every call may go on in the background: hvd_nccl_settled asks for that, and for errors that came
 * since. An error names this rank, its device by number, uuid and PCI place, and NCCL's version and file.
 */
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DRAINING_NS 100000000u /* a device that was aborted takes microseconds, unless another set holds it up */

static int hear_all(struct hvd_nccl_plane *plane, const unsigned char *all, struct hvd_error *error)
{
    struct hvd_nccl_hello one, other, zero;
    char version[2][32];
    memcpy(&zero, all, sizeof zero);
    plane->all_scale = true;
    for (int rank = 0; rank < plane->size; rank++) {
        memcpy(&one, all + (size_t)rank * HVD_HELLO_BYTES, sizeof one);
        one.text[sizeof one.text - 1] = one.pci[sizeof one.pci - 1] = '\0';
        plane->all_scale &= one.packs != 0;
        if (one.code != HVD_OK)
            return hvd_fail_rank(error, HVD_EINIT, rank, "rank %d cannot use NCCL: %s", rank, one.text);
        if (one.version != zero.version) {
            hvd_nccl_version(zero.version, version[0], sizeof version[0]);
            hvd_nccl_version(one.version, version[1], sizeof version[1]);
            return hvd_fail_rank(error, HVD_EINIT, rank,
                                 "rank 0 has NCCL %s and rank %d has NCCL %s: install the same framework on all hosts",
                                 version[0], rank, version[1]);
        }
        for (int before = 0; before < rank; before++) {
            memcpy(&other, all + (size_t)before * HVD_HELLO_BYTES, sizeof other);
            if (memcmp(&other.uuid, &one.uuid, sizeof one.uuid) == 0)
                return hvd_fail_rank(error, HVD_EINIT, rank,
                                     "ranks %d and %d use the same GPU (device %d, PCI %s), which NCCL does not "
                                     "support: give each its own, with torch.cuda.set_device(hvd.local_rank())",
                                     before, rank, one.ordinal, one.pci);
        }
    }
    return HVD_OK;
}

void hvd_nccl_say_hello(struct hvd_nccl_plane *plane, const struct hvd_work *first, void *mine)
{
    struct hvd_nccl_hello hello = {.code = HVD_OK};
    struct hvd_error error = {0};
    plane->cuda = hvd_cuda_load(&error);
    hello.ordinal = first->device ? first->device - 1 : hvd_nccl_device_usual(plane->local_rank);
    plane->nccl = plane->cuda ? hvd_nccl_load(&error) : NULL;
    if (plane->nccl)
        plane->device = hvd_nccl_device_take(hello.ordinal, &error);
    if (plane->device) {
        hello.version = plane->nccl->version;
        hello.packs = plane->device->module != NULL;
        hello.uuid = plane->device->uuid;
        memcpy(hello.pci, plane->device->pci, sizeof hello.pci);
    }
    if (plane->device && plane->rank == 0 && hvd_nccl_enter(plane, &error) == HVD_OK) {
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
    char uuid[33] = "";
    for (int i = 0; i < 16; i++)
        snprintf(uuid + 2 * i, 3, "%02x", plane->device->uuid.bytes[i]);
    hvd_nccl_failed(result, plane->comm, what, &words);
    return hvd_fail(error, HVD_EINTERNAL, "%.1200s [rank %d of its set, device %d, uuid %s, PCI %s]", words.text,
                    plane->rank, plane->device->ordinal, uuid, plane->device->pci);
}

int hvd_nccl_connect(struct hvd_nccl_plane *plane, const void *all, struct hvd_error *error)
{
    struct hvd_nccl_hello zero;
    int code = hear_all(plane, all, error);
    if (code == HVD_OK)
        code = hvd_nccl_enter(plane, error);
    if (code != HVD_OK)
        return code;
    memcpy(&zero, all, sizeof zero);
    struct hvd_nccl_config config = {
        .size = sizeof config, .magic = HVD_NCCL_MAGIC, .version = HVD_NCCL_CONFIG_VERSION, .blocking = 0};
    int result = plane->nccl->CommInitRankConfig(&plane->comm, plane->size, zero.id, plane->rank, &config);
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
    int result = plane->nccl->CommGetAsyncError(plane->comm, &state);
    if (result != HVD_NCCL_SUCCESS)
        state = result;
    if (state == HVD_NCCL_SUCCESS)
        return HVD_OK;
    if (state != HVD_NCCL_IN_PROGRESS)
        return hvd_nccl_refused(plane, state, what, error);
    if (!plane->connected && plane->timeout_ns && hvd_now_ns() - plane->since_ns > plane->timeout_ns)
        return hvd_fail(error, HVD_ETIMEOUT,
                        "NCCL has not connected the %d ranks of this set within %.0f s (rank %d of it waits, on device "
                        "%d): see what NCCL_DEBUG=INFO says, or set NCCL_SOCKET_IFNAME",
                        plane->size, (double)plane->timeout_ns / 1e9, plane->rank, plane->device->ordinal);
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
