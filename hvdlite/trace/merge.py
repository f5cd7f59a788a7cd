"""hvdlite-trace merge DIR|FILES -o out.json: one picture of all ranks, for Perfetto and chrome://tracing.

Takes timelines (FILE finds FILE.rank-K.json beside it), flight records, or a folder of either. Rows of timelines are on
the clock of rank 0 already; a record is put there by the offset that it carries. Into each NEGOTIATE span of the first
rank go ticks at which the other ranks were ready, named after them, as Horovod's timeline has them.

A timeline whose writer was killed in the middle of a row is taken as far as it goes; rows that a viewer could not read
are left out and counted. A file that is neither is an error that names it, and the others are merged. Of several
attempts of a job the newest counts (attempts.py).
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import attempts
from .events import BYTES_MAX, BadRecord, read_record
from .regular_file import opened
from .spans import Row, Spans

HELP = "merge the timelines or flight records of all ranks into one file"
TIMELINE_MAX = 8 * BYTES_MAX
TIME_MAX = 1e18  # microseconds; nothing greater is a time or a number of a process, and infinity is no JSON
DIGITS_MAX = 40  # of a whole number; greater ones are infinite for a viewer, and Python refuses to read the greatest
DEPTH_MAX = 20
PHASES = {"B": (), "E": (), "X": ("name", "dur"), "i": ("name",), "M": ("name", "args"), "C": ("name", "args")}


class Picture(NamedTuple):
    """What a file has given."""

    rows: list[Row]
    about: dict[str, Any]  # what the file says of its rank
    bad: int  # rows that are left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this subcommand."""
    parser.add_argument("inputs", nargs="+", metavar="DIR|FILE", help="timelines, flight records, or folders of them")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    attempts.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if there was nothing to merge."""
    rows, about, complaints = [], [], []
    try:
        chosen = attempts.choose(attempts.with_older(inputs(args.inputs)), args.before)
    except attempts.NoAttemptError as error:
        print(f"hvdlite-trace: {error}", file=sys.stderr)
        return 1
    for path in chosen.paths:
        if os.path.realpath(path) == os.path.realpath(args.output):  # which follows links in a circle, too
            complaints.append(f"{path}: is the output")
            continue
        try:
            found = read(path)
        except (BadRecord, OSError) as error:
            complaints.append(str(error))
            continue
        rows.append(found.rows)
        about.append(found.about)
        if found.bad:
            noun, are = ("row", "is") if found.bad == 1 else ("rows", "are")
            complaints.append(f"{path}: {found.bad} {noun} that a viewer could not read {are} left out [HVD723]")
    older = attempts.note(chosen, "hvdlite-trace merge")
    for complaint in complaints + ([older] if older else []):
        print(f"hvdlite-trace: {complaint}", file=sys.stderr)
    if not rows:
        print("hvdlite-trace: nothing to merge [HVD723]", file=sys.stderr)
        return 1
    whole = {"traceEvents": merged(rows), "displayTimeUnit": "ms", "otherData": {"ranks": about}}
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump(whole, file, allow_nan=False)
    print(f"{args.output}: {len(rows)} file{'s' if len(rows) > 1 else ''}; open it in ui.perfetto.dev")
    return 0


def inputs(named: Iterable[str]) -> list[Path]:
    """The files that are meant, each once."""
    found: dict[Path, None] = {}
    for name in named:
        path = Path(name)
        if path.is_dir():
            records = sorted(path.glob("rank-*.flight.json"))
            found.update(dict.fromkeys(records or sorted(path.glob("*.json"))))
        else:
            found[path] = None
            beside = path.parent.glob(f"{path.name}.rank-*.json") if path.name else ()
            found.update(dict.fromkeys(sorted(beside)))
    return list(found)


def read(path: Path) -> Picture:
    """A timeline or a record. Raises BadRecord, OSError."""
    with opened(path) as file:
        first = file.read(1)
    if first == b"{":
        record = read_record(path)
        spans = Spans(record.rank, f"rank {record.rank} ({record.host})", record.offset_ns)
        for event in record.events:
            spans.feed(event)
        spans.end()
        about = {"rank": record.rank, "host": record.host, "clock_error_ns": record.error_ns, "why": record.why}
        return Picture(json.loads(b"[" + bytes(spans.take())[1:] + b"]"), about, 0)
    return _timeline(path)


def _timeline(path: Path) -> Picture:
    with opened(path) as file:
        large = os.fstat(file.fileno()).st_size > TIMELINE_MAX
        raw = b"" if large else file.read(TIMELINE_MAX + 1)
    if large or len(raw) > TIMELINE_MAX:
        raise BadRecord(f"{path}: larger than any timeline [HVD723]")
    text = raw.decode("utf-8", "replace")
    try:
        found = _parsed(text)
    except (ValueError, RecursionError):
        found = list(_lines(text))
    found = found if isinstance(found, list) else []
    rows = [row for row in found if _well_formed(row)]
    metadata = next((row["args"] for row in rows if row.get("name") == "hvdlite_timeline"), None)
    if not isinstance(metadata, dict):
        raise BadRecord(f"{path}: neither a timeline of hvdlite nor a flight record [HVD723]")
    return Picture(rows, metadata, len(found) - len(rows))


def _parsed(text: str) -> Any:
    """Raises ValueError, RecursionError."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= DIGITS_MAX else math.inf)


def _lines(text: str) -> Iterable[Any]:
    """The rows of an array that was cut: one stands on each line. None for a line that is no row, unless it is the last
    one, where the array was cut."""
    lines = [line.strip().rstrip(",") for line in text.split("\n")]
    for number, line in enumerate(lines):
        try:
            if line not in ("", "[", "]"):
                yield _parsed(line)
        except (ValueError, RecursionError):
            if number < len(lines) - 1:
                yield None


def _number(value: Any) -> bool:
    """One that JSON has."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < TIME_MAX


def _is_json(value: Any, deep: int = DEPTH_MAX) -> bool:
    """Python reads and writes NaN and infinity, which JSON has not; 1e999 and the greatest whole numbers are infinite,
    too."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        return deep > 0 and all(_is_json(each, deep - 1) for each in inside)
    return True


def _well_formed(row: Any) -> bool:
    """Has it what its phase needs, and nothing that a viewer refuses?"""
    if not isinstance(row, dict) or not isinstance(row.get("ph"), str) or row["ph"] not in PHASES:
        return False
    if not _number(row.get("pid")) or not _number(row.setdefault("tid", 0)):
        return False
    if not all(key in row for key in PHASES[row["ph"]]) or not (row["ph"] == "M" or _number(row.get("ts"))):
        return False
    if not _number(row.get("dur", 0)) or not _is_json(row):
        return False
    if row["ph"] != "M":
        return True
    return isinstance(row["args"], dict) and isinstance(row["args"].get("name", ""), str)


def merged(files: list[list[Row]]) -> list[Row]:
    """All rows in the order of time, with the other ranks' ticks in the first rank's negotiations."""
    rows = [row for found in files for row in found]
    head = [row for row in rows if row["ph"] == "M"]
    body = sorted([*(row for row in rows if row["ph"] != "M"), *_ticks(rows)], key=lambda row: row["ts"])
    return head + body


def _ticks(rows: list[Row]) -> list[Row]:
    titles = {
        (r["pid"], r["tid"]): r["args"].get("name") for r in rows if r["ph"] == "M" and r["name"] == "thread_name"
    }
    spans: dict[Any, dict[Any, list[tuple[float, float, Any]]]] = {}  # by lane's title, by rank: end, begin, lane
    begun: dict[Any, float] = {}
    for row in rows:
        lane = (row["pid"], row.get("tid"))
        if row["ph"] == "B" and str(row.get("name", "")).startswith("NEGOTIATE_"):
            begun[lane] = row["ts"]
        elif row["ph"] == "E" and lane in begun and titles.get(lane):
            of_title = spans.setdefault(titles[lane], {})
            of_title.setdefault(row["pid"], []).append((row["ts"], begun.pop(lane), row["tid"]))
    made = []
    for by_rank in spans.values():
        first = min(by_rank)
        for rank, others in by_rank.items():
            if rank == first:
                continue
            others.sort()
            for end, begin, lane in by_rank[first]:
                at = bisect.bisect_left(others, (end,))
                near = min(others[max(0, at - 1) : at + 1], key=lambda span: abs(span[0] - end))
                if near[1] <= end and begin <= near[0]:  # they overlap: it is the same collective
                    ts = min(max(near[1], begin), end)
                    made.append({"ph": "X", "ts": ts, "dur": 0, "pid": first, "tid": lane, "name": str(rank)})
    return made
