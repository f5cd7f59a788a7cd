"""Replicas of a model that is divided into stages and parts of layers; each replica becomes one rank.

A Pipeline averages the gradients of each stage among the copies of that stage, when its backward passes are over. What
the ranks of a copy do among themselves is computing here, and lasts as recorded. So a copy submits one gradient, when
the last of its ranks submits its last one; it has all bytes of the copy, and is done when all ranks have theirs.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter

from .rank_timeline import RankTimeline, Span, Times

GRADIENTS = re.compile(r"\.grads_\d+of\d+( \(set \d+\))?$")  # as parallel/optimizer_step.py names them
NAME = "gradients of all stages"


def copies(lines: dict[int, RankTimeline]) -> list[list[int]]:
    """The ranks of each copy; none where the model is not divided. Raises ValueError with the reason."""
    members: dict[int, list[int]] = {}
    for rank, line in sorted(lines.items()):
        sets = {spans[0].set for name, spans in line.spans.items() if GRADIENTS.search(name)}
        for each in sets:
            members.setdefault(each, []).append(rank)
    if not members:
        return []
    if sorted(sum(members.values(), [])) != sorted(lines) or len({len(ranks) for ranks in members.values()}) > 1:
        raise ValueError("its stages do not all have as many copies, or a rank averages no gradients")
    found = [sorted(ranks) for ranks in zip(*members.values())]
    return found if len(found) > 1 else []


def as_ranks(
    found: list[list[int]], lines: dict[int, RankTimeline], times: dict[int, dict[int, Times]]
) -> tuple[dict[int, RankTimeline], dict[int, dict[int, Times]]]:
    """Timelines and steps of copies, as if each was one rank."""
    gradients = {rank: _gradients(line, times[rank]) for rank, line in lines.items()}
    often = {rank: Counter(map(len, of.values())).most_common(1)[0][0] for rank, of in gradients.items()}
    out_lines, out_times = dict[int, RankTimeline](), dict[int, dict[int, Times]]()
    for copy, ranks in enumerate(found):
        first, spans = lines[ranks[0]], []
        out_times[copy] = {}
        for step in sorted(set.intersection(*(set(times[rank]) for rank in ranks))):
            of = [span for rank in ranks for span in gradients[rank].get(step, ())]
            if not of or len(of) != sum(often[rank] for rank in ranks):
                continue
            submitted, done = max(span.submitted for span in of), max(span.done for span in of)
            spans.append(Span(submitted, submitted, submitted, done, sum(span.bytes for span in of), 0, False))
            mine = [times[rank][step] for rank in ranks]
            begin, end = max(each.begin for each in mine), max(each.end for each in mine)
            cpu = sum(each.cpu for each in mine) if min(each.cpu for each in mine) >= 0 else -1
            waits = max(done - submitted, 0.0)
            out_times[copy][step] = Times(begin, end, max(end - begin - waits, 0.0), waits, cpu)
        until, lacks = min(lines[rank].end for rank in ranks), sum(lines[rank].lacks for rank in ranks)
        out_lines[copy] = RankTimeline({NAME: spans}, [], Counter(), until, lacks, first.about)
    return out_lines, out_times


def _gradients(line: RankTimeline, times: dict[int, Times]) -> dict[int, list[Span]]:
    """By step."""
    steps = sorted(times)
    begins = [times[step].begin for step in steps]
    found: dict[int, list[Span]] = {}
    for name, spans in line.spans.items():
        for span in spans if GRADIENTS.search(name) else ():
            index = bisect.bisect_right(begins, span.submitted) - 1
            if index >= 0 and span.submitted < times[steps[index]].end:
                found.setdefault(steps[index], []).append(span)
    return found
