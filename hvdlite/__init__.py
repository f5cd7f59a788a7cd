"""hvdlite: a training script for one process runs on many.

    import hvdlite as hvd            # NumPy arrays
    import hvdlite.torch as hvd      # PyTorch tensors

This file imports nothing: the launcher lives in this package and needs neither NumPy nor the compiled extension. The
names below are those of hvdlite.numpy, imported when the first of them is used; what needs no arrays comes without
NumPy, whose import takes longer than init().
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Average",
    "HorovodInternalError",
    "HvdError",
    "HvdForkError",
    "HvdInitError",
    "HvdMismatchError",
    "HvdNotInitializedError",
    "HvdNotYetError",
    "HvdOptionError",
    "HvdPeerLostError",
    "HvdTimeoutError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_WITHOUT_NUMPY = {
    "init": "_life",
    "shutdown": "_life",
    "is_initialized": "_life",
    "is_homogeneous": "_life",
    "rank": "_core",
    "size": "_core",
    "local_rank": "_core",
    "local_size": "_core",
    "cross_rank": "_core",
    "cross_size": "_core",
    "ccl_built": "built",
    "cuda_built": "built",
    "ddl_built": "built",
    "gloo_built": "built",
    "gloo_enabled": "built",
    "mpi_built": "built",
    "mpi_enabled": "built",
    "mpi_threads_supported": "built",
    "nccl_built": "built",
    "rocm_built": "built",
    "start_timeline": "built",
    "stop_timeline": "built",
    "run": "built",
}

if TYPE_CHECKING:
    from .numpy import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    value = getattr(import_module(f".{_WITHOUT_NUMPY.get(name, 'numpy')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
