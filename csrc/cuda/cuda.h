/* cuda.h - CUDA's driver that was found when the program ran: one table of functions.
 *
 * No cuda.h is compiled against, and nothing is loaded before a tensor on a device comes. A process has one driver, so
 * there is one table, written once by hvd_cuda_load and read-only from then on. Handles (contexts, streams, events)
 * travel as void *, addresses on devices as uintptr_t. Calls of the table return CUDA's own codes: 0 is success,
 * hvd_cuda_failed puts the others into words.
 */
#ifndef HVD_CUDA_H
#define HVD_CUDA_H

#include "../base/base.h"

#define HVD_CUDA_NOT_READY 600 /* cuEventQuery: the work before it is under way */

struct hvd_cuda_uuid {
    unsigned char bytes[16];
};

/* X(NAME, symbol, arguments): the newest binary interface of each, all of them there since CUDA 11.0. */
#define HVD_CUDA_CALLS(X)                                                                                    \
    X(Init, "cuInit", (unsigned flags))                                                                      \
    X(DriverGetVersion, "cuDriverGetVersion", (int *version))                                                \
    X(GetErrorName, "cuGetErrorName", (int code, const char **name))                                         \
    X(GetErrorString, "cuGetErrorString", (int code, const char **text))                                     \
    X(DeviceGetCount, "cuDeviceGetCount", (int *count))                                                      \
    X(DeviceGet, "cuDeviceGet", (int *device, int ordinal))                                                  \
    X(DeviceGetUuid, "cuDeviceGetUuid", (struct hvd_cuda_uuid * uuid, int device))                           \
    X(DeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *text, int length, int device))                        \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                   \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **ctx, int device))                          \
    X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device))                                 \
    X(CtxPushCurrent, "cuCtxPushCurrent_v2", (void *ctx))                                                    \
    X(CtxPopCurrent, "cuCtxPopCurrent_v2", (void **ctx))                                                     \
    X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                 \
    X(StreamCreateWithPriority, "cuStreamCreateWithPriority", (void **stream, unsigned flags, int priority)) \
    X(StreamDestroy, "cuStreamDestroy_v2", (void *stream))                                                   \
    X(StreamWaitEvent, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))                     \
    X(EventCreate, "cuEventCreate", (void **event, unsigned flags))                                          \
    X(EventDestroy, "cuEventDestroy_v2", (void *event))                                                      \
    X(EventRecord, "cuEventRecord", (void *event, void *stream))                                             \
    X(EventQuery, "cuEventQuery", (void *event))                                                             \
    X(MemAlloc, "cuMemAlloc_v2", (uintptr_t * address, size_t bytes))                                        \
    X(MemFree, "cuMemFree_v2", (uintptr_t address))                                                          \
    X(MemAllocHost, "cuMemAllocHost_v2", (void **memory, size_t bytes))                                      \
    X(MemFreeHost, "cuMemFreeHost", (void *memory))                                                          \
    X(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (uintptr_t to, uintptr_t from, size_t bytes, void *stream))   \
    X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *to, uintptr_t from, size_t bytes, void *stream))       \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (uintptr_t to, const void *from, size_t bytes, void *stream)) \
    X(MemsetD8Async, "cuMemsetD8Async", (uintptr_t to, unsigned char value, size_t count, void *stream))     \
    X(MemsetD16Async, "cuMemsetD16Async", (uintptr_t to, unsigned short value, size_t count, void *stream))  \
    X(MemsetD32Async, "cuMemsetD32Async", (uintptr_t to, unsigned value, size_t count, void *stream))        \
    X(MemsetD2D32Async, "cuMemsetD2D32Async",                                                                \
      (uintptr_t to, size_t pitch, unsigned value, size_t width, size_t height, void *stream))

/* Y(NAME, symbol, arguments): what is used where it is there; else NULL. */
#define HVD_CUDA_NEWER_CALLS(Y) Y(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))

struct hvd_cuda {
    bool loaded;
    int version; /* of CUDA as the driver has it, such as 12040 */
    char path[512];
#define X(name, symbol, arguments) int(*name) arguments;
    HVD_CUDA_CALLS(X)
    HVD_CUDA_NEWER_CALLS(X)
#undef X
};

/* The driver of this process. Any thread; loads it at the first call. NULL and why not, which will not change. */
const struct hvd_cuda *hvd_cuda_load(struct hvd_error *error);
/* CUDA's version as the driver has it; 0 without one. Begins nothing: not even the driver. Any thread. */
int hvd_cuda_version(void);
/* The library that is asked for first, before the first load; a copy is kept. NULL: libcuda.so.1. */
void hvd_cuda_prefer(const char *path);
/* The context is this thread's current one until leave, and what is called meanwhile spoils no CUDA graph that somebody
 * captures: for calls about streams and memory of our own. *mode is for leave. CUDA's code. They may be nested. */
int hvd_cuda_enter(const struct hvd_cuda *cuda, void *ctx, int *mode);
void hvd_cuda_leave(const struct hvd_cuda *cuda, int mode);
/* What was put on a device does not end, and nobody can end it: from then on nothing waits for devices, as freeing
 * memory does; until all that was said of has come to its end after all. */
void hvd_cuda_hang(void);
void hvd_cuda_recover(void);
bool hvd_cuda_hangs(void);
/* HVD_OK, or HVD_EINTERNAL with CUDA's own words in `error`: "CUDA could not <what>: ...". */
int hvd_cuda_failed(int code, const char *what, struct hvd_error *error);

#endif
