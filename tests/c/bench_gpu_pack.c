/* bench_gpu_pack.c - how fast are the gradients of a ResNet-50 packed into one bucket on a device, and unpacked, beside
 * that device's own copy of as many bytes? And are they the same bits afterwards, and what the CPU makes of them where
 * they are cast to 16 bits on the way?
 *
 *     bench_gpu_pack [driver [runs]]     the driver: a file in place of libcuda.so.1, such as the tests' GPU that is
 * none
 *
 * Only CUDA's driver is needed: the plane's own packing is called, without NCCL. Exit code 77: there is no GPU; 1:
 * wrong bits. Issue 5 asks for at least 70 % of the copy's bandwidth.
 */
#include "kernel/adasum.h"
#include "kernel/kernel.h"
#include "plane/nccl/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TENSORS = 161 };
#define IN_A_ROW 10 /* so that what a run costs the host counts little */
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

/* Into the bucket and out again: tensors that lie as in a bucket anyway would measure nothing. */
static void both_ways(const struct hvd_work *work, double factor)
{
    struct hvd_error error = {0};
    done(hvd_nccl_pack(&plane, work, factor, &error), &error);
    HVD_ASSERT(plane.bucket.unpacks && plane.bucket.in == plane.fusion.at && plane.bucket.out == plane.fusion.at);
    done(hvd_nccl_unpack(&plane, work, &error), &error);
}

static double seconds_of(const struct hvd_work *work, uintptr_t copy, double factor)
{
    double best = 1e9;
    for (int run = 0; run < runs; run++) {
        drain();
        uint64_t began = hvd_now_ns();
        for (int again = 0; again < IN_A_ROW && copy; again++)
            check(plane.cuda->MemcpyDtoDAsync(copy, plane.fusion.at, work->count * 4, plane.device->stream), "copy");
        for (int again = 0; again < IN_A_ROW && !copy; again++)
            both_ways(work, factor);
        drain();
        double took = (double)(hvd_now_ns() - began) * 1e-9 / IN_A_ROW;
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

/* What a third of i + k becomes, halved, as a value of 16 bits: by the CPU's kernels. */
static float narrowed(int wire, uint64_t number)
{
    float value = (float)(number % 100003) / 3 * 0.5f, result;
    uint16_t half;
    hvd_narrow_of_floats(wire, &half, &value, 1);
    hvd_floats_of_narrow(wire, &result, &half, 1, 1);
    return result;
}

/* Some tensors through a bucket of 16 bits, multiplied by a half on the way. */
static int wrongly_cast(const struct hvd_work *like, double *host, int dtype, int wire)
{
    enum { SOME = 20 };
    int bad = 0;
    struct hvd_error error = {0};
    struct hvd_piece piece[SOME];
    struct hvd_work work = *like;
    size_t bytes = (size_t)hvd_dtype_bytes(dtype);
    work.dtype = dtype;
    work.wire = wire + 1;
    work.piece = piece;
    work.pieces = SOME;
    for (uint32_t i = 0; i < SOME; i++) {
        piece[i] = like->piece[i];
        piece[i].count = piece[i].count * 4 / bytes - i % 4;
        for (uint64_t k = 0; k < piece[i].count; k++)
            if (dtype == HVD_DTYPE_float64)
                host[k] = (double)((float)((i + k) % 100003) / 3);
            else
                ((float *)host)[k] = (float)((i + k) % 100003) / 3;
        check(plane.cuda->MemcpyHtoDAsync((uintptr_t)piece[i].out, host, piece[i].count * bytes, plane.device->stream),
              "copy");
        drain();
    }
    done(hvd_nccl_pack(&plane, &work, 0.5, &error), &error);
    done(hvd_nccl_unpack(&plane, &work, &error), &error);
    for (uint32_t i = 0; i < SOME; i++) {
        check(plane.cuda->MemcpyDtoHAsync(host, (uintptr_t)piece[i].out, piece[i].count * bytes, plane.device->stream),
              "copy");
        drain();
        for (uint64_t k = 0; k < piece[i].count; k++)
            bad += (dtype == HVD_DTYPE_float64 ? host[k] : (double)((float *)host)[k]) != narrowed(wire, i + k);
    }
    return bad;
}

/* In every way there is, and how long the gradients take. */
static int casts(struct hvd_work *work, float *host)
{
    int bad = 0;
    for (int wide = HVD_DTYPE_float32; wide <= HVD_DTYPE_float64; wide++) {
        bad += wrongly_cast(work, (double *)(void *)host, wide, HVD_DTYPE_float16);
        bad += wrongly_cast(work, (double *)(void *)host, wide, HVD_DTYPE_bfloat16);
    }
    work->wire = HVD_DTYPE_bfloat16 + 1;
    double both = seconds_of(work, 0, 0.5), bytes = 4.0 * (double)work->count;
    work->wire = 0;
    printf("the same cast to bfloat16 and back in %.3f ms: %.0f GB/s; %d wrong values\n", both * 1e3,
           3 * bytes / both / 1e9, bad);
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
        both_ways(&work, 2);
        bad += wrong(&work, host, 2, false);
    }
    printf("%s: %d tensors, %.1f MB, packed and unpacked in %.3f ms: %.0f GB/s, a copy in %.3f ms: %.0f GB/s, %.0f %% "
           "of it; %d wrong values\n",
           plane.all_scale ? "kernels" : "no kernels, copies", TENSORS, bytes / 1e6, both * 1e3, 4 * bytes / both / 1e9,
           copy * 1e3, 2 * bytes / copy / 1e9, 100 * 2 * copy / both, bad);
    bad += plane.all_scale ? casts(&work, host) : 0;
    for (uint32_t i = 0; i < TENSORS; i++)
        plane.cuda->MemFree((uintptr_t)piece[i].out);
    plane.cuda->MemFree(beside);
    hvd_nccl_free_memory(&plane);
    hvd_nccl_leave(&plane);
    hvd_nccl_device_drop(plane.device);
    free(host);
    return bad != 0 || !plane.all_scale;
}
