"""The public names that need no framework, stated once: `hvdlite`, `hvdlite.numpy` and `hvdlite.torch` all show them.

A new name is added here, twice (the import and `__all__`; a linter compares them), and nowhere else. What
takes tensors is bound to an adapter in hvdlite/numpy.py and hvdlite/torch/__init__.py.

Nothing here loads NumPy: a script that only asks for its rank does not pay for it.
"""

from __future__ import annotations

from . import autotune
from ._core import cross_rank, cross_size, local_rank, local_size, rank, size
from ._core.memory import memory_stats
from .errors import (
    HorovodInternalError,
    HvdArgumentError,
    HvdError,
    HvdForkError,
    HvdInitError,
    HvdMismatchError,
    HvdNotFiniteError,
    HvdNotInitializedError,
    HvdNotYetError,
    HvdOptionError,
    HvdPeerLostError,
    HvdRunError,
    HvdStateError,
    HvdTimeoutError,
)
from .executors.run import run
from .lifecycle.capabilities import (
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
)
from .lifecycle.init import init, is_homogeneous, is_initialized, shutdown
from .metrics import StepLogger, report, stats, stats_step, write_stats
from .metrics.counters import counters
from .metrics.link_traffic import link_stats
from .ops import Adasum, Average, Handle, Max, Min, Product, Sum, barrier, join, monitored_barrier, poll, synchronize
from .ops.arguments import Compressor
from .ops.objects import allgather_object, broadcast_object
from .process_sets.mesh import Mesh
from .process_sets.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from .trace.recorder import dump_trace, start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compressor",
    "Handle",
    "HorovodInternalError",
    "HvdArgumentError",
    "HvdError",
    "HvdForkError",
    "HvdInitError",
    "HvdMismatchError",
    "HvdNotFiniteError",
    "HvdNotInitializedError",
    "HvdNotYetError",
    "HvdOptionError",
    "HvdPeerLostError",
    "HvdStateError",
    "HvdRunError",
    "HvdTimeoutError",
    "Max",
    "Mesh",
    "Min",
    "ProcessSet",
    "Product",
    "StepLogger",
    "Sum",
    "add_process_set",
    "allgather_object",
    "autotune",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "dump_trace",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "link_stats",
    "local_rank",
    "local_size",
    "memory_stats",
    "monitored_barrier",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "remove_process_set",
    "report",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stats_step",
    "stop_timeline",
    "synchronize",
    "write_stats",
]
