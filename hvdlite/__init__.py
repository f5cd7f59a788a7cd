"""hvdlite: a training script for one process runs on many.

    import hvdlite as hvd            # NumPy arrays
    import hvdlite.torch as hvd      # PyTorch tensors

This file imports nothing: the launcher lives in this package and needs neither NumPy nor the compiled extension. The
names below are those of hvdlite.numpy, imported when the first of them is used.
"""

from __future__ import annotations

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
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

if TYPE_CHECKING:
    from .numpy import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    from . import numpy

    value = getattr(numpy, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
