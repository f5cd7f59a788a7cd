"""Schedule of fragments: which one is sent, and which one arrives, after an optimizer step.

The model is cut into P fragments. One of them is due after every `sync_every / P` steps, in turn, so each is exchanged
once in `sync_every` steps and the exchanges are spread over them (A. Douillard et al., Streaming DiLoCo with
overlapping communication, 2025, arXiv 2501.18512). What is sent at step t arrives at step t + delay. As the delay is
shorter than the time between two turns, one fragment is in flight.

All ranks send the same fragments in the same order, each at its own pace: the number of turns alone says what is next.
So ranks may differ in their steps, and an interrupted turn is made at the next step. After a change of ranks, all take
one rank's counts, and what was in flight is sent again. Pure: nothing here has tensors or communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Schedule:
    """The counts of a rank. It trusts its arguments: `sync_every` is a multiple of `fragments`, `delay` is less than
    their quotient."""

    def __init__(self, sync_every: int, fragments: int, delay: int) -> None:
        self.period, self.fragments, self.delay = sync_every // fragments, fragments, delay
        self.step = self.turn = 0  # of the optimizer; that have been sent
        self.due = self.period  # the step of the next turn
        self.again: list[int] = []  # fragments that were in flight when the ranks changed
        self.in_flight: dict[int, int] = {}  # fragment: the step at which it arrives
        self.arrived = [0] * fragments
        self.moved: set[int] = set()  # fragments that this rank has trained since it last sent them

    def after_step(self) -> Iterator[tuple[str, int]]:
        """What is to be done after a step: ("arrive", fragment) or ("send", fragment), in order."""
        self.step += 1
        self.moved = set(range(self.fragments))
        yield from self._arrivals(self.step)
        while self.again or self.step >= self.due:
            if (number := self.next()) is not None:
                yield "send", number
        yield from self._arrivals(self.step)

    def overdue(self) -> Iterator[tuple[str, int]]:
        """What should have arrived after the last step."""
        yield from self._arrivals(self.step)

    def before_end(self) -> Iterator[tuple[str, int]]:
        """All that is in flight arrives."""
        yield from self._arrivals(max(self.in_flight.values(), default=0))

    def _arrivals(self, step: int) -> Iterator[tuple[str, int]]:
        for number in [number for number, due in self.in_flight.items() if due <= step]:
            yield "arrive", number

    def next(self) -> int | None:
        """The fragment to send. None: its turn is left out, as it is in flight after a change of ranks."""
        if self.again:
            return self.again[0]
        number = (self.turn + 1) % self.fragments
        if number not in self.in_flight:
            return number
        self._next_turn()
        return None

    def _next_turn(self) -> None:
        self.turn += 1
        self.due += self.period

    def next_at_end(self) -> int:
        """The fragment to send when this rank makes no further steps, while others may."""
        if not self.again:
            self.step = max(self.step, self.due)
        number = self.next()
        assert number is not None, "nothing is in flight at the end"
        return number

    def sent(self, number: int) -> None:
        """This fragment is in flight."""
        self.in_flight[number] = self.step + self.delay
        self.moved.discard(number)
        if number in self.again:
            self.again.remove(number)
        else:
            self._next_turn()

    def has_arrived(self, number: int) -> None:
        """It is not in flight any more."""
        del self.in_flight[number]
        self.arrived[number] += 1

    def state(self) -> dict[str, Any]:
        """For `load`. What is in flight is not part of it, and is to be sent again."""
        again = sorted({*self.again, *self.in_flight})
        return {
            "step": self.step, "turn": self.turn, "due": self.due, "period": self.period, "again": again,
            "arrived": [*self.arrived], "moved": sorted({*self.moved, *again}),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from the counts of `state`, which may be another rank's. With another period, one begins."""
        self.step, self.turn, self.again = state["step"], state["turn"], [*state["again"]]
        self.due = state["due"] if state["period"] == self.period else self.step + self.period
        self.arrived, self.moved, self.in_flight = [*state["arrived"]], set(state["moved"]), {}


def cut(sizes: Sequence[int], parts: int) -> list[slice]:
    """Consecutive parts of nearly equal size, none of them empty; there are at least as many sizes as parts."""
    total, cuts, size = sum(sizes), [0], 0
    for number, each in enumerate(sizes):
        needed = parts - len(cuts)  # further cuts, with a place left for each
        if needed and number > cuts[-1]:
            middle = 2 * size + each > 2 * total * len(cuts) // parts  # this one would lie beyond the mark for the most
            if middle or len(sizes) - number == needed:
                cuts.append(number)
        size += each
    return [slice(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(sizes)])]
