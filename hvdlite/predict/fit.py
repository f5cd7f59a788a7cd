"""Fit of a bucket's time, a + b S for S bytes, to what was recorded, with the spread of single buckets.

Of each size the median counts, sizes that are rare are left out, and least squares are relative: a small bucket matters
as much as a large one. Where all buckets have about one size, a cannot be told from b, and is taken as 0. How much
longer than fitted buckets took is kept by size, since small ones scatter much more than large ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .rank_timeline import Floats

RARE = 0.05  # of the most frequent size
CLASS_MIN = 5  # buckets
FAR = math.log(4)  # a bucket of another size is as unlike as one at another time


@dataclass(frozen=True)
class Fit:
    """ns, ns a byte. `ratios`: taken / fitted of buckets, by size and by whether all ranks were done computing: what
    computes and what copies may share processors."""

    a: float
    b: float
    ratios: dict[tuple[float, bool], list[float]]
    note: str = ""
    off: float = 0.0  # how far the medians of sizes lie from the line, relative

    def like(self, size: float, after: bool) -> list[float]:
        """Ratios of buckets of about that size. What held up a smaller one, held it up for so long: a larger one would
        not have waited longer."""
        near = min(
            self.ratios,
            key=lambda known: abs(math.log(max(known[0], 1.0) / max(size, 1.0))) + FAR * (known[1] != after),
        )
        scale = min(1.0, (self.a + self.b * near[0]) / max(self.a + self.b * size, 1.0))
        return [1 + (ratio - 1) * scale for ratio in self.ratios[near]]


def fit(buckets: Floats) -> Fit:
    """buckets: rows (bytes, ns, after), as a Recording has them. None at all: one rank, which moves nothing."""
    if not len(buckets):
        return Fit(0.0, 0.0, {(1.0, True): [1.0]}, "recorded on one rank: nothing is known of communication")
    sizes = np.unique(buckets[:, 0])
    taken = [buckets[buckets[:, 0] == size, 1] for size in sizes]
    often = max(map(len, taken))
    kept = [(size, float(np.median(of)), len(of)) for size, of in zip(sizes, taken) if len(of) >= max(2, RARE * often)]
    kept = kept or [(float(size), float(np.median(of)), len(of)) for size, of in zip(sizes, taken)]
    x, y, w = (np.array(column, float) for column in zip(*kept))
    note = ""
    if x.max() < 2 * max(x.min(), 1.0):
        a, b = 0.0, float((y * w).sum() / max((x * w).sum(), 1.0))
        note = "all buckets have about one size: what a message costs cannot be told from what its bytes cost"
    else:
        rows = np.stack([np.ones_like(x), x], 1) * (np.sqrt(w) / y)[:, None]
        a, b = map(float, np.linalg.lstsq(rows, np.sqrt(w), rcond=None)[0])
        if a < 0:  # through zero
            a, b = 0.0, float((w * x / y).sum() / (w * (x / y) ** 2).sum())
        if b < 0:
            a, b = float(np.average(y, weights=w)), 0.0
    ratios: dict[tuple[float, bool], list[float]] = {}
    for size, took, after in buckets.tolist():
        ratios.setdefault((size, bool(after)), []).append(took / max(a + b * size, 1.0))
    often_enough = {known: of for known, of in ratios.items() if len(of) >= CLASS_MIN}
    off = float(np.sqrt(np.average((y / np.maximum(a + b * x, 1.0) - 1) ** 2, weights=w)))
    return Fit(a, b, often_enough or ratios, note, off)
