"""Submission of a process group's call: one request of the core, or a group of them, on its process set.

The order of calls matches them on all ranks of a group. Two groups of the same ranks share one set and need not be
used in one order, so of these only the first goes without names; the calls of the others are named by group and number.
So are those that callbacks of futures start, in an order of their own (futures.py).

`asyncOp` is False where the caller waits anyway (torch 2.13): then the call waits here, and a finished Work comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, Work, _create_work_from_future  # type: ignore[attr-defined]

from ... import _core
from ...process_sets.process_set import ProcessSet, number_of
from ..adapter import DTYPES
from . import bucket_memory, futures
from .tensors import Part, device_terms, dtype_of, gpu_of
from .work import DONE, HOLDS, HvdWork, named, profiled, ranged

_NAMES = 4096  # after which the names of a group come again: the core knows them then
_DEFAULT = timedelta(minutes=30)  # torch's; as the limit of a group: the limits of the job hold
_NO_TIME = timedelta(0)


class Submission:
    """The state of a group, and the path of all its calls."""

    def open(
        self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, label: str, process_set: ProcessSet,
        unnamed: bool
    ) -> None:  # fmt: skip
        """rank: in the group. ranks: those of the job, in the order of the group."""
        self._store, self._me, self._ranks, self._count = store, rank, list(ranks), len(ranks)
        self._label, self._desc, self._set, self._unnamed = label, "undefined", process_set, unnamed
        self._in = number_of(process_set)
        ordered = sorted(ranks)
        self._set_ranks = [ordered.index(each) for each in ranks]  # in the set, of each rank of the group
        self._ascending = self._set_ranks == list(range(self._count))
        self._calls = self._asides = 0
        self._closed, self._line = False, futures.FutureQueue()
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long each later call may take, where it gives no limit of its own."""
        self._limit = None if timeout >= _DEFAULT else timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _text(self, what: str) -> Callable[[], str]:
        number = self._calls
        return lambda: f"process group {self._label!r} ({self._desc}), {what}, call {number}"

    def _name(self, what: str) -> str | None:
        if self._closed:
            raise ValueError(
                f"process group {self._label!r} ({self._desc}), {what}: the group was destroyed; use another one, or "
                "make a new one with new_group or init_process_group [HVD213]"
            )
        self._calls += 1
        if futures.inside():
            self._asides += 1
            return f"{what}.{self._label}.then.{self._asides % _NAMES}"
        return None if self._unnamed else f"{what}.{self._label}.{self._calls % _NAMES}"

    def _root(self, opts: Any) -> int:
        """The root in the group, which the group's own methods also take as a number. Raises ValueError."""
        root: int = opts if isinstance(opts, int) else opts.rootRank
        if not 0 <= root < self._count:
            raise ValueError(
                f"process group {self._label!r}: rank {self._me} names rank {root} as the root: pass one of 0 to "
                f"{self._count - 1} [HVD216]"
            )
        return root

    def _timeout(self, opts: Any) -> float | None:
        timeout = getattr(opts, "timeout", None)
        return timeout.total_seconds() if timeout is not None and _NO_TIME < timeout < _DEFAULT else self._limit

    def _plain(self, opts: Any, *tensors: torch.Tensor) -> bool:
        """Whether the fast path takes a call: it waits at once, of nothing but the addresses of these tensors."""
        if not self._unnamed or getattr(opts, "asyncOp", True) or futures.inside() or profiled():
            return False
        for each in tensors:
            if each.__class__ is not torch.Tensor or not each.is_cpu or each.layout is not torch.strided:
                return False
            if each.dtype not in DTYPES or not each.is_contiguous() or each.is_neg():
                return False
        return self._timeout(opts) == self._limit

    def _at_once(
        self, kind: int, op: int, what: str, source: torch.Tensor, target: torch.Tensor, shape: tuple[int, ...],
        room: int = 0
    ) -> Work:  # fmt: skip
        """The fast path: makes nothing but the request, which is known from the second call on. room: of an even
        allgather or alltoall, bytes at the target."""
        self._calls += 1
        request = _core.request(
            kind, op, DTYPES[source.dtype], None, shape, process_set=self._in, output_bytes=room, even=room > 0
        )
        try:
            request.run(
                source.data_ptr(), target.data_ptr(), (source.untyped_storage(), target.untyped_storage()), self._limit
            )
        except Exception as error:
            named(error, self._text(what))
            raise
        return DONE

    def _go(
        self, kind: int, what: str, parts: Sequence[Part], results: list[torch.Tensor],
        finish: Callable[[list[_core.Pending]], Any] | None = None, opts: Any = None, **more: Any
    ) -> Work:  # fmt: skip
        """Submits the parts, several of them as a group. finish: what completes the result."""
        with ranged(what):
            return self._submit(kind, what, parts, results, finish, opts, **more)

    def _submit(
        self, kind: int, what: str, parts: Sequence[Part], results: list[torch.Tensor],
        finish: Callable[[list[_core.Pending]], Any] | None, opts: Any, **more: Any
    ) -> Work:  # fmt: skip
        limit, name, waits = self._timeout(opts), self._name(what), getattr(opts, "asyncOp", True) is False
        op = more.pop("op", 0)
        quiet = _core.QUIET if waits else _core.SOON
        try:
            device = gpu_of([*results, *(part.source for part in parts)]) if kind != _core.BARRIER else None
            if len(parts) == 1 and device is None:
                source, target, shape, room = parts[0]
                request = _core.request(
                    kind, op, dtype_of(source), name, tuple(shape), process_set=self._in, output_bytes=room, **more
                )
                addresses, keep = _addresses(kind, source, target), (source.untyped_storage(), target, results)
                if waits and finish is None:
                    request.run(*addresses, keep, limit)
                    return DONE
                pending = [_core.Pending(request).start(*addresses, quiet, keep)]
            else:
                pending = self._several(kind, op, name, parts, results, quiet, device is not None, more)
        except Exception as error:
            named(error, self._text(what))
            raise
        work = HvdWork(pending, results, limit, self._text(what), finish, device, self._line)
        if waits:
            work.wait()
            return DONE
        if HOLDS and len(pending) > 1:  # C++ waits for it once for each tensor
            return _create_work_from_future(work.get_future())
        return work

    def _several(
        self, kind: int, op: int, name: str | None, parts: Sequence[Part], results: list[torch.Tensor], quiet: int,
        on_device: bool, more: dict[str, Any]
    ) -> list[_core.Pending]:  # fmt: skip
        """A group, or one on a device."""
        names = [name]
        if len(parts) > 1:
            more |= {"group": _core.group_number(name, self._in), "group_count": len(parts)}
            names = [None if name is None else f"{name}.{i}" for i in range(len(parts))]
        requests = []
        for each, (source, target, shape, room) in zip(names, parts):
            start, into = _addresses(kind, source, target)
            keep = (source.untyped_storage(), target, results)
            terms = device_terms(source) if on_device else {}
            requests.append(
                _core.submission(
                    kind, op, dtype_of(source), each, tuple(shape), start, into, keep, process_set=self._in,
                    output_bytes=room, **more, **terms,
                )
            )  # fmt: skip
        return _core.submit_group(requests, quiet)


def _addresses(kind: int, source: torch.Tensor, target: torch.Tensor | None) -> tuple[int, int]:
    """Where the core reads, and where it writes. A bucket of DDP's may be known to it by an address of its own."""
    if kind == _core.ALLREDUCE and futures.in_backward():
        return (address := bucket_memory.address_of(source)), address
    return source.data_ptr(), 0 if target is None else target.data_ptr()
