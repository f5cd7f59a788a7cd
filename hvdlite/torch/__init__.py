"""hvdlite on PyTorch tensors: `import hvdlite.torch as hvd`.

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

Collectives take and return tensors; the dtypes are those of the core, bfloat16 among them.
"""

from __future__ import annotations

from .. import data
from .._core import cross_rank, cross_size, local_rank, local_size, rank, size
from .._life import init, is_homogeneous, is_initialized, shutdown
from ..built import (
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
from ..errors import (
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
from ..objects import allgather_object, broadcast_object
from ..ops import Average, Max, Min, Product, Sum, barrier, poll, synchronize
from ..process_set import global_process_set
from . import elastic
from .compression import Compression
from .consistency import check_consistency
from .ops import collectives as _ops
from .optimizer import DistributedOptimizer, WeightedAverage, uneven_inputs
from .state import broadcast_optimizer_state, broadcast_parameters, broadcast_state
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

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
    "Compression",
    "DistributedOptimizer",
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
    "WeightedAverage",
    "SyncBatchNorm",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_state",
    "ccl_built",
    "check_consistency",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
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
    "uneven_inputs",
]
