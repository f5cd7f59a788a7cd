/* nvtx.h - ranges that NVIDIA's profilers show: off, and then a load and a branch, until a library is opened.
 *
 * Which library that is the caller says; nothing is opened or looked for otherwise, and nothing here is compiled
 * against NVTX's header. Any thread. A range begins and ends on any two threads. Names are copied by the library.
 */
#ifndef HVD_TRACE_NVTX_H
#define HVD_TRACE_NVTX_H

#include "../ground/ground.h"

#include <stdatomic.h>

extern _Atomic bool hvd_nvtx_on;

/* HVD_OK: it is on from now to the end of the process. HVD_EINIT says why this file will not do. */
int hvd_nvtx_open(const char *library, struct hvd_error *error);
uint64_t hvd_nvtx_begin(const char *name); /* while it is on. Never 0 */
void hvd_nvtx_end(uint64_t range);         /* 0: there is none */

#endif
