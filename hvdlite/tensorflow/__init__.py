"""hvdlite on TensorFlow: `import hvdlite.tensorflow as hvd`.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

Collectives take tensors, variables and tf.IndexedSlices, eagerly and inside tf.function, and have gradients. Nothing
here was compiled against TensorFlow: any version from 2.16 on is served.

In tf.function collectives of one name go one after the other, in the order of the program: a name may come again in a
step. Where TensorFlow keeps no such order (in a graph of a session, or where several threads call one function) a name
that is started twice in a step is an error, tf.errors.InvalidArgumentError: give each call a name of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import _api, data
from .._api import *  # noqa: F403
from . import elastic, ops
from .compression import Compression
from .consistency import check_consistency
from .functions import (  # type: ignore[assignment]
    allgather_object,  # noqa: F401
    broadcast_,
    broadcast_global_variables,
    broadcast_object,  # noqa: F401  (by their names in _public)
    broadcast_object_fn,
    broadcast_variables,
)
from .ops import *  # type: ignore[assignment]  # noqa: F403
from .optimizer import BroadcastGlobalVariablesHook, DistributedOptimizer
from .strategy import Strategy
from .sync_batch_norm import SyncBatchNormalization
from .tape import DistributedGradientTape, PartialDistributedGradientTape


def __getattr__(name: str) -> Any:
    """Tables on servers and remote calls are imported when they are used."""
    if name in ("aggregation", "ps", "rpc"):
        return import_module(f"hvdlite.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "Strategy",
    "SyncBatchNormalization",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_consistency",
    "data",
    "elastic",
]
__all__ += ops.__all__
__all__ += _api.__all__
