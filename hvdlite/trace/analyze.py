"""hvdlite-trace analyze DIR: the rank and the collective that a job stopped at, from its flight records.

Findings come from comparing. A tensor that some ranks wait for and others never submitted shows the missing
ranks. Two tensors, each waited for by ranks that lack the other, show that the order differs. The failure in the
records, the same on all ranks, names the rank that ended the job; what the others were waiting for then shows where. If
nothing is stuck, times are compared, on one clock: the last rank, how often, and by how much.

A rank that was killed has left no record, and a record may be cut: what the others say is said nevertheless, and who or
which file is missing.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors.rank_ranges import as_runs
from . import attempts
from .events import BadRecord, Event, Record, Waiting, read_record
from .regular_file import no_folder

HELP = "name the rank and the collective at fault"
TIMEOUT = -7  # HVD_ETIMEOUT: the rank that gave up is not to blame
MISMATCH = -4  # HVD_EMISMATCH
MATCHES = 5  # collectives that must have been compared before a rank counts as late
LATE_NS, LATE_SHARE = 1_000_000, 0.5

Key = tuple[int, str, int]  # process set: its number; name; its first rank, -1: not known


class Lateness(NamedTuple):
    """How late a rank submits, over the collectives that could be compared."""

    rank: int
    last: int  # of them it was last in so many
    of: int
    median_ns: int  # behind the first, where it was last
    error_ns: int  # of the clocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this subcommand."""
    parser.add_argument("folder", metavar="DIR", help="folder with rank-K.flight.json of all ranks")
    attempts.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if there is nothing to read."""
    wrong = no_folder(args.folder)
    if wrong:
        print(f"hvdlite-trace: {wrong}", file=sys.stderr)
        return 1
    try:
        records, complaints = load(args.folder, args.before)
    except attempts.NoAttemptError as error:
        print(f"hvdlite-trace: {args.folder}: {error}", file=sys.stderr)
        return 1
    for complaint in complaints:
        print(f"hvdlite-trace: {complaint}", file=sys.stderr)
    if not records:
        print(f"hvdlite-trace: no flight record could be read in {args.folder} [HVD723]", file=sys.stderr)
        return 1
    print(verdict(records))
    return 0


def load(folder: str, before: int = 0) -> tuple[dict[int, Record], list[str]]:
    """({rank: record}, what is wrong with others) of the newest attempt, or one so many before it. Raises
    NoAttemptError."""
    found = attempts.choose(attempts.with_older(sorted(Path(folder).glob("rank-*.flight.json"))), before)
    read, complaints = [], []
    for path in found.paths:
        try:
            read.append(read_record(path))
        except (BadRecord, OSError) as error:
            complaints.append(str(error))
    size = max((each.size for each in read), default=0)
    records = {}
    for each in read:
        if each.size == size and each.rank not in records:
            records[each.rank] = each
        else:
            complaints.append(f"{each.path}: of another job, left out")
    older = attempts.note(found, f"hvdlite-trace analyze {folder}")
    return records, complaints + ([older] if older else [])


def verdict(records: Mapping[int, Record]) -> str:
    """The paragraph."""
    size = next(iter(records.values())).size
    absent = [rank for rank in range(size) if rank not in records]
    failure = next((each.failure for each in records.values() if each.failure is not None), None)
    findings = list(_order(records))
    blamed = bool(findings)
    if failure is not None and (failure[1] != TIMEOUT or not findings):
        findings += _failure(records, failure, absent)
        blamed = failure[1] != TIMEOUT
    if not blamed:
        missing = list(_missing(records))
        findings = missing + findings if missing else findings
    if not findings:
        findings += (
            _mixed(records)
            or _late(records)
            or ["Nothing is wrong that the records show: no rank waits for what another lacks."]
        )
    if absent and (failure is None or failure[0] not in absent):
        findings.append(
            f"{_ranks(absent, 'has', 'have')} left no record: killed, on another host, or not failed at all."
        )
    return " ".join(findings)


def _ranks(ranks: Sequence[int], one: str, several: str) -> str:
    """`rank 3 waits`, `ranks 0-2, 5 wait`."""
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {as_runs(list(ranks))} {several}"


def _called(kind: str, key: Key) -> str:
    set_number, name, _ = key
    where = f" in process set {set_number}" if set_number else ""
    unnamed = re.fullmatch(r"\w+\.noname\.(\d+)", name)
    if unnamed:
        return f"its {kind} without a name, number {int(unnamed[1]) + 1}{where}"
    return f"{kind} '{_shown(name)}'{where}"


def _shown(name: str) -> str:
    """In one line, whatever a script has put into a name."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def _waits(records: Mapping[int, Record]) -> tuple[dict[Key, list[int]], dict[Key, str]]:
    """Which ranks wait for what, the longest waited for first; and its kind."""
    since: dict[Key, int] = {}
    ranks_of: dict[Key, list[int]] = {}
    kinds: dict[Key, str] = {}
    for rank, record in sorted(records.items()):
        for each in record.waiting:
            if each.name is None:
                continue
            key = _key(record, each)
            start = each.since + record.offset_ns
            since[key] = min(since.get(key, start), start)
            ranks_of.setdefault(key, []).append(rank)
            kinds[key] = each.kind
    return {key: ranks_of[key] for key in sorted(ranks_of, key=lambda key: since[key])}, kinds


def _key(record: Record, each: Event | Waiting) -> Key:
    return each.set, each.name or "", record.sets.get(each.set, [-1])[0]


def _members(records: Mapping[int, Record], key: Key) -> list[int]:
    """Ranks with a record that have to do with the set."""
    set_number = key[0]
    if set_number == 0:
        return sorted(records)
    known = (record.sets.get(set_number, [-2]) for record in records.values())
    ranks = next((ranks for ranks in known if ranks[0] == key[2]), None)
    if ranks is not None:
        return sorted(set(ranks) & set(records))
    return sorted(
        rank
        for rank, record in records.items()
        if any(each.set == set_number for each in record.events)
        or any(each.set == set_number for each in record.waiting)
    )


def _lack(records: Mapping[int, Record], key: Key, waiters: Sequence[int]) -> list[int]:
    return [rank for rank in _members(records, key) if rank not in waiters]


def _order(records: Mapping[int, Record]) -> Iterator[str]:
    """Two tensors, each waited for by a rank that lacks the other."""
    waits, kinds = _waits(records)
    for one, those in waits.items():
        for other, others in waits.items():
            mine = [rank for rank in those if rank in _lack(records, other, others)]
            theirs = [rank for rank in others if rank in _lack(records, one, those)]
            if one != other and mine and theirs:
                yield (
                    f"The order of collectives differs: {_ranks(mine, 'waits', 'wait')} for {_called(kinds[one], one)},"
                    f" which {_ranks(theirs, 'has', 'have')} not submitted, and {_ranks(theirs, 'waits', 'wait')} for "
                    f"{_called(kinds[other], other)}, which {_ranks(mine, 'has', 'have')} not submitted. All ranks "
                    "must submit the same collectives, or wait for none before all are submitted: look for a branch "
                    "that depends on the rank or on its share of the input."
                )
                return


def _missing(records: Mapping[int, Record]) -> Iterator[str]:
    """A tensor that some wait for and others never submitted."""
    waits, kinds = _waits(records)
    for key, waiters in waits.items():
        lack = _lack(records, key, waiters)
        if lack:
            yield (
                f"{_ranks(waiters, 'waits', 'wait').capitalize()} for {_called(kinds[key], key)}, which "
                f"{_ranks(lack, 'has', 'have')} never submitted."
            )
            yield from (_last_of(records[rank]) for rank in lack[:4])
            return


def _last_of(record: Record) -> str:
    """What a rank did last."""
    submits = [each for each in record.events if each.what == "submit" and each.name is not None]
    if not submits:
        return f"Rank {record.rank} ({record.host}) had submitted nothing."
    last = submits[-1]
    ago = (record.written_ns - last.t) / 1e9
    busy = not record.waiting and record.failure is None
    doing = "; it waits for nothing, so it is busy with something else" if busy else ""
    what = _called(last.by, _key(record, last))
    return (
        f"The last that rank {record.rank} ({record.host}) submitted was {what}, {ago:.3g} s before its record was "
        f"written{doing}."
    )


def _failure(records: Mapping[int, Record], failure: tuple[int, int, str], absent: Sequence[int]) -> Iterator[str]:
    culprit, code, text = failure
    text = text.rstrip(". ")
    if "HvdMismatchError" in text or any(map(_refused, records.values())):
        yield f"The ranks disagree about one collective: {text}."
    elif code == TIMEOUT:
        yield f"A rank lost patience: {text}."
    elif culprit < 0:
        yield f"The job failed: {text}."
    else:
        yield f"Rank {culprit} is at fault: {text}."
    if culprit in absent:
        yield f"Rank {culprit} left no record: it was killed, is stopped or could not write one."
    waits, kinds = _waits(records) if code != TIMEOUT else ({}, {})
    for key, waiters in waits.items():
        lack = _lack(records, key, waiters)
        if culprit in absent and culprit not in lack:
            lack = [*lack, culprit]
        if lack:
            yield (
                f"At that moment {_ranks(waiters, 'waited', 'waited')} for {_called(kinds[key], key)}, which "
                f"{_ranks(sorted(lack), 'had', 'had')} not submitted."
            )
            break
    if culprit in records and code != TIMEOUT and records[culprit].events:
        yield _last_of(records[culprit])


def _refused(record: Record) -> Event | None:
    """The request that a mismatch has ended last, unless much has happened since."""
    return next((each for each in record.events[:-65:-1] if each.what == "end" and each.value == -MISMATCH), None)


def _mixed(records: Mapping[int, Record]) -> list[str]:
    """The ranks disagreed about a tensor, and went on."""
    found = next((_key(record, each) for record in records.values() if (each := _refused(record))), None)
    if found is None or not found[1]:
        return []
    by_submission: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        mine = [each for each in record.events if each.what == "submit" and _key(record, each) == found]
        if mine:
            by_submission.setdefault(f"{mine[-1].by} of {mine[-1].value} bytes", []).append(rank)
    submitted = ", ".join(
        f"{_ranks(ranks, 'submitted', 'submitted')} an {what}" for what, ranks in by_submission.items()
    )
    name = _shown(found[1])
    return [f"The ranks disagree about '{name}': {submitted}. Kind, shape, dtype and op must be the same on all ranks."]


def lateness(records: Mapping[int, Record]) -> list[Lateness]:
    """Of each rank with a record, the most often last first. Times are on the clock of rank 0."""
    done = {rank: _done(record) for rank, record in records.items()}
    first = min(records)
    last: Counter[int] = Counter()
    behind: dict[int, list[int]] = {rank: [] for rank in records}
    compared = 0
    for key, spans in done[first].items():
        for submitted, finished in spans:
            starts = {first: submitted}
            for rank in records:
                others = done[rank].get(key, ()) if rank != first else ()
                near = [span for span in others if span[0] <= finished and submitted <= span[1]]
                if near:
                    starts[rank] = min(near, key=lambda span: abs(span[1] - finished))[0]
            if len(starts) < len(records) or len(records) < 2:
                continue
            compared += 1
            late = max(starts, key=lambda rank: starts[rank])
            last[late] += 1
            behind[late].append(starts[late] - min(starts.values()))
    error = max((record.error_ns or 0 for record in records.values()), default=0)
    return sorted(
        (Lateness(r, last[r], compared, int(statistics.median(behind[r] or [0])), error) for r in records),
        key=lambda each: -each.last,
    )


def _done(record: Record) -> dict[Key, list[tuple[int, int]]]:
    """(submitted, finished) of every collective that the record has both of."""
    found: dict[Key, list[tuple[int, int]]] = {}
    begun: dict[Key, int] = {}
    for each in record.events:
        if each.name is None:
            continue
        key = _key(record, each)
        if each.what == "submit":
            begun[key] = each.t
        elif each.what == "finish" and key in begun:
            found.setdefault(key, []).append((begun.pop(key) + record.offset_ns, each.t + record.offset_ns))
    return found


def _late(records: Mapping[int, Record]) -> list[str]:
    late = next(iter(lateness(records)), None)
    if late is None or late.of < MATCHES or late.last < LATE_SHARE * late.of:
        return []
    if late.median_ns < max(LATE_NS, 3 * late.error_ns):
        return []
    clock = f" (clocks are known to {late.error_ns / 1e6:.3g} ms)" if late.error_ns else ""
    return [
        f"Nothing is stuck, but rank {late.rank} ({records[late.rank].host}) is late: it was the last to submit in "
        f"{late.last} of {late.of} collectives, in the median {late.median_ns / 1e6:.3g} ms after the first{clock}; "
        "the others wait for it. Look at what it does between steps: its input, other work on its host, a slower "
        "device."
    ]
