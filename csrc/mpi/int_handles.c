/* int_handles.c - calls of a library whose handles are ints: MPICH and what descends from it.
 *
 * Intel MPI, MVAPICH, Cray MPICH and ParaStation share MPICH's ABI. Its handles are 32-bit numbers with the sign bit
 * clear or set; what a uintptr_t holds above those bits means nothing, for they come back the same when narrowed.
 * Everything else stands in calls.h, which is compiled once for each width.
 */
#define HANDLE  int
#define RESOLVE hvd_mpi_int_handles
#include "calls.h"
