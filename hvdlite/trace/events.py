"""Events, read from the ring of this process or from a file.

The ring holds numbers (csrc/trace/trace.h says what they mean), a flight record says the same in words. Both become
`Event`, so that what reads events need not know where they come from. A record is written by another process, perhaps
on another day by another version, perhaps by another user: everything that is taken from it is checked, and a file
that will not do raises BadRecord with what is wrong, so that the others can still be read.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from .regular_file import opened

FORMAT = "hvdlite-flight-1"
BYTES_MAX = 1 << 28  # of a record: 65,536 events are 16 MB


class Event(NamedTuple):
    """One event. `t`: ns of the rank's own CLOCK_MONOTONIC."""

    t: int
    what: str  # as in csrc/trace/trace.h
    tag: int
    set: int
    value: int  # submit: bytes; round: items that waited before; start: bytes; finish, end, abort: -code
    by: str  # the kind of collective; of a start the plane
    name: str | None  # of the tensor


class Waiting(NamedTuple):
    """What was submitted and had not finished."""

    name: str | None
    kind: str
    set: int
    since: int  # when it was submitted, ns


class BadRecord(ValueError):
    """A file that is no record; the text names it and says why."""


class Record(NamedTuple):
    """A flight record."""

    path: str
    job: str
    epoch: int
    rank: int
    size: int
    host: str
    why: str
    written_ns: int  # on the rank's own clock
    failure: tuple[int, int, str] | None  # rank, code, text
    offset_ns: int
    error_ns: int | None
    waiting: list[Waiting]
    events: list[Event]
    sets: dict[int, list[int]]  # the ranks of process sets that are open; sets without a common rank may share a number


def _whole(value: Any, low: int = 0, high: int = (1 << 63) - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]!r} where a number belongs")
    return value


def _text(value: Any, most: int = 4096) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} where a text belongs")
    return value[:most]


def _name(value: Any) -> str | None:
    return None if value is None else _text(value, 512)


def _event(row: dict[str, Any]) -> Event:
    by = row.get("plane") if row["what"] == "start" else row.get("kind", "")
    return Event(
        _whole(row["t"]),
        _text(row["what"], 20),
        _whole(row["tag"], 0, (1 << 32) - 1),
        _whole(row.get("set", 0), 0, 255),
        _whole(row.get("value", 0)),
        _text(by or "", 40),
        _name(row.get("name")),
    )


def _waiting(row: dict[str, Any]) -> Waiting:
    return Waiting(
        _name(row["name"]), _text(row["kind"], 40), _whole(row.get("set", 0), 0, 255), _whole(row["since_ns"])
    )


def _record(path: str, found: dict[str, Any]) -> Record:
    if found.get("format") != FORMAT:
        raise ValueError(f"its format is {str(found.get('format'))[:40]!r}, not {FORMAT!r}")
    failure, clock = found.get("failure"), found.get("clock") or {}
    size = _whole(found["size"], 1, 1 << 20)
    error = clock.get("error_ns", 0)
    rows = found.get("events", [])
    if not isinstance(rows, list) or not isinstance(found.get("waiting", []), list):
        raise ValueError("its events are no list")
    return Record(
        path,
        _text(found.get("job", ""), 64),
        _whole(found.get("epoch", 0)),
        _whole(found["rank"], 0, size - 1),
        size,
        _text(found.get("host", "?"), 100),
        _text(found.get("why", "?"), 20),
        _whole(found.get("written_ns", 0)),
        None
        if failure is None
        else (_whole(failure["rank"], -1), _whole(failure["code"], -1000, 1000), _text(failure["text"])),
        _whole(clock.get("offset_ns", 0), -(1 << 63)),
        None if error is None else _whole(error),
        [_waiting(row) for row in found.get("waiting", [])],
        [_event(row) for row in rows],
        {int(number): [_whole(rank) for rank in ranks] for number, ranks in found.get("sets", {}).items() if ranks},
    )


def read_record(path: str | os.PathLike[str]) -> Record:
    """The record in a file. Raises BadRecord; OSError where the file cannot be read."""
    shown = os.fspath(path)
    with opened(path) as file:
        raw = file.read(BYTES_MAX + 1)
    if len(raw) > BYTES_MAX:
        raise BadRecord(f"{shown}: larger than any flight record [HVD723]")
    try:
        found = json.loads(raw.decode("utf-8", "replace"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return _record(shown, found)
    except RecursionError:
        raise BadRecord(f"{shown}: not a flight record: nested too deeply [HVD723]") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadRecord(f"{shown}: not a flight record, or an incomplete one: {missing[:200]} [HVD723]") from None
