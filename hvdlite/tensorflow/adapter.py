"""TensorFlow's eager tensors, through NumPy: an array over the tensor's own memory, and back, without a copy.

A tensor in CPU memory shows itself as a NumPy array (bfloat16 and float8, too, by dtypes that TensorFlow brings along),
and an array whose memory is aligned as TensorFlow likes it becomes a tensor that uses it. So the collectives work on
arrays, and all that is TensorFlow's is what is taken for a tensor and what is given back. A tensor on a GPU is
copied to the CPU by TensorFlow.

What a graph holds are no tensors yet but promises of some; those are for `ops.run`, which
makes nodes of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from .. import _core
from ..numpy import NumpyAdapter, aligned
from ..ops.adapter import View

DTYPES: dict[tf.DType, int] = {
    getattr(home, name): number
    for name, number in _core.DTYPES.items()
    for home in (tf, tf.dtypes.experimental)  # float8 is there
    if hasattr(home, name)
}
_OF_NUMPY = {np.dtype(dtype.as_numpy_dtype): number for dtype, number in DTYPES.items()}


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """The array over an eager tensor in the CPU's memory. NumPy takes no bfloat16 that has no dimension but a copy."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def check_dtype(dtype: tf.DType) -> int:
    """The core's number of a dtype. ValueError for one that it has not."""
    number = DTYPES.get(dtype)
    if number is None:
        raise _unsupported(dtype.name)
    return number


def _unsupported(dtype: str) -> ValueError:
    supported = ", ".join(known.name for known in DTYPES)
    return ValueError(f"Tensor type {dtype} is not supported; supported: {supported} [HVD202]")


class TensorflowAdapter(NumpyAdapter):
    """Arrays over tensors, for which what NumpyAdapter says of arrays holds; bfloat16 and float8 are more dtypes."""

    def accept(self, value: Any, writable: bool = False) -> Any:
        """The array over an eager tensor. TypeError for what is neither tensor nor array, and for a symbolic one."""
        if isinstance(value, tf.Tensor):
            if not hasattr(value, "numpy"):
                raise TypeError(f"{value!r} belongs to a graph and has no value yet [HVD247]")
            value = array_of(value)
        return super().accept(value, writable)

    def view(self, tensor: Any) -> View:
        number = _OF_NUMPY.get(tensor.dtype)
        if number is None:
            raise _unsupported(str(tensor.dtype) if tensor.dtype.isnative else tensor.dtype.str)
        return View(tensor.__array_interface__["data"][0], tensor.shape, number, tensor.flags.c_contiguous)

    def form(self, tensor: Any) -> Any:
        return None  # tensors come as tensors: there is no fast path by address

    def like(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return aligned(shape, tensor.dtype)

    def new(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return aligned(shape, getattr(tf, dtype).as_numpy_dtype)


def tensor_of(result: Any) -> tf.Tensor:
    """What the adapter made, as a tensor."""
    return tf.convert_to_tensor(result)
