"""A job of a bucket made of ordinary collectives, one after the other.

Each collective is started with the result of the one before it, and the last result goes into the gradients. PowerSGD
and top-k are such chains.

What a signal handler interrupts is made once more: so nothing is written but by `finish`, which writes the same each
time. A chain that has failed has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import OUTCOMES
from ...ops import Handle
from ..optimizer.failed_backward import SKIP_SHAPE

Start = Callable[[Any], Handle]


class Chain:
    """`starts`: each gets the result of the collective before it, the first one None, and returns a handle. `finish`
    gets the last result; it may be called again after a signal handler has raised in it."""

    def __init__(self, starts: Sequence[Start], finish: Callable[[Any], None]) -> None:
        self.stage = 0
        self._starts, self._finish = list(starts), finish
        self._handle: Handle | None = None
        self._error: Exception | None = None
        self._over = False

    def step(self, block: bool = True) -> bool:
        """As `Job` has it."""
        if self._over or (self._handle is not None and not (block or self._handle.done())):
            return False
        try:
            result = None if self._handle is None else self._handle.wait()
            if self._handle is None or self.stage + 1 < len(self._starts):
                following = 0 if self._handle is None else self.stage + 1
                self._handle = self._starts[following](result)
                self.stage = following
            else:
                self._finish(result)
                self._over = True
        except OUTCOMES as error:
            self._error, self._over = error, True
        return True

    def done(self) -> bool:
        """As `Job` has it."""
        while self.step(block=False):
            pass
        return self._over

    def wait(self) -> None:
        """As `Job` has it."""
        while self.step():
            pass
        if self._error is not None:
            raise self._error


def nothing() -> torch.Tensor:
    """What a rank gives whose backward pass has failed: no other rank has this shape."""
    return torch.empty(SKIP_SHAPE)
