"""How long is a step of n ranks? A few hundred are played, each of recorded pieces.

Each rank draws one recorded step: when its gradients were ready, and how long it went on behind the last one. As many
ranks as were recorded draw the same one together, since what slows a host slows all of it. A gradient is agreed when
the last rank has it. What becomes ready within a burst travels together, up to the fusion threshold; one bucket moves
at a time and takes what `media.py` says, times a recorded ratio of buckets of that size. All ranks begin the next step
when theirs is over: so stragglers follow from the draws, and need no formula. Over a wire votes wait behind data that
are under way, in shared memory they do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .fit import Fit
from .media import Cost
from .recording import Recording
from .timeline import Floats

STEPS, PICTURE_STEPS, SHOWN = 200, 5, 16


class Played(NamedTuple):
    """Means over steps and ranks, ns."""

    step: float
    exposed: float  # behind the last gradient of a rank: it waits
    late: float  # of that, until the last rank has its last gradient
    steps: Floats
    picture: list[tuple[int, str, float, float]]  # (rank, or -1: the wire; what; begin; end) of the first steps


@dataclass(frozen=True)
class Setting:
    """What is changed against the recording."""

    fusion: float  # bytes
    stretch: float = 1.0  # of all that a rank computes
    batch: float = 1.0  # of what comes before its last gradient
    wire: float = 1.0  # bytes that travel for each of a gradient
    behind: bool = True  # votes wait behind data


def play(
    rec: Recording, n: int, cost: Cost, fit: Fit | None, setting: Setting, steps: int = STEPS, seed: int = 0,
    picture: bool = False, percentile: float | None = None
) -> Played:  # fmt: skip
    """fit: whose ratios are drawn; None: every bucket takes what cost says. percentile: every bucket takes this
    percentile of them. The same seed gives the same answer."""
    size, chance = (rec.bytes * setting.wire).tolist(), random.Random(seed)
    ready_of, tail_of = rec.ready * (setting.stretch * setting.batch), rec.tail * setting.stretch
    rounds, begin = _rounds(rec), np.zeros(n)
    known: dict[tuple[float, bool], tuple[float, list[float]]] = {}

    def takes(bytes_: float, after: bool) -> float:
        """ns of one bucket."""
        if (bytes_, after) not in known:
            ratios = [1.0] if fit is None else fit.like(bytes_ / setting.wire, after)
            pool = ratios if percentile is None else [float(np.percentile(ratios, percentile))]
            known[bytes_, after] = cost(bytes_), pool
        whole, ratios = known[bytes_, after]
        return whole * chance.choice(ratios)

    out, seen = [], []
    for number in range(steps):
        shown = picture and number < PICTURE_STEPS
        drawn = _drawn(chance, len(ready_of), rec.together, n)
        ready, tail = ready_of[drawn], tail_of[drawn]
        if setting.stretch > 1:  # they share processors: what one takes longer, the others take longer, too
            ready, tail = np.broadcast_to(ready.mean(0), ready.shape), np.full(n, tail.mean())
        now, waited, late = begin.copy(), np.zeros(n), np.zeros(n)  # now: when a rank would be here if it only computed
        arrived = now
        done: dict[int, float] = {}
        free = asked = 0.0
        for phase in rec.phases:
            if phase.after and n > 1:
                stops = now + ready[:, phase.members].min(1) - phase.gap * setting.stretch
                goes_on = max(done[i] for i in phase.after)
                pause = np.maximum(0.0, goes_on - stops)
                if shown:
                    seen += [(r, "waits", stops[r], stops[r] + pause[r]) for r in range(min(n, SHOWN)) if pause[r]]
                late += np.minimum(pause, np.maximum(0.0, arrived.max() - stops))
                waited, now = waited + pause, now + pause
            absolute = ready[:, phase.members] + now[:, None]
            moment = absolute.max(0)
            order = [phase.members[i] for i in np.argsort(moment, kind="stable").tolist()]
            agreed = dict(zip(phase.members, moment.tolist()))
            arrived, i = absolute.max(1), 0
            while i < len(order) and n > 1:
                at = max(agreed[order[i]], asked)
                if setting.behind:
                    at = max(at, free)
                j = i
                while j < len(order) and agreed[order[j]] <= at + rec.burst:
                    j += 1
                asked = max(at, agreed[order[j - 1]]) + chance.choice(rounds[j == len(order)])
                done.update(dict.fromkeys(rec.votes.intersection(order[i:j]), asked))
                for members in _buckets([k for k in order[i:j] if k not in rec.votes], size, setting.fusion):
                    start, bytes_ = max(free, asked), sum(size[k] for k in members)
                    free = start + takes(bytes_, start >= agreed[order[-1]])
                    done.update(dict.fromkeys(members, free))
                    if shown:
                        seen.append((-1, f"{bytes_ / 1e6:.2f} MB", start, free))
                i = j
        over = max(done.values(), default=0.0)
        ends = np.maximum(np.maximum(over, arrived) + tail, arrived)
        last = np.maximum(0.0, over - arrived)
        late += np.minimum(last, arrived.max() - arrived)
        out.append(((ends - begin).mean(), (waited + last).mean(), late.mean()))
        if shown:
            for rank in range(min(n, SHOWN)):
                seen += [(rank, "waits", arrived[rank], arrived[rank] + last[rank])]
                seen.append((rank, "step", begin[rank], ends[rank]))
        begin = ends
    rows = np.array(out)
    step, exposed, behind = rows.mean(0).tolist()
    return Played(step, exposed, behind, rows[:, 0], seen)


def _rounds(rec: Recording) -> tuple[list[float], list[float]]:
    """Agreements while some rank computes, and when none does."""
    pools = [rec.rounds[rec.rounds[:, 1] == after, 0].tolist() for after in (0.0, 1.0)]
    return pools[0] or pools[1], pools[1] or pools[0]


def _drawn(chance: random.Random, draws: int, together: int, n: int) -> list[int]:
    """Rows of `ready`, which are in the order of steps, then of ranks."""
    if n < together:
        return chance.choices(range(draws), k=n)
    steps = chance.choices(range(draws // together), k=-(-n // together))
    return [step * together + rank for step in steps for rank in range(together)][:n]


def _buckets(order: list[int], size: list[float], fusion: float) -> list[list[int]]:
    """Gradients that travel together, up to the threshold, in their order."""
    groups: list[list[int]] = []
    held = 0.0
    for k in order:
        if not groups or held + size[k] > fusion:
            groups.append([])
            held = 0.0
        groups[-1].append(k)
        held += size[k]
    return groups
