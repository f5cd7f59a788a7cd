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
from .recording import Floats, Recording

STEPS, PICTURE_STEPS = 200, 5


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
    out, seen = [], []
    for number in range(steps):
        drawn = _drawn(chance, len(ready_of), rec.together, n)
        ready, tail = ready_of[drawn], tail_of[drawn]
        if setting.stretch > 1:  # they share processors: what one takes longer, the others take longer, too
            ready, tail = np.broadcast_to(ready.mean(0), ready.shape), np.full(n, tail.mean())
        ready = ready + begin[:, None]
        moment = ready.max(0)
        order = np.argsort(moment, kind="stable").tolist()
        agreed = moment.tolist()
        computed = agreed[order[-1]]
        free = asked = 0.0
        i = 0
        while i < len(order) and n > 1:
            at = max(agreed[order[i]], asked)
            if setting.behind:
                at = max(at, free)
            j = i
            while j < len(order) and agreed[order[j]] <= at + rec.burst:
                j += 1
            after = j == len(order)  # all ranks are done computing
            asked = max(at, agreed[order[j - 1]]) + chance.choice(rounds[after])
            for bytes_ in _buckets([size[k] for k in order[i:j]], setting.fusion):
                start = max(free, asked)
                key = bytes_, start >= computed
                if key not in known:
                    ratios = [1.0] if fit is None else fit.like(bytes_ / setting.wire, key[1])
                    known[key] = cost(bytes_), ratios if percentile is None else [np.percentile(ratios, percentile)]
                whole, ratios = known[key]
                free = start + whole * chance.choice(ratios)
                if picture and number < PICTURE_STEPS:
                    seen.append((-1, f"{bytes_ / 1e6:.2f} MB", start, free))
            i = j
        arrived = ready.max(1)
        ends = np.maximum(np.maximum(free, arrived) + tail, arrived)
        waited = np.maximum(0.0, free - arrived)
        late = np.minimum(waited, arrived.max() - arrived)
        out.append(((ends - begin).mean(), waited.mean(), late.mean()))
        if picture and number < PICTURE_STEPS:
            for rank in range(min(n, 16)):
                seen += [
                    (rank, "computing", begin[rank], arrived[rank]),
                    (rank, "waits", arrived[rank], ends[rank] - tail[rank]),
                ]
                seen.append((rank, "optimizer and the rest", ends[rank] - tail[rank], ends[rank]))
        begin = ends
    rows = np.array(out)
    step, exposed, late = rows.mean(0).tolist()
    return Played(step, exposed, late, rows[:, 0], seen)


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


def _buckets(sizes: list[float], fusion: float) -> list[float]:
    """Tensors that travel together, up to the threshold, in their order."""
    groups, held = [], 0.0
    for size in sizes:
        if held and held + size > fusion:
            groups.append(held)
            held = 0.0
        held += size
    return [*groups, held]
