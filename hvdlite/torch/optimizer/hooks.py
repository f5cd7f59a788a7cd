"""What runs at a parameter when backward adds to its gradient, hundreds of times per step, and what that costs.

Autograd takes about a microsecond to come to a hook at all, once for each of its two kinds: before the gradient is
added to (a *guard*), and after. So in the plain case there is one hook, after, and it only notes the parameter's
number, which takes some 0.6 us; what is noted is looked at where a run of gradients ends (`order`), many at a time, for
2 to 3 us each, most of it to make Python's objects of the gradients.

A guard is needed where a gradient that is in flight may be added to once more, which must not happen before it has
arrived: by a nested backward (re-entrant checkpoints), by a pass after one that failed, by several passes that are
waited for later (`wait_in_backward=False`), and for every op but an average, where what was reduced is changed before a
pass adds to it. An optimizer's first rounds are guarded and learn whether any of that happens; if not, its guards go,
and the first sign of it brings them back for good. If that first sign is itself an addition to a gradient in flight (a
graph that was plain for two rounds and then reaches one parameter both nested and not), it is an error, and no wrong
average.

A gradient is never sent by its own hook, but by that of a later parameter or by the end of backward: other hooks of the
same parameter, whenever they were registered, have changed then what they change. On a GPU the two parameters' hooks
may run on different streams, so they note theirs, too (`streams`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import backward_pass as passes
from .streams import Writers

CALM_ROUNDS = 2
_current_task = passes.task_number


class Now:
    """The backward pass of which a hook may note its parameter without asking: its task, or NONE."""

    __slots__ = ("task",)
    NONE = -2  # unlike all tasks, and unlike -1, which is outside of autograd's engine

    def __init__(self) -> None:
        self.task = Now.NONE


class Listener(Protocol):
    """What hooks report to an exchange."""

    def reaching(self, number: int) -> None:
        """Backward is about to add to this gradient."""

    def ready(self, number: int) -> None:
        """Backward has added to this gradient, in a pass that `now` does not name."""

    def run_ends(self) -> None:
        """What was noted may go."""


class Hooks:
    """The hooks of an optimizer's parameters."""

    def __init__(self, listener: Listener, ends: bytearray, writers: Writers) -> None:
        self._listener, self._writers = weakref.ref(listener), writers
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
        hook = _after(self._listener, self.now, self.noted, self._ends, number, writes)
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        self._after.append(parameter.register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(trainable)
        self._guard(parameter, number)

    def _guard(self, parameter: torch.Tensor, number: int) -> None:
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        self._guards.append((parameter, parameter.register_hook(_guard(self._listener, number))))
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


def _guard(listener: Callable[[], Listener | None], number: int) -> Any:
    def reaching(_: torch.Tensor) -> None:
        alive = listener()
        if alive is not None:
            alive.reaching(number)

    return passes.uncompiled(reaching)


def _after(
    listener: Callable[[], Listener | None], now: Now, noted: list[int], ends: bytearray, number: int,
    writes: Callable[[], None] | None
) -> Any:  # fmt: skip
    note = noted.append

    def ready(_: torch.Tensor) -> None:
        if _current_task() != now.task:
            alive = listener()
            if alive is not None:
                alive.ready(number)
            return
        if ends[number]:
            alive = listener()
            if alive is not None:
                alive.run_ends()
        note(number)

    if writes is None:
        return passes.uncompiled(ready)

    def written(gradient: torch.Tensor) -> None:
        writes()
        ready(gradient)

    return passes.uncompiled(written)
