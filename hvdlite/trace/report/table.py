"""From the files of all ranks to one table: a row for each rank, a column for each step, on one clock.

Steps have the same number on all ranks, because each counts its own from init on. What a rank does not tell of a step
is NaN. A rank is late by how much later than the first it had submitted what the step needs; that is known for steps of
which all ranks report, and only where the offset between the hosts' clocks is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .read import NONE, RankFile

MS = 1e-6  # milliseconds in a nanosecond
Array = np.ndarray


class JobTable:
    """steps: their numbers, [n]. Each other array is [ranks, n], in ms; `seconds` [n] since the first step began."""

    def __init__(self, ranks: Sequence[RankFile]) -> None:
        self.ranks = [file.rank for file in ranks]
        self.hosts = [file.host for file in ranks]
        self.files = list(ranks)
        parts = [np.frombuffer(file.columns["step"], np.int64) for file in ranks]
        self.steps: Array = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        columns = [np.searchsorted(self.steps, part) for part in parts]

        def column(name: str, add: Sequence[int] | None = None) -> Array:
            found = np.full((len(ranks), len(self.steps)), np.nan)
            for row, (file, at) in enumerate(zip(ranks, columns)):
                values = np.frombuffer(file.columns[name], np.int64)
                found[row, at] = np.where(values == NONE, np.nan, (values + (add[row] if add else 0)) * MS)
            return found

        self.step, self.compute, self.exposed = column("step_ns"), column("compute_ns"), column("exposed_ns")
        self.negotiation, self.data_wait = column("negotiation_ns"), column("data_wait_ns")
        self.optimizer = column("optimizer_ns")
        offsets = [file.offset_ns for file in ranks]
        self.one_clock = None not in offsets
        add = [offset or 0 for offset in offsets]
        self.began = column("t", add)
        self.arrived = column("arrived_ns", add)
        self.late = self.arrived - _least(self.arrived) if self.one_clock else np.full_like(self.step, np.nan)
        if self.late.size:
            self.late[:, np.isnan(self.late).any(axis=0)] = np.nan
        first = _least(self.began)
        self.seconds: Array = (first - first[0]) / 1000 if len(first) else first

    def last_share(self, least_ms: float) -> Array:
        """Of each rank: in which share of the steps it was the last, by at least so much. NaN: unknown."""
        known = ~np.isnan(self.late).any(axis=0)
        if len(self.ranks) < 2 or not known.any():
            return np.full(len(self.ranks), np.nan)
        late = self.late[:, known]
        return ((late == late.max(axis=0)) & (late >= least_ms)).mean(axis=1)

    def bins(self, most: int) -> list[slice]:
        """At most so many neighbouring groups of steps, of nearly the same length."""
        borders = np.linspace(0, len(self.steps), min(most, len(self.steps)) + 1).astype(int)
        return [slice(a, b) for a, b in zip(borders[:-1], borders[1:])]


def _least(values: Array) -> Array:
    """The least of each column, NaN where there is none."""
    if not values.size:
        return np.empty(values.shape[1:])
    return np.nanmin(np.where(np.isnan(values).all(axis=0), np.inf, values), axis=0)


def middle(values: Array, axis: int | None = None) -> Array:
    """The median of what is known; NaN where nothing is."""
    if not values.size:
        return np.full((), np.nan) if axis is None else np.full(np.delete(values.shape, axis), np.nan)
    empty = np.isnan(values).all(axis=axis)
    return np.where(
        empty,
        np.nan,
        np.nanmedian(np.where(np.expand_dims(empty, axis) if axis is not None else empty, 0.0, values), axis=axis),
    )
