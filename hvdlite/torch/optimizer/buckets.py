"""Which gradients travel together: each alone, the members of a group, or a bucket that a comm hook reduces.

By default each travels alone, as soon as it is ready, and the engine puts neighbours into one bucket. A carrier gets
the gradients that may be sent now; it sends them through the wire and notes the flight of each in the exchange. What it
holds back it sends when the round ends (`rest`), or gives back when it is going to change (`take_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ...errors import OUTCOMES, HvdError, HvdMismatchError
from ...ops import Handle
from ..ops import plain
from .failed_backward import send_skip, send_skipped_group
from .gradient_codec import Flight

if TYPE_CHECKING:
    from .reducer import Exchange

_MB = 1 << 20


class Carrier:
    """Decides which gradients travel together. Here nothing is held back."""

    compresses = keeps = False  # gradients; what compression has lost

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def ready(self, number: int) -> None:
        """This gradient may travel now."""
        self.exchange.in_flight[number] = self.exchange.wire.send(number)

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        """These may. `quiet`: they are waited for at once."""
        for number in numbers:
            self.ready(number)

    def rest(self) -> None:
        """All gradients of the round are ready: what was held back goes now, if nothing depends on the other ranks."""

    def settled(self, lacking: Sequence[int]) -> None:
        """What each rank sends is known: zeros go for these, which are frozen here and not on every rank."""
        if lacking:
            self.all_ready(lacking, True)

    def differ(self, names: Sequence[str]) -> None:
        """In this round these are sent by some ranks only. HvdMismatchError: this carrier cannot bear that."""

    def take_back(self, number: int) -> None:
        """This gradient, ready but held back, is going to change."""

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        """Those of them that a skip replaces before it is known what each rank sends."""
        return numbers

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Handle]]]:
        """The pass has failed: send skips (`failed_backward`) instead of these, which are all that are not in flight.
        Yields the numbers of those that are sent."""
        for number in numbers:
            yield (number,), send_skip(self.exchange.wire, number)

    def over(self) -> None:
        """Nothing of a round is in flight: the next one begins, whatever an exception has left of the last."""

    def forget(self) -> None:
        """All ranks go back to a commit: nothing is held back, and nothing is agreed."""

    def scaled_by(self, scaler: Any) -> None:
        """A GradScaler has multiplied the loss. Of a carrier that `keeps` residuals, as what follows."""

    def kept(self) -> dict[str, Any]:
        """The residuals, for a state_dict."""
        return {}

    def keep(self, state: Any) -> None:
        """What `kept` has returned on this rank, or None."""

    def collect(self, root_rank: int) -> None:
        """Move all ranks' residuals to one of them. Collective."""


class EachAlone(Carrier):
    """Every gradient travels as soon as it is ready; the engine puts neighbours into one bucket."""

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        flight = self.exchange.wire.prepare_all(tuple(numbers))
        if flight is not None:
            self.exchange.in_flight.update(dict.fromkeys(numbers, flight))
            flight.start(quiet)
            return
        # Gradients that are views of one memory mostly lie in it as their parameters follow each other. Backward comes
        # from the end, but for the few of each layer; what travels exactly from the end is left where it lies on GPUs.
        super().all_ready(sorted(numbers, reverse=True), quiet)


class InGroups(Carrier):
    """The gradients of a group travel when the last of them is ready; what is in no group travels alone."""

    def __init__(self, exchange: Exchange, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(exchange)
        self.group_of = {number: index for index, group in enumerate(groups) for number in group}
        self.groups = [list(group) for group in groups]
        self.waiting: dict[int, set[int]] = {}

    def ready(self, number: int) -> None:
        index = self.group_of.get(number)
        if index is None:
            super().ready(number)
            return
        ready = self.waiting.setdefault(index, set())
        ready.add(number)
        if len(ready) == len(self.groups[index]):
            self._send(index)

    def settled(self, lacking: Sequence[int]) -> None:
        super().settled(lacking)
        for index in sorted(self.waiting):  # its other members are frozen on all ranks
            self._send(index)

    def take_back(self, number: int) -> None:
        self.waiting[self.group_of[number]].discard(number)

    def forget(self) -> None:
        self.waiting.clear()

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        return [number for number in numbers if number not in self.group_of]

    def skip(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Handle]]]:
        self.waiting.clear()
        yield from super().skip(self.at_once(numbers))
        wire = self.exchange.wire
        for index in sorted({self.group_of[number] for number in numbers if number in self.group_of}):
            members = [number for number in sorted(self.groups[index]) if number in numbers]
            yield members, send_skipped_group(wire, members, self._name(index))

    def _name(self, index: int) -> str:
        return f"optimizer.group.{index}{self.exchange.wire.suffix}"

    def _send(self, index: int) -> None:
        members, in_flight = sorted(self.waiting[index]), self.exchange.in_flight
        if members and members[0] not in in_flight:  # else an exception came when they had been sent
            flight = self.exchange.wire.send_group(members, self._name(index))
            in_flight.update(dict.fromkeys(members, flight))
        del self.waiting[index]


class GradBucket:
    """Gradients that travel together, as a comm hook gets them; the interface of ``torch.distributed.GradBucket``.

    ``register_comm_hook`` of a distributed optimizer passes it to the hook; do not construct one.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> optimizer.register_comm_hook(None, lambda state, bucket: hvd.allreduce_async(bucket.buffer(), op=hvd.Sum))
        >>> weight.sum().backward()
        >>> weight.grad.tolist()
        [2.0]
    """

    def __init__(self, index: int, last: bool, parameters: list[torch.Tensor]) -> None:
        self._index, self._last, self._parameters = index, last, parameters
        self._buffer = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]

    def index(self) -> int:
        """Return the number of the bucket in this round.

        Returns:
            int: from 0, in the order in which buckets are sent.
        """
        return self._index

    def is_last(self) -> bool:
        """Return whether the bucket is the last one of this round.

        Returns:
            bool: True for the last one.
        """
        return self._last

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the bucket.

        Returns:
            list of torch.Tensor: in the order of their gradients in the buffer.
        """
        return list(self._parameters)

    def buffer(self) -> torch.Tensor:
        """Return the gradients of the bucket as one flat tensor, which the hook may overwrite.

        Returns:
            torch.Tensor: of one dimension and one dtype.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the flat tensor.

        Args:
            buffer (torch.Tensor): as many elements as the old one.

        Raises:
            ValueError: for another number of elements.
        """
        if buffer.numel() != self._buffer.numel():
            raise ValueError(f"the buffer has {self._buffer.numel()} elements, not {buffer.numel()} [HVD227]")
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the bucket as views of the buffer.

        Returns:
            list of torch.Tensor: each of the shape of its parameter.
        """
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters)]


class InBuckets(Carrier):
    """Gradients travel in buckets that a hook reduces, as in DistributedDataParallel.

    A hook may use collectives without names, which are matched by their order, so it must be called for the same
    buckets in the same order on every rank, whatever order gradients become ready in. The layout is therefore the same
    everywhere: at first the reverse order of the parameters, since backward comes from the end; in the first round the
    set's first rank notes the order in which its gradients become ready and broadcasts it, and from the second round on
    buckets follow it. A bucket is sent when all its gradients are there and all buckets before it are sent.

    A layout is cut at `cap` bytes and where the dtype changes; frozen parameters are left out while they are frozen, on
    all ranks alike. The flat tensor is made when the bucket is sent, and the result is copied back into the gradients.
    """

    def __init__(self, exchange: Exchange, state: Any, hook: Callable[[Any, Any], Any], cap_mb: float) -> None:
        if not cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={cap_mb!r} must be above 0 [HVD222]")
        super().__init__(exchange)
        self.state, self.hook, self.cap = state, hook, int(cap_mb * _MB)
        self.order: list[int] | None = None  # of readiness, agreed
        self.seen: list[int] = []
        self.order_handle: tuple[Handle, torch.Tensor] | None = None
        self.layout: list[list[int]] = []
        self.ready_now: set[int] = set()
        self.launched: set[int] = set()
        self.sent = 0

    def ready(self, number: int) -> None:
        wire = self.exchange.wire
        if number in self.launched or wire.is_sparse(number):  # reached once more, after its bucket was sent
            super().ready(number)
            return
        wire.fill(number)
        if not self.layout:
            self._lay_out()
        if self.order is None:
            self.seen.append(number)
        self.ready_now.add(number)
        while self.sent < len(self.layout) and self.ready_now.issuperset(self.layout[self.sent]):
            self._launch()

    def rest(self) -> None:
        if self.ready_now and not self.layout:
            self._lay_out()
        while self.sent < len(self.layout):
            self._launch()
        if self.order is None and self.order_handle is None and self.seen:
            self._send_order()
        self._clear()

    def settled(self, lacking: Sequence[int]) -> None:
        """Nothing is held back, and nothing is lacking: `differ` has raised."""

    def forget(self) -> None:
        if self.order_handle is not None:
            with suppress(*OUTCOMES):
                self.order_handle[0].wait()
        self.order, self.seen, self.order_handle = None, [], None
        self._clear()

    def _clear(self) -> None:
        self.ready_now.clear()
        self.launched.clear()
        self.layout, self.sent = [], 0

    def differ(self, names: Sequence[str]) -> None:
        some = ", ".join(map(repr, names[:3]))
        self.exchange.in_flight.clear()  # other ranks have other buckets: no rank may wait for these
        raise HvdMismatchError(
            "with a comm hook all ranks must send the same gradients in a round, because they are cut into buckets. "
            f"Some ranks only send {some}: freeze and add parameters on all ranks alike. Let the exception end this "
            "rank [HVD301]"
        )

    def take_back(self, number: int) -> None:
        self.ready_now.discard(number)
        if number in self.seen:
            self.seen.remove(number)

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Handle]]]:
        raise HvdError(
            "the last backward pass ended with an exception. With a comm hook, hvdlite cannot notify the other ranks "
            "that this rank skips the step: let the exception end this rank [HVD308]"
        )

    def _lay_out(self) -> None:
        """Cut the parameters into buckets, the same on all ranks."""
        wire = self.exchange.wire
        if self.order_handle is not None:
            handle, order = self.order_handle
            handle.wait()
            self.order, self.order_handle = order.tolist(), None
        count = len(wire.parameters)
        known = self.order or []
        later = set(known)
        order_now = [*known, *(number for number in reversed(range(count)) if number not in later)]
        self.layout, held, cap, dtype = [], 0, min(_MB, self.cap), None
        for number in order_now:
            parameter = wire.parameters[number]
            if not (parameter.requires_grad or parameter.grad is not None) or wire.is_sparse(number):
                continue
            size = parameter.numel() * parameter.element_size()
            if not self.layout or held + size > cap or parameter.dtype != dtype:
                if self.layout:
                    cap = self.cap
                self.layout.append([])
                held, dtype = 0, parameter.dtype
            self.layout[-1].append(number)
            held += size

    def _launch(self) -> None:
        exchange, members = self.exchange, self.layout[self.sent]
        parameters = [exchange.wire.parameters[number] for number in members]
        for number in members:
            exchange.wire.fill(number)
        exchange.wire.writers.join(members)
        bucket = GradBucket(self.sent, self.sent == len(self.layout) - 1, parameters)
        self.sent += 1
        self.launched.update(members)
        outcome = self.hook(self.state, bucket)

        def arrive(result: Any) -> None:
            self._spread(result, bucket, parameters)

        flight = Flight(members, _Outcome(outcome), arrive)
        for number in members:
            exchange.in_flight[number] = flight

    def _spread(self, result: Any, bucket: GradBucket, parameters: list[torch.Tensor]) -> None:
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        expected = sum(parameter.numel() for parameter in parameters)
        if not isinstance(result, torch.Tensor) or result.numel() != expected:
            got = f"{result.numel()} elements" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(
                f"the comm hook returned {got} for bucket {bucket.index()}: it must return a tensor of {expected} "
                "elements, a torch.futures.Future of one, or the handle of an asynchronous collective [HVD227]"
            )
        for part, parameter in zip(result.view(-1).split([p.numel() for p in parameters]), parameters):
            parameter.grad.copy_(part.view(parameter.shape))  # type: ignore[union-attr]

    def _send_order(self) -> None:
        """Send the first rank's order to all; no rank waits for it before the next round begins."""
        wire = self.exchange.wire
        members = set(self.seen)
        missing = [number for number in range(len(wire.parameters)) if number not in members]
        order = torch.tensor([*self.seen, *missing], dtype=torch.int64)
        name = "optimizer.order" + wire.suffix
        handle = plain.broadcast_async_(order, wire.process_set.ranks[0], name=name, process_set=wire.process_set)
        self.order_handle = (handle, order)


class _Outcome:
    """What a hook returned, to be waited for."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def wait(self) -> Any:
        outcome = self.outcome
        if isinstance(outcome, (Handle, torch._C.Future)):  # then() returns a plain one of C
            return outcome.wait()
        return outcome
