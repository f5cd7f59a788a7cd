"""Groups of gradients that are sent together. By default each travels alone, as soon as it is ready, and the engine
puts neighbours into one bucket; gradients of a group wait for the last of them.

A carrier gets the gradients that may be sent now; it sends them through the wire and notes the flight of each in the
exchange. What it holds back it sends when the round ends (`rest`), or gives back when it is going to change
(`take_back`). Comm hooks have a carrier of their own (`buckets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ...ops import Handle
from .failed_backward import send_skip, send_skipped_group

if TYPE_CHECKING:
    from .reducer import Exchange


class Carrier(Protocol):
    """Decides which gradients travel together."""

    def ready(self, number: int) -> None:
        """This gradient may travel now."""

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        """These may. `quiet`: they are waited for at once."""

    def rest(self) -> None:
        """All gradients of the round are ready: what was held back goes now, if nothing depends on the other ranks."""

    def settled(self, lacking: Sequence[int]) -> None:
        """What each rank sends is known: zeros go for these, which are frozen here and not on every rank."""

    def differ(self, names: Sequence[str]) -> None:
        """In this round these are sent by some ranks only. HvdMismatchError: this carrier cannot bear that."""

    def take_back(self, number: int) -> None:
        """This gradient, ready but held back, is going to change."""

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        """Those of them that a skip replaces before it is known what each rank sends."""

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Handle]]]:
        """The pass has failed: send skips (`failed_backward`) instead of these, which are all that are not in flight.
        Yields the numbers of those that are sent."""

    def forget(self) -> None:
        """All ranks go back to a commit: nothing is held back, and nothing is agreed."""


class EachAlone:
    """Every gradient travels as soon as it is ready; the engine puts neighbours into one bucket."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def ready(self, number: int) -> None:
        self.exchange.in_flight[number] = self.exchange.wire.send(number)

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        flight = self.exchange.wire.prepare_all(tuple(numbers))
        if flight is not None:
            self.exchange.in_flight.update(dict.fromkeys(numbers, flight))
            flight.start(quiet)
            return
        # Gradients that are views of one memory mostly lie in it as their parameters follow each other. Backward comes
        # from the end, but for the few of each layer; what travels exactly from the end is left where it lies on GPUs.
        for number in sorted(numbers, reverse=True):
            self.ready(number)

    def rest(self) -> None:
        """Nothing is held back."""

    def settled(self, lacking: Sequence[int]) -> None:
        if lacking:
            self.all_ready(lacking, True)

    def differ(self, names: Sequence[str]) -> None:
        """Each gradient is an exchange of its own."""

    def take_back(self, number: int) -> None:
        """Nothing is held back."""

    def forget(self) -> None:
        """Nothing is held back."""

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    def skip(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Handle]]]:
        for number in numbers:
            yield (number,), send_skip(self.exchange.wire, number)


class InGroups:
    """The gradients of a group travel when the last of them is ready; what is in no group travels alone."""

    def __init__(self, exchange: Exchange, groups: Sequence[Sequence[int]]) -> None:
        self.exchange = exchange
        self.group_of = {number: index for index, group in enumerate(groups) for number in group}
        self.groups = [list(group) for group in groups]
        self.waiting: dict[int, set[int]] = {}

    def ready(self, number: int) -> None:
        index = self.group_of.get(number)
        if index is None:
            self.exchange.in_flight[number] = self.exchange.wire.send(number)
            return
        ready = self.waiting.setdefault(index, set())
        ready.add(number)
        if len(ready) == len(self.groups[index]):
            self._send(index)

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        for number in numbers:
            self.ready(number)

    def rest(self) -> None:
        """A group with frozen members is held back: another rank may send them."""

    def settled(self, lacking: Sequence[int]) -> None:
        self.all_ready(lacking, True)
        for index in sorted(self.waiting):  # its other members are frozen on all ranks
            self._send(index)

    def differ(self, names: Sequence[str]) -> None:
        """All ranks send the same groups once that is settled."""

    def take_back(self, number: int) -> None:
        self.waiting[self.group_of[number]].discard(number)

    def forget(self) -> None:
        self.waiting.clear()

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        return [number for number in numbers if number not in self.group_of]

    def skip(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Handle]]]:
        self.waiting.clear()
        wire = self.exchange.wire
        for number in numbers:
            if number not in self.group_of:
                yield (number,), send_skip(wire, number)
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
