"""Time of a pipeline step: its schedule, simulated with transfers and sums of gradients.

A forward waits for the activation of the stage before, a backward for the gradient of the stage behind; each way
between two stages is a link of its own. An update ("U") is the sum of a stage's gradients over its replicas. Orders are
those that `hvdlite.parallel` runs (parallel/schedule.py), played by the one simulator (events.py). Times are in any one
unit.

GPipe: Huang et al., 2019. 1F1B: PipeDream-Flush, Narayanan et al., ICML 2021; DAPPLE, Fan et al., PPoPP 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..parallel import schedule
from .simulator import Tasks


class Played(NamedTuple):
    """peaks: by stage, how many micro-batches are between their forward and their backward, at most. busy: by stage,
    how long it computes. spans: (what, stage, number, start, end); what is "F", "B", "send" or "sum"."""

    end: float
    peaks: list[int]
    busy: list[float]
    spans: list[tuple[str, int, int, float, float]]


def makespan(
    orders: Sequence[Sequence[schedule.Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    comm: Sequence[float] = (),
    sums: Sequence[float] = (),
) -> Played:
    """forward, backward, sums: by stage, of a micro-batch and of an update. comm: entry s is how long a message between
    the stages s and s + 1 takes, each way. Without comm or sums they take no time. ValueError for orders that do not
    fit together."""
    peaks = schedule.check(orders).stash
    comm, sums = list(comm) or [0.0] * len(orders), list(sums) or [0.0] * len(orders)
    number: dict[tuple[str, int, int], int] = {}
    for s, order in enumerate(orders):
        for what, k in order:
            number[what, s, k] = len(number)
    tasks = Tasks()
    sends: list[tuple[float, int, int, int, int]] = []  # added behind all actions, with numbers known before
    for s, order in enumerate(orders):
        before = None
        for what, k in order:
            after = [] if before is None else [(before, 0.0)]
            if what == "B":
                after.append((number["F", s, k], 0.0))
            peer = {"F": s - 1, "B": s + 1}.get(what, -1)
            if 0 <= peer < len(orders):
                after.append((len(number) + len(sends), 0.0))
                sends.append((comm[min(s, peer)], peer, s, k, number[what, peer, k]))
            takes, resource = {"F": (forward[s], "stage"), "B": (backward[s], "stage"), "U": (sums[s], "sum")}[what]
            before = tasks.add(takes, [((resource, s), takes)], after, (what if what != "U" else "sum", s, k))
    for takes, peer, s, k, made in sends:
        tasks.add(takes, [(("link", peer, s), takes)], [(made, 0.0)], ("send", peer, k))
    start, end = tasks.play()
    spans = [(*tag, a, b) for tag, a, b in zip(tasks.tags, start, end)]
    busy = [sum(b - a for what, s, _, a, b in spans if s == at and what in "FB") for at in range(len(orders))]
    return Played(max(end, default=0.0), peaks, busy, spans)
