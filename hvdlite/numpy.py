"""hvdlite on NumPy arrays; `import hvdlite as hvd` shows the same names.

Arrays of every dtype of the core but bfloat16, which NumPy has not. Plain numbers and NumPy scalars are taken as arrays
without dimensions where the result is a new array. Results are ndarrays.

Refused is what would silently give something else than asked: masked arrays (the mask would be lost), other byte
orders, and read-only arrays where the result is to overwrite them.
"""

from __future__ import annotations

import numbers
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._core import cross_rank, cross_size, local_rank, local_size, rank, size
from ._life import init, is_homogeneous, is_initialized, shutdown
from .adapter import View
from .built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    run,
    start_timeline,
    stop_timeline,
)
from .errors import (
    HorovodInternalError,
    HvdError,
    HvdForkError,
    HvdInitError,
    HvdMismatchError,
    HvdNotInitializedError,
    HvdNotYetError,
    HvdOptionError,
    HvdPeerLostError,
    HvdTimeoutError,
)
from .objects import allgather_object, broadcast_object
from .ops import Average, Collectives, Max, Min, Product, Sum, barrier, poll, synchronize
from .process_set import global_process_set

if TYPE_CHECKING:
    from . import data


def __getattr__(name: str) -> Any:
    """hvdlite.data is imported when it is used first: most programs shard by other means."""
    if name == "data":
        return import_module(f"{__package__}.data")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_DTYPES = {np.dtype(name): number for name, number in _core.DTYPES.items() if name != "bfloat16"}


class NumpyAdapter:
    """ndarrays."""

    def accept(self, value: Any, writable: bool = False) -> np.ndarray:
        if not isinstance(value, np.ndarray):
            if writable or not isinstance(value, (numbers.Number, np.generic)):
                raise TypeError(f"expected a NumPy array, not {type(value).__module__}.{type(value).__qualname__}")
            value = np.asarray(value)
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("masked arrays are not supported: their mask would be lost; fill it or send it beside")
        if writable and not value.flags.writeable:
            raise ValueError("the array is read-only: use the form without _, or a copy")
        return value

    def view(self, tensor: np.ndarray) -> View:
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            supported = ", ".join(str(known) for known in _DTYPES)
            raise ValueError(
                f"Tensor type {tensor.dtype.str!r} ({tensor.dtype}) is not supported; supported: {supported}"
            )
        address = tensor.__array_interface__["data"][0]
        return View(address, tensor.shape, dtype, tensor.flags.c_contiguous)

    def like(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, tensor.dtype)

    def contiguous(self, tensor: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(tensor)

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        into[...] = source

    def cast(self, tensor: np.ndarray, dtype: str) -> np.ndarray:
        return tensor.astype(dtype)


_ops: Collectives[np.ndarray] = Collectives(NumpyAdapter())

allreduce = _ops.allreduce
allreduce_ = _ops.allreduce_
allreduce_async = _ops.allreduce_async
allreduce_async_ = _ops.allreduce_async_
grouped_allreduce = _ops.grouped_allreduce
grouped_allreduce_ = _ops.grouped_allreduce_
grouped_allreduce_async = _ops.grouped_allreduce_async
grouped_allreduce_async_ = _ops.grouped_allreduce_async_
allgather = _ops.allgather
allgather_async = _ops.allgather_async
broadcast = _ops.broadcast
broadcast_ = _ops.broadcast_
broadcast_async = _ops.broadcast_async
broadcast_async_ = _ops.broadcast_async_

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
