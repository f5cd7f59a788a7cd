/* bench_gpu_pack.c - how fast are the gradients of a ResNet-50 packed into one bucket on a device, and unpacked, beside
 * that device's own copy of as many bytes? And are they the same bits afterwards?
 *
 *     bench_gpu_pack [driver [runs]]     the driver: a file in place of libcuda.so.1, such as the tests' GPU that is
 * none
 *
 * Only CUDA's driver is needed: the plane's own packing is called, without NCCL. Exit code 77: there is no GPU; 1:
 * wrong bits. Issue 5 asks for at least 70 % of the copy's bandwidth.
 */
#include "kernel/kernel.h"
#include "plane/nccl/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TENSORS = 161 };
static int runs = 20;
#define ELEMENTS 25557032u

static struct hvd_nccl_plane plane;
static struct hvd_nccl none; /* without memory of NCCL's own */

static void check(int code, const char *what)
{
    struct hvd_error error = {0};
    if (code == 0)
        return;
    hvd_cuda_failed(code, what, &error);
    fprintf(stderr, "%s\n", error.text);
    exit(1);
}

static void done(int code, const struct hvd_error *error)
{
    if (code == HVD_OK)
        return;
    fprintf(stderr, "%s\n", error->text);
    exit(1);
}

static void drain(void)
{
    struct hvd_error error = {0};
    struct hvd_mark *mark = hvd_nccl_device_mark(plane.device, &error);
    int code = mark ? HVD_AGAIN : error.code;
    while (code == HVD_AGAIN)
        code = hvd_mark_reached(mark, &error);
    done(code, &error);
    hvd_mark_drop(mark);
}

/* Sizes as they occur: most are small, a few have millions; they add up to the model's. */
static void sizes(struct hvd_work *work, struct hvd_piece *piece)
{
    static const uint64_t typical[] = {64, 256, 512, 1024, 2048, 36864, 65536, 262144, 589824};
    for (uint32_t i = 0; i < TENSORS; i++) {
        piece[i].count = typical[i % HVD_COUNT_OF(typical)];
        work->count += piece[i].count;
    }
    for (uint32_t i = 0; work->count < ELEMENTS; i += HVD_COUNT_OF(typical)) {
        uint64_t more = ELEMENTS - work->count < 2000000 ? ELEMENTS - work->count : 2000000;
        piece[i % TENSORS].count += more;
        work->count += more;
    }
}

static double seconds_of(const struct hvd_work *work, uintptr_t copy, double factor)
{
    double best = 1e9;
    struct hvd_error error = {0};
    for (int run = 0; run < runs; run++) {
        drain();
        uint64_t began = hvd_now_ns();
        if (copy) {
            check(plane.cuda->MemcpyDtoDAsync(copy, plane.fusion.at, work->count * 4, plane.device->stream), "copy");
        } else {
            done(hvd_nccl_pack(&plane, work, factor, &error), &error);
            done(hvd_nccl_unpack(&plane, work, &error), &error);
        }
        drain();
        double took = (double)(hvd_now_ns() - began) * 1e-9;
        best = took < best ? took : best;
    }
    return best;
}

/* Every tensor holds its own numbers; after all runs, and once times 2 they are doubled. */
static int wrong(const struct hvd_work *work, float *host, float times, bool put)
{
    int bad = 0;
    for (uint32_t i = 0; i < work->pieces; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        for (uint64_t k = 0; put && k < piece->count; k++)
            host[k] = (float)((i + k) % 1021);
        if (put)
            check(plane.cuda->MemcpyHtoDAsync((uintptr_t)piece->out, host, piece->count * 4, plane.device->stream),
                  "copy");
        else
            check(plane.cuda->MemcpyDtoHAsync(host, (uintptr_t)piece->out, piece->count * 4, plane.device->stream),
                  "copy");
        drain();
        for (uint64_t k = 0; !put && k < piece->count; k++)
            bad += host[k] != (float)((i + k) % 1021) * times;
    }
    return bad;
}

int main(int count, char **arguments)
{
    struct hvd_error error = {0};
    struct hvd_piece piece[TENSORS];
    struct hvd_work work = {.kind = HVD_ALLREDUCE, .op = HVD_OP_sum, .dtype = HVD_DTYPE_float32, .piece = piece};
    work.pieces = TENSORS;
    work.divide_by = 1;
    runs = count > 2 ? atoi(arguments[2]) : runs;
    hvd_cuda_prefer(count > 1 ? arguments[1] : NULL);
    plane.cuda = hvd_cuda_load(&error);
    plane.device = plane.cuda ? hvd_nccl_device_take(0, &error) : NULL;
    if (!plane.device) {
        printf("skipped: %s\n", error.text);
        return 77;
    }
    plane.nccl = &none;
    plane.size = 2;
    plane.all_scale = plane.device->module != NULL;
    sizes(&work, piece);
    done(hvd_nccl_enter(&plane, &error), &error);
    float *host = malloc(4 * ELEMENTS);
    HVD_ASSERT(host);
    for (uint32_t i = 0; i < TENSORS; i++) {
        uintptr_t memory;
        check(plane.cuda->MemAlloc(&memory, piece[i].count * 4), "give memory");
        piece[i].in = piece[i].out = (void *)memory;
    }
    wrong(&work, host, 1, true);
    double both = seconds_of(&work, 0, 1), bytes = 4.0 * (double)work.count;
    uintptr_t beside;
    check(plane.cuda->MemAlloc(&beside, work.count * 4), "give memory");
    double copy = seconds_of(&work, beside, 1);
    int bad = wrong(&work, host, 1, false);
    if (plane.all_scale) {
        done(hvd_nccl_pack(&plane, &work, 2, &error), &error);
        done(hvd_nccl_unpack(&plane, &work, &error), &error);
        bad += wrong(&work, host, 2, false);
    }
    printf("%s: %d tensors, %.1f MB, packed and unpacked in %.3f ms: %.0f GB/s, a copy in %.3f ms: %.0f GB/s, %.0f %% "
           "of it; %d wrong values\n",
           plane.all_scale ? "kernels" : "no kernels, copies", TENSORS, bytes / 1e6, both * 1e3, 4 * bytes / both / 1e9,
           copy * 1e3, 2 * bytes / copy / 1e9, 100 * 2 * copy / both, bad);
    for (uint32_t i = 0; i < TENSORS; i++)
        plane.cuda->MemFree((uintptr_t)piece[i].out);
    plane.cuda->MemFree(beside);
    hvd_nccl_free_memory(&plane);
    hvd_nccl_leave(&plane);
    hvd_nccl_device_drop(plane.device);
    free(host);
    return bad != 0 || !plane.all_scale;
}
