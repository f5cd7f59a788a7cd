"""Stragglers: from the time at which each rank had submitted a step, to how often it was the last.

Lateness of a rank in a step is how much later it arrived than the first rank. A step counts if every rank has
reported it; ranks' steps are the same by their numbers, because each counts its own from init on.

Ranks of one host have one clock. Between hosts the offset of their clocks is needed (`clock_offset`); where it is
unknown, no rank is reported as late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _core
from .summary import MS, percentile


def clock_offset() -> tuple[int, int] | None:
    """What to add to this rank's CLOCK_MONOTONIC to have rank 0's, and how wrong that may be: ns. None: not known."""
    offset_ns, error_ns, _ = _core.clock()
    return None if error_ns < 0 else (offset_ns, error_ns)


def judge(arrived: Sequence[Mapping[int, int]]) -> dict[int, dict[str, Any]] | None:
    """By rank, what `hvd.stats(everyone=True)` reports of its lateness. arrived: of each rank, by step, on one clock
    (ns).

    None: there is no step that all ranks have reported.
    """
    numbers = set(arrived[0]).intersection(*arrived[1:]) if arrived else set()
    if not numbers:
        return None
    late: list[list[float]] = [[] for _ in arrived]
    last = [0] * len(arrived)
    for number in numbers:
        times = [each[number] for each in arrived]
        first, end = min(times), max(times)
        for rank, time in enumerate(times):
            late[rank].append((time - first) * MS)
            last[rank] += time == end and end > first
    found = {}
    for rank, values in enumerate(late):
        values.sort()
        percentiles = {f"p{share}_ms": percentile(values, share) for share in (50, 90, 99)}
        found[rank] = {**percentiles, "last_share": last[rank] / len(numbers), "steps": len(numbers)}
    return found
