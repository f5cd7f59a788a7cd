"""hvdlite on PyTorch tensors: `import hvdlite.torch as hvd`.

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

Collectives take and return tensors; the dtypes are those of the core, bfloat16 and float8 among them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import _api, data
from .._api import *  # noqa: F403
from .compression import Compression
from .graph_break import keep_off_graph as _keep_off_graph
from .memory import empty
from .ops import collectives as _ops
from .ops.fast_calls import fast_calls as _fast_calls
from .ops.sparse import sparse_allreduce_async

if TYPE_CHECKING:
    from . import elastic
    from .compressed.accordion import Accordion
    from .compressed.power_sgd import PowerSGD
    from .compressed.top_k import TopK
    from .consistency import check_consistency
    from .local import DiLoCo, LocalSGD
    from .optimizer import (
        DistributedOptimizer,
        WeightedAverage,
        gradient_stats,
        noise_scale,
        uneven_inputs,
        watch_gradients,
    )
    from .sharded_checkpoint import load_sharded, save_sharded
    from .state_broadcast import broadcast_optimizer_state, broadcast_parameters, broadcast_state
    from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from .training_scope import scope

_LATER = {  # on first use: more than half of the import, and not needed for torch.distributed
    "elastic": ("elastic",),
    "ps": ("ps",),
    "compressed.accordion": ("Accordion",),
    "compressed.power_sgd": ("PowerSGD",),
    "compressed.top_k": ("TopK",),
    "consistency": ("check_consistency",),
    "local": ("DiLoCo", "LocalSGD"),
    "sharded_checkpoint": ("load_sharded", "save_sharded"),
    "optimizer": (
        "DistributedOptimizer",
        "WeightedAverage",
        "gradient_stats",
        "noise_scale",
        "uneven_inputs",
        "watch_gradients",
    ),
    "state_broadcast": ("broadcast_optimizer_state", "broadcast_parameters", "broadcast_state"),
    "sync_batch_norm": ("SyncBatchNorm", "convert_sync_batchnorm"),
    "training_scope": ("scope",),
}
_ELSEWHERE = {"aggregation": "hvdlite.aggregation", "rpc": "hvdlite.rpc"}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}

allgather = _ops.allgather
allgather_async = _ops.allgather_async
allreduce = _ops.allreduce
allreduce_async = _ops.allreduce_async
allreduce_, allreduce_async_, synchronize = _fast_calls(_ops)
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

__all__ = [
    "Accordion",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "PowerSGD",
    "SyncBatchNorm",
    "TopK",
    "WeightedAverage",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_state",
    "check_consistency",
    "data",
    "convert_sync_batchnorm",
    "elastic",
    "empty",
    "gradient_stats",
    "load_sharded",
    "noise_scale",
    "save_sharded",
    "scope",
    "sparse_allreduce_async",
    "uneven_inputs",
    "watch_gradients",
]
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

_keep_off_graph(*(globals()[name] for name in __all__ if name not in _MODULE_OF))


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return import_module(_ELSEWHERE[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULE_OF[name]}")
    value: Any = module if name == _MODULE_OF[name] else getattr(module, name)
    if name != "DistributedOptimizer":
        _keep_off_graph(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
