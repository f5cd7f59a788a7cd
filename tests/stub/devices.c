/* devices.c - the driver: which devices there are, and what they are called. See stub.h. */
#include "stub.h"

#include <stdio.h>
#include <string.h>

EXPORT int cuInit(unsigned flags)
{
    CALLED("cuInit");
    return (int)flags;
}

EXPORT int cuDriverGetVersion(int *version)
{
    *version = 12040;
    return 0;
}

EXPORT int cuGetErrorName(int code, const char **name)
{
    *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OF_THE_STUB";
    return 0;
}

EXPORT int cuGetErrorString(int code, const char **text)
{
    (void)code;
    *text = "the stub was told to fail";
    return 0;
}

EXPORT int cuDeviceGetCount(int *count)
{
    *count = STUB_DEVICES;
    return 0;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? 9 : 0; /* compute capability 9.0 */
    return 0;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < STUB_DEVICES ? 0 : 101;
}

EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    memset(uuid, 0xab, 16);
    uuid[15] = (unsigned char)device;
    return 0;
}

EXPORT int cuDeviceGetPCIBusId(char *text, int length, int device)
{
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void **ctx, int device)
{
    *ctx = (void *)(uintptr_t)(device + 1);
    return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return 0;
}
