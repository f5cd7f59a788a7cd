"""Recording of a small job: steps and gradients in a folder that `hvdlite-run --record DIR` has filled.

rank-K.steps.jsonl says of each step when it began and ended on each rank; the timelines (line.json and, of the other
ranks, line.json.rank-K.json) say of every gradient when this rank submitted it, when all had agreed, and when its
bucket began and ended. Both are on the clock of rank 0. Gradients are distinguished from other tensors by coming once
in nearly every step; those that begin together were one bucket.

The first steps are left out, and so are those that took more than twice the median, those that lack a gradient, and
what a timeline has lost: each is counted in `problems`. Files are untrusted: they are read within the bounds of
trace/report/read.py and trace/merge.py, and nothing in them is believed.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors.codes import uncoded
from ..trace.events import BadRecord
from ..trace.report.read import NONE, Folder, RankFile, ReadError
from .phases import MATTERS, Draw, Phase, computed, look_for_waits, phases_of, recorded_waits
from .rank_timeline import BYTES_MAX, Floats, RankTimeline, Span, Times, clean, read
from .replicas import as_ranks, copies

SKIP, STEPS_MIN, COMMON = 5, 5, 0.9
UNSTEADY = 0.2  # of the median step
TIMELINE = "line.json"
GRADIENTS_MAX, RANKS_MAX = 1 << 16, 64


class RecordingError(ValueError):
    """A folder from which nothing can be predicted. The text names it and what is missing: record the job again."""


@dataclass(frozen=True)
class Recording:
    """Times in ns. A draw is one step of one rank: `ready[draw, gradient]` is how long it has computed when it submits
    (waits do not count), `tail[draw]` how long it goes on behind its last gradient's end everywhere; those of a step
    stand together, `together` of them. `buckets`: rows (bytes, ns from when its last rank began it, after); `rounds`:
    agreements that waited for nothing, rows (ns, after); after is 1 where all ranks were done computing. `doubts`: what
    the job does that no prediction here knows."""

    folder: str
    size: int
    local_size: int  # ranks of a host
    cores: int  # processors of a host; 0: not recorded
    fusion: int
    names: list[str]
    bytes: Floats
    votes: set[int]  # gradients so small that they travel with the votes
    together: int
    phases: list[Phase]
    ready: Floats
    tail: Floats
    buckets: Floats
    rounds: Floats
    burst: float  # in so many ns a rank submits what travels together
    step_ns: Floats  # by step, the mean over ranks
    exposed_ns: float  # the mean
    cpu: float  # processors that a rank keeps busy, by the time in which it does not wait for gradients
    planes: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    of_copy: int = 1  # ranks of a copy of a divided model; each copy counts as one rank here, see replicas.py

    @property
    def hosts(self) -> int:
        return -(-self.size // self.local_size)

    @property
    def unsteady(self) -> float:
        """By how much recorded steps differ, of the median; 0 where that is little."""
        low, median, high = np.percentile(self.step_ns, (10, 50, 90)).tolist()
        return float((high - low) / median) if high - low > UNSTEADY * median else 0.0


def load(folder: str | os.PathLike[str]) -> Recording:
    """Raises RecordingError."""
    path = Path(folder)
    try:
        found = Folder(path)
        found.look()
    except ReadError as error:
        raise _wrong(path, uncoded(str(error))) from None
    ranks = {file.rank: file for file in found.ranks}
    size = _checked(path, ranks, found)
    problems = list(found.problems)
    lines = {rank: _line(path, file, problems) for rank, file in ranks.items()}
    times = {rank: _times(path, file) for rank, file in ranks.items()}
    try:
        divided = copies(lines)
    except ValueError as error:
        raise _wrong(path, str(error)) from None
    if divided:
        lines, times = as_ranks(divided, lines, times)
        ranks = {copy: ranks[mine[0]] for copy, mine in enumerate(divided)}
        size, of_copy = len(divided), len(divided[0])
    else:
        of_copy = 1
    every = sorted(set.intersection(*(set(each) for each in times.values())))[SKIP:]
    if size == 1 and not lines[0].spans:
        return _alone(path, ranks[0], times, _usable([], {}, times, every, size, problems), problems)
    common = [step for step in every if all(times[rank][step].begin < lines[rank].end for rank in ranks)]
    if len(common) < len(every):
        problems.append(f"the timeline ends before {len(every) - len(common)} of {len(every)} steps begin")
    if len(common) < STEPS_MIN:
        raise _wrong(path, f"{len(common)} steps behind the first {SKIP} are on all ranks; record at least 15 steps")
    by_name = _gradients({rank: line.spans for rank, line in lines.items()}, times, common)
    if not by_name:
        raise _wrong(
            path,
            "no tensor is averaged once in each step: these are no steps of training, or those of a single copy of a "
            "divided model: record two copies",
        )
    names = list(by_name)
    steps = _usable(names, by_name, times, common, size, problems)
    if len(steps) < STEPS_MIN:
        raise _wrong(path, f"{len(steps)} whole steps are left ({'; '.join(problems)}); record at least 15 steps")
    return _made(path, ranks, names, by_name, times, steps, lines, problems, of_copy)


def _wrong(path: Path, why: str) -> RecordingError:
    return RecordingError(f"{path}: the recording is not sufficient for a prediction: {why} [HVD007]")


def _checked(path: Path, ranks: dict[int, RankFile], found: Folder) -> int:
    """The number of ranks of one whole job. Raises RecordingError."""
    if not ranks:
        hint = f" ({'; '.join(map(uncoded, found.problems))})" if found.problems else ""
        if any(path.glob("rank-*.steps.jsonl")):
            raise _wrong(
                path,
                f"no step is marked in it{hint}: optimizers and pipelines mark steps, other loops call stats_step()",
            )
        raise _wrong(path, f"it holds no steps of any rank{hint}: record with hvdlite-run --record {path}")
    size = ranks[min(ranks)].size
    if size > RANKS_MAX:
        raise _wrong(path, f"{size} ranks; at most {RANKS_MAX} are read, and 2 are enough")
    if len({(file.size, file.job, file.about.get("epoch")) for file in ranks.values()}) > 1:
        raise _wrong(path, "its files are of several jobs: record into an empty folder")
    missing = sorted(set(range(size)) - set(ranks))
    if missing:
        raise _wrong(
            path,
            f"the steps of rank {missing[0]} of {size} are not in it: copy them from its host, unless it ended early",
        )
    unknown = [rank for rank, file in ranks.items() if file.offset_ns is None]
    if unknown:
        raise _wrong(path, f"rank {unknown[0]} could not compare its clock with rank 0's")
    return size


def _line(path: Path, file: RankFile, problems: list[str]) -> RankTimeline:
    """The timeline of a rank. Raises RecordingError."""
    line = path / (TIMELINE + (f".rank-{file.rank}.json" if file.rank else ""))
    try:
        if line.exists() and line.stat().st_size > BYTES_MAX:
            raise _wrong(path, f"{line.name} is larger than {BYTES_MAX >> 20} MB: record fewer steps")
        found = read(line)
    except (BadRecord, OSError) as error:
        if not line.exists():
            raise _wrong(path, f"{line.name} is missing, which tells of each gradient: use --record {path}") from None
        raise _wrong(path, uncoded(str(error))) from None
    if str(found.about.get("job", "")) != file.job or found.about.get("epoch") != file.about.get("epoch"):
        raise _wrong(path, f"{line.name} is of another job than {file.path.name}: record into an empty folder")
    if found.lacks:
        problems.append(f"{line.name} lacks {found.lacks} events: steps that lack one do not count")
    return found


def _times(path: Path, file: RankFile) -> dict[int, Times]:
    """By step."""
    of, offset = file.columns, file.offset_ns or 0
    found = {}
    for index, step in enumerate(of["step"]):
        took = of["step_ns"][index]
        begin, exposed = of["t"][index] + offset, min(max(of["exposed_ns"][index], 0), took)
        found[step] = Times(begin, begin + took, took - exposed, exposed, of["cpu_ns"][index])
    return found


ByName = dict[str, dict[tuple[int, int], Span]]  # by gradient, then by rank and step


def _gradients(
    spans: dict[int, dict[str, list[Span]]], times: dict[int, dict[int, Times]], common: list[int]
) -> ByName:
    """What comes once in nearly every step."""
    begins = {rank: [times[rank][step].begin for step in common] for rank in spans}
    found: ByName = {}
    for name in list(spans[min(spans)])[:GRADIENTS_MAX]:
        seen: dict[tuple[int, int], Span] = {}
        often = 0
        for rank, of in spans.items():
            for span in of.get(name, ()):
                index = bisect.bisect_right(begins[rank], span.submitted) - 1
                if index >= 0 and span.submitted < times[rank][common[index]].end:
                    often += (rank, common[index]) in seen
                    seen.setdefault((rank, common[index]), span)
        if len(seen) >= COMMON * len(common) * len(spans) and often < 0.1 * len(seen):
            found[name] = seen
    return found


def _usable(
    names: list[str],
    by_name: ByName,
    times: dict[int, dict[int, Times]],
    common: list[int],
    size: int,
    problems: list[str],
) -> list[int]:
    """Steps that have all gradients and did not take more than twice the median."""
    whole = [step for step in common if all((r, step) in by_name[name] for name in names for r in range(size))]
    if len(whole) < len(common):
        problems.append(f"{len(common) - len(whole)} of {len(common)} steps lack a gradient and are left out")
    took = {step: max(each[step].end - each[step].begin for each in times.values()) for step in whole}
    usual = float(np.median(list(took.values()))) if took else 0.0
    slow = [step for step in whole if took[step] > 2 * usual]
    if slow:
        problems.append(
            f"{len(slow)} of {len(whole)} steps took more than twice the median, up to "
            f"{max(took[step] for step in slow) / 1e6:.0f} ms, and are left out"
        )
    return [step for step in whole if took[step] <= 2 * usual]


def _made(
    path: Path,
    ranks: dict[int, RankFile],
    names: list[str],
    by_name: ByName,
    times: dict[int, dict[int, Times]],
    steps: list[int],
    lines: dict[int, RankTimeline],
    problems: list[str],
    of_copy: int,
) -> Recording:
    waits = {rank: recorded_waits(line, names) for rank, line in lines.items()}
    draws: list[Draw] = []
    for step in steps:
        of = {rank: [by_name[name][rank, step] for name in names] for rank in ranks}
        done = max(span.done for mine in of.values() for span in mine)  # a rank may have the last sum before others
        for rank, mine in of.items():
            begin, end = times[rank][step].begin, times[rank][step].end
            draw = Draw(begin, end, done, times[rank][step].exposed, mine)
            until = float(draw.submitted.max())
            within = (bisect.bisect_left(waits[rank], (at,)) for at in (begin, until))
            draw.waits = [wait for wait in waits[rank][slice(*within)] if wait.end <= until]
            draws.append(draw)
    unexplained = look_for_waits(draws)
    ready = np.array([computed(draw) for draw in draws])
    phases = phases_of(draws)
    buckets: list[tuple[float, float, float]] = []
    rounds: list[tuple[float, float]] = []
    bursts: list[float] = []
    for at in range(0, len(draws), len(ranks)):
        _buckets([draw.spans for draw in draws[at : at + len(ranks)]], phases, buckets, rounds, bursts)
    first = ranks[min(ranks)]
    every = [times[rank][step] for rank in ranks for step in steps]
    planes = tuple(sorted({clean(plane) for file in ranks.values() for plane, moved in file.bytes.items() if moved}))
    cpus = [each for each in every if each.cpu != NONE and each.cpu >= 0]
    return Recording(
        str(path), len(ranks), max(1, first.about.get("local_size", first.size) // of_copy),
        first.about.get("cores", 0), first.about.get("fusion_threshold", 128 << 20), names,
        np.array([span.bytes for span in draws[-1].spans], float),
        {number for number, span in enumerate(draws[-1].spans) if span.votes}, len(ranks), phases, ready,
        np.array([draw.end - max(draw.done, draw.submitted.max()) for draw in draws]),
        np.array(buckets, float).reshape(-1, 3), np.array(rounds or [(0.0, 0.0)]),
        float(np.clip(np.percentile(bursts, 90) if bursts else 0.0, 30e3, 2e6)),
        np.array([np.mean([times[rank][step].end - times[rank][step].begin for rank in ranks]) for step in steps]),
        float(np.mean([each.exposed for each in every])),
        sum(each.cpu for each in cpus) / max(sum(each.compute for each in cpus), 1.0), planes, problems,
        _doubts(names, lines, draws, len(times[0]), unexplained), of_copy,
    )  # fmt: skip


def _alone(
    path: Path, file: RankFile, times: dict[int, dict[int, Times]], steps: list[int], problems: list[str]
) -> Recording:
    """Of one rank, whose optimizer submits no gradients: durations alone. Raises RecordingError."""
    if len(steps) < STEPS_MIN:
        raise _wrong(path, f"{len(steps)} whole steps are left; record at least 15 steps")
    every, none = [times[0][step] for step in steps], np.zeros((len(steps), 0))
    took = np.array([each.end - each.begin for each in every])
    cpus = [each.cpu for each in every if each.cpu != NONE and each.cpu >= 0]
    return Recording(
        str(path), 1, 1, file.about.get("cores", 0), file.about.get("fusion_threshold", 128 << 20), [], none[0],
        set(), 1, [], none, took, np.zeros((0, 3)), np.zeros((1, 2)), 30e3, took, 0.0,
        sum(cpus) / max(float(took.sum()), 1.0), (), problems,
    )  # fmt: skip


def _doubts(
    names: list[str], lines: dict[int, RankTimeline], draws: list[Draw], steps: int, unexplained: float
) -> list[str]:
    """What comes in many steps and is not played."""
    found = []
    if unexplained > MATTERS:
        found.append(f"ranks wait {unexplained:.0%} of a step for what the timeline does not tell: taken as computing")
    others = {kind for line in lines.values() for (kind, _), times in line.others.items() if times >= steps / 2}
    if others:
        found.append(f"each step also has {' and '.join(sorted(others))}, which is taken to last as recorded")
    uneven = {
        name
        for line in lines.values()
        for name, spans in line.spans.items()
        if name not in names and len(spans) >= steps / 5
    } | {name for name, span in zip(names, draws[-1].spans) if span.set}
    if uneven:
        found.append(
            f"tensors that all ranks do not average together once in each step, as {min(uneven)!r}, are taken to last "
            "as recorded"
        )
    return found


def _buckets(
    of: list[list[Span]],
    phases: list[Phase],
    buckets: list[tuple[float, float, float]],
    rounds: list[tuple[float, float]],
    bursts: list[float],
) -> None:
    """Of one step: the time of each bucket from when its last rank begins it, since waiting for a late rank is no
    transfer; and of those that found nothing in flight, how long the agreement took. of: by rank, by gradient."""
    if len(of) == 1:
        return
    groups: dict[float, list[int]] = {}
    for index, span in enumerate(of[0]):
        if span.votes:
            continue
        groups.setdefault(span.begun, []).append(index)
    last_of = {max(mine[i].submitted for mine in of for i in phase.members) for phase in phases}
    before = 0.0
    for _, members in sorted(groups.items()):
        begun = max(mine[i].begun for mine in of for i in members)
        done = max(mine[i].done for mine in of for i in members)
        submitted = max(mine[i].submitted for mine in of for i in members)
        took, after = max(done - max(begun, before), 1.0), float(submitted in last_of)
        buckets.append((sum(of[0][i].bytes for i in members), took, after))
        if submitted >= before:
            rounds.append((max(begun - submitted, 0.0), after))
        last = max(of, key=lambda mine: max(mine[i].submitted for i in members))
        bursts.append(submitted - min(last[i].submitted for i in members))
        before = done
