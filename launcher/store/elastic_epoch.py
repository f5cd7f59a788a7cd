"""Current epoch of an elastic job: its allgather rounds, its end, and reports of lost ranks.

This is epochs.Epoch, with members for ranks: it opens with all of them, and the first failure ends it for all. A
connection that ends without a BYE waits `SILENCE_S`, since the launcher will mostly know a better text.

Two living ranks that cannot reach each other would join again and fail again for ever. The first report of a lost rank
is kept for two epochs; `cut` finds such a pair. Later reports, and all reports of an epoch of which a member has ended,
do not count: ranks that leave because of it look like lost ones to their neighbours. Frames leave by `send_frame`;
`clock` is the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from hvdlite.errors.codes import coded
from hvdlite.security import framing

from .elastic_members import Member
from .epochs import LOST_CODE, SILENCE_S, Epoch, Refusal, SendFrame


class Current:
    """The last epoch that has opened, or at first an empty one."""

    def __init__(self, job: int, send_frame: SendFrame, clock: Callable[[], float]) -> None:
        self.members: dict[int, Member] = {}  # of the epoch, by rank; ended ones stay
        self.base = -1  # the commit that its rank 0 brought
        self._job, self._send_frame, self._clock = job, send_frame, clock
        self._epoch = Epoch(-1)
        self._report: tuple[int, int] | None = None  # reporter and lost member of the report that ended it
        self._before: tuple[int, int] | None = None  # the same of the one before

    def open(self, number: int, chosen: list[Member]) -> None:
        """The next one begins, with these by rank."""
        self._before, self._report = (self._report if self._all_live() else None), None
        self._epoch = epoch = Epoch(number)
        epoch.open, epoch.present = True, {m.number for m in chosen}
        self.members = {m.number: m for m in chosen}
        self.base, epoch.timeout = chosen[0].commit, chosen[0].timeout
        slots: dict[str, list[int]] = {}
        for member in sorted(chosen, key=lambda m: m.slot):
            slots.setdefault(member.host, []).append(member.slot)
        for rank, member in enumerate(chosen):
            member.rank, member.base = rank, max(self.base, member.commit)
            here = slots[member.host]
            joined = {"epoch": number, "job": self._job, "rank": rank, "size": len(chosen)}
            joined.update(local_rank=here.index(member.slot), local_size=len(here))
            self._send_frame(member.number, framing.JOINED, json.dumps(joined).encode())

    def contribute(self, rank: int, number: int, part: bytes) -> None:
        """A member's part of an allgather. Raises Refusal."""
        epoch = self._epoch
        if rank not in epoch.present:
            raise Refusal(f"member {rank} takes part in an allgather, and is in no epoch [HVD112]")
        if epoch.ending is not None:
            return
        name = self.members[rank].who()
        if number != epoch.rounds + 1 or rank in epoch.parts:
            raise Refusal(f"{name} sent its part of allgather {number}, but {epoch.rounds} are complete [HVD112]")
        if not epoch.parts:
            epoch.deadline, epoch.bytes = self._clock() + epoch.timeout, 0
        epoch.parts[rank] = part
        epoch.bytes += len(part)
        departed = epoch.departed - epoch.silent.keys()
        if epoch.bytes + 4 * len(self.members) + 5 > framing.FRAME_MAX:
            text = f"allgather {number} exceeds {framing.FRAME_MAX >> 20} MiB with the part of {name} [HVD112]"
            self._fail(framing.REFUSED, text.encode())
        elif departed:
            self._lost(min(departed), f"{self.members[min(departed)].who()} has left the job")
        elif len(epoch.parts) == len(self.members):
            whole = framing.pack_gathered(number, [epoch.parts[m] for m in self.members])
            epoch.rounds, epoch.parts, epoch.deadline = number, {}, None
            self._all(framing.GATHERED, whole)

    def named(self, reporter: int, culprit: int) -> int:
        """The member that has a rank in the reporter's epoch; the reporter where there is none."""
        known = reporter in self.members and 0 <= culprit < len(self.members)
        return list(self.members)[culprit] if known else reporter

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A member says why the epoch ends."""
        if reporter not in self._epoch.present:
            return
        if self._epoch.ending is None and code == LOST_CODE and culprit != reporter:
            self._report = reporter, culprit
        rank = self.members[culprit].rank if culprit in self.members else -1
        self._fail(framing.LOST, framing.pack_end(rank, code, text), spare=reporter)

    def left(self, number: int, unfit: bool) -> None:
        """BYE: what happens to the member from now on is no loss to this epoch, unless it is waited for."""
        if self._leave(number):
            member = self.members[number]
            member.unfit = unfit
            if self._epoch.parts:
                self._lost(number, f"{member.who()} has left the job")

    def disconnected(self, number: int, why: str) -> None:
        """The member's connection ended. why: what is known of it."""
        if self._leave(number) and self._epoch.ending is None:
            name = self.members[number].who()
            text = f"{name}: {why}" if why else f"the connection of {name} ended without a goodbye"
            self._epoch.silent[number] = (self._clock() + SILENCE_S, text)

    def lose(self, number: int, text: str) -> None:
        """The member's process has ended, or is about to."""
        if self._leave(number):
            self._lost(number, text)

    def dues(self) -> list[float]:
        """When to call `late`."""
        epoch = self._epoch
        times = [due for due, _ in epoch.silent.values()]
        return times if epoch.deadline is None else [*times, epoch.deadline]

    def late(self, now: float) -> tuple[Member, str] | None:
        """Acts on what is due. The member that has kept the others waiting too long, and a text."""
        epoch = self._epoch
        for number, (due, text) in list(epoch.silent.items()):
            if due <= now:
                self._lost(number, text)
        if epoch.deadline is None or epoch.deadline > now:
            return None
        missing = next(m for number, m in self.members.items() if number not in epoch.parts)
        limit = f"within {epoch.timeout:g} s (HVDLITE_START_TIMEOUT sets the limit)"
        return missing, f"{missing.who()} did not take part in allgather {epoch.rounds + 1} {limit} [HVD113]"

    def cut(self, waiting: Mapping[int, Member]) -> tuple[Member, str] | None:
        """One of two ranks that were lost to each other in two epochs in a row without a commit between, though both
        wait for the next, and a text. Never the one that alone has state."""
        now, before = self._report, self._before
        if now is None or before is None or not self._all_live() or not {*now, *before} <= waiting.keys():
            return None
        if any(m.commit > max(0, m.base) for m in waiting.values() if m.rank >= 0):
            return None
        blamed = {now[1]} & {before[1]}
        ends = set(now) if set(now) == set(before) else blamed
        having = [number for number, m in waiting.items() if m.commit >= 0]
        ends -= set(having if len(having) == 1 else ())
        if not ends:
            return None
        worst = max(ends, key=lambda each: (each in blamed, waiting[each].rank))
        other = waiting[now[0] if worst == now[1] else now[1]]
        text = (
            f"cannot be reached by {other.who()}, the second epoch in a row, though both are alive: the link between "
            "them is cut [HVD454]"
        )
        return waiting[worst], f"{waiting[worst].who()} {text}"

    def _all_live(self) -> bool:
        return not any(m.ended for m in self.members.values())

    def _leave(self, number: int) -> bool:
        """Whether the member was in the epoch until now."""
        epoch = self._epoch
        if number not in epoch.present and number not in epoch.silent:
            return False
        epoch.present.discard(number)
        epoch.departed.add(number)
        return True

    def _lost(self, number: int, text: str) -> None:
        self._fail(framing.LOST, framing.pack_end(self.members[number].rank, LOST_CODE, coded("HVD401", text)))

    def _fail(self, kind: int, body: bytes, spare: int = -1) -> None:
        """The first failure of an epoch is its ending."""
        epoch = self._epoch
        if epoch.ending is None:
            epoch.ending = (kind, body)
            epoch.deadline, epoch.parts, epoch.silent = None, {}, {}
            self._all(kind, body, spare)

    def _all(self, kind: int, body: bytes, spare: int = -1) -> None:
        for number in sorted(self._epoch.present - {spare}):
            self._send_frame(number, kind, body)
