"""How does a call of a process group travel? As one request of the core, or a group of them, on its process set.

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
from ...process_set import ProcessSet, number_of
from . import futures
from .tensors import Part, dtype_of
from .work import DONE, HOLDS, HvdWork, named

_NAMES = 4096  # after which the names of a group come again: the core knows them then
_DEFAULT = timedelta(minutes=30)  # torch's; as the limit of a group: the limits of the job hold
_NO_TIME = timedelta(0)


class Submission:
    """The state of a group, and the way of all its calls."""

    def open(
        self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, label: str, process_set: ProcessSet,
        unnamed: bool
    ) -> None:  # fmt: skip
        """rank: in the group. ranks: those of the job, in the order of the group."""
        self._store, self._me, self._ranks, self._count = store, rank, list(ranks), len(ranks)
        self._label, self._desc, self._set, self._unnamed = label, "undefined", process_set, unnamed
        self._in = number_of(process_set)
        ordered = sorted(ranks)
        self._place = [ordered.index(each) for each in ranks]  # in the set, of each rank of the group
        self._ascending = self._place == list(range(self._count))
        self._calls = self._asides = 0
        self._closed = False
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long each later call may take, where it gives no limit of its own."""
        self._limit = None if timeout >= _DEFAULT else timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _said(self, what: str) -> Callable[[], str]:
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

    def _timeout(self, opts: Any) -> float | None:
        asked = getattr(opts, "timeout", None)
        return asked.total_seconds() if asked is not None and _NO_TIME < asked < _DEFAULT else self._limit

    def _go(
        self, kind: int, what: str, parts: Sequence[Part], results: list[torch.Tensor],
        finish: Callable[[list[_core.Pending]], Any] | None = None, opts: Any = None, **more: Any
    ) -> Work:  # fmt: skip
        """Submits the parts, several of them as a group. finish: what lets the result land."""
        limit, name, waits = self._timeout(opts), self._name(what), getattr(opts, "asyncOp", True) is False
        op = more.pop("op", 0)
        quiet = _core.QUIET if waits else _core.SOON
        try:
            if len(parts) == 1:
                source, target, shape, room = parts[0]
                request = _core.request(
                    kind, op, dtype_of(source), name, tuple(shape), process_set=self._in, output_bytes=room, **more
                )
                keep = (source.untyped_storage(), results)
                if waits and finish is None:
                    request.run(_start(kind, source, target), target, keep, limit)
                    return DONE
                pending = [_core.Pending(request).start(_start(kind, source, target), target, quiet, keep)]
            else:
                pending = self._group(kind, op, name, parts, results, quiet, more)
        except Exception as error:
            named(error, self._said(what))
            raise
        work = HvdWork(pending, results, limit, self._said(what), finish)
        if waits:
            work.wait()
            return DONE
        if HOLDS and len(pending) > 1:  # C++ waits for it once for each tensor
            return _create_work_from_future(work.get_future())
        return work

    def _group(
        self, kind: int, op: int, name: str | None, parts: Sequence[Part], results: list[torch.Tensor], quiet: int,
        more: dict[str, Any]
    ) -> list[_core.Pending]:  # fmt: skip
        group = _core.group_number(name, self._in)
        given = [
            _core.given(
                kind, op, dtype_of(source), None if name is None else f"{name}.{i}", tuple(shape),
                _start(kind, source, target), target, (source.untyped_storage(), results), process_set=self._in,
                group=group, group_count=len(parts), output_bytes=room, **more,
            )
            for i, (source, target, shape, room) in enumerate(parts)
        ]  # fmt: skip
        return _core.submit_group(given, quiet)


def _start(kind: int, source: torch.Tensor, target: int) -> int:
    """Where the core reads. An allreduce is in place, and the place may be known by another address (buckets.py)."""
    return target if kind == _core.ALLREDUCE else source.data_ptr()
