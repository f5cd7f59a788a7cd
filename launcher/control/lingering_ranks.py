"""Report of ranks that run long after others have ended well: they may save or evaluate, or hang.

No rank waits for such a rank in a collective, so no stall report names it, and the launcher waits with it. So after the
time of a stall report the launcher names once the ranks that still run and, of those on this host, their state: a
stopped rank does not end before SIGCONT.
"""

from __future__ import annotations

from collections.abc import Callable

from ..agent import process
from .ending import Ending

STATES = {"T": "is stopped (SIGCONT lets it go on)", "t": "is stopped by a debugger", "D": "waits for a disk or device"}
NAMED = 8  # of many ranks these are enough


class Lingering:
    """patience: seconds after the last end that was a good one; 0: for ever. announce: to the user."""

    def __init__(self, ending: Ending, patience: float, announce: Callable[[str], None]) -> None:
        self._ending, self._patience, self._announce = ending, patience, announce
        self._ended = 0  # ranks
        self._since: float | None = None

    def due(self) -> float | None:
        """When `look` has something to do; None: never."""
        return None if self._since is None else self._since + self._patience

    def look(self, now: float) -> None:
        """Names the ranks that still run, if it is time to. Once for each time that a rank has ended."""
        codes, living = self._ending.codes, self._ending.living
        if len(codes) != self._ended:
            self._ended = len(codes)
            self._since = now if self._patience and living and not any(codes.values()) else None
        if self._since is None or now < self._since + self._patience:
            return
        self._since = None
        if self._ending.culprit() is not None or self._ending.stop_signal is not None:
            return
        states = [f"{self._ending.who(rank)} {_state(self._ending, rank)}" for rank in sorted(living)[:NAMED]]
        more = f", and {len(living) - NAMED} more" if len(living) > NAMED else ""
        self._announce(f"{self._ended} of {self._ended + len(living)} ranks have ended well, the last of them "
                  f"{self._patience:g} s ago; {', '.join(states)}{more} [HVD505]")  # fmt: skip


def _state(ending: Ending, rank: int) -> str:
    """In words, as far as it can be seen from here."""
    letter = "" if ending.far else process.state_of(ending.pids.get(rank, 0))[0]
    return STATES.get(letter, "still runs")
