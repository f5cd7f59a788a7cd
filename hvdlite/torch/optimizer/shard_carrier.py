"""Carrier of a sharded optimizer: gradients are reduced to the ranks that own them, and dropped where they came from.

A bucket of the layout (`training.shard_layout`) goes when its gradients are ready and all buckets before it have gone:
by one reducescatter, or by one reduce where it has one owner. Then `p.grad` is a `SentGradient`, which has no memory
and raises an error for code that reads it. At most WINDOW buckets are in flight, since each keeps its gradients alive.
All ranks send in one order, so that a rank that waits for its oldest bucket waits for nothing that depends on it.

All that travels of a bucket (gradients, then values, then state) has the name that the gradient's allreduce would have.
So a rank that is in another part of its step than the others, or not sharded, is a mismatch at once and not a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ... import _core
from ...errors import HvdError, HvdMismatchError, is_outcome
from ...errors.codes import uncoded
from ...ops import Handle
from ...ops.arguments import full_name
from ...ops.tensors import placed
from ...process_sets.process_set import number_of
from ...training.shard_layout import Bucket
from ..ops import plain
from .buckets import Carrier
from .failed_backward import PRIORITY, SKIP_SHAPE
from .gradient_codec import Flight, Wire
from .reducer import Exchange

WINDOW = 3  # buckets in flight at once
_LOOK_S = 0.1
_OTHER_KIND = "disagree on the collective"  # in the core's text


class SentGradient(torch.Tensor):
    """What ``p.grad`` is between the moment when the gradient is sent and ``zero_grad``: an error for its readers."""

    _name: str
    zeroed: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, dtype: Any = None, device: Any = None) -> SentGradient:
        made: SentGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )
        made._name, made.zeroed = name.partition("#")[0], False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self._name!r}: each rank has its share>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        called = func._schema.name
        found = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
        mine = [each for each in found if isinstance(each, SentGradient)]
        if called in ("aten::zero_", "aten::_foreach_zero_"):
            for each in mine:
                each.zeroed = True
            return args[0] if called == "aten::zero_" else None
        if called == "aten::detach":
            return args[0]
        if called == "aten::_to_copy":  # as model.double() does
            return SentGradient(mine[0], mine[0]._name, kwargs.get("dtype"), kwargs.get("device"))
        raise HvdError(
            f"the gradient of {mine[0]._name!r} is not on this rank: with shard=True each rank has a share of the "
            "averaged gradients. Clip with optimizer.clip_grad_norm_(max_norm). To read this rank's own gradient, use "
            "parameter.register_post_accumulate_grad_hook [HVD200]"
        )


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
            yield from super()._landings()
            return

        def refuse() -> None:
            raise elsewhere

        yield refuse

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

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self.process_set = exchange.wire.process_set
        self.ranks, self.me = self.process_set.size(), self.process_set.rank()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, int] = {}
        self.shares: dict[int, torch.Tensor] = {}
        self._adds: set[int] = set()  # parameters whose next share adds to the one that is there
        self._ready: set[int] = set()
        self._waits: list[set[int]] = []
        self._repeats: set[int] = set()
        self._next = 0
        self._sent: deque[Flight] = deque()
        self._spare: list[torch.Tensor] = []  # flat memory, used again

    def append(self, buckets: Iterable[Bucket]) -> None:
        """More parameters."""
        for bucket in buckets:
            self.bucket_of.update(dict.fromkeys(bucket.numbers, len(self.buckets)))
            self.buckets.append(bucket)

    def name(self, index: int) -> str:
        """What travels of a bucket has this name."""
        numbers = self.buckets[index].numbers
        first = self.exchange.wire.names[numbers[0]]
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return full_name("allreduce.", first + more) or ""

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

    def settled(self, lacking: Sequence[int]) -> None:
        for number in lacking:
            parameter = self.exchange.wire.parameters[number]
            parameter.grad = SentGradient(parameter, self.exchange.wire.names[number])
        for index in sorted({self.bucket_of[number] for number in lacking}):
            if not any(number in self.exchange.in_flight for number in self.buckets[index].numbers):
                self._launch(index)
        self._sent.clear()

    def take_back(self, number: int) -> None:
        self._ready.discard(number)

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Handle]]]:
        for index in sorted({self.bucket_of[number] for number in numbers}):
            bucket = self.buckets[index]
            nothing = torch.empty(SKIP_SHAPE, dtype=bucket.kind[0])
            yield bucket.numbers, [self._reduced(index, nothing, nothing)]
        self._sent.clear()
        self._adds.clear()
        self._clear()

    def forget(self) -> None:
        self._sent.clear()
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
        while len(self._sent) >= WINDOW:
            try:
                self._sent[0].complete()
            except Exception as error:
                if not is_outcome(error):  # else the round raises it when all is complete
                    raise
            self._sent.popleft()
        wire.writers.join(bucket.numbers)
        source, memory, adds = self._packed(bucket)
        packed, ctx = (source, None) if wire.uncompressed else wire.compression.compress(source)
        low, high = bucket.section(self.me, self.ranks)
        handle = self._reduced(index, packed, packed.new_empty(high - low))
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

        flight = Flight(bucket.numbers, handle, arrive)
        self._sent.append(flight)
        self.exchange.in_flight.update(dict.fromkeys(filter(self._travels, bucket.numbers), flight))

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

    def _reduced(self, index: int, source: torch.Tensor, share: torch.Tensor) -> Handle:
        """The reduction of a bucket, to the share of each rank."""
        bucket, wire, terms = self.buckets[index], self.exchange.wire, self.exchange.wire.terms
        view, target = plain.adapter.view(source), plain.adapter.view(share).address
        kind, root = (_core.REDUCESCATTER, 0) if bucket.owner is None else (_core.REDUCE, bucket.owner)
        pending = _core.submit(
            kind, terms.op, view.dtype, self.name(index), view.shape, view.address,
            target if bucket.owner in (None, self.me) else 0, (source.untyped_storage(), share), root=root,
            prescale=terms.prescale, postscale=terms.postscale, process_set=number_of(self.process_set),
            priority=PRIORITY if wire.reporting in bucket.numbers else 0, quiet=_core.SOON, **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: share)
