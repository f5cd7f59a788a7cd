"""Join timeout: how long ranks at the rendezvous wait for missing ones, and the notice meanwhile.

Survivors wait `rendezvous_s` from the first of them; members missing then are killed. The first epoch waits for all
that were started, for the start timeout that its members have brought; from then on it waits for --min-np of them only.
A member that is missing when it opens so is killed: it was not started as a newcomer, and cannot come later as one.

Pure: members and times in, decisions out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from . import elastic_messages
from .elastic_members import Member, Terms

REPORT_S = 5.0  # at the rendezvous, before missing members are named


class JoinTimeout:
    """Of one epoch after the other. announce: reports missing members. missing: these; waiting: all that are there."""

    def __init__(self, terms: Terms, announce: Callable[[str], None]) -> None:
        self._rendezvous_s, self._announce = terms.rendezvous_s, announce
        self._since: float | None = None
        self._named = False  # the missing members have been named
        self.first = True  # no epoch has opened yet
        self.overdue = False  # the first epoch need not wait for all

    def look(self, now: float, missing: Collection[Member], waiting: Collection[Member]) -> None:
        """These are there now."""
        if not missing or not self._there(waiting):
            self._since, self.overdue = None, False
        elif self._since is None:
            self._since, self._named = now, False

    def limit(self, waiting: Collection[Member]) -> float:
        """How long they wait."""
        return max((m.timeout for m in waiting), default=0.0) if self.first else self._rendezvous_s

    def due(self, waiting: Collection[Member]) -> float | None:
        """When to call `late`."""
        if self._since is None or self.overdue:
            return None
        limit = self.limit(waiting)
        return self._since + (limit if self._named else min(limit, REPORT_S))

    def late(self, now: float, missing: Collection[Member], waiting: Collection[Member]) -> Collection[Member]:
        """Acts on what is due. Returns the members that the survivors no longer wait for."""
        if self._since is None or not missing:
            return ()
        limit = self.limit(waiting)
        if not self._named and self._since + min(limit, REPORT_S) <= now:
            self._named = True
            self._announce(elastic_messages.waited_for(missing, self._there(waiting), now - self._since, self.first))
        over = self._since + limit <= now
        self.overdue = over and self.first
        return missing if over and not self.first else ()

    def _there(self, waiting: Collection[Member]) -> int:
        return sum(m.rank >= 0 or self.first for m in waiting)
