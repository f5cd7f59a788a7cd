"""Timeline of one rank by tensor: when each was submitted, agreed, moved, done, and waited for.

A lane of a timeline is a tensor (csrc/trace/spans.c): NEGOTIATE_ALLREDUCE from this rank's submit until all have
agreed, then ALLREDUCE, in it QUEUE until its bucket begins, then the plane that carries it. Lanes "waits N" say when a
thread of the script waited for which tensor. A file is of another program: it is read within the bounds of
trace/merge.py, and a lane that makes no sense gives nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..trace import merge

Floats = NDArray[np.float64]
BYTES_MAX = 256 << 20
NAME_MAX = 200
_WAITS = range(2, 100)  # lanes of csrc/trace/spans.c


class Span(NamedTuple):
    """One allreduce on one rank, ns on rank 0's clock."""

    submitted: float
    agreed: float
    begun: float  # its bucket
    done: float
    bytes: int
    set: int
    votes: bool  # so small that it travelled with the votes, in no bucket


class Times(NamedTuple):
    """One step of one rank, ns on rank 0's clock."""

    begin: float
    end: float
    compute: float
    exposed: float
    cpu: float


class RankTimeline(NamedTuple):
    """spans: by tensor, in the order of time. others: how often other collectives came, by kind and tensor."""

    spans: dict[str, list[Span]]
    waits: list[tuple[float, float, str]]  # begin, end, tensor
    others: Counter[tuple[str, str]]
    end: float  # of what is in the file
    lacks: int  # events that are lost
    about: dict[str, Any]  # what the file says of its rank


class _Open:
    """A tensor between its submit and its end."""

    def __init__(self, row: dict[str, Any], kind: str) -> None:
        about = row.get("args")
        size = about.get("bytes") if isinstance(about, dict) else None
        self.bytes = size if type(size) is int and 0 <= size < 1 << 50 else -1
        self.kind, self.submitted, self.depth, self.set = kind, row["ts"] * 1e3, 1, 0
        self.agreed = self.begun = 0.0
        self.votes = False


def read(path: Path) -> RankTimeline:
    """Raises trace.events.BadRecord, OSError."""
    picture = merge.read(path)
    lost = [row["args"].get("lost") for row in picture.rows if row.get("name") == "hvdlite_lost_events"]
    line = RankTimeline({}, [], Counter(), max((row.get("ts", 0) * 1e3 for row in picture.rows), default=0.0),
                lost[-1] if lost and type(lost[-1]) is int else picture.bad, picture.about)  # fmt: skip
    title: dict[Any, str] = {}
    open_: dict[Any, _Open] = {}
    waiting: dict[Any, tuple[float, str]] = {}
    for row in picture.rows:
        lane, phase, name = row.get("tid"), row["ph"], str(row.get("name", ""))
        if phase == "M":
            if name == "thread_name":
                title[lane] = clean(row["args"].get("name", ""))
        elif lane in _WAITS:
            if phase == "B":
                waiting[lane] = row["ts"] * 1e3, clean(name)
            elif phase == "E" and lane in waiting:
                begin, tensor = waiting.pop(lane)
                line.waits.append((begin, row["ts"] * 1e3, tensor))
        elif phase == "B" and name.startswith("NEGOTIATE_"):
            open_[lane] = _Open(row, name[len("NEGOTIATE_") :])
        elif lane in open_ and phase in "BE":
            _follow(line, open_, lane, row, name, title.get(lane, "?"))
    return line


def _follow(
    line: RankTimeline, open_: dict[Any, _Open], lane: Any, row: dict[str, Any], name: str, tensor: str
) -> None:
    each, now = open_[lane], row["ts"] * 1e3
    if row["ph"] == "B":
        each.depth += 1
        about = row.get("args")
        if isinstance(about, dict) and type(about.get("set")) is int:
            each.set = about["set"]
        if name.endswith("_ALLREDUCE"):
            each.begun, each.votes = now, name.startswith("VOTES_")
        return
    each.depth -= 1
    if not each.agreed:
        each.agreed = now
    elif not each.depth:
        del open_[lane]
        if each.kind != "ALLREDUCE":
            line.others[each.kind.lower(), tensor] += 1
        elif each.bytes >= 0:
            begun = each.begun or each.agreed  # a rank alone moves nothing
            span = Span(each.submitted, each.agreed, begun, now, each.bytes, each.set, each.votes)
            line.spans.setdefault(tensor, []).append(span)


def clean(name: Any) -> str:
    """As a terminal may show it."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:NAME_MAX])
