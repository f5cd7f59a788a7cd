"""What runs at a parameter when backward adds to its gradient, hundreds of times per step, and what that costs.

Autograd takes about a microsecond to come to a hook at all, once for each of its two kinds: before the gradient is
added to (a *guard*), and after. So in the plain case there is one hook, after, and it only notes the parameter's
number, which takes some 0.6 us; what is noted is looked at where a run of gradients ends (`ReadyOrder`), many at a
time, for 2 to 3 us each, most of it to make Python's objects of the gradients.

A guard is needed where a gradient that is in flight may be added to once more, which must not happen before it has
arrived: by a nested backward (re-entrant checkpoints), by a pass after one that failed, by several passes that are
waited for later (`wait_in_backward=False`), and for every op but an average, where what was reduced is changed before a
pass adds to it. An optimizer's first rounds are guarded and learn whether any of that happens; if not, its guards go,
and the first sign of it brings them back for good. If that first sign is itself an addition to a gradient in flight (a
graph that was plain for two rounds and then reaches one parameter both nested and not), it is an error, and no wrong
average.

A gradient is never sent by its own hook, but by that of a later parameter or by the end of backward: other hooks of the
same parameter, whenever they were registered, have changed then what they change. On a GPU the two parameters' hooks
may run on different streams, so they note theirs, too (`Writers`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import backward_pass as passes

if TYPE_CHECKING:
    from .reducer import Exchange

try:
    _address: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a PyTorch without CUDA, or one that has given it up

    def _address(device: int) -> int:
        return torch.cuda.current_stream(torch.device("cuda", device)).cuda_stream


class Writers:
    """The CUDA streams on which gradients were written in the open passes, and what must follow them.

    Autograd adds to a gradient on the stream that its part of forward ran on, and the gradient is sent later, by the
    hook of another parameter, whose stream may be another one. An event on that one does not cover the first: the
    collective would read what is not written yet. (Autograd lets the caller's stream wait for all of them, but only
    when backward is over.)

    So the hook of a parameter on a GPU notes the current stream, 0.3 us of its time, and where the sending hook has
    another one, the gradient is sent from the stream it was written on: its ready event is recorded there, and what is
    computed of it to travel (a compressed copy) is computed there. No stream of the user's waits for another by that.
    Only gradients that become one tensor, in a group or in the bucket of a comm hook, must have come together: the
    current stream waits for theirs. When no pass is open any more, all of this is autograd's business, and what was
    noted is forgotten.
    """

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, torch.cuda.Stream]] = {}  # by parameter: its device, the stream
        self._known: dict[tuple[int, int], tuple[int, torch.cuda.Stream]] = {}

    def noter(self, parameter: torch.Tensor, number: int) -> Callable[[], None] | None:
        """What notes the current stream for this parameter; None if it lies on no GPU."""
        if not parameter.is_cuda:
            return None
        device, written, known = parameter.get_device(), self._written, self._known

        def note() -> None:
            key = device, _address(device)
            writer = known.get(key)
            if writer is None:
                writer = known[key] = device, torch.cuda.current_stream(torch.device("cuda", device))
            written[number] = writer

        return note

    def elsewhere(self, number: int) -> torch.cuda.Stream | None:
        """The stream on which this gradient was written, if it is not the current one."""
        if number not in self._written:
            return None
        device, stream = self._written[number]
        return None if stream.cuda_stream == _address(device) else stream

    def join(self, numbers: Iterable[int]) -> None:
        """Let the current stream wait until these gradients are written."""
        others = {id(stream): stream for stream in map(self.elsewhere, numbers) if stream is not None}
        for stream in others.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def forget(self) -> None:
        """No pass is open: the caller's stream has waited for all of them."""
        self._written.clear()


FIRST_BYTES = 1 << 20
LONGEST_BYTES = 32 << 20
LAST_BYTES = 1 << 20


def cut(order: Sequence[int], bytes_of: Sequence[int]) -> set[int]:
    """The parameters, in this order of readiness, before which a run ends."""
    left = sum(bytes_of[number] for number in order)
    length, last = min(FIRST_BYTES, left // 4), min(LAST_BYTES, left // 4)
    ends, held = set(), 0
    for number in order:
        closes = left <= last < left + held  # what comes from here on is small enough for the end
        if held and (held >= length or closes):
            ends.add(number)
            held, length = 0, min(2 * length, LONGEST_BYTES)
        held += bytes_of[number]
        left -= bytes_of[number]
    return ends


class ReadyOrder:
    """What has become ready in this round, in order, and the gradients after which the engine is woken.

    Waking it for each of hundreds of gradients costs more than the gradients; waking it once leaves nothing to overlap.
    So gradients are gathered into runs: the first is small, that reduction begins early; each next one is twice as
    long, since it can move while the one before still does; and what is left for the end of backward, when no rank
    computes any more, is small again.

    Measured with a ResNet-50's backward on two ranks that fill both CPUs of their machine (median milliseconds over a
    step without communication): first runs of 1 MB 26, of 4 MB 34, of 16 MB 30; DistributedDataParallel over Gloo 130.

    The order is learned. Backward goes roughly from the last parameter to the first, which is what the first pass
    assumes; each round notes how it was, and the next one is cut accordingly. Nothing here is agreed between ranks: the
    plan decides what is sent together, and a rank with another order only wakes its engine at other moments.

    `ends[number]` is 1 where a run ends before this parameter; hooks hold on to it, and it is changed in place.
    """

    def __init__(self) -> None:
        self.ends = bytearray()
        self.bytes_of: list[int] = []
        self._known: list[int] | None = None
        self._seen: list[int] = []

    def add(self, size: int) -> None:
        """One more parameter, of so many bytes."""
        self.bytes_of.append(size)
        self.ends.append(0)
        self._known = None

    def begin(self) -> None:
        """A round begins."""
        if self._known is None:
            self._lay_out(list(reversed(range(len(self.ends)))))

    def _lay_out(self, order: list[int]) -> None:
        self._known = order
        ends = cut(order, self.bytes_of)
        self.ends[:] = bytes(number in ends for number in range(len(self.ends)))

    def ready(self, numbers: Sequence[int]) -> None:
        """These have become ready, in this order."""
        self._seen += numbers

    def round_over(self) -> None:
        """Everything of a round has completed."""
        if self._seen and self._seen != self._known:
            self._lay_out(self._seen)
        self._seen = []


CALM_ROUNDS = 2
_current_task = passes.task_number


class Now:
    """The backward pass of which a hook may note its parameter without asking: its task, or NONE."""

    __slots__ = ("task",)
    NONE = -2  # unlike all tasks, and unlike -1, which is outside of autograd's engine

    def __init__(self) -> None:
        self.task = Now.NONE


class Hooks:
    """The hooks of an optimizer's parameters."""

    def __init__(self, exchange: Exchange, ends: bytearray, writers: Writers) -> None:
        self._exchange, self._writers = weakref.ref(exchange), writers
        self.now, self.noted, self._ends = Now(), list[int](), ends
        self._parameters: list[tuple[torch.Tensor, int]] = []
        self._after: list[Any] = []
        self._guards: list[tuple[torch.Tensor, Any]] = []
        self._calm = 0

    def add(self, parameter: torch.Tensor, number: int) -> None:
        """One more parameter, of a dtype that gradients can have. Its hooks stay through freezing and unfreezing."""
        self.arm()
        self._parameters.append((parameter, number))
        writes = self._writers.noter(parameter, number)
        hook = _after(self._exchange, self.now, self.noted, self._ends, number, writes)
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        self._after.append(parameter.register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(trainable)
        self._guard(parameter, number)

    def _guard(self, parameter: torch.Tensor, number: int) -> None:
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        self._guards.append((parameter, parameter.register_hook(_guard(self._exchange, number))))
        parameter.requires_grad_(trainable)

    def arm(self) -> None:
        """Guard all gradients, until some rounds have shown that it is not needed."""
        self._calm = 0
        if not self._guards:
            for parameter, number in self._parameters:
                self._guard(parameter, number)

    def disarm(self) -> None:
        """Take the guards away."""
        for parameter, guard in self._guards:
            guard.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dict costs half of what a hook does
        self._guards = []

    def round_over(self, plain: bool) -> None:
        """A round has completed; `plain`: without anything that needs guards."""
        self._calm = self._calm + 1 if plain else 0
        if self._calm == CALM_ROUNDS:
            self.disarm()
        elif not plain:
            self.arm()

    def remove(self) -> None:
        """Of all parameters."""
        self.disarm()
        for hook in self._after:
            hook.remove()
        self._after = []


def _guard(exchange: Callable[[], Exchange | None], number: int) -> Any:
    def reaching(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            alive.reaching(number)

    return passes.uncompiled(reaching)


def _after(
    exchange: Callable[[], Exchange | None], now: Now, noted: list[int], ends: bytearray, number: int,
    writes: Callable[[], None] | None
) -> Any:  # fmt: skip
    note = noted.append

    def ready(_: torch.Tensor) -> None:
        if _current_task() != now.task:
            alive = exchange()
            if alive is not None:
                alive.ready(number)
            return
        if ends[number]:
            alive = exchange()
            if alive is not None:
                alive.run_ends()
        note(number)

    if writes is None:
        return passes.uncompiled(ready)

    def written(gradient: torch.Tensor) -> None:
        writes()
        ready(gradient)

    return passes.uncompiled(written)
