"""What does a distributed optimizer hold besides the original, and what happens from a gradient's hook to its average?

Each parameter has two hooks. `reaching` runs before backward adds to the gradient: it finds out which backward pass
this is, and sees to it that nothing that is under way is written to. `ready` runs after: the gradient book says whether
the gradient is due, and if so it is sent while backward goes on. When the outermost pass ends and closes its window,
the rest is sent and everything is waited for; so clipping and unscaling between backward and step see averages.

Invariants:
  - A rank sends every trainable parameter exactly once per round, in any order. Where backward did not reach one, zeros
    travel. Every n-th round of an optimizer meets the others' n-th: ranks that run different numbers of passes between
    steps do not fit together, except that a rank may skip backward: its `step` sends everything.
  - A round is over before a pass adds to gradients again. What arrived is then made fit to be reduced once more.
  - The hook that sends is the last of its parameter's hooks, so that those of the user have changed what they change.

`wait_in_backward=False` leaves the waiting to synchronize and step: more overlap, and clipping needs synchronize.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...errors import HvdError
from ...optimizer import GradientBook
from . import backward as passes
from .wire import Flight, Wire

_serials = itertools.count()
_owner_of: dict[int, weakref.ref[Exchange]] = {}  # by id of a parameter, which its exchange keeps alive
_current_task = passes.task_number


class Carrier(Protocol):
    """Decides which gradients travel together."""

    def ready(self, number: int) -> None:
        """This gradient may travel now."""

    def rest(self) -> None:
        """All gradients of the round are ready: whatever was held back goes now."""

    def take_back(self, number: int) -> None:
        """This gradient, ready but held back, is going to change."""


class EachAlone:
    """Every gradient travels as soon as it is ready; the engine puts neighbours into one bucket."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def ready(self, number: int) -> None:
        self.exchange.in_flight[number] = self.exchange.wire.send(number)

    def rest(self) -> None:
        """Nothing is held back."""

    def take_back(self, number: int) -> None:
        """Nothing is held back."""


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

    def rest(self) -> None:
        for index in sorted(self.waiting):  # members that are frozen now, on all ranks alike
            self._send(index)

    def take_back(self, number: int) -> None:
        self.waiting[self.group_of[number]].discard(number)

    def _send(self, index: int) -> None:
        members = sorted(self.waiting.pop(index))
        if not members:
            return
        wire = self.exchange.wire
        flight = wire.send_group(members, f"optimizer.group.{index}{wire.suffix}")
        for member in members:
            self.exchange.in_flight[member] = flight


class Exchange:
    """Names, hooks, and gradients under way."""

    def __init__(self, wire: Wire, passes_per_step: int) -> None:
        self.serial = next(_serials)
        self.wire = wire
        self.book = GradientBook(passes_per_step)
        self.carrier: Carrier = EachAlone(self)
        self.in_flight: dict[int, Flight] = {}
        self.hooks: list[Any] = []
        self.wait_in_backward = True
        self.skipping = False  # within skip_synchronize
        self.asked = False  # the user called synchronize since the last backward
        self.lost: str | None = None  # a parameter that a newer optimizer has taken over
        self._lock = threading.RLock()
        self._open: set[passes.Backward] = set()
        self._task, self._pass, self._nested = -1, -1, False
        self._captured = False  # this task adds to no gradient

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """One more parameter. Hooks stay through freezing and unfreezing."""
        self._take_over(parameter, name)
        wire, number = self.wire, self.book.add()
        wire.parameters.append(parameter)
        wire.names.append(name)
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        trainable, myself = parameter.requires_grad, weakref.ref(self)
        parameter.requires_grad_(True)
        self.hooks.append(parameter.register_hook(_before(parameter, myself, number)))
        self.hooks.append(parameter.register_post_accumulate_grad_hook(_after(myself, number)))
        parameter.requires_grad_(trainable)

    def _take_over(self, parameter: torch.Tensor, name: str) -> None:
        """Two optimizers that reduce one gradient, each in place, would spoil it: the newer one has it."""
        earlier = _owner_of.get(id(parameter), lambda: None)()
        if earlier is not None and earlier is not self:
            earlier.lost = name
            for hook in earlier.hooks:
                hook.remove()
        _owner_of[id(parameter)] = weakref.ref(self)

    def reaching(self, number: int) -> None:
        """Backward is about to add to this gradient."""
        with self._lock:
            task = _current_task()
            if task != self._task or task < 0:
                self._enter(task, number)
            if self._captured:
                return
            if self.book.is_sent(number):
                self._recall(number)
            self.book.reached(number, self._pass)

    def ready(self, number: int) -> None:
        """Backward has added to this gradient."""
        with self._lock:
            if self.book.due(number, self._nested):
                self._go(number)

    def _enter(self, task: int, number: int) -> None:
        self._captured = passes.only_captures(self.wire.parameters[number])
        if self._captured:
            self._task = task
            return
        if task < 0:  # hooks called by something else than autograd's engine: step() sends
            self._begin(None)
            self._task, self._nested = task, True
            return
        backward = passes.running(task)
        if self not in backward.participants:
            self._begin(backward)
            backward.participants.append(self)
        self._task, self._pass, self._nested = task, backward.serial, backward.is_nested(task)

    def _begin(self, backward: passes.Backward | None) -> None:
        if self.book.under_way() and not self._open:
            self.finish()
        self._add_on()
        self.asked = False
        self.book.begun()
        if backward is not None:
            self._open.add(backward)

    def _add_on(self) -> None:
        """What was reduced will be reduced again, with something added to it."""
        if self.wire.predivide != 1.0:
            self.wire.refresh()
        if self.book.reduced:
            with torch.no_grad():
                self.wire.again(range(len(self.wire.names)))
            self.book.reduced = False

    def _recall(self, number: int) -> None:
        """A pass reaches once more what has been sent in this round: let it arrive, to be sent again."""
        flight = self.in_flight.get(number)
        if flight is None:
            self.carrier.take_back(number)
            self.book.recall(number)
            return
        with torch.no_grad():
            flight.land()
            self.wire.again(flight.numbers)
        for each in flight.numbers:
            del self.in_flight[each]
            self.book.recall(each)

    def left(self, backward: passes.Backward) -> bool:
        """See Participant: a pass has ended."""
        with self._lock:
            self._open.discard(backward)
            return self.book.ended() and not self._open and self.wait_in_backward

    def abandoned(self, backward: passes.Backward) -> None:
        """See Participant: a pass has failed."""
        self._open.discard(backward)

    def _go(self, number: int) -> None:
        self.carrier.ready(number)
        self.book.sent(number)

    def send_rest(self) -> None:
        """Send what has not been sent in this round; does not wait."""
        if self.lost is not None:
            raise HvdError(
                f"a newer DistributedOptimizer has parameter {self.lost!r}: use that one, or wrap an optimizer once. "
                "Gradients can be averaged for one optimizer only."
            )
        with self._lock, torch.no_grad():
            self._add_on()
            for number in self.book.unsent():
                parameter = self.wire.parameters[number]
                if parameter.requires_grad or parameter.grad is not None:
                    self._go(number)
            self.carrier.rest()

    def land(self) -> None:
        """Wait for all that is under way; raises the first failure after all have ended."""
        failure: Exception | None = None
        with self._lock, torch.no_grad():
            for flight in dict.fromkeys(self.in_flight.values()):
                try:
                    flight.land()
                except Exception as error:
                    failure = failure or error
            self.in_flight.clear()
            try:
                self.wire.round_over()
            except Exception as error:
                failure = failure or error
            self.book.landed()
            if failure is not None:
                self.book.reset()
                raise failure

    def finish(self) -> None:
        """Complete the round: send the rest and wait for all. Raises the first failure."""
        self.send_rest()
        self.land()

    def restart(self, drop: bool = False) -> None:
        """Gradients are used up or dropped. What is under way is waited for; with `drop`, its failure is ignored."""
        passes.left_by(self)
        self._open.clear()
        if self.book.under_way():
            try:
                self.finish()
            except Exception:
                if not drop:
                    raise
        self.book.reset()
        self.asked = False


def _before(parameter: torch.Tensor, exchange: weakref.ref[Exchange], number: int) -> Any:
    """Runs before a gradient is accumulated, and keeps the hook that runs after at the end of the parameter's."""

    def reaching(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            hooks: Any = parameter_of()._post_accumulate_grad_hooks  # type: ignore[union-attr]
            if len(hooks) > 1:
                _to_the_end(hooks)
            alive.reaching(number)

    parameter_of = weakref.ref(parameter)
    return passes.uncompiled(reaching)


def _after(exchange: weakref.ref[Exchange], number: int) -> Any:
    def ready(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            alive.ready(number)

    hook = passes.uncompiled(ready)
    hook.sends = True
    return hook


def _to_the_end(hooks: dict[int, Any]) -> None:
    """Hooks run in the order of the dict; those that send come last, also after what the user registered later."""
    seen_other = False
    for key in reversed(list(hooks)):
        if not getattr(hooks[key], "sends", False):
            seen_other = True
        elif seen_other:
            hooks[key] = hooks.pop(key)
