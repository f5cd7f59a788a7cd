"""Simulation of training steps on n ranks: a few hundred, each made of recorded pieces.

Each rank draws one recorded step: when its gradients were ready, and how long it went on behind the last one. As many
ranks as were recorded draw the same one together, since what slows a host slows all of it. A gradient is agreed when
the last rank has it. What becomes ready within a burst travels together, up to the fusion threshold; one bucket moves
at a time and takes what `network_model.py` says, times a recorded ratio of buckets of that size. All ranks begin the
next step when theirs is over: so stragglers follow from the draws, and need no formula. Over a wire votes wait behind
data that are in flight, in shared memory they do not.

With `sync_every` above 1 a rank draws so many steps and waits for nobody in them. They count as one step, whose
gradients are all ready at its end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .fit import Fit
from .network_model import Cost
from .phases import Phase
from .rank_timeline import Floats
from .recording import Recording

STEPS, PICTURE_STEPS, SHOWN = 200, 5, 16
STRETCHES = 8  # of a recording
EXCHANGES_MIN = 20  # of many steps each: as sure as STEPS of one
# Notes of a prediction: what the play of several steps without an exchange takes for granted.
NOT_OVERLAPPED = (
    "with sync_every above 1, ranks are taken to wait for the whole exchange, and an outer optimizer to need no time "
    "(hvd.DiLoCo with fragments and delay hides most of that wait)"
)
GONE = "recorded steps wait in their middle: with sync_every above 1 such waits are taken to be gone: not measured"


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
    sync_every: int = 1  # steps of each rank's own before one exchange


class _Wire:
    """What moves the buckets of a step: one at a time. Times in ns since the first step began."""

    def __init__(self, rec: Recording, cost: Cost, fit: Fit | None, setting: Setting, chance: random.Random) -> None:
        self._rec, self._cost, self._fit, self._setting = rec, cost, fit, setting
        self._chance, self._rounds = chance, _rounds(rec)
        self._size = (rec.bytes * setting.wire).tolist()
        self._known: dict[tuple[float, bool], tuple[float, list[float]]] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is in flight."""
        self._free = self._voted = 0.0
        self.done: dict[int, float] = {}  # by gradient
        self.moved: list[tuple[float, float, float]] = []  # bytes, begin, end

    def _takes(self, size: float, after: bool) -> float:
        """ns of one bucket. after: all ranks are done computing."""
        if (size, after) not in self._known:
            ratios = [1.0] if self._fit is None else self._fit.like(size / self._setting.wire, after)
            self._known[size, after] = self._cost(size), ratios
        whole, ratios = self._known[size, after]
        return whole * self._chance.choice(ratios)

    def exchange(self, order: list[int], agreed: dict[int, float]) -> None:
        """Gradients in the order in which the last rank has them, agreed when it does."""
        i = 0
        while i < len(order):
            at = max(agreed[order[i]], self._voted)
            if self._setting.behind:
                at = max(at, self._free)
            j = i
            while j < len(order) and agreed[order[j]] <= at + self._rec.burst:
                j += 1
            together = order[i:j]
            self._voted = max(at, agreed[together[-1]]) + self._chance.choice(self._rounds[j == len(order)])
            self.done.update(dict.fromkeys(self._rec.votes.intersection(together), self._voted))
            rest = [k for k in together if k not in self._rec.votes]
            for members in _buckets(rest, self._size, self._setting.fusion):
                start, size = max(self._free, self._voted), sum(self._size[k] for k in members)
                self._free = start + self._takes(size, start >= agreed[order[-1]])
                self.done.update(dict.fromkeys(members, self._free))
                self.moved.append((size, start, self._free))
            i = j


def play(
    rec: Recording, n: int, cost: Cost, fit: Fit | None, setting: Setting, steps: int = STEPS, seed: int = 0,
    picture: bool = False
) -> Played:  # fmt: skip
    """fit: whose ratios are drawn; None: every bucket takes what cost says. The same seed gives the same answer."""
    chance = random.Random(seed)
    wire, begin = _Wire(rec, cost, fit, setting, chance), np.zeros(n)
    ready_of, tail_of = rec.ready * (setting.stretch * setting.batch), rec.tail * setting.stretch
    phases, every, numbers = rec.phases, setting.sync_every, np.random.default_rng(seed)
    steps = min(steps, max(EXCHANGES_MIN, steps // every))
    took_of = ready_of.max(1, initial=0.0) + tail_of
    if every > 1 and phases:
        phases = [Phase(list(range(ready_of.shape[1])), [], 0.0)]
    out, seen = [], []
    for number in range(steps):
        shown = range(min(n, SHOWN) if picture and number < PICTURE_STEPS else 0)
        if every > 1:
            tail = _own_steps(numbers, took_of, rec.together, n, every)
            ready, tail = np.repeat(tail[:, None], ready_of.shape[1], 1), tail * (not phases)
        else:
            drawn = _drawn(chance, len(ready_of), rec.together, n)
            ready, tail = ready_of[drawn], tail_of[drawn]
        if setting.stretch > 1:  # they share processors: what one takes longer, the others take longer, too
            ready, tail = np.broadcast_to(ready.mean(0), ready.shape), np.full(n, tail.mean())
        now, waited, late = begin.copy(), np.zeros(n), np.zeros(n)  # now: when a rank would be here if it only computed
        arrived = now
        wire.begin()
        for phase in phases:
            if phase.after and n > 1:
                stops = now + ready[:, phase.members].min(1) - phase.gap * setting.stretch
                pause = np.maximum(0.0, max(wire.done[i] for i in phase.after) - stops)
                seen += [(rank, "waits", stops[rank], stops[rank] + pause[rank]) for rank in shown]
                late += np.minimum(pause, np.maximum(0.0, arrived.max() - stops))
                waited, now = waited + pause, now + pause
            absolute = ready[:, phase.members] + now[:, None]
            moment, arrived = absolute.max(0), absolute.max(1)
            order = [phase.members[i] for i in np.argsort(moment, kind="stable").tolist()]
            if n > 1:
                wire.exchange(order, dict(zip(phase.members, moment.tolist())))
        over = max(wire.done.values(), default=0.0)
        ends = np.maximum(np.maximum(over, arrived) + tail, arrived)
        last = np.maximum(0.0, over - arrived)
        late += np.minimum(last, arrived.max() - arrived)
        out.append(((ends - begin).mean(), (waited + last).mean(), late.mean()))
        for rank in shown:
            seen.append((rank, "step" if every == 1 else f"{every} steps", begin[rank], ends[rank]))
            seen.append((rank, "waits", arrived[rank], arrived[rank] + last[rank]))
        seen += [(-1, f"{size / 1e6:.2f} MB", start, end) for size, start, end in wire.moved if shown]
        begin = ends
    rows = np.array(out) / every
    step, exposed, behind = rows.mean(0).tolist()
    return Played(step, exposed, behind, rows[:, 0], seen)


def drawn_again(rec: Recording, fit: Fit | None, chance: random.Random) -> tuple[Recording, Fit | None]:
    """Another recording that the same job could have given: stretches of this one, since steps that follow each other
    are alike."""
    steps = _stretches(len(rec.ready) // rec.together, chance)
    rows = [step * rec.together + rank for step in steps for rank in range(rec.together)]
    if fit is not None:
        fit = replace(fit, ratios={k: [of[i] for i in _stretches(len(of), chance)] for k, of in fit.ratios.items()})
    return replace(rec, ready=rec.ready[rows], tail=rec.tail[rows]), fit


def _stretches(count: int, chance: random.Random) -> list[int]:
    """count places, drawn in stretches."""
    length = -(-count // STRETCHES)
    begins = [chance.randrange(count - length + 1) for _ in range(0, count, length)]
    return [begin + i for begin in begins for i in range(length)][:count]


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


def _own_steps(numbers: np.random.Generator, took: Floats, together: int, n: int, every: int) -> Floats:
    """ns of `every` steps of each rank, drawn as `_drawn` draws one. Of many: how often each comes."""
    of = took.reshape(-1, together if n >= together else 1)
    draws, groups = len(of), -(-n // of.shape[1])
    if every < draws:
        sums = of[numbers.integers(draws, size=(every, groups))].sum(0)
    else:
        sums = numbers.multinomial(every, np.full(draws, 1 / draws), groups) @ of
    return np.asarray(sums.ravel()[:n])


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
