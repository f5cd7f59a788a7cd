"""`horovod.common.basics`: the object through which Horovod's modules ask the library, here the library's functions.

Scripts rarely touch it; frameworks on top of Horovod do, and some reach for `horovod.torch.mpi_ops._basics`. An object
of this class holds nothing: there is one job in a process, and every such object asks about that one. The
functions stand in hvdlite.torch as well, where a script should ask.
"""

from __future__ import annotations

from typing import Any

from .. import ops
from .._core import cross_rank, cross_size, local_rank, local_size, rank, size
from ..lifecycle import capabilities
from ..lifecycle.init import init, is_homogeneous, is_initialized, shutdown
from ..process_sets.process_set import process_set_by_id, process_sets_by_number
from ..trace import recorder


class HorovodBasics:
    """Horovod's questions about the job. The arguments, a path to an extension, mean nothing here."""

    Average, Sum, Min, Max, Product = ops.Average, ops.Sum, ops.Min, ops.Max, ops.Product
    Adasum = 2

    def __init__(self, pkg_path: str | None = None, *args: Any) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of each registered process set, by its number."""
        return {number: list(each.ranks) for number, each in process_sets_by_number().items()}

    def _process_set_rank(self, process_set_id: int) -> int:
        """This rank's number in a set. ValueError if it is not in it, or there is none."""
        return process_set_by_id(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int:
        """How many ranks a set has. ValueError if there is none."""
        return process_set_by_id(process_set_id).size()

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    is_initialized = staticmethod(is_initialized)
    is_homogeneous = staticmethod(is_homogeneous)
    rank = staticmethod(rank)
    size = staticmethod(size)
    local_rank = staticmethod(local_rank)
    local_size = staticmethod(local_size)
    cross_rank = staticmethod(cross_rank)
    cross_size = staticmethod(cross_size)
    start_timeline = staticmethod(recorder.start_timeline)
    stop_timeline = staticmethod(recorder.stop_timeline)
    mpi_threads_supported = staticmethod(capabilities.mpi_threads_supported)
    mpi_enabled = staticmethod(capabilities.mpi_enabled)
    mpi_built = staticmethod(capabilities.mpi_built)
    gloo_enabled = staticmethod(capabilities.gloo_enabled)
    gloo_built = staticmethod(capabilities.gloo_built)
    nccl_built = staticmethod(capabilities.nccl_built)
    ddl_built = staticmethod(capabilities.ddl_built)
    ccl_built = staticmethod(capabilities.ccl_built)
    cuda_built = staticmethod(capabilities.cuda_built)
    rocm_built = staticmethod(capabilities.rocm_built)


_basics = HorovodBasics()
