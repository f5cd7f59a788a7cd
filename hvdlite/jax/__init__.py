"""hvdlite on JAX: `import hvdlite.jax as hvd`.

    hvd.init()
    params = hvd.broadcast_parameters(params)
    optimizer = hvd.DistributedGradientTransformation(optax.adam(1e-3))

Collectives take and return trees of arrays, inside `jax.jit` and outside.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import _api, data
from .._api import *  # noqa: F403
from .compression import Compression
from .errors import translate_errors
from .ops import allgather, allreduce, alltoall, broadcast, reducescatter
from .optimizer import DistributedGradientTransformation, broadcast_parameters, check_consistency


def __getattr__(name: str) -> Any:
    if name in ("aggregation", "elastic", "rpc"):
        return import_module(f"{__name__}.elastic" if name == "elastic" else f"hvdlite.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Compression",
    "DistributedGradientTransformation",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_parameters",
    "check_consistency",
    "data",
    "elastic",  # noqa: F405
    "reducescatter",
    "translate_errors",
]
__all__ += _api.__all__
