"""TensorFlow's eager tensors, through NumPy: an array over the tensor's own memory, and back, without a copy.

A tensor in CPU memory shows itself as a NumPy array (bfloat16, too, by a dtype that TensorFlow brings along), and an
array whose memory is aligned as TensorFlow likes it becomes a tensor that uses it. So the collectives work on arrays,
and all that is TensorFlow's is what is taken for a tensor and what is given back. A tensor on another device is copied
to the CPU by TensorFlow.

What a graph holds are no tensors yet but promises of some; those are for `ops.run`, which
makes nodes of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from .. import _core
from ..adapter import View
from ..numpy import NumpyAdapter

_ALIGNMENT = 64
DTYPES: dict[tf.DType, int] = {getattr(tf, name): number for name, number in _core.DTYPES.items() if hasattr(tf, name)}
_OF_NUMPY = {np.dtype(dtype.as_numpy_dtype): number for dtype, number in DTYPES.items()}


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A new array, contents undefined, that becomes a tensor without a copy."""
    dtype = np.dtype(dtype)
    count = math.prod(shape) * dtype.itemsize
    block = np.empty(count + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + count].view(dtype).reshape(shape)


def check_dtype(dtype: tf.DType) -> int:
    """The core's number of a dtype. ValueError for one that it has not."""
    number = DTYPES.get(dtype)
    if number is None:
        raise _unsupported(dtype.name)
    return number


def _unsupported(dtype: str) -> ValueError:
    supported = ", ".join(known.name for known in DTYPES)
    return ValueError(f"Tensor type {dtype} is not supported; supported: {supported}")


class TensorflowAdapter(NumpyAdapter):
    """Arrays over tensors: what NumpyAdapter says of arrays holds, and bfloat16 is one more dtype."""

    def accept(self, value: Any, writable: bool = False) -> np.ndarray:
        """The array over an eager tensor. TypeError for what is neither tensor nor array, and for a symbolic one."""
        if isinstance(value, tf.Tensor):
            if not hasattr(value, "numpy"):
                raise TypeError(f"{value!r} belongs to a graph and has no value yet")
            value = np.asarray(value)
        return super().accept(value, writable)

    def view(self, tensor: np.ndarray) -> View:
        number = _OF_NUMPY.get(tensor.dtype)
        if number is None:
            raise _unsupported(str(tensor.dtype) if tensor.dtype.isnative else tensor.dtype.str)
        return View(tensor.__array_interface__["data"][0], tensor.shape, number, tensor.flags.c_contiguous)

    def form(self, tensor: Any) -> Any:
        return None  # tensors come as tensors: there is no short way by address

    def like(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return aligned(shape, tensor.dtype)

    def new(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return aligned(shape, getattr(tf, dtype).as_numpy_dtype)
