"""Rows of the core for training steps (csrc/engine/flight_recorder/step_costs.h), each read once and kept.

The core names the columns of a row (`hvd_step_name`), so nothing of its layout is repeated here. All counts of a
row are since init; a `Step` is the difference to the row before. The core keeps the last 512 rows and so does this
module, for several callers: each keeps the number of the last row that it has seen.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from .. import _core
from .._core import ffi, lib

KEPT = 511  # steps: the core's rows but for one, which is being written or is the one before


def _names() -> tuple[str, ...]:
    text, found = ffi.new("char[]", 128), list[str]()
    while lib.hvd_step_name(len(found), text, 128) == 1:
        found.append(_core.text_of(text))
    return tuple(found)


NAMES = _names()
INDEX = {name: index for index, name in enumerate(NAMES)}
CARRIERS = tuple(name.partition(".")[2] for name in NAMES if name.startswith("bytes."))  # planes, and the votes last
SIZES = tuple(name.partition(".")[2] for name in NAMES if name.startswith("size."))
_OF_STEP = ("number", "begin_ns", "end_ns", "arrived_ns")  # these are no counts


class Step(NamedTuple):
    """One step: what the counts have grown by in it, and when it was. Times in ns of CLOCK_MONOTONIC."""

    number: int
    begin_ns: int
    end_ns: int
    arrived_ns: int  # when this rank had submitted what the step needs; 0: nothing was
    grown: tuple[int, ...]  # in the order of NAMES

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns

    def of(self, name: str) -> int:
        """How much this count has grown."""
        return self.grown[INDEX[name]]


def row(number: int) -> tuple[int, ...] | None:
    """The row of a step, of 0 the counts as they are now. None: it is not kept. Raises HvdNotInitializedError."""
    values = ffi.new("int64_t[]", len(NAMES))
    found = _core.checked(lib.hvd_step_row(number, values))
    return tuple(ffi.unpack(values, len(NAMES))) if found else None


class History:
    """The last steps of this incarnation of the job."""

    def __init__(self) -> None:
        self.since_ns = 0  # when the first step began
        self._lock = threading.Lock()
        self._steps: deque[Step] = deque(maxlen=KEPT)
        self._last: tuple[int, ...] = (0,) * len(NAMES)

    def steps(self, after: int = 0) -> list[Step]:
        """Those after this number, as far as they are kept, oldest first. Raises HvdNotInitializedError."""
        with self._lock:
            now = row(0)
            assert now is not None
            newest = now[0]
            first = max(self._last[0] + 1, newest - KEPT)
            if first > self._last[0] + 1:
                self._last = row(first - 1) or (0,) * len(NAMES)
            for number in range(first, newest + 1):
                self._take(row(number))
            return [step for step in self._steps if step.number > after]

    def _take(self, values: tuple[int, ...] | None) -> None:
        """A step needs the row before it; where that is gone there is none."""
        if values is None:
            return
        number, begin, end, arrived = values[:4]
        if number == self._last[0] + 1:
            grown = tuple(now - before for now, before in zip(values, self._last))
            self._steps.append(Step(number, begin, end, arrived, grown))
        self._last = values
