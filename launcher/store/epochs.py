"""Epochs of the store: joins, allgather rounds and losses since each init. A state machine without a socket.

The epoch of a rank is how many times it has joined before. An epoch opens when every rank of the job is in it; until
then those present wait. An open epoch has at most one allgather round in the making. The first failure ends an epoch (a
rank lost, an abort record, ranks missing at the time limit, versions that differ): all present get the reason, once,
and ranks that join it later get the same, so that no rank waits for what cannot happen.

A connection that ends without a BYE waits `SILENCE_S` before its rank is declared lost, because the launcher will
mostly know a better text ("killed by SIGKILL") a moment later; `ended` brings it.

Time comes from time.monotonic() only to set and compare deadlines; messages go out through the one callback `send`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Callable

from hvdlite.errors.codes import code_of, coded, uncoded
from hvdlite.security import framing

SILENCE_S = 0.15
LOST_CODE = -5  # HVD_EPEER

SendFrame = Callable[[int, int, bytes], None]
OnLate = Callable[[int, int, str], None]


class Refusal(ValueError):
    """A rank sent a frame that cannot be; the text goes to it in a REFUSED frame."""


class Epoch:
    """One incarnation of the job, from init to shutdown."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.present: set[int] = set()  # joined, connection alive
        self.departed: set[int] = set()  # sent BYE, or lost
        self.open = False
        self.ending: tuple[int, bytes] | None = None  # the frame with the reason of its failure
        self.given_up = False  # ranks were missing at the time limit
        self.first = -1  # the rank that joined first
        self.timeout = 0.0
        self.deadline: float | None = None  # for the ranks that are missing, or the round in the making
        self.rounds = 0
        self.parts: dict[int, bytes] = {}
        self.bytes = 0  # of these
        self.silent: dict[int, tuple[float, str]] = {}  # disconnected ranks, when they count as lost, and why


class Epochs:
    """The state machine of one job of `size` ranks. `send(rank, kind, body)` sends a frame to a connected rank.

    `late(waiting, missing, text)` is called when ranks are missing at the time limit, with the first of either kind,
    and when one ends that others wait for at the start.
    """

    def __init__(
        self, size: int, job: int, send: SendFrame, late: OnLate | None = None, servers: int = 0, aggregators: int = 0
    ) -> None:
        self.size, self.tables = size, servers
        # Addresses of servers that are there, or were. Aggregators follow; one that has ended has the address "".
        self.servers: list[str | None] = [None] * (servers + aggregators)
        self._servers_ended: dict[int, str] = {}
        self._job = job
        self._send_frame = send
        self._late = late
        self._joins = [0] * size
        self._pids: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._build: tuple[tuple[str, str], int] | None = None  # version and wire, and the rank that sent them
        self._epochs: dict[int, Epoch] = {}
        self._of: dict[int, Epoch] = {}  # the epoch that each connected rank is in

    def check(self, rank: int, size: int, pid: int, build: tuple[str, str], living: bool) -> None:
        """May this process join as this rank? Raises Refusal."""
        if size != self.size:
            raise Refusal(
                f"the environment of this rank says {size} ranks, but this job has {self.size}: give all ranks the "
                "same WORLD_SIZE (PET_NNODES, HVDLITE_SIZE) [HVD119]"
            )
        if not 0 <= rank < size:
            raise Refusal(f"there is no rank {rank} in a job of {size} [HVD119]")
        if living:
            raise Refusal(
                f"rank {rank} is already in the job as process {self._pids[rank]}; process {pid} inherited its "
                "environment, or was given the same RANK: call init in one process of each rank only, and give every "
                "rank its own RANK [HVD118]"
            )
        if rank in self._ended:
            raise Refusal(coded("HVD121", f"the launcher reported the end of this rank: {self._ended[rank]}"))
        if self._build is not None and self._build[0] != build:
            (version, wire), other = self._build
            text = (
                f"rank {rank} runs hvdlite {build[0]} (wire {build[1]}), rank {other} runs hvdlite {version} "
                f"(wire {wire}): install the same version for all ranks"
            )
            self._fail(self._epoch(self._joins[rank]), framing.REFUSED, text.encode())
            raise Refusal(coded("HVD121", text))

    def named(self, reporter: int, culprit: int) -> int:
        """The rank that a reporter blames: itself where there is no such one."""
        return culprit if 0 <= culprit < self.size else reporter

    def news(self) -> dict[str, int]:
        """No rank comes or goes."""
        return {}

    def who(self, rank: int) -> str:
        """For texts."""
        return self._names[rank]

    def join(
        self, rank: int, pid: int, build: tuple[str, str], timeout: float, host: str = "", commit: int = -1
    ) -> None:
        """The rank is in its next epoch; `check` has allowed it. host: what texts say of where it is."""
        epoch = self._epoch(self._joins[rank])
        self._joins[rank] += 1
        self._pids[rank] = pid
        self._names[rank] = f"rank {rank} (pid {pid} on {host})" if host else f"rank {rank} (pid {pid})"
        self._build = self._build or (build, rank)
        self._of[rank] = epoch
        if epoch.ending is not None:
            self._send_frame(rank, *epoch.ending)
            return
        epoch.present.add(rank)
        if epoch.first < 0:
            epoch.first, epoch.timeout = rank, timeout
            epoch.deadline = time.monotonic() + timeout
        for other, text in self._ended.items():
            if self._joins[other] <= epoch.number:
                self._lose(epoch, other, text)
                return
        self._open(epoch)

    def _open(self, epoch: Epoch) -> None:
        """If all are there, servers too."""
        for text in list(self._servers_ended.values())[:1]:
            self._fail(epoch, framing.REFUSED, f"{uncoded(text)} [HVD024]".encode())
        if len(epoch.present) == self.size and None not in self.servers and epoch.ending is None:
            epoch.open, epoch.deadline = True, None
            joined: dict[str, object] = {"epoch": epoch.number, "job": self._job}
            joined.update(servers=self.servers[: self.tables], aggregators=self.servers[self.tables :])
            self._all(epoch, framing.JOINED, json.dumps(joined).encode())

    def served(self, number: int, address: str) -> None:
        """A parameter server or an aggregator is there."""
        self.servers[number] = address
        self._look_at_servers()

    def server_ended(self, number: int, text: str) -> None:
        """Its process has ended. Ranks that have not joined cannot any more, those that have need one that runs.
        An aggregator's end does no harm."""
        if number >= self.tables:
            self.served(number, "")
            return
        self._servers_ended[number] = text
        self._look_at_servers()
        if len(self._servers_ended) == self.tables:
            last = f"{uncoded(text)}: no parameter server is left [{code_of(text)}]"
            for epoch in self._epochs.values():
                self._fail(epoch, framing.LOST, framing.pack_end(-1, LOST_CODE, last))

    def _look_at_servers(self) -> None:
        for epoch in [each for each in self._epochs.values() if not each.open and each.ending is None]:
            self._open(epoch)

    def contribute(self, rank: int, number: int, part: bytes) -> None:
        """The rank's part of allgather round `number` (from 1). The last part completes the round."""
        epoch = self._of[rank]
        if epoch.ending is not None:
            return
        if not epoch.open or number != epoch.rounds + 1 or rank in epoch.parts:
            raise Refusal(f"rank {rank} sent its part of allgather {number}, but {epoch.rounds} are complete [HVD112]")
        if not epoch.parts:
            epoch.deadline = time.monotonic() + epoch.timeout
            epoch.bytes = 0
        epoch.parts[rank] = part
        epoch.bytes += len(part)
        if epoch.bytes + 4 * self.size + 5 > framing.FRAME_MAX:
            text = f"allgather {number} exceeds {framing.FRAME_MAX >> 20} MiB with the part of rank {rank} [HVD112]"
            self._fail(epoch, framing.REFUSED, text.encode())
        elif epoch.departed - epoch.silent.keys():  # the silent ones get their text soon
            other = min(epoch.departed - epoch.silent.keys())
            self._lose(epoch, other, f"rank {other} has left the job")
        elif len(epoch.parts) == self.size:
            whole = framing.pack_gathered(number, [epoch.parts[r] for r in range(self.size)])
            epoch.rounds, epoch.parts, epoch.deadline = number, {}, None
            self._all(epoch, framing.GATHERED, whole)

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A rank reports why the job ends: the others of its epoch get the reason."""
        epoch = self._of.get(reporter)
        if epoch is not None:
            self._fail(epoch, framing.LOST, framing.pack_end(culprit, code, text), spare=reporter)

    def given_up(self, rank: int) -> bool:
        """Whether others were missing in the rank's epoch: what it says of its end tells nothing new."""
        return rank in self._of and self._of[rank].given_up

    def left(self, rank: int, unfit: bool = False) -> None:
        """BYE: its end is no loss to this epoch from now on, unless it is waited for. unfit: in elastic jobs only."""
        epoch = self._of.pop(rank)
        epoch.present.discard(rank)
        epoch.departed.add(rank)
        if not epoch.open or epoch.parts:
            self._lose(epoch, rank, f"{self._names[rank]} has left the job")
        self._tidy()

    def disconnected(self, rank: int, why: str = "") -> None:
        """The connection ended, after a BYE or without. why: what is known of it."""
        epoch = self._of.pop(rank, None)
        if epoch is None:
            return
        epoch.present.discard(rank)
        epoch.departed.add(rank)
        if rank in self._ended:
            self._lose(epoch, rank, self._ended[rank])
        elif epoch.ending is None:
            name = self._names[rank]
            text = f"{name}: {why}" if why else f"the connection of {name} ended without a goodbye"
            epoch.silent[rank] = (time.monotonic() + SILENCE_S, text)
        self._tidy()

    def ended(self, rank: int, text: str) -> None:
        """The rank's process has ended."""
        self._ended[rank] = text
        for epoch in list(self._epochs.values()):
            member = rank in epoch.present or rank in epoch.silent
            waited_for = not epoch.open and self._joins[rank] <= epoch.number and epoch.present
            if member or waited_for:
                self._lose(epoch, rank, text)

    def deadline(self) -> float | None:
        """When `tick` is due; None: never."""
        times = [epoch.deadline for epoch in self._epochs.values() if epoch.deadline is not None]
        for epoch in self._epochs.values():
            times += [due for due, _ in epoch.silent.values()]
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Acts on what is due."""
        for epoch in list(self._epochs.values()):
            for rank, (due, text) in list(epoch.silent.items()):
                if due <= now:
                    self._lose(epoch, rank, text)
            if epoch.deadline is not None and epoch.deadline <= now:
                self._give_up(epoch)

    def _give_up(self, epoch: Epoch) -> None:
        """Ranks are missing at the time limit."""
        limit = f"within {epoch.timeout:g} s (HVDLITE_START_TIMEOUT sets the limit)"
        missing = sorted(set(range(self.size)) - (set(epoch.parts) if epoch.open else epoch.present))
        if not missing:
            kinds = {"parameter server": self.servers[: self.tables], "aggregator": self.servers[self.tables :]}
            absent = {what: [k for k, each in enumerate(kind) if each is None] for what, kind in kinds.items()}
            named = " and ".join(ranks_named(numbers, what) for what, numbers in absent.items() if numbers)
            text = f"{named} did not start {limit} [HVD113]"
            self._fail(epoch, framing.REFUSED, text.encode())
            return
        if epoch.open:
            waiting = min(epoch.parts)
            text = f"{ranks_named(missing)} did not take part in allgather {epoch.rounds + 1} {limit} [HVD113]"
        else:
            waiting = epoch.first
            text = f"{ranks_named(missing)} did not call init {limit}; rank {waiting} was the first to wait [HVD113]"
        epoch.given_up = True
        if self._late is not None:
            self._late(waiting, missing[0], text)
        self._fail(epoch, framing.REFUSED, text.encode())

    def _epoch(self, number: int) -> Epoch:
        return self._epochs.setdefault(number, Epoch(number))

    def _lose(self, epoch: Epoch, rank: int, text: str) -> None:
        if self._joins[rank] <= epoch.number:
            code = code_of(text) or "HVD401"
            again = " again" if self._joins[rank] else ""
            text = f"{uncoded(text)} and did not call init{again} [{code}]"
        if self._late is not None and epoch.ending is None and not epoch.open and epoch.present:
            self._late(epoch.first, rank, text)
        self._fail(epoch, framing.LOST, framing.pack_end(rank, LOST_CODE, coded("HVD401", text)))

    def _fail(self, epoch: Epoch, kind: int, body: bytes, spare: int = -1) -> None:
        """The first failure of an epoch is its ending."""
        if epoch.ending is not None:
            return
        epoch.ending = (kind, body)
        epoch.deadline, epoch.parts, epoch.silent = None, {}, {}
        self._all(epoch, kind, body, spare)

    def _all(self, epoch: Epoch, kind: int, body: bytes, spare: int = -1) -> None:
        for rank in sorted(epoch.present - {spare}):
            self._send_frame(rank, kind, body)

    def _tidy(self) -> None:
        """Forgets epochs that no rank is in or can still join."""
        waiting = min(self._joins)
        busy = {id(epoch) for epoch in self._of.values()}
        for number in [n for n, e in self._epochs.items() if n < waiting and id(e) not in busy and not e.silent]:
            del self._epochs[number]


def ranks_named(ranks: Iterable[int], what: str = "rank") -> str:
    """ "rank 3", "ranks 1, 3", and no more than a line of them."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:16])) + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")
    return f"{what} {shown}" if len(listed) == 1 else f"{what}s {shown}"
