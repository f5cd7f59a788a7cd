"""hvdlite for Keras 3, on TensorFlow or PyTorch: `import hvdlite.keras as hvd`.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=int(hvd.rank() == 0))

Each rank fits its own part of the data. With TF_USE_LEGACY_KERAS=1 it is for Keras 2 (tf_keras), on TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import _public
from .. import ops as _everybodys
from .._public import *  # noqa: F403
from ..ops.terms import NoneCompressor
from . import backend as _backend
from . import callbacks, elastic
from .consistency import check_consistency
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .saving import load_model


def __getattr__(name: str) -> Any:
    """`Compression` is that of the backend; `ps` and `rpc` come when they are used."""
    if name == "Compression":
        return _backend.ops().Compression
    if name in ("ps", "rpc"):
        return import_module(f"{__name__}.ps" if name == "ps" else "hvdlite.rpc")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "Compression", "ps", "rpc"})


def _value(value: Any) -> Any:
    return _backend.keras.ops.convert_to_tensor(value) if not _backend.legacy() else value


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: Any = NoneCompressor
) -> Any:  # fmt: skip
    """Reduce a tensor, an array or a number over all ranks: a tensor of the backend."""
    return _backend.ops().allreduce(
        _value(value), name=name, average=average, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        op=op, compression=compression,
    )  # fmt: skip


def allgather(value: Any, name: str | None = None) -> Any:
    """Every rank's rows, in rank order."""
    return _backend.ops().allgather(_value(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return _backend.ops().broadcast(_value(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = _everybodys.Average) -> Any:
    """This rank's rows of the reduced tensor."""
    return _backend.ops().reducescatter(_value(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """TensorFlow 1's. RuntimeError: Keras 3 keeps no such collection."""
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
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _public.__all__
