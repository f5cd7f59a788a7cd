"""Capabilities of this build, under the names of Horovod: `mpi_built()`, `nccl_built()` and the like.

Scripts branch on these answers: is there a transport without MPI, may GPU tensors be reduced, do two libraries share
MPI. So they report what works in this process now, not the build options. Horovod's built-in transport is Gloo;
hvdlite's own does the same work under that name, for scripts that ask "Gloo or MPI?" and mean "with mpirun or not?".
Everything here can be asked before init().
"""

from __future__ import annotations

from .. import mpi
from .._core import gpu_discovery


def mpi_built() -> bool:
    """Return whether a usable MPI library is found. The call loads the library and does not start MPI.

    Returns:
        bool: False if no library is found or the one that is found cannot be used.

    Example:
        >>> isinstance(hvd.mpi_built(), bool)
        True
    """
    return mpi.available()


def mpi_enabled() -> bool:
    """Return whether the ranks of this job met over MPI.

    Returns:
        bool: False also before ``init``.

    Example:
        >>> hvd.mpi_enabled()
        False
    """
    return mpi.enabled()


def mpi_threads_supported() -> bool:
    """Return whether mpi4py may be used from several threads beside hvdlite.

    Returns:
        bool: True. ``init`` refuses an MPI without ``MPI_THREAD_MULTIPLE``.

    Raises:
        ValueError: if the job does not run over MPI.

    Example:
        >>> hvd.mpi_enabled() and hvd.mpi_threads_supported()
        False
    """
    if mpi.enabled():
        return True  # less than MPI_THREAD_MULTIPLE is refused by init()
    raise ValueError(
        "MPI is not enabled: this process is not a rank of an MPI job. Start it with mpirun, or use comm=. [HVD109]"
    )


def gloo_built() -> bool:
    """Return whether a transport without MPI is available.

    Returns:
        bool: True. hvdlite's own transport takes the place of Horovod's Gloo.

    Example:
        >>> hvd.gloo_built()
        True
    """
    return True


def gloo_enabled() -> bool:
    """Return whether the transport without MPI is in use.

    Returns:
        bool: True, always.

    Example:
        >>> hvd.gloo_enabled()
        True
    """
    return True


def nccl_built() -> int:
    """Return the version of the NCCL library that GPU tensors use. The call loads NCCL.

    Returns:
        int: a version such as 22105 for 2.21.5; 0 if there is no NCCL or no CUDA driver.

    Raises:
        HvdOptionError: if an environment variable of hvdlite has an invalid value.

    Example:
        >>> hvd.nccl_built() >= 0
        True
    """
    return gpu_discovery.nccl_version()


def ddl_built() -> bool:
    """Return whether IBM DDL is in use; a name of Horovod's.

    Returns:
        bool: False, always.

    Example:
        >>> hvd.ddl_built()
        False
    """
    return False


def ccl_built() -> bool:
    """Return whether Intel oneCCL is in use; a name of Horovod's.

    Returns:
        bool: False, always.

    Example:
        >>> hvd.ccl_built()
        False
    """
    return False


def cuda_built() -> bool:
    """Return whether CUDA tensors can be reduced here: this machine has a CUDA driver.

    Returns:
        bool: False if there is no driver.

    Raises:
        HvdOptionError: if an environment variable of hvdlite has an invalid value.

    Example:
        >>> isinstance(hvd.cuda_built(), bool)
        True
    """
    return gpu_discovery.cuda_version() > 0


def rocm_built() -> bool:
    """Return whether ROCm tensors can be reduced; a name of Horovod's.

    Returns:
        bool: False, always.

    Example:
        >>> hvd.rocm_built()
        False
    """
    return False
