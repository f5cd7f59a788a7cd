/* pointer_handles.c - calls of a library whose handles are pointers: Open MPI, and the standard ABI of MPI 5.
 *
 * Open MPI's predefined handles are addresses of its variables, those of the standard ABI are small numbers cast to
 * pointers; to a call both are a pointer. Everything else stands in calls.h, which is compiled once for each
 * width of a handle.
 */
#define HANDLE  void *
#define RESOLVE hvd_mpi_pointer_handles
#include "calls.h"
