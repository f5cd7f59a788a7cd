"""Search for the settings with the shortest steps from few, noisy times. Pure: no clock, no file, no engine.

`search` asks for one sample after the other (it yields a setting and is sent the milliseconds of a step under it) and
returns a Verdict. First all settings are measured by turns, in rounds that begin with another one each time; the best
of the others by its shortest time is then compared with the default in pairs of neighbouring samples, whose order is
drawn, so that neither a slow drift of the machine nor something that comes every few steps takes a side. What was seen
in the rounds does not count in the pairs: the best of several is always lucky.

The default stays unless the other one wins so many pairs that luck would do it in one search out of fifty at most, and
its median gain is more than the noise of that median and more than one step in a hundred. A search ends as soon as that
cannot come to pass any more. The same times give the same verdict.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from math import comb, sqrt
from operator import truediv
from statistics import median
from typing import NamedTuple

STEPS_MAX = 50  # calls of step() from the first to the verdict
PAIRS_MIN = 6  # with fewer no number of wins is beyond luck
SAMPLES_MIN = 2 * 2 + 2 * PAIRS_MIN
LUCK = 0.02
GAIN_MIN = 0.01


class Verdict(NamedTuple):
    """What to use from now on, its time, and how the best of the others compares with the default: `gain` and `noise`
    are parts of the default's time (0.05: five percent shorter, noise: two standard errors of that)."""

    chosen: int
    milliseconds: float
    rival: int
    gain: float
    noise: float
    pairs: int


class Budget(NamedTuple):
    """How many samples, each of how many steps; `cut` says that more were asked for."""

    warmup: int
    steps: int
    samples: int
    cut: bool


def budget(warmup: int, steps: int, samples: int) -> Budget:
    """What is asked for, cut to what ends within STEPS_MAX: first samples of fewer steps, then fewer samples."""
    intervals = STEPS_MAX - 1
    fewer = max(1, min(steps, intervals // (warmup + samples)))
    if fewer * (warmup + samples) <= intervals:
        return Budget(warmup, fewer, samples, fewer < steps)
    warmup = min(warmup, intervals - SAMPLES_MIN)
    return Budget(warmup, 1, min(samples, intervals - warmup), True)


def wins_needed(pairs: int) -> int:
    """The fewest wins out of `pairs` that luck brings in LUCK of all cases at most; more than `pairs` if none do."""
    chance, wins = 0, pairs + 1
    while wins > 0 and chance + comb(pairs, wins - 1) <= LUCK * 2**pairs:
        wins -= 1
        chance += comb(pairs, wins)
    return wins


def search(settings: Sequence[int], samples: int, seed: int = 0) -> Generator[int, float, Verdict]:
    """Yields the setting of the next sample, wants its milliseconds, returns the Verdict. settings[0] is the default.

    Where `samples` are few the last settings are left out. ValueError: fewer than SAMPLES_MIN, or nothing to compare.
    """
    if samples < SAMPLES_MIN or len(settings) < 2:
        raise ValueError(f"{samples} samples of {len(settings)} settings tell nothing [HVD901]")
    settings = settings[: max(2, (samples - 2 * PAIRS_MIN) // 2)]
    rounds = min(max(2, 2 * samples // 5 // len(settings)), (samples - 2 * PAIRS_MIN) // len(settings))
    times: dict[int, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        turn = number % len(settings)
        for setting in (*settings[turn:], *settings[:turn]):
            times[setting].append((yield setting))
    default = settings[0]
    best = [min(row) for row in zip(*times.values())]
    parts = {setting: median(map(truediv, times[setting], best)) for setting in settings}
    rival = min(settings[1:], key=lambda setting: parts[setting])
    if parts[rival] >= parts[default]:
        return Verdict(default, median(times[default]), rival, 1 - parts[rival] / parts[default], 0.0, 0)
    return (yield from _duel(default, rival, (samples - rounds * len(settings)) // 2, random.Random(seed)))


def _duel(default: int, rival: int, pairs: int, draw: random.Random) -> Generator[int, float, Verdict]:
    times: dict[int, list[float]] = {default: [], rival: []}
    gains: list[float] = []
    needed = wins_needed(pairs)
    while len(gains) < pairs and sum(gain <= 0 for gain in gains) <= pairs - needed:
        order = [default, rival] if draw.random() < 0.5 else [rival, default]
        for setting in order:
            times[setting].append((yield setting))
        gains.append(times[default][-1] - times[rival][-1])
    whole, gain = median(times[default]), median(gains)
    noise = 2 * 1.2533 * 1.4826 * median(abs(each - gain) for each in gains) / sqrt(len(gains))
    won = sum(each > 0 for each in gains) >= needed and gain > max(noise, GAIN_MIN * whole)
    chosen = rival if won else default
    return Verdict(chosen, median(times[chosen]), rival, gain / whole, noise / whole, len(gains))
