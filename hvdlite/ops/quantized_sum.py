"""The sum of float32 tensors over ranks in 8 or 4 bits, as a chain of ordinary collectives.

Each rank owns a range of the tensors' blocks. An alltoall brings the encoded blocks to their owners, the owner adds
them in rank order and encodes the sum, an allgather brings the encoded sums to all. So a block is rounded once on each
rank and once as a sum, all ranks decode the same bytes, and none of the core's algorithms knows of it (ZeRO++'s qgZ, G.
Wang et al. 2023, is the same exchange). Where hosts have several ranks, a reduce inside each host comes first and a
broadcast inside it last, both of full float32, and only the first rank of each host takes part in between.

A sum is addresses and counts, so it serves every framework. It is a chain of requests, of which one is in flight. Every
call may be interrupted by a signal handler and repeated. If a request fails by a mismatch, a rank that other ranks wait
for in a later one sends something there that fits nothing, and they fail, too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import _core
from .._core import byte_exchange, ffi, lib
from ..errors import OUTCOMES, HvdMismatchError
from ..process_sets.levels import levels_of
from ..process_sets.process_set import ProcessSet, number_of
from .arguments import Sum, full_name

BLOCK: int = lib.HVD_QUANTIZED_BLOCK
_UINT8, _FLOAT32 = _core.DTYPES["uint8"], _core.DTYPES["float32"]
_LEAST = -(2**31)  # of priorities
_NO_SHAPE = (0,) * 8  # as many dimensions as there can be
_HEAD = struct.Struct("<QI")  # of each rank: elements, and a checksum of the counts
# A row of the alltoall and the allgather, in bytes: a head fits in, and a block is some of them. Ranks with different
# bits thus disagree on a dimension, and their error names both.
_ROW = {8: 20, 4: 12}
_uncleared = ffi.new_allocator(should_clear_after_alloc=False)


class Member(NamedTuple):
    """A contiguous float32 tensor in the CPU's memory: addresses of its values, of the result, of the residual (0:
    none); elements."""

    source: int
    target: int
    residual: int
    elements: int


class _Step(NamedTuple):
    """prepare: makes the request that comes next, of the one that has ended. refusals: what is sent if it fails."""

    stage: int
    prepare: Callable[[Any], Any]
    refusals: tuple[_Step, ...] = ()


def _address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


def _readable(error: Exception) -> Exception:
    """With the names that users know in the place of dimensions."""
    text = str(error)
    for bits, row in _ROW.items():
        text = text.replace(f"[*, {row}]", f"int{bits}")
    if not isinstance(error, HvdMismatchError) or text == str(error):
        return error
    readable = HvdMismatchError(text)
    readable.ranks = error.ranks
    return readable


def meet(bits: int, name: str | None, process_set: ProcessSet) -> None:
    """Wait for all ranks of a set where hosts have several: the sum itself runs in other sets, in which nobody sees a
    rank that sums otherwise, or has joined. Raises what a collective raises."""
    if levels_of(process_set).across is process_set:
        return
    request = _core.request(
        _core.ALLTOALL, 0, _UINT8, full_name("allreduce.", name), (0, _ROW[bits]), process_set=number_of(process_set)
    )
    pending = _core.Pending(request).start(0, 0, _core.QUIET, None)
    error = pending.ended()
    pending.release()
    if error is not None:
        raise _readable(error)


class QuantizedSum:
    """One sum under way. `keep` holds the memory of the members. `priority`: as in `_core.request`.

    All ranks of the set give members of the same counts, in the same order. `begin` sends the first request, and so
    does the first `step`.
    """

    def __init__(
        self, bits: int, members: Sequence[Member], name: str | None, process_set: ProcessSet, keep: Any,
        prescale: float = 1.0, factor: float = 1.0, priority: int = 0
    ) -> None:  # fmt: skip
        levels = levels_of(process_set)
        self.ranks, self.name, self._full = process_set.ranks, name, full_name("allreduce.", name)
        self._last = None if name is None else f"broadcast.{name}.quantized"
        self._members, self._keep, self._prescale, self._priority = members, keep, prescale, priority
        self._inside = None if levels.inside is None else number_of(levels.inside)
        self._across = None if levels.across is None else number_of(levels.across)
        across = levels.across
        self._sizes = (1, 0) if across is None else (across.size(), across.rank())
        self._total = sum(member.elements for member in members)
        if self._inside is not None:
            self._flat = _uncleared("float[]", max(self._total, 1))
        self._job, self._tensors = self._made(bits, factor)
        self._row = _ROW[bits]
        self._error: Exception | None = None
        leads = self._across is not None
        steps = []
        if self._inside is not None:
            steps.append(_Step(0, self._pack, (_Step(1, self._refuse_across),) if leads else ()))
        if leads:
            others = () if self._inside is None else (_Step(3, self._refuse_broadcast),)
            steps += [_Step(1, self._encode, others), _Step(2, self._add, others)]
        if self._inside is not None:
            steps.append(_Step(3, self._hand_out))
        self.stage = 0  # of the request in flight, the same on all ranks that have a part in it
        # What follows; the request that is to be sent, the one before it, and its successor, which may be in flight.
        self._state: tuple[Any, ...] = (tuple(steps), None, None, None, ())

    def _made(self, bits: int, factor: float) -> tuple[Any, Any]:
        members, at = self._members, 0
        tensors = ffi.new("struct hvd_quantized_tensor[]", max(len(members), 1))
        for tensor, member in zip(tensors, members):
            source, target = member.source, member.target
            if self._inside is not None:
                source = target = _address(self._flat + at)
            setattr(tensor, "from", ffi.cast("float *", source))
            tensor.to, tensor.residual = ffi.cast("float *", target), ffi.cast("float *", member.residual)
            tensor.count = member.elements
            at += member.elements
        job = ffi.new("struct hvd_quantized *")
        job.tensors, job.count, job.bits = tensors, len(members), bits
        job.ranks, job.rank = self._sizes
        job.prescale, job.factor = (self._prescale if self._inside is None else 1.0), factor
        self._block = 4 + bits * BLOCK // 8
        self._cut = [lib.hvd_quantized_first(job, rank) for rank in range(job.ranks + 1)]
        return job, tensors

    # The chain.

    def begin(self) -> QuantizedSum:
        """Send the first request. Never waits for another rank."""
        if not self._begun():
            self._prepare(None)
        self._launch()
        return self

    def refuse(self) -> QuantizedSum:
        """Instead of `begin`: this rank has no values, and all ranks shall fail with a mismatch that names it."""
        if not self._begun():
            steps = self._state[0]
            first = self._refuse_across if self._inside is None else self._refuse_inside
            self._state = ((_Step(0, first, steps[0].refusals),), None, None, None, ())
        return self.begin()

    def _begun(self) -> bool:
        rest, request, _, pending, _ = self._state
        return request is not None or pending is not None or not rest

    def _prepare(self, ended: Any) -> None:
        (step, *rest), *_ = self._state
        self.stage = step.stage
        self._state = (tuple(rest), step.prepare(ended), ended, None, step.refusals)

    def _launch(self) -> None:
        rest, request, ended, pending, refusals = self._state
        if request is not None:
            if pending is None or not pending.native:
                known, source, target, keep = request
                pending = _core.Pending(known)
                self._state = (rest, request, ended, pending, refusals)
                pending.start(source, target, _core.SOON, keep)
            self._state = (rest, None, ended, pending, refusals)
        if ended is not None:
            ended.release()
            self._state = (rest, None, None, pending, refusals)

    def step(self, block: bool = True) -> bool:
        """Go on to the next request; whether that was possible, always if it may block. Raises nothing that `wait`
        would raise."""
        self.begin()  # which an exception may have interrupted
        rest, _, _, pending, refusals = self._state
        if pending is None or not (block or pending.done()):
            return False
        error = pending.ended()
        if error is not None and refusals is not None:
            self._error = self._error or _readable(error)
            rest = refusals if isinstance(error, HvdMismatchError) else ()
            self._state = (rest, None, None, pending, None)  # a call that comes again does this once
        try:
            if not rest:
                self._end(pending)
                return True
            self._prepare(pending)
            self._launch()
        except OUTCOMES as failure:
            self._error = self._error or failure
            self._state = ((), None, pending, None, ())
        return True

    def _end(self, pending: Any) -> None:
        if self._error is None:
            if self._inside is not None:
                self._unpack()
            else:
                self._decode(pending)
        self._state = ((), None, pending, None, ())
        self._launch()  # releases it

    def over(self) -> bool:
        """Whether nothing of it is in flight or to be sent."""
        return self._state[:4] == ((), None, None, None)

    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Goes on as far as that needs no waiting."""
        while self.step(block=False):
            pass
        return self.over()

    def wait(self) -> QuantizedSum:
        """Until it is over. Raises why it has failed; HvdMismatchError also if the ranks' counts differ."""
        while self.step():
            pass
        if self._error is not None:
            raise self._error
        self._keep = None
        return self

    # The requests.

    def _request(
        self, kind: int, dtype: int, name: str | None, shape: tuple[int, ...], number: int | None, **more: Any
    ) -> Any:
        op = Sum if kind == _core.REDUCE else 0
        return _core.request(kind, op, dtype, name, shape, process_set=number or 0, **more)

    def _refuse_inside(self, _: Any) -> Any:
        return self._request(_core.REDUCE, _FLOAT32, self._full, _NO_SHAPE, self._inside), 0, 0, None

    def _refuse_across(self, _: Any) -> Any:
        shape, priority = ((0, self._row), _LEAST) if self._missed() else (_NO_SHAPE, 0)
        request = self._request(_core.ALLTOALL, _UINT8, self._full, shape, self._across, priority=priority)
        return request, 0, 0, None

    def _refuse_broadcast(self, _: Any) -> Any:
        shape, priority = ((self._total,), _LEAST) if self._missed() else (_NO_SHAPE, 0)
        request = self._request(_core.BROADCAST, _FLOAT32, self._last, shape, self._inside, priority=priority)
        address = _address(self._flat)
        return request, address, address, self._flat

    def _missed(self) -> bool:
        """Whether the ranks disagree on a priority, by which an optimizer reports a missed step: others learn that."""
        return str(_LEAST) in str(self._error)

    def _pack(self, _: Any) -> Any:
        at = 0
        for member in self._members:
            byte_exchange.move(_address(self._flat + at), member.source, 4 * member.elements)
            at += member.elements
        address = _address(self._flat)
        request = self._request(
            _core.REDUCE, _FLOAT32, self._full, (self._total,), self._inside, prescale=self._prescale,
            priority=self._priority,
        )  # fmt: skip
        return request, address, address if self._across is not None else 0, (self._flat, self._keep)

    def _encode(self, _: Any) -> Any:
        rank = self._job.rank
        mine = self._rows_of(rank)
        splits = tuple(0 if r == rank else self._rows_of(r) for r in range(self._job.ranks))
        self._out = _uncleared("unsigned char[]", max(sum(splits) * self._row, 1))
        lib.hvd_quantized_encode(self._job, self._out)
        self._sums = _uncleared("unsigned char[]", (mine + 1) * self._row)
        request = self._request(
            _core.ALLTOALL, _UINT8, self._full, (sum(splits), self._row), self._across, splits=splits,
            priority=self._priority,
        )  # fmt: skip
        return request, _address(self._out), 0, (self._keep, self._out)

    def _add(self, pending: Any) -> Any:
        came, rank = pending.gathered(), self._job.rank
        mine = self._rows_of(rank)
        fits = all(rows == (0 if r == rank else mine) for r, rows in enumerate(came.rows_of))
        if fits:
            lib.hvd_quantized_sum(self._job, self._out, ffi.cast("unsigned char *", came.address), self._sums)
        rows = mine + 1 if fits else 1  # else some rank has another count: the heads say so to all
        head = self._sums + (rows - 1) * self._row
        counts = ",".join(str(member.elements) for member in self._members)
        ffi.memmove(head, _HEAD.pack(self._total, zlib.crc32(counts.encode())).ljust(self._row, b"\0"), self._row)
        name = None if self.name is None else f"allgather.{self.name}.quantized"
        request = self._request(_core.ALLGATHER, _UINT8, name, (rows, self._row), self._across)
        return request, _address(self._sums), 0, (self._keep, self._sums)

    def _decode(self, pending: Any) -> None:
        came, at, heads = pending.gathered(), 0, []
        base = ffi.cast("unsigned char *", came.address)
        for rows in came.rows_of:
            at += rows
            none = rows < 1  # which no rank gives
            heads.append((0, 0) if none else _HEAD.unpack(bytes(ffi.buffer(base + (at - 1) * self._row, _HEAD.size))))
        due = [self._rows_of(rank) + 1 for rank in range(self._job.ranks)]
        if len(set(heads)) > 1 or list(came.rows_of) != due:
            self._error = self._error or self._differ(heads)
            return
        lib.hvd_quantized_decode(self._job, base, self._row)

    def _hand_out(self, pending: Any) -> Any:
        if self._across is not None:
            self._decode(pending)
        if self._error is not None:
            return self._refuse_broadcast(pending)
        address = _address(self._flat)
        request = self._request(_core.BROADCAST, _FLOAT32, self._last, (self._total,), self._inside)
        return request, address, address, (self._flat, self._keep)

    def _unpack(self) -> None:
        at = 0
        for member in self._members:
            byte_exchange.move(member.target, _address(self._flat + at), 4 * member.elements)
            at += member.elements

    def _rows_of(self, rank: int) -> int:
        return (self._cut[rank + 1] - self._cut[rank]) * self._block // self._row

    def _differ(self, heads: list[tuple[int, int]]) -> HvdMismatchError:
        other = next((r for r, head in enumerate(heads) if head != heads[0]), 0)
        of = "" if self.name is None else f" of {self.name!r}"
        return HvdMismatchError(
            f"compression: the ranks give different tensors{of}: rank {self.ranks[0]} gives {heads[0][0]} elements, "
            f"another one {heads[other][0]}, and shapes or order differ. Give the same tensors on all ranks [HVD301]"
        )

    def stats(self) -> list[tuple[tuple[float, float, int], tuple[float, float, int]]]:
        """Of each member, of what this rank gave and of the result: greatest magnitude, sum of squares, elements that
        are NaN or infinite. Zeros for what another rank of the host gave."""
        both = [(tensor.given, tensor.result) for tensor in self._tensors[0 : len(self._members)]]
        return [tuple((each.greatest, each.square, each.not_finite) for each in pair) for pair in both]  # type: ignore[misc]
