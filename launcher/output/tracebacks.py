"""Tracebacks of many ranks, folded so that one can be read. Pure: pieces and times in, pieces out.

A rank writes its traceback line by line, and others write theirs at the same time. So what follows the first line of a
traceback waits until the rank has been silent for `SILENT_S` or has ended, at most `LONGEST_S`, and comes as one block.

Ranks often fail in the same calls: a file that is not there, shapes that differ. The first such traceback is shown
whole, also with those that it is chained to; of the others within `ALIKE_S` only what was raised. Files of
--output-filename have all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .lines import TAIL_BYTES, Piece

SILENT_S, LONGEST_S, ALIKE_S = 0.25, 1.0, 10.0
_FIRST = b"Traceback (most recent call last):\n"


class Shown(NamedTuple):
    """A traceback that stands on the screen."""

    rank: int
    time: float
    line: int  # of the screen


class Traces:
    """The stderr of all ranks."""

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}
        self._due: dict[int, tuple[float, float]] = {}  # when what waits is shown if nothing comes, and else
        self._shown: dict[bytes, Shown] = {}  # by its calls

    def feed(self, rank: int, pieces: Sequence[Piece], now: float, line: int) -> list[Piece]:
        """What can be shown of what a rank has written; line: the number of lines on the screen."""
        ready: list[Piece] = []
        for piece in pieces:
            text = piece.text
            if rank not in self._held and piece.block:
                at = 0 if text.startswith(_FIRST) else text.find(b"\n" + _FIRST) + 1
                if at or text.startswith(_FIRST):
                    self._held[rank], self._due[rank] = b"", (now, now + LONGEST_S)
                    ready += [Piece(text[:at], block=True)] if at else []
                    text = text[at:]
            if rank in self._held and piece.block:
                self._held[rank] += text
                self._due[rank] = now + SILENT_S, self._due[rank][1]
            else:
                ready += [*self.flush(rank, now, line), piece]
        return ready + (self.flush(rank, now, line) if len(self._held.get(rank, b"")) > TAIL_BYTES else [])

    def due(self) -> float | None:
        """When a traceback has waited long enough; None: none waits."""
        return min(map(min, self._due.values()), default=None)

    def silent(self, now: float) -> list[int]:
        """Ranks whose traceback has waited long enough."""
        return [rank for rank, due in self._due.items() if min(due) <= now]

    def flush(self, rank: int, now: float, line: int) -> list[Piece]:
        """The traceback of a rank that waits, if one does."""
        text = self._held.pop(rank, b"")
        self._due.pop(rank, None)
        if not text:
            return []
        calls, raised = parted(text)
        first = self._shown.get(calls)
        if first is not None and calls and raised and first.rank != rank and now < first.time + ALIKE_S:
            return [Piece(b"(calls as on rank %d) " % first.rank + raised, block=True)]
        if len(self._shown) > 100:
            self._shown.clear()
        self._shown[calls] = Shown(rank, now, line)
        return [Piece(text, block=True)]

    def line(self, text: bytes) -> int | None:
        """At which line of the screen a traceback with these calls stands; None: there is none."""
        shown = self._shown.get(parted(text)[0])
        return None if shown is None else shown.line


def parted(text: bytes) -> tuple[bytes, bytes]:
    """The calls of a traceback, and what was raised; no calls where there are none."""
    at = text.rfind(b'\n  File "') + 1
    end = text.find(b"\n", at) + 1 if at else 0
    while text.startswith((b"    ", b"  [Previous line repeated"), end):
        end = text.find(b"\n", end) + 1 or len(text)
    return text[:end], text[end:]
