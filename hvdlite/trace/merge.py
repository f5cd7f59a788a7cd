"""hvdlite-trace merge DIR|FILES -o out.json: one picture of all ranks, for Perfetto and chrome://tracing.

Takes timelines (FILE finds FILE.rank-K.json beside it), flight records, or a folder of either. Rows of timelines are on
the clock of rank 0 already; a record is put there by the offset that it carries. Into each NEGOTIATE span of the first
rank go ticks at which the other ranks were ready, named after them, as Horovod's timeline has them.

A timeline whose writer was killed in the middle of a row is taken as far as it goes; a file that is neither is an error
that names it, and the others are merged. Of several attempts of a job the newest counts (attempts.py).
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import attempts
from .events import BYTES_MAX, BadRecord, read_record
from .spans import Row, Spans

HELP = "make one file of the timelines or flight records of all ranks"
TIME_MAX = 1e18  # microseconds; nothing greater is a time or a number of a process, and infinity is no JSON
PHASES = {"B": (), "E": (), "X": ("name", "dur"), "i": ("name",), "M": ("name", "args"), "C": ("name", "args")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this subcommand."""
    parser.add_argument("inputs", nargs="+", metavar="DIR|FILE", help="timelines, flight records, folders of them")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="what to write")
    attempts.add_argument(parser)


def run(asked: argparse.Namespace) -> int:
    """0, or 1 if there was nothing to merge."""
    rows, about, complaints = [], [], []
    try:
        chosen = attempts.choose(attempts.with_older(inputs(asked.inputs)), asked.before)
    except attempts.NoAttemptError as error:
        print(f"hvdlite-trace: {error}", file=sys.stderr)
        return 1
    for path in chosen.paths:
        if path.resolve() == Path(asked.output).resolve():
            complaints.append(f"{path}: is the output")
            continue
        try:
            found, told = read(path)
        except (BadRecord, OSError) as error:
            complaints.append(str(error))
            continue
        rows.append(found)
        about.append(told)
    older = attempts.note(chosen, "hvdlite-trace merge")
    for complaint in complaints + ([older] if older else []):
        print(f"hvdlite-trace: {complaint}", file=sys.stderr)
    if not rows:
        print("hvdlite-trace: nothing to merge [HVD723]", file=sys.stderr)
        return 1
    with open(asked.output, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": merged(rows), "displayTimeUnit": "ms", "otherData": {"ranks": about}}, file)
    print(f"{asked.output}: {len(rows)} file{'s' if len(rows) > 1 else ''}; open it in ui.perfetto.dev")
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


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """(rows, what the file says of its rank) of a timeline or a record. Raises BadRecord, OSError."""
    with open(path, "rb") as file:
        first = file.read(1)
    if first == b"{":
        record = read_record(path)
        spans = Spans(record.rank, f"rank {record.rank} ({record.host})", record.offset_ns)
        for event in record.events:
            spans.feed(event)
        spans.end()
        told = {"rank": record.rank, "host": record.host, "clock_error_ns": record.error_ns, "why": record.why}
        return json.loads(b"[" + bytes(spans.take())[1:] + b"]"), told
    return _timeline(path)


def _timeline(path: Path) -> tuple[list[Row], dict[str, Any]]:
    if path.stat().st_size > 8 * BYTES_MAX:
        raise BadRecord(f"{path}: larger than any timeline [HVD723]")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = list(_lines(text))
    rows = [row for row in found if _well_formed(row)] if isinstance(found, list) else []
    told = next((row["args"] for row in rows if row.get("name") == "hvdlite_timeline"), None)
    if not isinstance(told, dict):
        raise BadRecord(f"{path}: neither a timeline of hvdlite nor a flight record [HVD723]")
    return rows, told


def _lines(text: str) -> Iterable[Any]:
    """The rows of an array that was cut: one stands on each line."""
    for line in text.splitlines():
        try:
            yield json.loads(line.strip().rstrip(","))
        except (ValueError, RecursionError):
            continue


def _number(value: Any) -> bool:
    """One that JSON has."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < TIME_MAX


def _well_formed(row: Any) -> bool:
    """Has it what its phase needs?"""
    if not isinstance(row, dict) or not isinstance(row.get("ph"), str) or row["ph"] not in PHASES:
        return False
    if not _number(row.get("pid")) or not _number(row.setdefault("tid", 0)):
        return False
    if not all(key in row for key in PHASES[row["ph"]]) or not (row["ph"] == "M" or _number(row.get("ts"))):
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
