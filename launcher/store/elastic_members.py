"""Members of an elastic job and the order in which they get ranks, for elastic_membership.py.

A member is one process that the launcher has started; its number is never used twice. It keeps its host and its slot
until it ends, and a newcomer takes the lowest slot that is free.

Ranks: hosts in the order of their oldest member, on a host by slot. So ranks are the old ones again as soon as all
slots are taken, and the local rank, which counts slots, leads a newcomer to the GPU that is free. But rank 0 is the
survivor whose last commit is the lowest (they differ by one at most, see hvdlite/elastic/__init__.py), then the lowest
rank, with its host in front: state is taken from rank 0, and from a newcomer never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple


class Terms(NamedTuple):
    """What was asked for."""

    min_np: int
    max_np: int | None  # None: no limit
    np: int  # of the first epoch
    timeout: float  # how long fewer than min_np wait for more
    reset_limit: int | None  # epochs after the first; None: no limit
    rendezvous_s: float = 300.0  # from the first survivor at the rendezvous to the last


class Events(NamedTuple):
    """What the launcher gets to know."""

    opened: Callable[[int, list[int]], None]  # an epoch: its number, and its members by rank
    failed: Callable[[str], None]  # the job cannot go on
    kill: Callable[[int, str], None]  # this member, and why
    news: Callable[[], None]  # Membership.news() has changed
    waits: Callable[[str], None]  # the ranks wait for one; no failure yet


class Member:
    """One process."""

    def __init__(self, number: int, host: str, slot: int) -> None:
        self.number, self.host, self.slot = number, host, slot
        self.pid = 0
        self.commit = -1  # the number of its last commit, as in its JOIN; -1: it had no state
        self.base = -1  # that of the last epoch's rank 0 at its beginning, or its own where that was higher
        self.rank = -1  # in the last epoch that it was in
        self.timeout = 30.0  # HVDLITE_START_TIMEOUT
        self.removed = ""  # why it is to go
        self.dismissed = False  # it has the order to end
        self.killed = ""  # why it is being killed
        self.ended = ""  # how
        self.unfit = False  # it has left the last epoch because its state was of another form
        self.later = False  # it prepares beside the others, and joins where its training function begins
        self.returned: bool | None = False  # its training function has; None: that has raised
        self.silent = False  # it has joined, and has not reported its end
        self.started = 0  # the process that was started for it; it may be a wrapper of `pid`

    def who(self) -> str:
        """For texts. An error finds its rank in them, so it is that of the epoch which they are about."""
        return f"{f'rank {self.rank}' if self.rank >= 0 else 'a new rank'} (pid {self.pid} on {self.host})"


def age(member: Member) -> tuple[int, int]:
    """Survivors by their last rank, then newcomers by number."""
    return (0, member.rank) if member.rank >= 0 else (1, member.number)


def ordered(waiting: Collection[Member]) -> list[Member]:
    """These by rank in the epoch that is to open."""
    having = [m for m in waiting if m.commit >= 0] or [m for m in waiting if m.rank >= 0]
    root = min(having or waiting, key=lambda m: (m.commit, m.rank, m.number))
    oldest: dict[str, tuple[int, int]] = {}
    for member in sorted(waiting, key=age):
        oldest.setdefault(member.host, age(member))
    oldest[root.host] = (-1, 0)
    return sorted(waiting, key=lambda m: (oldest[m.host], m is not root, m.slot))


def expected_rank(hosts: Sequence[str], host: str, slot: int, slots: int) -> str:
    """What a newcomer takes for its rank while it prepares: never rank 0 of 1. hosts: of all members, with it."""
    names, rank = list(dict.fromkeys(hosts)), max(1, len(hosts) - 1)
    return ",".join(map(str, (rank, rank + 1, slot, slots, names.index(host), len(names))))


def staying(members: Collection[Member]) -> list[Member]:
    """Members of the last epoch that are alive and to stay."""
    return [m for m in members if m.rank >= 0 and not (m.ended or m.killed or m.removed)]


def come_and_go(members: Collection[Member], come: int, most: int | None, may_go: bool) -> dict[str, int]:
    """How many of those that would come have room, and how many are to go now. most: --max-np."""
    go = sum(bool(m.removed) for m in members if m.rank >= 0 and not (m.ended or m.killed or m.dismissed))
    room = come if most is None else max(0, most - len(staying(members)))
    return {"come": min(come, room), "go": go * may_go}
