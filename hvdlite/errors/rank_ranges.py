"""Numbers of ranks in texts, as ranges: `0-2, 5`.

Messages of the launcher and of ranks name the same ranks in the same way; a job has more of them than a line has room.
"""

from __future__ import annotations

from collections.abc import Iterable


def as_runs(numbers: Iterable[int], between: str = ", ") -> str:
    """Ascending numbers as their runs, `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
