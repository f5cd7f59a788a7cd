"""Phases of a step: its gradients in groups, with computing separated from waiting.

A script that averages its loss, normalizes over all ranks or steps two optimizers waits in the middle of a step; what
it submits afterwards comes when it does because of that wait, which lasts longer or shorter with other ranks and links.
So ready times are counted in computing alone, and a phase says which gradients were waited for before its own were
submitted.

Waits for a handle are in the timeline; one during which the same rank submits something is another thread's, and holds
nobody up. Waits of an optimizer are not, but each step says how long its rank has waited in all: where much of that is
not accounted for, it is looked for between two submits, up to the end of what was under way, at the place where it
explains most. A wait for what is done already leaves no trace: a dependency that is seen in one of five steps holds in
all.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from .rank_timeline import RankTimeline, Span

SEEN = 0.2
MATTERS = 0.03  # of a step


class Phase(NamedTuple):
    """Gradients that a script submits before it waits for others; most scripts have one phase."""

    members: list[int]
    after: list[int]  # gradients that it has waited for
    gap: float  # ns that it computes between that wait and its first submit


class Wait(NamedTuple):
    begin: float
    end: float
    of: list[int]  # gradients


class Draw:
    """One step of one rank. done: the last gradient, on all ranks. exposed: how long the rank has waited in all."""

    def __init__(self, begin: float, end: float, done: float, exposed: float, spans: list[Span]) -> None:
        self.begin, self.end, self.done, self.spans = begin, end, done, spans
        self.submitted = np.array([span.submitted for span in spans])
        self.finished = np.array([span.done for span in spans])
        self.exposed, self.waits = exposed, list[Wait]()

    def unexplained(self) -> float:
        """ns of waiting that are neither in `waits` nor behind the last submit."""
        behind = max(0.0, self.finished.max() - self.submitted.max())
        return float(self.exposed - behind - sum(wait.end - wait.begin for wait in self.waits))

    def possible_waits(self) -> dict[int, Wait]:
        """By gradient: the time between the submit before it and the end of what was under way, if that ended first."""
        order = np.argsort(self.submitted, kind="stable")
        found = {}
        for at in range(1, len(order)):
            earlier, now = order[:at], self.submitted[order[at]]
            begin, done = self.submitted[order[at - 1]], self.finished[earlier]
            in_flight = (done > begin) & (done <= now)
            if in_flight.any():
                found[int(order[at])] = Wait(begin, float(done[in_flight].max()), earlier[done > begin].tolist())
        return found


def recorded_waits(line: RankTimeline, names: list[str]) -> list[Wait]:
    """Those of a timeline for gradients, in the order of time."""
    submits = sorted(span.submitted for of in line.spans.values() for span in of)
    index = {name: number for number, name in enumerate(names)}
    return sorted(
        Wait(begin, end, [index[name]])
        for begin, end, name in line.waits
        if name in index and bisect.bisect_right(submits, begin) == bisect.bisect_left(submits, end)
    )


def look_for_waits(draws: list[Draw]) -> float:
    """Adds to `waits` what an optimizer has waited. Returns how much of a step stays unexplained, 0 to 1."""
    steps = float(np.mean([draw.end - draw.begin for draw in draws]))
    left = np.array([draw.unexplained() for draw in draws])
    if left.mean() < MATTERS * steps:
        return 0.0
    waits_of = [draw.possible_waits() for draw in draws]
    every = sorted({gradient for of in waits_of for gradient in of})
    while every and left.mean() >= MATTERS * steps:
        taken = np.array([[of[g].end - of[g].begin if g in of else 0.0 for g in every] for of in waits_of])
        rest = np.abs(left[:, None] - taken).mean(0)
        best = int(np.argmin(rest))
        if rest[best] > 0.7 * np.abs(left).mean():
            break
        for draw, of in zip(draws, waits_of):
            if every[best] in of:
                draw.waits = sorted([*draw.waits, of[every[best]]])
        left = left - taken[:, best]
        del every[best]
    return float(max(0.0, left.mean()) / steps)


def computed(draw: Draw) -> list[float]:
    """How long the rank has computed when it submits each gradient, ns."""
    ends, lost, over = [], [0.0], draw.begin
    for wait in draw.waits:  # of several threads the time counts once
        lost.append(lost[-1] + max(0.0, wait.end - max(wait.begin, over)))
        over = max(over, wait.end)
        ends.append(over)
    return [at - draw.begin - lost[bisect.bisect_right(ends, at)] for at in draw.submitted.tolist()]


def phases_of(draws: list[Draw]) -> list[Phase]:
    """In the order in which the script submits."""
    count = len(draws[0].spans)
    seen = np.zeros((count, count))  # [waited for, submitted]
    for draw in draws:
        for wait in draw.waits:
            seen[wait.of] += draw.submitted >= wait.end
    needs = seen >= SEEN * len(draws)
    needed_by = needs.sum(0)
    found: list[Phase] = []
    before: set[int] = set()
    for number in sorted(set(needed_by.tolist())):
        members = np.flatnonzero(needed_by == number).tolist()
        needed = set(np.flatnonzero(needs[:, members].any(1)).tolist()) - set(members)
        found.append(Phase(members, sorted(needed - before), _gap(draws, members) if number else 0.0))
        before |= needed
    return found


def _gap(draws: list[Draw], members: list[int]) -> float:
    """The median, ns."""
    gaps = []
    for draw in draws:
        first = draw.submitted[members].min()
        ends = [wait.end for wait in draw.waits if wait.end <= first]
        gaps += [first - max(ends)] if ends else []
    return float(np.median(gaps)) if gaps else 0.0
