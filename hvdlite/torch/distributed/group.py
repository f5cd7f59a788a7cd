"""Process group of backend "hvdlite": a Python subclass of torch's ProcessGroup.

C++ callers (DDP's reducer, functional collectives) reach it by torch's trampoline (PyProcessGroup.hpp), which finds our
methods by name; Python callers find them as attributes. No method uses more of the base class than rank() and size().
Python-only calls and the new names of torch 2.13 stand beside the old ones.
"""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from ... import _core, ops
from ...errors import HvdNotYetError
from ...lifecycle import init
from ..graph_break import keep_off_graph
from . import functional, futures, work
from .data_movement import Moves
from .reductions import Reductions
from .rendezvous import JOB
from .send_recv import Pairs
from .submission import Submission
from .tensors import POOL, Part

_Base: Any = dist.ProcessGroup  # its stubs know no subclasses in Python
# What the base class would call on a backend in C++, of which there is none: one ends by SIGSEGV, others do nothing.
_ABSENT = {
    "split_group": "make a group with torch.distributed.new_group on all ranks",
    "merge_remote_group": "make a group with torch.distributed.new_group on all ranks",
    "_register_on_completion_hook": "use a callback, work.get_future().then(...)",
    "_start_coalescing": "use torch.distributed._coalescing_manager without a device",
    "_end_coalescing": "use torch.distributed._coalescing_manager without a device",
}


class HvdProcessGroup(Reductions, Moves, Pairs, _Base):
    """Made by torch, by init_process_group and new_group. Ranks in calls are those of the group."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    bound_device_id = None

    def __init__(self, store: Store, rank: int, ranks: list[int], timeout: timedelta, label: str, whole: bool) -> None:
        _Base.__init__(self, rank, len(ranks))  # the form with a store is not for subclasses
        Pairs.__init__(self)
        self._whole = whole  # the default group, with which the job ends
        process_set, first = JOB.set_of(ranks, store)
        self.open(store, rank, ranks, timeout, label, process_set, first)

    # -- what torch asks a group about

    def getBackendName(self) -> str:
        """hvdlite."""
        return "hvdlite"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """By which functional collectives find it."""
        return self._label

    def setGroupName(self, name: str) -> None:
        """Torch names groups itself."""
        self._label = name

    def getGroupDesc(self) -> str:
        """The group_desc of new_group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """As getGroupDesc has it."""
        self._desc = desc

    group_name = pg_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu"), torch.device("cuda")])

    def get_group_store(self) -> Store:
        """The store that torch gave it."""
        return self._store

    def _get_backend(self, device: Any) -> HvdProcessGroup:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type} [HVD203]")
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether allocate_tensor has memory for that device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Shared memory, which collectives need not copy: FSDP2 asks for its buffers here."""
        return POOL.tensor(size, dtype)

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # every call counts from the first one on

    def _wait_for_pending_works(self) -> None:
        pass  # a Work that was dropped still arrives

    def _has_hooks(self) -> bool:
        return False

    # -- no rank gets data

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Over when all ranks of the group have come."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._go(_core.BARRIER, "barrier", [Part(nothing, None, ())], [], None, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names all ranks that are missing, on every rank: HvdTimeoutError. torch's own function of that
        name takes Gloo's groups only."""
        ops.monitored_barrier(self._limit if timeout is None else timeout, self._set, self._label)

    # -- the end

    def shutdown(self) -> None:
        """By destroy_process_group. With the default group the job ends, unless the script has called hvd.init()."""
        self._closed, self._unnamed = True, False
        self._line.end()
        if self._whole:
            self._whole = False
            JOB.leave()

    def abort(self) -> None:
        """Ends the job on all ranks with an error that names this one and the group."""
        init.abort(f"has aborted the process group {self._label!r}")
        self.shutdown()


def create(options: Any, _: Any = None) -> HvdProcessGroup:
    """By torch, on members only. options: torch's DistributedBackendOptions. Raises HvdInitError, ValueError."""
    size, ranks = options.group_size, list(options.global_ranks_in_group)
    whole = not ranks
    if whole or not init.is_initialized():
        if ranks and size < dist.get_world_size():
            raise ValueError(
                f"the first group of backend hvdlite has the ranks {ranks} of {dist.get_world_size()}: make one of all "
                "ranks before, or call hvd.init() [HVD213]"
            )
        rank = ranks[options.group_rank] if ranks else options.group_rank
        JOB.enter(options.store, rank, size)
    ranks = ranks or list(range(size))
    return HvdProcessGroup(options.store, options.group_rank, ranks, options.timeout, str(options.group_id), whole)


def _refusing(call: str, instead: str) -> Any:
    def refuse(self: HvdProcessGroup, *_: Any, **__: Any) -> Any:
        # else torch collects later collectives, of which none would ever run, once this error is caught
        dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)
        raise HvdNotYetError(
            f"process group {self._label!r} of rank {self.rank()}: backend hvdlite has no {call}: {instead} [HVD246]"
        )

    return refuse


for _call, _instead in _ABSENT.items():
    setattr(HvdProcessGroup, _call, _refusing(_call, _instead))
functional.serve(HvdProcessGroup)

# torch.compile would follow a frame of ours and stumble over members that torch has not registered for a group.
for _kind in (HvdProcessGroup, Submission, Reductions, Moves, Pairs, work.HvdWork, futures.FutureQueue):
    keep_off_graph(*(each for each in vars(_kind).values() if isinstance(each, FunctionType)))
keep_off_graph(*(each for each in vars(futures).values() if isinstance(each, FunctionType)))
