"""Gradient tracker: when a parameter's gradient is complete and may be sent. Knows no framework.

Parameters are numbers. The tracker is called in each backward pass: that it begins, which parameters it reaches, that
it ends. After `passes_per_step` passes a gradient is due, and the optimizer's hook sends it while backward goes on with
the rest. A *window* is the passes whose gradients travel together; a *round* is the exchange of all of them. A round is
over when every parameter is reduced: what was not due by the end of the window's last pass, or by `synchronize`, is
sent then, complete or not, so that ranks that took different branches never wait for each other: every rank sends every
parameter once per round.

Gradients of several passes are summed, as in Horovod, because that is what backward does. For their mean, divide the
loss.

Two things make this more than a counter. One backward may reach a parameter several times (a weight shared between
re-entrant checkpoints): that is one pass, and since nobody knows which time is the last, on this rank or another, what
a nested backward has reached travels at the end of the pass from then on. And a pass may come after a round but before
the step: its gradients are added to what is reduced already, which `reduced` shows the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol


class Window(Protocol):
    """Several passes that an optimizer of Keras or TensorFlow adds up."""

    def position(self) -> int:
        """How many passes of the window are done."""

    def clear(self) -> None:
        """A window begins, on all ranks."""


windows: weakref.WeakSet[Window] = weakref.WeakSet()  # those of this process, but for graphs of TensorFlow 1


def check_passes(passes: object) -> None:
    """ValueError if that cannot be the number of backward passes per step."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r}: must be a whole number of at least 1 [HVD222]")


class GradientTracker:
    """Counts passes, and what has travelled since the last step. Not thread-safe: the optimizer holds a lock."""

    def __init__(self, passes_per_step: int = 1) -> None:
        self._per_step = 1
        self._passes: list[int] = []  # of this window
        self._latest: list[int] = []  # the backward that reached the parameter last
        self._sent: set[int] = set()
        self._often: set[int] = set()  # one backward may reach it more than once
        self._ended = 0  # passes of this window
        self._closing = False  # passes that were not counted wait for the next one to close the window
        self.accumulating = False  # passes are not counted (no_sync)
        self.reduced = False  # gradients hold what a round brought since the last step
        self.complete = False  # ... and no pass has begun since
        self.passes_per_step = passes_per_step

    @property
    def passes_per_step(self) -> int:
        """Backward passes after which a gradient is due. Setting it begins the window anew: ValueError below 1."""
        return self._per_step

    @passes_per_step.setter
    def passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        self._per_step = passes
        self._begin_window()

    def _begin_window(self) -> None:
        self._passes = [0] * len(self._passes)
        self._ended, self._closing = 0, False

    def add(self) -> int:
        """The number of a new parameter."""
        self._passes.append(0)
        self._latest.append(-1)
        self.complete = False
        return len(self._passes) - 1

    def begun(self) -> None:
        """A backward pass reaches its first parameter."""
        if self.complete:  # and `completed` may have been left by an exception
            self._sent.clear()
        self.complete = False

    def reached(self, parameter: int, backward: int) -> None:
        """The pass of this number is about to add to a gradient that is not in flight."""
        if parameter in self._sent:
            raise AssertionError("a gradient that is under way was reached again [HVD901]")
        if self._latest[parameter] == backward:
            self._often.add(parameter)
        else:
            self._latest[parameter] = backward
            if not self.accumulating:
                self._passes[parameter] += 1

    def reached_once(self, parameters: Sequence[int], backward: int) -> Sequence[int]:
        """The pass has added to these, to each for the first time and not nested; those that are due for this round."""
        if self._per_step == 1 and not (self.accumulating or self._often) and self._sent.isdisjoint(parameters):
            return parameters  # the plain case: each is due when it is reached
        for parameter in parameters:
            self.reached(parameter, backward)
        return [parameter for parameter in parameters if self.due(parameter)]

    def due(self, parameter: int, nested: bool = False) -> bool:
        """Whether a gradient that backward has just added to is complete for this round."""
        if nested:
            self._often.add(parameter)
        if self.accumulating or parameter in self._often or parameter in self._sent:
            return False
        return self._closing or self._passes[parameter] >= self._per_step

    def ended(self) -> bool:
        """A pass has ended; True if it was the last of its window."""
        if self.accumulating:
            self._closing = True
            return False
        self._ended += 1
        return self._closing or self._ended >= self._per_step

    def closes(self) -> bool:
        """Whether the window closes with the pass that is in progress."""
        return not self.accumulating and (self._closing or self._ended + 1 >= self._per_step)

    def left(self, parameter: int) -> int:
        """Backward passes of this window that have yet to reach it."""
        return max(0, self._per_step - self._passes[parameter])

    def sent(self, parameter: int) -> None:
        """The gradient is in flight."""
        self._sent.add(parameter)

    def all_sent(self, parameters: Iterable[int]) -> None:
        """The gradients are in flight."""
        self._sent.update(parameters)

    def is_sent(self, parameter: int) -> bool:
        """Whether it is in flight, or has arrived in a round that is not over."""
        return parameter in self._sent

    def recall(self, parameter: int) -> None:
        """What was sent has arrived and will be sent again in this round: backward reached it once more."""
        self._sent.discard(parameter)
        self._often.add(parameter)

    def seen_twice(self) -> bool:
        """Whether a backward pass has ever reached a parameter more than once, or nested."""
        return bool(self._often)

    def in_flight(self) -> bool:
        """Whether a round has begun, and is not complete."""
        return bool(self._sent) and not self.complete

    def unsent(self) -> list[int]:
        """Parameters that have yet to travel in this round."""
        return [parameter for parameter in range(len(self._passes)) if parameter not in self._sent]

    def completed(self) -> None:
        """The round is over: all gradients are reduced."""
        self.reduced = self.complete = True
        self._sent.clear()
        self._begin_window()

    def position(self) -> tuple[list[int], int, bool, bool, bool] | None:
        """What has been counted and reduced since the last step, for `go_on`. None: nothing."""
        if not (self._ended or self._closing or self.reduced or any(self._passes)):
            return None
        return list(self._passes), self._ended, self._closing, self.reduced, self.complete

    def go_on(self, position: tuple[list[int], int, bool, bool, bool]) -> None:
        """From where `position` was called."""
        self.reset()
        passes, self._ended, self._closing, self.reduced, self.complete = position
        self._passes = list(passes)

    def reset(self) -> None:
        """A step is over, or gradients are zero: nothing is sent, counted or reduced."""
        self._sent.clear()
        self._begin_window()
        self.reduced = self.complete = False
