"""Capacity of hosts: how many ranks may run on each, and whether to start another. Pure, but for this host's names.

The hosts are those of the command line, or what the host discovery script offers at the moment. All names of this
machine are one host. A host that is no longer offered has no slots, but its failures are remembered, since it may come
back.

A host on which a rank fails has a cooldown: it gets no new rank for LOW seconds, twice as long each time up to HIGH,
until it has been quiet for long. Its other ranks go on. Several ends within a second are one failure: they have one
cause, such as a device or a network that all of them use. A host on which process after process ends before it is a
rank is left out for `QUIET_S`, and then gets one more try at a time: something is missing there. A host that was not
offered for a while counts as mended when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..hosts.hosts import Host
from ..placement.host_flags import is_here

QUIET_S = 600.0  # after which the failures of a host are forgotten
RETRY_S = 1.0  # at least, until a host that could not be reached is tried again
TOGETHER_S = 1.0  # ends of ranks on a host within this time are one failure


class _HostState:
    """A host that ranks may run on, or might once."""

    def __init__(self) -> None:
        self.offered = self.out = False  # out: its last processes have all ended before they were ranks
        self.slots = self.failures = 0
        self.early = 0  # processes in a row that ended before they were ranks
        self.before = 0  # the same, when one became a rank the last time
        self.failed: float | None = None  # when, the last time that counted
        self.until = 0.0  # the end of the cooldown


class Capacity:
    """own: what slots call this host; None: no rank was placed here. cooldown: LOW and HIGH in seconds. failures: after
    so many processes in a row that ended before they were ranks a host is left out."""

    def __init__(self, listed: Sequence[Host], own: str | None, cooldown: tuple[float, float], failures: int) -> None:
        self._own = "localhost" if own is None else own
        self._low, self._high = cooldown
        self._failures = failures
        self._states: dict[str, _HostState] = {}
        self._called: dict[str, str] = {}  # each name is looked up once, as a resolver may be slow
        self.offer(listed)

    def offer(self, listed: Sequence[Host]) -> dict[str, int]:
        """From now on these hosts are there, and no other. Slots by name, all names of this machine in one."""
        slots: dict[str, int] = {}
        for host in listed:
            self.look_up(host.name)
            name = self._called[host.name]
            slots[name] = slots.get(name, 0) + host.slots
        for name in slots:
            self._states.setdefault(name, _HostState())
        for name, state in self._states.items():
            if name in slots and not state.offered:
                state.early, state.out = 0, False
            state.offered, state.slots = name in slots, slots.get(name, 0)
        return slots

    def look_up(self, name: str) -> None:
        """Is it a name of this machine? That may take long, and may be asked by any thread."""
        if name not in self._called:
            here = False
            try:
                here = is_here(name)
            finally:  # it is asked once, whatever comes of it
                self._called[name] = self._own if here else name

    def called(self, name: str) -> str:
        """What a host that was looked up is called here."""
        return self._called[name]

    def knows(self, name: str) -> bool:
        """Whether it was looked up."""
        return name in self._called

    def names(self) -> list[str]:
        """All hosts that were ever offered."""
        return list(self._states)

    def slots(self, name: str) -> int:
        """0 for a host that is not offered now."""
        return self._states[name].slots

    def can_start(self, name: str, now: float) -> bool:
        """Whether a new rank may be started there. Whether a slot is free is for the caller to know."""
        state = self._states[name]
        return state.offered and state.until <= now

    def failed(self, name: str, now: float, new: bool, unfit: bool = False) -> None:
        """A rank has ended there. new: it was none yet, or unfit: it was one that could not take the state."""
        state = self._states[name]
        if unfit:
            state.early = max(state.early, state.before)
        state.early += new
        if new and state.early >= self._failures:
            state.out, state.until = True, now + QUIET_S
        if state.failed is not None:
            if now < state.failed + TOGETHER_S:
                return
            if now > state.failed + max(QUIET_S, 2 * self._high):
                state.failures = 0
        state.failures, state.failed = state.failures + 1, now
        state.until = max(state.until, now + min(self._high, self._low * 2 ** min(state.failures - 1, 30)))

    def unreached(self, name: str, now: float) -> None:
        """No agent has come from there. The host may be about to start, so it is tried again and again."""
        self.failed(name, now, False)
        self._states[name].until = max(self._states[name].until, now + RETRY_S)

    def became_rank(self, name: str) -> None:
        """A process there is a rank now, so nothing is missing."""
        state = self._states[name]
        state.before, state.early, state.out = state.early, 0, False

    def remedy(self, name: str, now: float) -> str:
        """What follows from its failures, to be put behind a text; "" if nothing."""
        state = self._states[name]
        if state.out:
            why = f"{state.early} processes in a row ended there before they were ranks"
            return f"; host {name} is left out for {QUIET_S:g} s: {why}"
        left = round(state.until - now, 1)
        return f"; host {name} gets no new rank for {left:g} s" if left > 0 else ""

    def due(self, now: float) -> float | None:
        """When the next cooldown ends."""
        ends = [state.until for state in self._states.values() if state.until > now and state.offered]
        return min(ends, default=None)

    def hopeless(self) -> bool:
        """No host is offered that is not left out."""
        return all(state.out or not state.offered for state in self._states.values())
