"""End of a round on all ranks when the backward pass of one has raised, and steps that one rank has missed.

The user catches the exception to go on with the next batch. Some gradients are in flight by then and the other ranks
wait for the rest, so a rank that only went on would be one round behind for good, and one that sent what it has would
bring half a gradient into the average, which the others apply and it does not.

So the pass is over for all: for each gradient that has not travelled the rank sends a *skip*, a tensor of a shape that
no gradient has, under the gradient's name. The ranks disagree on it, nothing is moved, and the engine goes on.
Elsewhere the mismatch is reported as what it is, with the rank's number, where the averages are waited for: every rank
has an error in the same step, and equal weights. At least one gradient is always skipped, since the last ones are sent
by the end of backward only.

Later nothing can be skipped: all has been added up, the others get their averages, and step. A signal handler may
still raise while this rank waits, or steps. Then it is *behind*: step() makes up for it, and to drop the gradients is
an error that says so. What another exception of the script has left is found by the next round (`Untaken`).
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ...errors import HvdError, HvdMismatchError, is_outcome
from ...ops import Handle
from ..ops import plain

if TYPE_CHECKING:
    from ...training.gradient_tracker import GradientTracker
    from .backward_pass import Backward
    from .buckets import Carrier
    from .gradient_codec import Flight, Wire
    from .hooks import Hooks
    from .reducer import Exchange

PRIORITY = -(2**31)  # of the gradient that reports a missed step: no other has it
UNTAKEN = (
    "completed a round of gradients. The other ranks complete this round and take the step, and without it the "
    "weights of this rank would differ. The averages are available: go on to optimizer.step(), after what your loop "
    "does before it (unscaling, clipping), then to zero_grad(). If they are lost (gradients are None, or a closure "
    "was left),"
)
VOID = "has no averages, since a rank skipped its backward pass"
TORN = (
    "took its step: some of its weights may be old, while the other ranks have taken the whole step. To make the ranks "
    "equal,"
)
_NOTE = -1  # in the tracker: the agreement on what travels in this round is in flight
SKIP_SHAPE = (0,) * 8  # as many dimensions as there can be
_SHOWN = 3
_RANKS = r"(ranks? \d[\d, and-]*?)(?: said|:) (?:(?!ranks? \d)[^\n])*?"
_SKIPPED = re.compile(_RANKS + r"\[[0*](?:, 0){7}\]")  # the first dimension may be one that is not compared
_MISSED = re.compile(f"{_RANKS}{PRIORITY}")
_NAMED = re.compile(r"tensor '(?:(?:grouped_)?allreduce\.)?([^']*)'")


def send_skip(wire: Wire, number: int) -> list[Handle]:
    """In the place of one gradient."""
    name, dtype = wire.names[number], wire.parameters[number].dtype
    handles = [plain.allreduce_async_(torch.empty(SKIP_SHAPE, dtype=dtype), name=name, **wire.settings)]
    if wire.is_sparse(number) and not wire.sparse_as_dense and not wire.uneven:
        handles.append(plain.allgather_async(torch.empty(SKIP_SHAPE, dtype=dtype), f"{name}.values", wire.process_set))
    return handles


def send_skipped_group(wire: Wire, numbers: Sequence[int], name: str) -> list[Handle]:
    """In the place of a group."""
    tensors = [torch.empty(SKIP_SHAPE, dtype=wire.parameters[number].dtype) for number in numbers]
    return [plain.grouped_allreduce_async_(tensors, name=name, **wire.settings)]


def skip_error(error: Exception) -> HvdMismatchError | None:
    """The error that says which rank has skipped the pass, if that is why the exchange failed."""
    found = _SKIPPED.search(str(error)) if isinstance(error, HvdMismatchError) else None
    if found is None:
        return None
    named = _NAMED.search(str(error))
    which = f" {named[1]!r}" if named else ""
    return HvdMismatchError(
        f"{found[1]} skipped this backward pass: it ended there with an exception before the gradient of{which} was "
        "complete, so this step has no averages on any rank. To go on, catch this error where the script catches the "
        "exception: call optimizer.zero_grad() and take the next batch, without step() [HVD308]"
    )


def nothing_to_step_with(wire: Wire, numbers: Iterable[int]) -> HvdError:
    """The error of the rank itself, where it goes on without zero_grad()."""
    names = [wire.names[number] for number in numbers]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return HvdError(
        f"the last backward pass of rank {_core.rank()} ended with an exception before the gradients of "
        f"{', '.join(map(repr, names[:_SHOWN]))}{more} were sent: there is nothing to synchronize or step with. "
        "The other ranks are notified that this rank skips the step: call optimizer.zero_grad() and take the next "
        "batch, without step() [HVD308]"
    )


def apart(where: str) -> HvdError:
    """The error of a rank that goes on as if there had been no step, which the others take; VOID: of all ranks, which
    go on as if there had been no skip."""
    if where is VOID:
        return HvdError(
            f"rank {_core.rank()} has no averages to step with, because a rank skipped the last backward pass: the "
            "gradients are those of this rank alone. Call optimizer.zero_grad() on all ranks and take the next batch "
            "[HVD308]"
        )
    return HvdError(
        f"rank {_core.rank()} was interrupted while it {where} load a checkpoint on all ranks, or call "
        "hvd.broadcast_parameters and hvd.broadcast_optimizer_state [HVD309]"
    )


class Skips:
    """What a rank has sent in the place of gradients of one optimizer, until all of it is answered."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._handles: list[Handle] = []
        self._sending = threading.Lock()

    def send(self, carrier: Carrier, numbers: Iterable[int]) -> None:
        """In the place of these, as far as it has not been done."""
        failures: list[Exception] = []
        # Signal handlers raise in the main thread only. There, what has been sent could be lost before it is noted.
        sender = threading.Thread(target=self._send, args=(carrier, list(numbers), failures))
        sender.start()
        sender.join()
        if failures:
            raise failures[0]

    def _send(self, carrier: Carrier, numbers: list[int], failures: list[Exception]) -> None:
        try:
            with self._sending:  # the thread of a call that was interrupted may be at it
                for some, handles in carrier.skip([number for number in numbers if number not in self._numbers]):
                    self._numbers.update(some)
                    self._handles += handles
        except Exception as error:
            failures.append(error)

    def wait(self) -> None:
        """Raises the first failure that is no mismatch."""
        failure = wait_for_all(handle.wait for handle in self._handles)
        if failure is not None:
            raise failure


class Mark:
    """Whether gradients have been set to zero since: a look at one of them, where looking at all would take long."""

    def __init__(self, wire: Wire) -> None:
        self._of = next((each for each in wire.parameters if each.requires_grad), None)
        if self._of is not None and self._of.grad is None:
            with torch.no_grad():
                self._of.grad = torch.zeros_like(self._of)
        self._seen = self._look()

    def _look(self) -> Any:
        gradient = None if self._of is None else self._of.grad
        return None if gradient is None else (weakref.ref(gradient), gradient._version)

    def changed(self) -> bool:
        """They have."""
        return self._look() != self._seen


class Skipping:
    """The part of an exchange that deals with what an exception has left."""

    wire: Wire
    tracker: GradientTracker
    hooks: Hooks
    carrier: Carrier
    in_flight: dict[int, Flight]
    failed: list[Exchange] | None
    skips: Skips
    behind: str | None
    void: Mark | None
    untaken: Untaken | None
    resting: bool
    lost: str | None
    _lock: threading.RLock
    _late: dict[int, None]

    def _closed(self, backward: Backward) -> None:
        """No pass of ours any more."""

    def _over(self, calm: bool) -> None:
        """The round is over."""

    def _settle(self) -> None:
        """After an exception: what was handed over is in flight, and nothing else, whatever had been noted by then."""
        for number, flight in list(self.in_flight.items()):
            if flight.begun():
                self.tracker.sent(number)
            else:
                del self.in_flight[number]

    def _missing(self) -> list[int]:
        """Gradients of a round that are not in flight."""
        numbered, sent = enumerate(self.wire.parameters), self.in_flight
        return [n for n, each in numbered if n not in sent and (each.requires_grad or each.grad is not None)]

    def fail(self, reached: list[Exchange]) -> None:
        """Our round ends with a failed pass, which has reached these."""
        self.failed, self.void = reached, Mark(self.wire)

    def falls(self, backward: Backward) -> bool:
        """Of a pass that has failed for others: is it, on other ranks, the last of our window, too?"""
        return self.failed is None and self.tracker.closes() and not self.tracker.in_flight()

    def interrupted(self, backward: Backward) -> None:
        """A signal handler, mostly, has raised while the end of the pass was dealt with."""
        with self._lock:
            self._closed(backward)
            self.left_behind()

    def left_behind(self, within: bool = False) -> None:
        """An exception, no outcome of the round, has come: the others may step without us. within: as we did."""
        self._settle()
        if self.behind is VOID:
            return
        untaken = self.lost is None and (self.tracker.in_flight() or self.tracker.complete)
        self.behind = TORN if within or self.behind is TORN else UNTAKEN if untaken else None

    def look_behind(self) -> None:
        """A pass begins. HvdError if gradients are lost with which the others step."""
        if self.behind is VOID:
            if self.void is None or self.void.changed():
                self.behind = self.void = None
        elif self.behind and any(each.requires_grad and each.grad is None for each in self.wire.parameters):
            raise apart(self.behind)

    def levelled(self) -> None:
        """All ranks have the same state now, whatever has become of the last step."""
        self.untaken = None
        if self.behind is not VOID:  # gradients stay what they are
            self.behind = None

    def skip(self) -> None:
        """Send skips instead of what is not in flight. May be called again after an exception, as `skipped`."""
        with self._lock, torch.no_grad():
            left = self._missing()
            self.skips.send(self.carrier, self.carrier.at_once(left))
            if self.wire.shares is not None:
                self.wire.shares.mine()  # which the others wait for, too
            self.all_sent(sorted(set(range(len(self.wire.names))).difference(left, self.in_flight)))

    def all_sent(self, silent: list[int]) -> None:
        """All gradients of the round are in flight, but for these, which are not sent. May be called again in it."""
        if not self.tracker.is_sent(_NOTE):
            self.wire.all_sent(silent)
            self.tracker.sent(_NOTE)

    def skipped(self) -> Exception | None:
        """Wait for them and for all that is in flight: then the round has ended on all ranks."""
        with self._lock, torch.no_grad():
            waits = [flight.complete for flight in dict.fromkeys(self.in_flight.values())]
            failure = wait_for_all([self._skip_lacking, *waits, self.skips.wait, self.wire.round_over])
            self.failed, self.skips, self.behind = None, Skips(), VOID
            self.in_flight.clear()
            self._late.clear()
            self.hooks.noted.clear()
            self.tracker.reset()
            self._over(False)
        return failure

    def _skip_lacking(self) -> None:
        """As `skip`, of what is frozen on this rank and not on every rank, and of what depends on that."""
        self.skips.send(self.carrier, [*self._missing(), *self.wire.agreement.lacking(self.wire.names)])


def skip(exchange: Exchange) -> None:
    """A pass has failed: its round ends here and, with an error that says so, on the other ranks. So it does for all
    optimizers that the pass has reached. A caller that is interrupted in it calls it again."""
    reached: Any = exchange.failed or ()
    together = {each for each in reached if getattr(each, "failed", None) is reached}
    exchanges: list[Exchange] = sorted({exchange, *together}, key=lambda one: one.serial)
    for each in exchanges:
        each.skip()
    for each in exchanges:
        failure = each.skipped()
        if failure is not None:
            raise failure


def forget(exchange: Exchange) -> None:
    """All ranks go back to a commit: of a step that was in progress nothing is left, nor of a job that has ended."""
    exchange.restart(drop=True)
    exchange.wire.forget()
    exchange.carrier.forget()
    exchange.failed, exchange.skips, exchange.resting = None, Skips(), False
    exchange.behind = exchange.void = exchange.untaken = None


def wait_for_all(waits: Iterable[Callable[[], object]]) -> Exception | None:
    """Wait for everything. The first failure that is no mismatch, which is what skips are for."""
    failure: Exception | None = None
    for wait in waits:
        try:
            wait()
        except HvdMismatchError:
            pass
        except Exception as error:
            if not is_outcome(error):
                raise
            failure = failure or error
    return failure


class Untaken:
    """A round whose step is not taken yet, and the first of the parameters as it was then.

    No other rank sees an exception of the user's script between backward and step on one rank: the averages are there,
    the other ranks step with them, and the script may catch it and go on with the next batch. So a rank remembers that
    a round was completed and no step taken since. All ranks may have that in common: GradScaler skips a step, several
    rounds add up, a generator's pass reaches the discriminator, a loss is no number. If not, one of them has missed a
    step.

    That is reported with the next round, at no cost where there is nothing to report: the gradient of one parameter has
    a priority then that no gradient has, the ranks disagree on it, and each has the error. It lasts until the ranks are
    made equal: by a state that is loaded or broadcast, or by any write to the parameter. A comm hook sends what it
    likes, so with `register_comm_hook` nothing is reported.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._first = next((each for each in parameters if each.requires_grad), None)
        self._version = None if self._first is None else self._first._version

    def reporter(self, names: Sequence[str], silent: Sequence[int]) -> int | None:
        """The number of the gradient that reports it: the first by its name of those that travelled in the last round,
        which is the same on all ranks. None: the parameter has been written to since."""
        if self._first is None or self._first._version != self._version:
            return None
        return min((n for n in range(len(names)) if n not in silent), key=names.__getitem__, default=None)


def parted(error: Exception) -> HvdMismatchError | None:
    """The error that names the rank that has missed a step, if that is why the exchange failed."""
    found = _MISSED.search(str(error)) if isinstance(error, HvdMismatchError) else None
    if found is None:
        return None
    return HvdMismatchError(
        f"{found[1]} did not take the step that the other ranks took with the averages of the last round, so the "
        "weights differ between ranks: the script caught an exception between backward() and optimizer.step() there, "
        "or left out step(). To go on, call optimizer.zero_grad() on all ranks. Then load a checkpoint on all ranks, "
        "or call hvd.broadcast_parameters and hvd.broadcast_optimizer_state. Where the script catches such an "
        "exception, call optimizer.step() as on the other ranks [HVD309]"
    )
