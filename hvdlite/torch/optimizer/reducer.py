"""Reducer: the state of a distributed optimizer, and the path of a gradient from its hook to its average.

Hooks (`hooks`) note which gradients backward has added to. Where a run of them ends (`ReadyOrder`), and at the end of
the pass, the gradient tracker decides which of those noted are due, and they are sent in one call while backward goes
on. When the outermost pass ends and closes its window, the rest is sent and everything is waited for; so clipping and
unscaling between backward and step see averages.

Invariants:
  - A rank sends every trainable parameter exactly once per round, in any order. Where backward did not reach one, zeros
    travel. Every n-th round of an optimizer is matched with the others' n-th: ranks that run different numbers of
    passes between steps do not fit together, except that a rank may skip backward: its `step` sends everything.
  - A round is over before a pass adds to gradients again. What arrived is then made fit to be reduced once more.
  - A gradient is sent after all hooks of its parameter have run, so those of the user have changed what they change.

`wait_in_backward=False` leaves the waiting to synchronize and step: more overlap, and clipping needs synchronize.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ... import _core
from ...errors import HvdError, HvdMismatchError, is_outcome
from ...ops import Average
from ...training.gradient_tracker import GradientTracker
from . import backward_pass as passes
from .buckets import Carrier, EachAlone
from .failed_backward import VOID, Mark, Skipping, Skips, Untaken, apart, nothing_to_step_with, parted, skip, skip_error
from .gradient_codec import Flight, Wire
from .gradient_memory import GradientMemory, take_over
from .hooks import Hooks, Now, ReadyOrder

_serials = itertools.count()
_current_task = passes.task_number
_arrived = _core.lib.hvd_arrived  # what a step needs is in flight; what is submitted later is not waited for


class Exchange(Skipping):
    """Names, hooks, and gradients in flight."""

    def __init__(self, wire: Wire, passes_per_step: int) -> None:
        self.serial, self.wire, self.tracker = next(_serials), wire, GradientTracker(passes_per_step)
        self.carrier: Carrier = EachAlone(self)
        self.in_flight: dict[int, Flight] = {}
        self.order = ReadyOrder()
        self.hooks = Hooks(self, self.order.ends, wire.writers)
        self.wait_in_backward = True
        self.skipping = False  # within skip_synchronize
        self.synchronized = False  # the user called synchronize since the last backward
        self.lost: str | None = None  # a parameter that a newer optimizer has taken over
        self._lock = threading.RLock()
        self._open: set[passes.Backward] = set()
        self._task, self._pass, self._nested = -1, -1, False
        self._plain = True  # in this round no gradient needed a guard
        self._first_pass = False  # the next pass is the first of a step, and not of all
        self.failed: list[Exchange] | None = None  # a pass with an exception has reached these
        self.memory, self.skips = GradientMemory(), Skips()
        self.behind: str | None = None  # by an exception: why this rank may not take the step that the others take
        self.void: Mark | None = None  # made when a pass failed
        self.resting = False  # what a skip has left is dropped, and no pass has begun since: no rank steps
        self.untaken: Untaken | None = None  # a round is complete, and no step was taken since
        self.watch: Any = None  # a `Watch`
        self._late: dict[int, None] = {}  # due, but hooks of their parameter may yet change them

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """One more parameter."""
        take_over(self, parameter, name)
        number = self.tracker.add()
        self.wire.parameters.append(parameter)
        self.wire.names.append(name)
        self.order.add(parameter.numel() * parameter.element_size())
        if parameter.is_floating_point() or parameter.is_complex():
            self.hooks.add(parameter, number)

    def reaching(self, number: int) -> None:
        """A guard: backward is about to add to this gradient. torch.autograd.grad comes here, too, and adds to none."""
        with self._lock:
            task = _current_task()
            if task != self._task or task < 0:
                if passes.only_captures(self.wire.parameters[number]):
                    return
                self._enter(task)
            if self.tracker.is_sent(number):
                self._recall(number)

    def ready(self, number: int) -> None:
        """A hook: backward has added to this gradient, in a pass that `Now` does not name."""
        with self._lock:
            task = _current_task()
            if task != self._task or task < 0:
                self._enter(task)
            if self.tracker.is_sent(number):
                self.hooks.arm()
                raise HvdError(
                    f"a backward pass added to the gradient of {self.wire.names[number]!r} again during its average, "
                    "which no earlier pass did: call zero_grad() and repeat this step. hvdlite handles this case "
                    "from now on. [HVD232]"
                )
            if task == self.hooks.now.task:
                self.hooks.noted.append(number)
                return
            self._late.pop(number, None)
            self._send_late()
            self.tracker.reached(number, self._pass)
            if self.tracker.due(number, self._nested):
                self._late[number] = None

    def run_ends(self) -> None:
        """A hook: what was noted may go."""
        with self._lock:
            self._send_noted()

    def _enter(self, task: int) -> None:
        """The hook that has called is of another task than the one before."""
        now = self.hooks.now
        now.task = Now.NONE
        if task < 0:  # hooks called by something else than autograd's engine: step() sends
            passes.refuse_compiled(task)
            self._send_noted()
            self._begin(None)
            self._task, self._nested, self._plain = task, True, False
            return
        backward = passes.running(task)
        if backward.serial != self._pass:
            self._send_noted()
        if self not in backward.participants:
            self._begin(backward)
            backward.participants.append(self)
        self._task, self._pass, self._nested = task, backward.serial, backward.is_nested(task)
        if self._nested or len(self._open) > 1:
            self._plain = False
            self.hooks.arm()
        else:
            now.task = task

    def _begin(self, backward: passes.Backward | None) -> None:
        if not self._open:
            if self.failed is not None:
                skip(self)
            if self.tracker.in_flight():
                self.finish()
            if self.behind:
                self.look_behind()
        self._report()
        self.order.begin()
        if self._first_pass:
            self._first_pass = False
            self.memory.look(self.wire.parameters, self.wire.known_sparse)
        self._add_on()
        self.synchronized = self.resting = False
        self.tracker.begun()
        if backward is not None:
            self._open.add(backward)

    def _report(self) -> None:
        if not self.tracker.in_flight():
            self.carrier.over()
            wire = self.wire
            wire.reporting = None if self.untaken is None else self.untaken.reporter(wire.names, wire.agreement.silent)

    def _add_on(self) -> None:
        """What was reduced will be reduced again, with something added to it."""
        if self.wire.predivide != 1.0:
            self.wire.refresh()
        if self.tracker.reduced:
            with torch.no_grad():
                self.wire.again(range(len(self.wire.names)))
            self.tracker.reduced = False

    def _recall(self, number: int) -> None:
        """A pass reaches once more what has been sent in this round: let it arrive, to be sent again."""
        self._plain = False
        flight = self.in_flight.get(number)
        if flight is None:
            self.carrier.take_back(number)
            self.tracker.recall(number)
            return
        again = (number,) if flight.each_alone else flight.numbers
        with torch.no_grad():
            flight.complete()
            self.wire.again(again)
        for each in again:
            del self.in_flight[each]
            self.tracker.recall(each)

    def left(self, backward: passes.Backward) -> bool:
        """A pass is over; whether a round is complete and to be waited for."""
        with self._lock:
            self._send_noted(quiet=self.wait_in_backward)
            self._closed(backward)
            return self.tracker.ended() and not self._open and self.wait_in_backward

    def abandoned(self, backward: passes.Backward) -> None:
        """A pass has ended with an exception. What it has reached may be in flight when the next one begins."""
        with self._lock:
            self._plain = False
            self._settle()
            self.hooks.arm()
            if self.tracker.in_flight() or self._late or (self.hooks.noted and self.tracker.closes()):
                self.fail(backward.participants)  # what is left is not sent: it would complete the round elsewhere
            else:
                self._send_noted()
            self._closed(backward)

    def _over(self, calm: bool) -> None:
        self.order.round_over()
        self.hooks.round_over(calm and self._plain)
        self._plain, self._first_pass = True, True

    def _closed(self, backward: passes.Backward) -> None:
        self._open.discard(backward)
        if not self._open:
            self.wire.writers.forget()

    def _send_late(self, quiet: bool = False) -> None:
        if self._late:
            due, self._late = list(self._late), {}
            self._go(due, quiet)

    def _send_noted(self, quiet: bool = False) -> None:
        """What hooks have noted of the pass, and what they held back."""
        self._send_late(quiet)
        noted = self.hooks.noted
        if noted:
            numbers = noted[:]
            del noted[: len(numbers)]
            due = self.tracker.reached_once(numbers, self._pass)
            if due:
                self._go(due, quiet)

    def _go(self, numbers: Sequence[int], quiet: bool) -> None:
        if self.wire.start.looks_at_data():
            self.wire.note_data(numbers)
        if self.watch is not None:
            self.watch.sent(numbers)
        self.carrier.all_ready(numbers, quiet)
        self.tracker.all_sent(numbers)
        self.order.ready(numbers)

    def send_rest(self) -> None:
        """Send what has not been sent in this round; does not wait."""
        if self.lost is not None:
            raise HvdError(
                f"a newer DistributedOptimizer has parameter {self.lost!r}: use the newer one, or wrap the optimizer "
                "once. hvdlite averages gradients for one optimizer only. [HVD233]"
            )
        with self._lock, torch.no_grad():
            if not self._open:
                self.wire.writers.forget()
            self._report()
            self._send_noted(quiet=True)
            self._add_on()
            parameters = self.wire.parameters
            unsent = self.tracker.unsent()
            left = [n for n in unsent if parameters[n].requires_grad or parameters[n].grad is not None]
            if left:
                self._go(left, True)
            self.carrier.rest()
            self.all_sent(sorted(set(unsent).difference(left)) if unsent else [])

    def _send_lacking(self) -> None:
        """What is frozen here and not on every rank goes, too: the others wait for it."""
        agreement = self.wire.agreement
        try:
            lacking = [number for number in agreement.lacking(self.wire.names) if number not in self.in_flight]
        finally:
            if agreement.partly:
                self._plain = False
                self.carrier.differ(agreement.partly)
        self.carrier.settled(lacking)
        self.tracker.all_sent(lacking)

    def _landings(self) -> Iterator[Callable[[], None]]:
        yield self._send_lacking
        yield from [each.complete for each in dict.fromkeys(self.in_flight.values())]
        yield self.wire.round_over

    def complete_round(self) -> Exception | None:
        """Wait for all; the first failure. What a signal handler raises comes out at once: it may be called again."""
        failure: Exception | None = None
        skipped: HvdMismatchError | None = None
        _arrived()
        with self._lock, torch.no_grad():
            for wait in self._landings():
                try:
                    wait()
                except Exception as error:
                    if not is_outcome(error):
                        raise
                    skipped = skipped or skip_error(error)
                    failure = skipped or (failure if wait != self.wire.round_over else None) or parted(error) or error
            failure = failure or (self.watch and self.watch.arrived(list(self.in_flight)))
            self.in_flight.clear()
            if failure is None:
                self.untaken = Untaken(self.wire.parameters)
            self.tracker.completed()
            adds_on = self.wire.op == Average or self.wire.weights is not None
            self._over(failure is None and adds_on and self.wait_in_backward and not self.tracker.seen_twice())
            self.memory.move_in(self.wire.parameters)
            if failure is not None:
                self.tracker.reset()
            if skipped is not None:
                self.behind, self.void = VOID, Mark(self.wire)
        return failure

    def finish(self) -> None:
        """Complete the round: send the rest and wait for all. Raises the first failure, and HvdError if the pass before
        has failed, which ends its round."""
        if self.failed is not None:
            refusal = nothing_to_step_with(self.wire, self._missing())
            skip(self)
            raise refusal
        try:
            self.send_rest()
            failure = self.complete_round()
        except BaseException:
            self.left_behind()
            raise
        if failure is not None:
            raise failure

    def complete(self) -> None:
        """As `finish`, where there is something to step with. HvdError if a skip has left gradients of this rank
        alone."""
        if self.behind is VOID:
            raise apart(VOID)
        if not (self.tracker.complete or self.resting):
            self.finish()

    def restart(self, drop: bool = False) -> None:
        """Gradients are used up or dropped, once all has come. HvdError if the others may have stepped with them.
        With `drop`, that and failures of the round are ignored."""
        passes.left_by(self)
        self._open.clear()
        raised: Exception | None = None
        if self.behind and self.behind is not VOID and self.failed is None and not drop:
            raise apart(self.behind)
        if self.failed is not None or self.tracker.in_flight():
            try:
                if self.failed is not None:
                    skip(self)
                else:
                    self.finish()
            except BaseException as error:
                self.behind = VOID if self.behind is VOID else None  # it was to be dropped, here as elsewhere
                if not drop or not isinstance(error, Exception):
                    raise
                raised = None if is_outcome(error) else error
        self.resting = self.behind is VOID and not drop
        if drop:
            self.untaken = None
        if not (drop and self.behind is VOID):  # gradients stay what they are
            self.behind = self.void = None
        self.in_flight.clear()
        self._late.clear()
        self.hooks.noted.clear()
        self.tracker.reset()
        self.synchronized = False
        if raised is not None:
            raise raised

    def wait_later(self, later: bool) -> None:
        """`wait_in_backward=False`, or no longer."""
        self.wait_in_backward = not later
        if later:
            self.hooks.arm()
