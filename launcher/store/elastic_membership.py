"""Membership of an elastic job. A state machine without a socket or a process.

An epoch is a list of members (elastic_members.py) that has been agreed on; the index in the list is the rank. A member
that has joined again waits at the rendezvous for the next epoch. One rule opens it: no living member of the last epoch
is elsewhere than at the rendezvous, and enough are there. So a death never opens an epoch before all survivors have
seen it, a newcomer never before the others have come to a commit, and a death at the rendezvous only changes the list.
Until an epoch opens no member at the rendezvous knows of it; once it is open it is an epoch of epochs.py: the first
failure ends it for all, and its survivors come to the rendezvous again.

A newcomer without state never leads an epoch where there was state: where all that had it are gone the job ends.
Newcomers that are about to come are waited for, for a moment, so that training is interrupted once and not for each.

A member that does not come to the rendezvous in time (join_timeout.py) is killed. So is one of two living ranks whose
link is cut: they would report each other as lost in each epoch, and nothing would go on. A member that is being killed
is in no epoch any more, and its end is not waited for.

What the launcher sees (an end) and what the store sees (a BYE, the end of a connection) come in any order, and the
latter may come from a member that was forgotten: one that has ended and is not of the last epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlite.errors.codes import coded
from hvdlite.security import framing

from . import elastic_messages, elastic_process_end
from .elastic_epoch import Current
from .elastic_members import Events, Member, Terms, age, come_and_go, ordered
from .elastic_process_end import End
from .elastic_removals import GRACE_S, Removals
from .epochs import Refusal, SendFrame
from .join_timeout import JoinTimeout

TOGETHER_S = 2.0  # from the first newcomer at the rendezvous


class Membership:
    """The state machine of an elastic job, with the methods of epochs.Epochs; `rank` is a member's number in them."""

    def __init__(
        self, terms: Terms, job: int, send_frame: SendFrame, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._terms, self._send_frame, self._events, self._clock = terms, send_frame, events, clock
        self._members: dict[int, Member] = {}  # all that are alive, and those of the last epoch
        self._preparing: set[int] = set()  # newcomers that have not joined
        self._waiting: dict[int, Member] = {}  # at the rendezvous
        self._awaited: dict[int, Member] = {}  # of the last epoch, living, and not at the rendezvous
        self._removals = Removals(terms, events.waits)
        self._current = Current(job, send_frame, clock)
        self._opened = 0  # epochs
        self._build: tuple[str, str] | None = None
        self._short_since: float | None = clock()  # too few are there
        self._join_timeout = JoinTimeout(terms, events.waits)
        self._held_until: float | None = None  # newcomers that come so soon come together
        self._over = ""  # why no member can join any more
        self._state = False  # a member has committed
        self._finished, self._absent = False, ""  # a rank, with training; how one did before the first epoch
        self._begun = False  # training
        self.ends = False  # all are to save and to end

    # Calls of the launcher.

    def started(self, number: int, host: str, slot: int, later: bool = False) -> None:
        """A process was started. later: it prepares beside the others, and is not waited for."""
        self._members[number] = Member(number, host, slot)
        self._members[number].later = later
        self._preparing.add(number)

    def process(self, number: int, pid: int) -> None:
        """The process that it is."""
        self._members[number].pid = self._members[number].started = pid

    def free_slot(self, host: str) -> int:
        """The lowest number of a host that no living member has."""
        taken = {m.slot for m in self._members.values() if m.host == host and not m.ended}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def size_now(self) -> int:
        """Of the last epoch."""
        return len(self._current.members)

    def trains(self, number: int, returned: bool | None) -> None:
        """Training has begun, or the training function of this member has returned; None: has raised."""
        if member := self._members.get(number):
            self._begun, member.returned = True, returned

    def end_of(self, number: int) -> End:
        """What is known here of a process that is about to end."""
        known, member = self._current.members.values(), self._members.get(number)
        return elastic_process_end.end_of(member, known, self._opened > 0, self._begun, self._finished)

    def ended(self, number: int, text: str, finished: bool = False) -> None:
        """Its process has ended. finished: with training."""
        member = self._members.get(number)
        if member is None or member.ended:
            return
        member.ended = text or "it has ended"
        self._finished |= finished and member.rank >= 0 and not member.dismissed
        if finished and not self._opened:
            self._absent = coded("HVD401", f"{member.ended} and did not call init")
        self._drop(member, text)
        if number not in self._current.members:
            del self._members[number]
        self._consider()
        if member.rank < 0:
            self._events.news()

    def remove(self, number: int, why: str) -> None:
        """The member is to go at the next commit; why is "": it is to stay after all."""
        member = self._members.get(number)
        if member is not None and not why and not member.dismissed:
            member.removed = ""
        elif not self._remove(number, why):
            return
        self._consider()
        self._events.news()

    def remove_new(self, why: str) -> list[int]:
        """Those that were in no epoch yet need not come. Their numbers."""
        for number in (new := [m.number for m in self._members.values() if m.rank < 0 and not m.ended]):
            self._remove(number, why)
        self._consider()
        return new

    def news(self) -> dict[str, int]:
        """For running ranks at their next commit: how many would come, are to go, and whether all are to end."""
        held = self._preparing and self._held_until is not None and self._clock() < self._held_until
        come = 0 if held else sum(m.rank < 0 for m in self._waiting.values())
        members = self._members.values()
        counts = come_and_go(members, come, self._terms.max_np, self._removals.may_go(members))
        return {**counts, "end": 1} if self.ends else counts

    def end(self) -> None:
        """All ranks are to save at their next commit, and to end; how many are left then matters no more."""
        self.ends = True
        self._consider()
        self._events.news()

    def living(self) -> list[int]:
        """All whose processes have not ended."""
        return [m.number for m in self._members.values() if not m.ended]

    def who(self, number: int) -> str:
        """For texts."""
        return self._members[number].who() if number in self._members else f"member {number}"

    def is_later(self, number: int) -> bool:
        """Whether it was started to prepare beside the others."""
        return self._members[number].later

    def is_removed(self, number: int) -> bool:
        """Whether it is to go, and does not know it yet."""
        member = self._members.get(number)
        return member is not None and bool(member.removed)

    def over(self, text: str) -> None:
        """The job ends: members that come to the rendezvous get the reason."""
        if not self._over:
            self._over = text
            for number in list(self._waiting):
                self._send_frame(number, framing.REFUSED, text.encode())

    # Calls of the store, as of Epochs.

    def check(self, rank: int, size: int, pid: int, build: tuple[str, str], living: bool) -> None:
        """May this process join as this member? Raises Refusal."""
        member = self._members.get(rank)
        if member is None:
            raise Refusal(f"the launcher did not start member {rank}, or it has ended [HVD119]")
        if self._over:
            raise Refusal(coded("HVD456", self._over))
        if living:
            raise Refusal(coded("HVD118", elastic_messages.there_already(member, pid)))
        if end := member.ended or member.killed:
            raise Refusal(coded("HVD121", f"the launcher reported the end of this rank: {end}"))
        if self._build is not None and self._build != build:
            member.pid = pid
            self._kill(member, elastic_messages.of_another_version(member, build, self._build))
            self._consider()
            raise Refusal(coded("HVD121", member.killed))

    def join(
        self, rank: int, pid: int, build: tuple[str, str], timeout: float, host: str = "", commit: int = -1
    ) -> None:
        """It is at the rendezvous; `check` has allowed it."""
        member = self._members[rank]
        self._build = self._build or build
        member.pid, member.timeout, member.commit, member.unfit = pid, timeout, commit, False
        member.silent = True
        self._state |= commit >= 0
        self._preparing.discard(rank)
        self._awaited.pop(rank, None)
        self._waiting[rank] = member
        if member.removed and (member.rank < 0 or self._finished):
            self._dismiss(member)
        self._consider()
        if self._opened and rank in self._waiting and member.rank < 0:
            if sum(m.rank < 0 for m in self._waiting.values()) == 1:
                self._held_until = self._clock() + TOGETHER_S
            self._events.news()

    def contribute(self, rank: int, number: int, part: bytes) -> None:
        """Its part of an allgather. Raises Refusal."""
        self._current.contribute(rank, number, part)

    def named(self, reporter: int, culprit: int) -> int:
        """The member that has a rank in the reporter's epoch; the reporter where there is none."""
        return self._current.named(reporter, culprit)

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A member says why its epoch ends."""
        if reporter == culprit and reporter in self._members:
            self._members[reporter].silent = False
        self._current.aborted(reporter, culprit, code, text)

    def given_up(self, rank: int) -> bool:
        """Never: a member that is missing at the time limit is killed, and its epoch has a loss as any other."""
        return False

    def left(self, rank: int, unfit: bool = False) -> None:
        """BYE."""
        if rank in self._members:  # else it was forgotten: its wrapper has ended before it
            self._members[rank].silent = False
        self._current.left(rank, unfit)
        self._back(rank)

    def disconnected(self, rank: int, why: str = "") -> None:
        """The connection ended, after a BYE or without."""
        self._current.disconnected(rank, why)
        self._back(rank)

    def deadline(self) -> float | None:
        """When `tick` is due."""
        if self._over:
            return None
        others = self._held_until, self._join_timeout.due(self._waiting.values()), self._removals.due()
        times = [*self._current.dues(), *self._removals.going.values(), *filter(None, others)]
        if self._short_since is not None:
            times.append(self._short_since + self._terms.timeout)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Acts on what is due."""
        if self._over:
            return
        if (late := self._current.late(now)) is not None:
            self._kill(*late)
        if self._removals.late(now) or (self._held_until is not None and self._held_until <= now):
            self._held_until = None
            self._events.news()
        for member in self._join_timeout.late(now, self._missing(), self._waiting.values()):
            self._kill(member, elastic_messages.not_come(member, self._terms.rendezvous_s))
        for member in [self._members[number] for number, due in self._removals.going.items() if due <= now]:
            self._kill(member, f"{member.who()} was removed, and has not ended within {GRACE_S:g} s [HVD501]")
        self._consider(self._short_since is not None and self._short_since + self._terms.timeout <= now)

    # Where members are.

    def _drop(self, member: Member, text: str) -> None:
        """It is nowhere any more."""
        self._current.lose(member.number, text)
        self._preparing.discard(member.number)
        self._awaited.pop(member.number, None)
        self._removals.going.pop(member.number, None)
        self._waiting.pop(member.number, None)

    def _kill(self, member: Member, text: str) -> None:
        """Its end is not waited for. The caller considers what that means."""
        member.killed = text
        self._drop(member, text)
        self._events.kill(member.number, text)

    def _remove(self, number: int, why: str) -> bool:
        member = self._members.get(number)
        if member is None or member.ended or member.killed or member.removed:
            return False
        member.removed = why
        self._preparing.discard(number)
        if number in self._waiting and (member.rank < 0 or self._finished):
            self._dismiss(member)
        return True

    def _dismiss(self, member: Member) -> None:
        """It is at the rendezvous, and gets the order to end."""
        del self._waiting[member.number]
        member.dismissed = True
        self._removals.going.setdefault(member.number, self._clock() + GRACE_S)
        self._send_frame(member.number, framing.REMOVED, member.removed.encode())

    def _back(self, number: int) -> None:
        """It is at the rendezvous no more, where it was, and may come again."""
        member = self._waiting.pop(number, None)
        if member is None:
            return
        if member.rank >= 0:
            self._awaited[number] = member
        else:
            self._preparing.add(number)
            self._events.news()
        self._consider()

    def _missing(self) -> list[Member]:
        """Members that those at the rendezvous wait for."""
        if self._opened:
            return list(self._awaited.values())
        first = [m for m in map(self._members.__getitem__, self._preparing) if not m.later]
        return first if sum(not m.later for m in self._waiting.values()) < self._terms.np else []

    # Epochs.

    def _consider(self, late: bool = False) -> None:
        """Opens the next epoch if it is time. late: the time to wait for more is over."""
        self._removals.look(self._clock(), self._members.values())
        if self._awaited:
            self._short_since = None
        elif not self._over:
            self._proceed(late)
        self._join_timeout.look(self._clock(), self._missing(), self._waiting.values())

    def _proceed(self, late: bool) -> None:
        """All that are awaited have come, or there is none."""
        for member in self._removals.at_rendezvous(self._waiting.values(), self._state):
            self._dismiss(member)
        waiting, terms, missing = self._waiting, self._terms, self._missing()
        enough = len(waiting) >= (1 if self.ends or self._finished else terms.min_np)
        if not self._opened:
            if self._absent and waiting:
                return self._give_up(self._absent)
            if missing and not (self._join_timeout.overdue if enough else late):
                since = self._clock() if self._short_since is None else self._short_since
                self._short_since = None if enough else since
                return
        elif not any(m.commit >= 0 if self._state else m.rank >= 0 for m in waiting.values()):
            if not self._finished:
                self._give_up(elastic_messages.STATE_LOST)
                return
            self._short_since = None
            for number in list(waiting):
                self._remove(number, "training is over")
            return
        elif (cut := self._current.cut(waiting)) is not None:
            self._kill(*cut)
            self._consider(late)
            return
        if not enough:
            if self._short_since is None:
                self._short_since = self._clock()
                self._events.waits(elastic_messages.short(len(waiting), terms, False))
            if late:
                self._give_up(f"{elastic_messages.short(len(waiting), terms, True)} [HVD421]")
        elif terms.reset_limit is not None and self._opened > terms.reset_limit:
            self._give_up(f"the ranks have changed more often than --reset-limit {terms.reset_limit} allows [HVD422]")
        else:
            for member in missing:  # at the first epoch
                self._kill(member, elastic_messages.not_begun(member, self._join_timeout.limit(waiting.values())))
            stay = sorted((m for m in waiting.values() if not m.removed), key=age)
            first = [] if self._opened else [m for m in stay if not m.later]
            kept = [m for m in waiting.values() if m.removed]  # beyond --max-np, until others have the state
            self._open(ordered([*(first or stay)[: terms.max_np], *kept]))

    def _open(self, chosen: list[Member]) -> None:
        for number, member in self._current.members.items():
            if member.ended:
                del self._members[number]
        self._short_since = self._held_until = None
        self._join_timeout.first = False
        self._awaited = {m.number: m for m in chosen}
        for number in self._awaited:
            del self._waiting[number]
        self._current.open(self._opened, chosen)
        self._opened += 1
        self._events.opened(self._opened - 1, list(self._awaited))

    def _give_up(self, text: str) -> None:
        self.over(text)
        self._events.failed(text)
