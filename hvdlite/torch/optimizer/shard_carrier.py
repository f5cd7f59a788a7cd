"""Carrier of a sharded optimizer: gradients are reduced to the ranks that own them, and dropped where they came from.

A bucket of the layout (`training.shard_layout`) goes when its gradients are ready and all buckets before it have gone:
by one reducescatter, or by one reduce where it has one owner. Then `p.grad` is a `SentGradient`, which has no memory
and raises an error for code that reads it. At most WINDOW buckets are in flight, since each keeps its gradients alive.
All ranks send in one order. But where a bucket is frozen on some ranks only, these send it at the end of the round, and
the others must not wait for it before: the window is a bound of memory, and is given up for such a round.

All that travels of a bucket (gradients, then values, then state) has the name that the gradient's allreduce would have.
So a rank that is in another part of its step than the others, or not sharded, is a mismatch at once and not a hang.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ... import _core
from ...errors import HvdError, HvdMismatchError, is_outcome
from ...errors.codes import uncoded
from ...lifecycle.init import incarnations
from ...ops import Average, Handle, Sum
from ...ops.arguments import full_name
from ...ops.tensors import placed
from ...process_sets.process_set import ProcessSet, number_of
from ...rendezvous import elastic_member
from ...training.shard_layout import Bucket
from ..ops import plain
from .buckets import Carrier
from .failed_backward import PRIORITY, SKIP_SHAPE
from .gradient_codec import Flight, Wire
from .reducer import Exchange
from .sent_gradient import SentGradient
from .share_reduction import Part, ShareReduction

WINDOW = 3  # buckets in flight at once
_WINDOW_S = 1.0  # longer than that a rank waits for no bucket: another one may send it at the end of the round only
_LOOK_S = 0.1
_OTHER_KIND = "disagree on the collective"  # in the core's text


class ShardedWire(Wire):
    """A wire whose gradients are not reduced in place."""

    def again(self, numbers: Sequence[int]) -> None:
        """Shares are added to; nothing of a gradient is changed."""

    def note_data(self, numbers: Sequence[int]) -> None:
        super().note_data([n for n in numbers if not isinstance(self.parameters[n].grad, SentGradient)])


class ShardedExchange(Exchange):
    """An exchange whose guards stay, since backward must not add to a `SentGradient`."""

    carrier: ShardCarrier

    def _over(self, calm: bool) -> None:
        super()._over(False)

    def reaching(self, number: int) -> None:
        super().reaching(number)
        self.carrier.reaching(number)

    def _landings(self) -> Iterator[Callable[[], None]]:
        """As without shards, unless another rank is in no round: then this rank has the error and waits for nothing."""
        elsewhere = self._elsewhere()
        if elsewhere is None:
            waits = super()._landings()
            yield next(waits)  # sends what is lacking
            yield self.carrier.go_across
            yield from waits
            return

        def refuse() -> None:
            raise elsewhere

        yield refuse

    def _skip_lacking(self) -> None:
        super()._skip_lacking()
        self.carrier.go_across()

    def _elsewhere(self) -> HvdMismatchError | None:
        """Wait until all ranks are in the round: None. The error, if one is in another part of its loop instead."""
        pending = self.wire.agreement.pending()
        while pending and not _core.within(pending, _LOOK_S):
            for flight in dict.fromkeys(self.in_flight.values()):
                error = flight.failure()
                if isinstance(error, HvdMismatchError) and _OTHER_KIND in str(error):
                    found = HvdMismatchError(
                        "another rank is not in this backward pass: it is in optimizer.step() or state_dict(), "
                        "which all ranks of a sharded optimizer must call after the same passes: "
                        f"{uncoded(str(error))} [HVD310]"
                    )
                    found.ranks = error.ranks
                    return found
        return None


class ShardCarrier(Carrier):
    """Sends buckets, and holds this rank's share of each: `shares`."""

    def __init__(self, exchange: Exchange, inside: ProcessSet, across: ProcessSet | None) -> None:
        """inside: the ranks that shard. across: the ranks with equal shares, where there are several such groups."""
        super().__init__(exchange)
        self.process_set, self.across = inside, across
        self.assign()
        self._adds: set[int] = set()  # parameters whose next share adds to the one that is there
        self._ready: set[int] = set()
        self._waits: list[set[int]] = []
        self._repeats: set[int] = set()
        self._next = 0
        self._sent: deque[tuple[Flight, ShareReduction]] = deque()
        self._bounded, self._differ = True, False  # by the window; some ranks send what others do not
        self._inside: list[ShareReduction] = []  # those of the round that may not yet go across groups
        self._spare: list[torch.Tensor] = []  # flat memory, used again

    def assign(self) -> None:
        """The ranks are those of this job now. Nothing is laid out, and no rank has a share."""
        self.ranks, self.me = self.process_set.size(), self.process_set.rank()
        self.incarnation = incarnations()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, int] = {}
        self.shares: dict[int, torch.Tensor] = {}

    def require_job(self) -> None:
        """HvdError if the shares are not of the ranks that there are now."""
        if not self.buckets and elastic_member.is_elastic():
            raise HvdError(
                "in an elastic job a sharded optimizer has shares after the first sync: give it to "
                "hvd.elastic.TorchState(model, optimizer), and train in a function of hvd.elastic.run [HVD200]"
            )
        if self.incarnation != incarnations():
            raise HvdError(
                "a sharded optimizer belongs to the ranks it was wrapped on, and hvd.init() was called again since: "
                "load a saved state into a new optimizer, and wrap that [HVD200]"
            )

    def append(self, buckets: Iterable[Bucket]) -> None:
        """More parameters."""
        for bucket in buckets:
            self.bucket_of.update(dict.fromkeys(bucket.numbers, len(self.buckets)))
            self.buckets.append(bucket)

    def label(self, index: int) -> str:
        """Of a bucket, for users."""
        numbers = self.buckets[index].numbers
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return self.exchange.wire.names[numbers[0]] + more

    def name(self, index: int) -> str:
        """What travels of a bucket has this name."""
        return full_name("allreduce.", self.label(index)) or ""

    def reaching(self, number: int) -> None:
        """Backward is about to add to this gradient."""
        parameter = self.exchange.wire.parameters[number]
        if isinstance(parameter.grad, SentGradient):
            if not parameter.grad.zeroed:
                self._adds.add(number)
            parameter.grad = None

    def _travels(self, number: int) -> bool:
        parameter = self.exchange.wire.parameters[number]
        return parameter.requires_grad or parameter.grad is not None

    def _begin(self) -> None:
        self.require_job()  # else a share would not have the size that arrives
        if not self._waits:
            self._waits = [set(filter(self._travels, bucket.numbers)) for bucket in self.buckets]

    def ready(self, number: int) -> None:
        self._begin()
        index = self.bucket_of[number]
        if index < self._next:  # a gradient that backward reached once more
            self._repeats.add(index)
            return
        self._ready.add(number)
        while self._next < len(self.buckets) and self._waits[self._next] <= self._ready:
            self._launch_next()

    def rest(self) -> None:
        self._begin()
        while self._next < len(self.buckets):
            self._launch_next()
        for index in sorted(self._repeats):
            self._launch(index)
        self._clear()

    def differ(self, names: Sequence[str]) -> None:
        self._differ = True

    def settled(self, lacking: Sequence[int]) -> None:
        for number in lacking:
            parameter = self.exchange.wire.parameters[number]
            parameter.grad = SentGradient(parameter, self.exchange.wire.names[number])
        for index in sorted({self.bucket_of[number] for number in lacking}):
            if not any(number in self.exchange.in_flight for number in self.buckets[index].numbers):
                self._launch(index)
        self._sent.clear()
        self._bounded, self._differ = not self._differ, False

    def take_back(self, number: int) -> None:
        self._ready.discard(number)

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Any]]]:
        for index in sorted({self.bucket_of[number] for number in numbers}):
            bucket = self.buckets[index]
            nothing = torch.empty(SKIP_SHAPE, dtype=bucket.kind[0])
            yield bucket.numbers, [self._reduced(index, nothing, nothing)]
        self._sent.clear()
        self._adds.clear()
        self._clear()

    def forget(self) -> None:
        self.shares.clear()
        self._sent.clear()
        self._inside.clear()
        self._adds.clear()
        self._clear()

    def _clear(self) -> None:
        self._ready.clear()
        self._repeats.clear()
        self._waits, self._next = [], 0

    def _launch_next(self) -> None:
        index, self._next = self._next, self._next + 1
        if self._waits[index]:
            self._launch(index)

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """Memory for a bucket of several parameters, to be given back to `spare`."""
        for at, memory in enumerate(self._spare):
            if (memory.dtype, memory.device) == bucket.kind and memory.numel() >= bucket.total:
                return self._spare.pop(at)
        return torch.empty(bucket.total, dtype=bucket.kind[0], device=bucket.kind[1])

    def spare(self, memory: torch.Tensor) -> None:
        """Nothing reads or writes it any more."""
        if not any(memory is each for each in self._spare):
            self._spare.append(memory)
            del self._spare[:-WINDOW]

    def _launch(self, index: int) -> None:
        bucket, wire = self.buckets[index], self.exchange.wire
        self._make_room()
        wire.writers.join(bucket.numbers)
        source, memory, adds = self._packed(bucket)
        packed, ctx = (source, None) if wire.uncompressed else wire.compression.compress(source)
        low, high = bucket.section(self.me, self.ranks)
        reduction = self._reduced(index, packed, packed.new_empty(high - low))
        old = self.shares.get(index)

        def arrive(share: torch.Tensor) -> None:
            if not wire.uncompressed:
                share = wire.compression.decompress(share, ctx)
            if old is not None and adds:
                share = share.clone()  # this may be called again
                for piece in bucket.pieces(self.me, self.ranks):
                    if piece.number in adds:
                        share[piece.offset : piece.stop] += old[piece.offset : piece.stop]
            self.shares[index] = share
            if memory is not None:
                self.spare(memory)

        flight = Flight(bucket.numbers, reduction, arrive)
        self._sent.append((flight, reduction))
        self.exchange.in_flight.update(dict.fromkeys(filter(self._travels, bucket.numbers), flight))

    def _make_room(self) -> None:
        """Wait until a bucket more may be in flight, and start what goes across groups."""
        until = time.monotonic() + _WINDOW_S
        while self._bounded and len(self._sent) >= WINDOW:
            flight, reduction = self._sent[0]
            if not reduction.within(max(0.0, until - time.monotonic())):
                self._bounded = time.monotonic() < until
                continue
            try:
                flight.complete()
            except Exception as error:
                if not is_outcome(error):  # else the round raises it when all is complete
                    raise
            self._sent.popleft()
        for flight, _ in self._sent:
            flight.failure()

    def go_across(self) -> None:
        """All is in flight. Start all that goes across groups, before this rank waits for any of it: the ranks of the
        other groups may wait in another order."""
        while self._inside:
            self._inside[-1].go_on()
            self._inside.pop()

    def _packed(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor | None, set[int]]:
        """What travels, in one dimension; the flat memory, if that is some; numbers whose share adds to the old one."""
        wire, adds, gradients = self.exchange.wire, set[int](), []
        for number in bucket.numbers:
            parameter = wire.parameters[number]
            gradient = parameter.grad
            if isinstance(gradient, SentGradient):
                adds.update(() if gradient.zeroed else (number,))
                gradient = None
            elif number in self._adds:
                adds.add(number)
            if gradient is not None and gradient.layout is not torch.strided:
                if not wire.sparse_as_dense:
                    raise ValueError(
                        f"the gradient of {wire.names[number]!r} is sparse, and shard=True needs dense gradients: use "
                        "sparse_as_dense=True, or leave this parameter to another optimizer [HVD231]"
                    )
                gradient = gradient.to_dense()
            gradients.append(None if gradient is None else gradient.detach())
        for number in bucket.numbers:
            parameter = wire.parameters[number]
            if self._travels(number):
                parameter.grad = SentGradient(parameter, wire.names[number])
        self._adds.difference_update(bucket.numbers)
        if len(gradients) == 1 and gradients[0] is not None:
            return gradients[0].to(bucket.kind[0]).reshape(-1), None, adds
        memory = self.flat(bucket)
        source, at = memory[: bucket.total], 0
        for gradient, number, count in zip(gradients, bucket.numbers, bucket.counts):
            part = source[at : at + count]
            if gradient is None:
                part.zero_()
            else:
                part.view(wire.parameters[number].shape).copy_(gradient)
            at += count
        return source, memory, adds

    def _reduced(self, index: int, source: torch.Tensor, share: torch.Tensor) -> ShareReduction:
        """The reduction of a bucket, to the share of each rank."""
        bucket, wire = self.buckets[index], self.exchange.wire
        terms, priority = wire.terms, PRIORITY if wire.reporting in bucket.numbers else 0
        inside = terms if self.across is None else terms._replace(op=Sum, postscale=1.0)
        view, target = plain.adapter.view(source), plain.adapter.view(share).address
        kind, root = (_core.REDUCESCATTER, 0) if bucket.owner is None else (_core.REDUCE, bucket.owner)
        pending = _core.submit(
            kind, inside.op, view.dtype, self.name(index), view.shape, view.address,
            target if bucket.owner in (None, self.me) else 0, (source.untyped_storage(), share), root=root,
            prescale=inside.prescale, postscale=inside.postscale, process_set=number_of(self.process_set),
            priority=priority, quiet=_core.SOON, **placed(view),
        )  # fmt: skip

        first = Part(Handle([pending], lambda _: share), pending)
        if self.across is None:
            return ShareReduction(first, None)
        members = self.across

        def across(sum_inside: torch.Tensor | None) -> Part:
            mine = share.new_empty(SKIP_SHAPE) if sum_inside is None else sum_inside
            view = plain.adapter.view(mine)
            divided = terms.postscale / (wire.process_set.size() if terms.op == Average else 1)
            request = _core.submit(
                _core.ALLREDUCE, Sum, view.dtype, self.name(index), view.shape, view.address, view.address, mine,
                postscale=divided, process_set=number_of(members), priority=priority, quiet=_core.SOON, **placed(view),
            )  # fmt: skip
            return Part(Handle([request], lambda _: mine), request)

        self._inside.append(ShareReduction(first, across))
        return self._inside[-1]
