"""TensorFlow's tensors on GPUs: are they reduced there, and how does an eager one get there and back?

On the GPU they are reduced where CUDA's driver can say what a device has been given so far (cuCtxRecordEvent), for
TensorFlow shows its stream to nobody; else by way of the CPU. HVDLITE_TENSORFLOW_GPU says `device` or `host`. The NaN
guard of the environment looks at them in the CPU's memory, so with it they go that way, and so do integers of 32 bits,
which TensorFlow itself keeps there, and dtypes of which it tells no address.

An eager tensor tells its address as a DLPack capsule, which keeps its memory; TensorFlow waits for its own stream to
give one. A collective begins when the device has done all that it was given before, and its result is given to
TensorFlow when the device has done the collective: what TensorFlow begins then waits for no stream of ours. So the
caller waits for the device, for his tensor, for the result's memory and for the collective, as a copy to the CPU and
back would let him wait, too. Graphs do not: csrc/tensorflow/device.c.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from .. import _core, config, gpu, guard
from ..errors import HvdOptionError

_BY_THE_CPU = (tf.int32, tf.uint32)


def records() -> bool:
    """Whether CUDA's driver can say what a device has been given so far. Begins nothing on a GPU."""
    gpu.find()
    return bool(_core.lib.hvd_gpu_version(2))


def _lacks(values: dict[str, Any]) -> str | None:
    """Why tensors on GPUs cannot be reduced there; None: they can."""
    if not tf.test.is_built_with_cuda():
        return f"TensorFlow {tf.__version__} was built without CUDA"
    if not records():
        return "CUDA's driver has no cuCtxRecordEvent, which came with CUDA 12.5, or there is none"
    if tf.config.optimizer.get_jit():
        return "XLA compiles parts of graphs by itself (tf.config.optimizer.set_jit), and may capture a CUDA graph"
    if values["nan_guard"]:
        return "HVDLITE_NAN_GUARD is on, which looks at TensorFlow's tensors in the CPU's memory"
    return None


def reduces_on_device() -> bool:
    """Whether tensors on GPUs are to be reduced there. HvdOptionError if that is asked for and cannot be."""
    values = config.load().values
    wanted = values["tensorflow_gpu"]
    if wanted == "host":
        return False
    lacks = _lacks(values)
    if lacks is not None and wanted == "device":
        raise HvdOptionError(
            f"rank {_core.rank()}: HVDLITE_TENSORFLOW_GPU=device asks for TensorFlow's tensors to be reduced on the "
            f"GPU, which cannot be: {lacks}; unset it, or say host, on all ranks [HVD674]"
        )
    return lacks is None


@functools.cache
def on_device() -> bool:
    """`reduces_on_device`, decided when it is first asked, for all of this process's life."""
    return reduces_on_device()


class _DLTensor(ctypes.Structure):
    """The beginning of what a capsule holds (github.com/dmlc/dlpack, dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p


class Placed:
    """An eager tensor in the memory of a GPU: `tensor`, and its `address`, which is good while this is kept."""

    __slots__ = ("_capsule", "address", "place", "tensor")

    def __init__(self, tensor: tf.Tensor, place: str) -> None:
        self.tensor, self.place = tensor, place
        self._capsule = tf.experimental.dlpack.to_dlpack(tensor)
        seen = _DLTensor.from_address(_pointer(self._capsule, b"dltensor"))
        self.address = (seen.data or 0) + seen.byte_offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(self.tensor.shape)


@functools.cache
def _any_gpus() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def place_of(tensor: tf.Tensor) -> str | None:
    """The name of the GPU in whose memory an eager tensor lies; None: it lies in the CPU's."""
    if not _any_gpus():
        return None
    place: str = tensor.backing_device
    return place if "GPU:" in place else None


def placed(tensor: tf.Tensor) -> Placed | None:
    """Where it lies, if it is to be reduced on a GPU. None: by way of the CPU."""
    place = place_of(tensor)
    if place is None or tensor.dtype in _BY_THE_CPU or not on_device():
        return None
    try:
        return Placed(tensor, place)
    except (tf.errors.OpError, TypeError, ValueError):  # DLPack, or this TensorFlow, does not know the dtype
        return None


def empty_at(place: str, shape: tuple[int, ...], dtype: tf.DType) -> Placed:
    """A new tensor on a GPU, which nothing else has (tf.zeros may give a constant that it keeps)."""
    with tf.device("CPU:0"):  # where Fill reads them
        dims = tf.constant(shape, tf.int64)
    with tf.device(place):
        made = tf.raw_ops.Fill(dims=dims, value=tf.zeros([], dtype))
    if place_of(made) != place:  # there is no kernel of Fill for this dtype there
        made = _sent(made, place)
    return Placed(made, place)


def _sent(tensor: Any, place: str) -> tf.Tensor:
    with tf.device(place):
        sent = tf.identity(tensor)
    if place_of(sent) != place:
        raise ValueError(f"a tensor of {sent.dtype.name} is not supported: TensorFlow moves none to {place} [HVD203]")
    return sent


@functools.cache
def _anchor(place: str) -> Placed:
    """Some memory there, by which the device is known also where a tensor is empty and has no address."""
    gpu.find()
    return empty_at(place, (1,), tf.float32)


@functools.cache
def _number(place: str) -> int:
    return _core.Point(_anchor(place).address).device


class GpuDevice:
    """A device as one tensor sees it; see hvdlite.adapter.Device."""

    def __init__(self, seen: Placed) -> None:
        self._place, self._tensor = seen.place, seen.tensor
        self.number = _number(seen.place)

    def ready(self) -> tuple[int, Any]:
        """An event after all that the device has been given."""
        point = _core.Point(_anchor(self._place).address)
        return point.event, point

    def follow(self, native: int, ready: Any) -> None:
        """Waits until the device has done the collective."""
        _core.arrived(native)

    def fetch(self, native: int, target: int, ready: Any) -> None:
        """Waits until the device has done the collective and a copy of its result."""
        _core.bring(native, target)

    def found(self) -> int:
        """Where the NaN guard looks: elements that are NaN, times 2^32, plus infinite ones."""
        tensor, most = self._tensor, 0xFFFFFFFF
        if not guard.looks() or not tensor.dtype.is_floating:
            return 0
        nan, infinite = (int(tf.math.count_nonzero(of(tensor))) for of in (tf.math.is_nan, tf.math.is_inf))
        return min(nan, most) << 32 | min(infinite, most)

    def near(self, tensor: Placed) -> np.ndarray:
        """A copy in the CPU's memory."""
        return np.ascontiguousarray(tensor.tensor.numpy())

    def far(self, tensor: np.ndarray) -> Placed:
        """A copy on the device of an array."""
        return Placed(_sent(tf.convert_to_tensor(tensor), self._place), self._place)
