"""Removal of ranks whose host is no longer offered: when no rank needs them any more, or after a limit.

A rank that is to go is interrupted at its next commit, and ends at the rendezvous. But the state lives on ranks alone:
where all hosts are replaced at once, the last rank that has it stays until a newcomer has synchronized. So does a rank
without which fewer than --min-np would be left. What stays is reported, with the limit (--elastic-timeout), after which
the ranks go all the same.

Pure: members and times in, decisions out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from . import elastic_messages
from .elastic_members import Member, Terms, staying

GRACE_S = 30.0  # for a rank that has the order to end


class Removals:
    """Of one job. announce: which ranks stay, and how long."""

    def __init__(self, terms: Terms, announce: Callable[[str], None]) -> None:
        self._terms, self._announce = terms, announce
        self._since: float | None = None  # ranks that are to go stay
        self._over = False  # they have stayed for as long as they may
        self.going: dict[int, float] = {}  # have the order to end, and are killed then

    def look(self, now: float, members: Collection[Member]) -> None:
        """These are the members now."""
        kept = [m for m in members if m.rank >= 0 and m.removed and not (m.dismissed or m.ended or m.killed)]
        if not kept or len(staying(members)) >= self._terms.min_np:
            self._since, self._over = None, False
        elif self._since is None:
            self._since = now
            self._announce(elastic_messages.kept(kept, self._terms))

    def may_go(self, members: Collection[Member]) -> bool:
        """Whether running ranks are to be interrupted for those that are to go."""
        return self._over or len(staying(members)) >= self._terms.min_np

    def at_rendezvous(self, waiting: Collection[Member], state: bool) -> list[Member]:
        """Those that may go now that all are there. state: a member has committed."""
        kept = [m for m in waiting if m.removed]
        rest = [m for m in waiting if not m.removed]
        heirs = [m for m in rest if (m.commit >= 0 if state else m.rank >= 0)]
        return kept if self._over or (heirs and len(rest) >= self._terms.min_np) else []

    def due(self) -> float | None:
        """When to call `late`."""
        return None if self._since is None or self._over else self._since + self._terms.timeout

    def late(self, now: float) -> bool:
        """Whether the time of those that stay is over now."""
        due = self.due()
        self._over |= due is not None and due <= now
        return due is not None and due <= now
