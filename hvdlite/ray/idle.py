"""Watch for a rank of a RayExecutor that waits in a collective for ranks whose call has returned.

These stay in the job, and take part in nothing until the next call, which begins when all have returned. So the rank
would wait for ever. The watch calls `awaited` (driven) on the idle ones, and they leave the job if it is so: then the
core fails what needs them. A rank that only computes is not disturbed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

_LEAVE_S = 10.0
_PAUSE_S, _PAUSE_MAX_S = 0.5, 4.0  # between questions; each sends a signal to all ranks (_core/stack_dump.py)


class Watch:
    """Of one call. inquired: whether idle ranks have something pending; left: whether they have left."""

    def __init__(self, ray: Any, workers: Sequence[Any]) -> None:
        self._ray, self._workers = ray, workers
        self._questions: list[Any] = []
        self._before, self._pause, self._due = [""], _PAUSE_S, time.monotonic() + _PAUSE_S
        self.inquired = self.left = False

    def look(self, idle: Sequence[int]) -> None:
        """Call it again and again. It waits for nothing, but for ranks to leave."""
        if self._questions:
            self._collect(idle)
        elif idle and not self.left and time.monotonic() >= self._due:
            self.inquired, self._questions = True, [self._workers[rank].awaited.remote() for rank in idle]

    def _collect(self, idle: Sequence[int]) -> None:
        count, answers = len(self._questions), [""]
        if len(self._ray.wait(self._questions, num_returns=count, timeout=0)[0]) < count:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):  # its next call will raise it
            answers = self._ray.get(self._questions)
        self._questions, self.left, self._before = [], any(answers) and answers == self._before, answers
        self._pause = _PAUSE_S if any(answers) else min(2 * self._pause, _PAUSE_MAX_S)
        self._due = time.monotonic() + self._pause
        if self.left:  # it was so twice, so nothing gets on
            refs = [self._workers[rank].leave.remote() for rank in idle]
            self._ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_S)
