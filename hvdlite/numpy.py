"""hvdlite on NumPy arrays; `import hvdlite as hvd` shows the same names.

Arrays of every dtype of the core; bfloat16 and float8, which NumPy itself has not, are those of the package ml_dtypes,
where that is installed. Plain numbers and NumPy scalars are taken as arrays without dimensions where the result is a
new array. Results are ndarrays.

Refused is what would silently give something else than asked: masked arrays (the mask would be lost), other byte
orders, and read-only arrays where the result is to overwrite them.
"""

from __future__ import annotations

import math
import numbers
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _api, _core
from ._api import *  # noqa: F403
from ._core.memory import block, shape_of
from .ops import Collectives
from .ops.adapter import View
from .ops.arguments import Compressor, NoneCompressor, Quantized

if TYPE_CHECKING:
    from . import data


def __getattr__(name: str) -> Any:
    """Public modules are imported when they are used first: most programs need none of them."""
    if name in ("aggregation", "data", "ps", "rpc"):
        return import_module(f"{__package__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ALIGNMENT = 64  # bytes
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPES = {np.dtype(name): number for name, number in _core.DTYPES.items() if name not in _ML_DTYPES}


def _number(dtype: np.dtype) -> int | None:
    """The core's number of a dtype; None: it has none. A script with an array of ml_dtypes has imported that."""
    number = _DTYPES.get(dtype)
    return _core.DTYPES.get(dtype.name) if number is None and dtype.type.__module__ == "ml_dtypes" else number


def _named(dtype: str) -> np.dtype:
    """NumPy's dtype of that name. ValueError without the package that it needs."""
    if dtype not in _ML_DTYPES:
        return np.dtype(dtype)
    try:
        return np.dtype(getattr(import_module("ml_dtypes"), dtype))
    except (ImportError, AttributeError):
        raise ValueError(
            f"NumPy does not support {dtype} without the package ml_dtypes: install it, or use hvdlite.torch [HVD807]"
        ) from None


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A new array, contents undefined, of which TensorFlow and JAX can make a tensor without a copy."""
    dtype = np.dtype(dtype)
    count = math.prod(shape) * dtype.itemsize
    block = np.empty(count + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + count].view(dtype).reshape(shape)


class NumpyAdapter:
    """ndarrays."""

    def accept(self, value: Any, writable: bool = False) -> np.ndarray:
        if not isinstance(value, np.ndarray):
            if writable or not isinstance(value, (numbers.Number, np.generic)):
                raise TypeError(
                    f"expected a NumPy array, not {type(value).__module__}.{type(value).__qualname__} [HVD201]"
                )
            value = np.asarray(value)
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                "masked arrays are not supported, because the mask would be lost: fill the array, or send the mask "
                "separately [HVD203]"
            )
        if writable and not value.flags.writeable:
            raise ValueError(
                "the array is read-only: use the function without the trailing underscore, or pass a copy [HVD203]"
            )
        return value

    def view(self, tensor: np.ndarray) -> View:
        dtype = _number(tensor.dtype)
        if dtype is None:
            supported = ", ".join(_core.DTYPES)
            raise ValueError(
                f"Tensor type {tensor.dtype.str!r} ({tensor.dtype}) is not supported; supported: {supported} [HVD202]"
            )
        address = tensor.__array_interface__["data"][0]
        return View(address, tensor.shape, dtype, tensor.flags.c_contiguous)

    def form(self, tensor: Any) -> Any:
        if tensor.__class__ is np.ndarray and tensor.flags.carray:
            return tensor.dtype, tensor.shape
        return None

    def address(self, tensor: np.ndarray) -> int:
        return tensor.__array_interface__["data"][0]

    def memory(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def twin(self, tensor: np.ndarray) -> tuple[np.ndarray, int]:
        made = np.empty(tensor.shape, tensor.dtype)
        return made, made.__array_interface__["data"][0]

    def like(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, tensor.dtype)

    def new(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, _named(dtype))

    def home(self) -> None:
        return None

    def contiguous(self, tensor: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(tensor)

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        into[...] = source

    def written(self, tensor: np.ndarray) -> None:
        """NumPy keeps no account of writing."""

    def cast(self, tensor: np.ndarray, dtype: str) -> np.ndarray:
        return tensor.astype(_named(dtype))


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16, and others as they are.

    float16 has 11 bits of precision and values up to 65504.

    Example:
        >>> hvd.allreduce(np.array([0.1]), compression=hvd.Compression.fp16).round(4).tolist()
        [0.1]
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array that travels, and its own dtype."""
        array = np.asarray(tensor)
        return (array.astype(np.float16) if array.dtype.kind == "f" else array), array.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The array in its own dtype again."""
        return tensor.astype(ctx, copy=False)


class BF16Compressor(Compressor):
    """Sends float32 arrays as bfloat16, and others as they are. It needs the package ml_dtypes.

    bfloat16 has 8 bits of precision and the range of float32.

    Example:
        >>> hvd.allreduce(np.float32([1e38]), compression=hvd.Compression.bf16).dtype
        dtype('float32')
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array that travels, and its own dtype."""
        array = np.asarray(tensor)
        return (array.astype(_named("bfloat16")) if array.dtype == np.float32 else array), array.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The array in its own dtype again."""
        return tensor.astype(ctx, copy=False)


class Compression:
    """The compressors that ``compression=`` takes, beside a ``Compressor`` of your own.

    * ``none``: arrays travel as they are.
    * ``fp16``: floating-point arrays travel as float16, which has 11 bits of precision and values up to 65504.
    * ``bf16``: float32 arrays travel as bfloat16, which has 8 bits of precision and the range of float32.
    * ``int8``, ``int4``: between hosts float arrays travel as integers with a scale for each 256 elements.

    Example:
        >>> hvd.allreduce(np.array([1.0, 2.0]), compression=hvd.Compression.fp16).tolist()
        [1.0, 2.0]
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Quantized(8)
    int4 = Quantized(4)


def empty(shape: Any, dtype: Any = float) -> np.ndarray:
    """Return a new array in memory that collectives need not copy.

    The memory is mapped by all ranks of the host. Without such memory (one rank, or no shared memory left) it is an
    ordinary array. ``allreduce_`` is fastest if the arrays of all ranks come from here. The contents are undefined.

    Args:
        shape (int or sequence of int): shape of the array.
        dtype (dtype): a dtype that collectives support. Default: float64.

    Returns:
        array: contiguous, of this shape and dtype.

    Raises:
        HvdNotInitializedError: before ``init``.
        ValueError: for an unsupported dtype or a negative dimension.
        TypeError: if ``shape`` or ``dtype`` has a wrong type.

    Example:
        >>> x = hvd.empty((2, 2))
        >>> x[:] = hvd.rank() + 1
        >>> hvd.allreduce_(x, op=hvd.Sum).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    _core.size()
    dims, kind = shape_of(shape), np.dtype(dtype)
    array = np.empty(0, kind)
    _ops.adapter.view(array)  # ValueError
    count = math.prod(dims)
    buffer = block(count * kind.itemsize) if count else None
    return np.empty(dims, kind) if buffer is None else np.frombuffer(buffer, kind).reshape(dims)


def check_consistency(arrays: Any, process_set: Any = global_process_set) -> None:  # noqa: F405
    """Compare arrays over all ranks, and raise an error on all ranks if any bit differs.

    All ranks of ``process_set`` must call it. It compares bits: 0.0 and -0.0 differ, and NaN equals NaN of the same
    bits.

    Args:
        arrays (array, dict, or list of arrays or of (str, array)): what to compare. Nested dicts and lists, numbers,
            strings, sets, and objects that can be pickled are compared as well.
        process_set (ProcessSet): ranks to compare. Default: all ranks.

    Raises:
        HvdMismatchError: if a rank differs. The text is the same on all ranks and names the first difference and the
            ranks that differ from the first rank of the set.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: on all ranks, if one rank has a value that cannot be compared or a name twice.
        TypeError: on all ranks, if reading the values raises it on one rank.

    Example:
        >>> hvd.check_consistency({"weight": np.array([1.0, 2.0])})
        >>> try:
        ...     hvd.check_consistency({"weight": np.array([1.0, 2.0 + hvd.rank()])})
        ... except hvd.HvdMismatchError as error:
        ...     print(error.ranks)
        (1,)
    """
    from .training import consistency

    given = [arrays] if isinstance(arrays, (np.ndarray, numbers.Number, np.generic)) else arrays
    remedy = "Start all ranks from one state with hvd.broadcast; change it on all alike."
    consistency.compare(lambda: consistency.named_leaves(given), lambda _: None, process_set, remedy)


_ops: Collectives[np.ndarray] = Collectives(NumpyAdapter())

allgather = _ops.allgather
allgather_async = _ops.allgather_async
allreduce = _ops.allreduce
allreduce_ = _ops.allreduce_
allreduce_async = _ops.allreduce_async
allreduce_async_ = _ops.allreduce_async_
alltoall = _ops.alltoall
alltoall_async = _ops.alltoall_async
broadcast = _ops.broadcast
broadcast_ = _ops.broadcast_
broadcast_async = _ops.broadcast_async
broadcast_async_ = _ops.broadcast_async_
gather = _ops.gather
gather_async = _ops.gather_async
grouped_allgather = _ops.grouped_allgather
grouped_allgather_async = _ops.grouped_allgather_async
grouped_allreduce = _ops.grouped_allreduce
grouped_allreduce_ = _ops.grouped_allreduce_
grouped_allreduce_async = _ops.grouped_allreduce_async
grouped_allreduce_async_ = _ops.grouped_allreduce_async_
grouped_reducescatter = _ops.grouped_reducescatter
grouped_reducescatter_async = _ops.grouped_reducescatter_async
recv = _ops.recv
recv_async = _ops.recv_async
reduce = _ops.reduce
reduce_async = _ops.reduce_async
reducescatter = _ops.reducescatter
reducescatter_async = _ops.reducescatter_async
scatter = _ops.scatter
scatter_async = _ops.scatter_async
send = _ops.send
send_async = _ops.send_async

__all__ = ["Compression", "check_consistency", "data", "empty"]
__all__ += _api.__all__
__all__ += [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "gather",
    "gather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "recv",
    "recv_async",
    "reduce",
    "reduce_async",
    "reducescatter",
    "reducescatter_async",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
]
