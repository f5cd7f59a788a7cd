"""What is this hvdlite made of? Horovod's questions about itself, answered truthfully.

Scripts branch on these answers: is there a transport without MPI, may GPU tensors be reduced, do two libraries share
MPI. So they say what works in this process now, not what a compiler once saw. Horovod's built-in transport is Gloo;
hvdlite's own does the same work under that name, for scripts that ask "Gloo or MPI?" and mean "with mpirun or not?".
Everything here can be asked before init().
"""

from __future__ import annotations

from . import gpu, mpi


def mpi_built() -> bool:
    """Whether MPI can be used: there is a library that hvdlite knows how to call. Asking loads it."""
    return mpi.available()


def mpi_enabled() -> bool:
    """Whether this job runs over MPI: its ranks have met there."""
    return mpi.enabled()


def mpi_threads_supported() -> bool:
    """Whether mpi4py may be used from several threads beside hvdlite. ValueError while MPI is not enabled."""
    if mpi.enabled():
        return True  # less than MPI_THREAD_MULTIPLE is refused by init()
    raise ValueError(
        "MPI is not enabled: this process is no rank of a job over MPI. Start it with mpirun, or use comm=. [HVD109]"
    )


def gloo_built() -> bool:
    """Whether there is a transport that needs no MPI. True: hvdlite's own, which does what Gloo does for Horovod."""
    return True


def gloo_enabled() -> bool:
    """Whether this job runs over the transport that needs no MPI. True."""
    return True


def nccl_built() -> int:
    """NCCL's version as a number such as 22105 if GPU tensors go over NCCL here, else 0. Asking loads NCCL."""
    return gpu.nccl_version()


def ddl_built() -> bool:
    """Whether IBM's DDL is used. False, always."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is used. False, always."""
    return False


def cuda_built() -> bool:
    """Whether CUDA tensors can be reduced: this machine has a driver of CUDA."""
    return gpu.cuda_version() > 0


def rocm_built() -> bool:
    """Whether ROCm tensors can be reduced. False, always: of GPUs, CUDA's are known."""
    return False
