"""hvdlite for Keras 3, on TensorFlow, PyTorch or JAX: `import hvdlite.keras as hvd`.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=int(hvd.rank() == 0))

Each rank fits its own part of the data. With TF_USE_LEGACY_KERAS=1 it is for Keras 2 (tf_keras), on TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import _api, data
from .. import ops as _everybodys
from .._api import *  # noqa: F403
from ..ops.arguments import NoneCompressor
from . import backend as _backend
from . import callbacks, elastic
from .consistency import check_consistency
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .saving import load_model


def __getattr__(name: str) -> Any:
    """``Compression`` is that of the backend. ``ps`` and ``rpc`` are imported on first use."""
    if name == "Compression":
        return _backend.compression()
    if name in ("aggregation", "ps", "rpc"):
        return import_module(f"{__name__}.ps" if name == "ps" else "hvdlite.rpc")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "Compression", "aggregation", "ps", "rpc"})


def _value(value: Any) -> Any:
    return _backend.keras.ops.convert_to_tensor(value) if not _backend.legacy() else value


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: Any = NoneCompressor
) -> Any:  # fmt: skip
    """Reduce a tensor, an array or a number over all ranks and return the result on every rank.

    All ranks must call it.

    Args:
        value: a tensor of the backend, an array or a number. Shape and dtype are the same on all ranks.
        op (int, optional): ``hvd.Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        compression (Compressor): the form in which the tensor travels, such as ``hvd.Compression.fp16``. ``int8`` and
            ``int4`` round between hosts, and have no gradient. Default: none.
        prescale_factor (float): multiplies the tensor before the reduction. Default: 1.0.
        postscale_factor (float): multiplies the result. Default: 1.0.
        average (bool, optional): Horovod's old form of ``op``. True is Average, False is Sum. Do not give both.

    Returns:
        A tensor of the backend with the shape of ``value``.

    Raises:
        HvdArgumentError: the dtype or the op is not supported.
        HvdMismatchError: the ranks disagree about shape, dtype, op or scale. All ranks raise it.
        HvdNotYetError: Keras runs on a backend other than TensorFlow, PyTorch and JAX.
        HvdPeerLostError: a rank has left or died.
        ValueError: ``op`` is unknown, or both ``op`` and ``average`` are given.

    Example:
        >>> hvd.allreduce(np.array([1.0, 2.0]) * (hvd.rank() + 1)).numpy().tolist()
        [1.5, 3.0]
    """
    return _backend.ops().allreduce(
        _value(value), name=name, average=average, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        op=op, compression=compression,
    )  # fmt: skip


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along the first dimension and return the result on every rank.

    All ranks must call it.

    Args:
        value: a tensor of the backend or an array, of at least one dimension. Only the first may differ between ranks.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.

    Returns:
        A tensor of the backend with all rows, in rank order.

    Raises:
        HvdArgumentError: the value has no dimensions.
        HvdMismatchError: dtype or the other dimensions differ. The other errors are those of ``allreduce``.

    Example:
        >>> hvd.allgather(np.array([hvd.rank(), 7])).numpy().tolist()
        [0, 7, 1, 7]
    """
    return _backend.ops().allgather(_value(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank on every rank.

    All ranks must call it.

    Args:
        value: a tensor of the backend, an array or a number. Shape and dtype are the same on all ranks.
        root_rank (int): the rank whose value is returned.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.

    Returns:
        A tensor of the backend.

    Raises:
        HvdMismatchError: shape, dtype or root differ. The other errors are those of ``allreduce``.
        ValueError: there is no rank ``root_rank``.

    Example:
        >>> hvd.broadcast(np.array([hvd.rank(), 7]), root_rank=1).numpy().tolist()
        [1, 7]
    """
    return _backend.ops().broadcast(_value(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = _everybodys.Average) -> Any:
    """Reduce a tensor over all ranks and return this rank's rows of the result.

    All ranks must call it. Rows are divided evenly in rank order; of the rest, the first ranks get one row each.

    Args:
        value: a tensor of the backend or an array, of at least one dimension. The same shape and dtype on all ranks.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        op (int): ``hvd.Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.

    Returns:
        A tensor of the backend with this rank's rows.

    Raises:
        HvdArgumentError: the value has no dimensions, or the op is not supported.
        HvdMismatchError: the ranks disagree about the tensor. The other errors are those of ``allreduce``.

    Example:
        >>> hvd.reducescatter(np.array([1.0, 2.0]) * (hvd.rank() + 1)).numpy().tolist()
        [1.5]  # rank 0
        [3.0]  # rank 1
    """
    return _backend.ops().reducescatter(_value(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras has no collection of global variables, which Horovod's function of this name needs.

    Use ``hvd.callbacks.BroadcastGlobalVariablesCallback`` or ``hvdlite.tensorflow.broadcast_variables``.

    Args:
        root_rank (int): not used.

    Raises:
        RuntimeError: always.

    Example:
        >>> hvd.broadcast_global_variables(0)
        Traceback (most recent call last):
            ...
        RuntimeError: Keras has no global variables: ... [HVD247]
    """
    raise RuntimeError(
        "Keras has no global variables: use hvd.callbacks.BroadcastGlobalVariablesCallback, or "
        "hvdlite.tensorflow.broadcast_variables [HVD247]"
    )


__all__ = [
    "Compression",  # noqa: F405  (see __getattr__)
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "check_consistency",
    "data",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _api.__all__
