"""What a switch that adds does, as two state machines: (datagram, time) in, [(where to, datagram)] out.

Pool is SwitchML's (Sapio et al., NSDI 2021): a job has `slots` slots of its own, each twice. Block c goes to slot
c mod slots, half (c / slots) mod 2. Hashed is ATP's (Lao et al., NSDI 2021): jobs share slots, by a hash of job and
block. Where two meet, the later one goes on to the job's server (server.py).

Other than the papers, a slot keeps the number of its block. By SwitchML's published rule a late repeat counts into the
block that comes next: it needs a loss and some jitter, and gave wrong sums in 4 of 20 simulated runs.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .packet import BLOCK, MARK, MAXIMUM, RESEND, RESULT, UPDATE, Packet

ALL, SERVER, SWITCH = -1, -2, -3  # where to; else a rank
Out = list[tuple[int, Packet]]
CELL_BYTES = 4 * BLOCK + 40
_FREE = -1


class Cell:
    """Memory of one block, made once."""

    def __init__(self) -> None:
        self.numbers = np.zeros(BLOCK, np.int32)
        self.job = self.seq = _FREE
        self.bits = self.exponent = self.count = self.flags = self.n = 0
        self.at = 0.0

    def take(self, p: Packet) -> None:
        """The block of this datagram, of which nothing is here yet."""
        self.job, self.seq, self.n, self.bits, self.count = p.job, p.seq, p.n, 0, len(p.numbers)
        self.exponent, self.flags = p.exponent, p.flags & ~RESEND

    def fits(self, p: Packet) -> bool:
        """Whether both are of one form."""
        return len(p.numbers) == self.count and p.n == self.n and not (p.flags ^ self.flags) & MAXIMUM

    def add(self, p: Packet, now: float) -> None:
        """The numbers of ranks that are not here yet."""
        mine = self.numbers[: self.count]
        if not self.bits:
            mine[:] = p.numbers
        else:
            (np.maximum if p.flags & MAXIMUM else np.add)(mine, p.numbers, out=mine)
        self.bits, self.at, self.flags = self.bits | p.bits, now, self.flags | (p.flags & MARK)
        self.exponent = max(self.exponent, p.exponent)

    @property
    def full(self) -> bool:
        """All ranks are in it."""
        return self.bits == (1 << self.n) - 1

    def packet(self, kind: int) -> Packet:
        """What is here."""
        numbers = self.numbers[: self.count].copy()
        return Packet(kind, self.flags, self.job, self.n, self.seq, self.bits, self.exponent, numbers)


class Machine:
    """What the loop of a socket asks of a machine. Here: of one that has room for all jobs."""

    hashed = False

    def admit(self, job: int) -> bool:
        """Return whether a job has a place, or gets it now.

        Args:
            job (int): the number of the job.

        Returns:
            bool: whether its blocks are added here.
        """
        return True

    def forget(self, job: int) -> None:
        """Free the memory of a job that has ended.

        Args:
            job (int): the number of the job.
        """


class Pool(Machine):
    """SwitchML's switch. It keeps every sum that a rank may still ask for, and needs no message for that.

    A rank sends block c + 2 slots only when it has the sum of c + slots. All ranks had to send c + slots for that, and
    they do so when they have the sum of c.

    Args:
        slots (int): blocks in flight of one job; at least the window of its workers.
        jobs (int): jobs that may have slots at once.

    Example:
        >>> from hvdlite.aggregation import Pool
        >>> Pool(slots=32).counts["added"]
        0
    """

    def __init__(self, slots: int, jobs: int = 1) -> None:
        self.slots, self.jobs = slots, jobs
        self.cells: dict[int, list[Cell]] = {}
        self.counts: Counter[str] = Counter()

    def admit(self, job: int) -> bool:
        """Give the job slots, if it has none yet.

        Args:
            job (int): the number of the job.

        Returns:
            bool: whether it has slots.
        """
        if job not in self.cells:
            if len(self.cells) >= self.jobs:
                return False
            self.cells[job] = [Cell() for _ in range(2 * self.slots)]
        return True

    def forget(self, job: int) -> None:
        """Give the slots of a job that has ended to others.

        Args:
            job (int): the number of the job.
        """
        self.cells.pop(job, None)

    def on_packet(self, p: Packet, now: float, congested: bool = False) -> Out:
        """Return the answers to one datagram.

        Args:
            p (Packet): the datagram.
            now (float): seconds of any clock.
            congested (bool): not used.

        Returns:
            list: (where to, datagram) of each answer.
        """
        if p.kind != UPDATE or not self.admit(p.job):
            self.counts["refused"] += 1
            return []
        cell = self.cells[p.job][p.seq // self.slots % 2 * self.slots + p.seq % self.slots]
        if p.seq < cell.seq:  # a repeat that was late
            self.counts["stale"] += 1
            return []
        if p.seq > cell.seq:
            cell.take(p)
        if p.bits & cell.bits:
            self.counts["repeated"] += 1
            return [(p.rank, cell.packet(RESULT))] if cell.full else []
        if not cell.fits(p):
            self.counts["disagree"] += 1
            return []
        cell.add(p, now)
        self.counts["added"] += 1
        return [(ALL, cell.packet(RESULT))] if cell.full else []

    @property
    def bytes(self) -> int:
        """Memory of all slots; the length of tensors does not matter."""
        return sum(map(len, self.cells.values())) * CELL_BYTES


class Hashed(Machine):
    """ATP's switch: best effort. What it does not add the server adds, so it may forget anything at any time.

    Args:
        slots (int): blocks in flight of all jobs.
        age (float): seconds after which another block may take the slot of one to which nothing came.

    Example:
        >>> from hvdlite.aggregation import Hashed
        >>> Hashed(slots=8).bytes
        8512
    """

    hashed = True

    def __init__(self, slots: int, age: float = 0.02) -> None:
        self.cells, self.age = [Cell() for _ in range(slots)], age
        self.slots = slots
        self.counts: Counter[str] = Counter()

    def place(self, job: int, seq: int) -> int:
        """Return the slot of a block.

        Args:
            job (int): the number of the job.
            seq (int): the number of the block.

        Returns:
            int: the number of the slot.
        """
        x = (job * 0x9E3779B1 ^ seq * 0x85EBCA6B) & 0xFFFFFFFF
        x ^= x >> 15
        return (x * 0xC2B2AE35 & 0xFFFFFFFF) % len(self.cells)

    def on_packet(self, p: Packet, now: float, congested: bool = False) -> Out:
        """Return the answers to one datagram.

        Args:
            p (Packet): the datagram.
            now (float): seconds of any clock.
            congested (bool): many datagrams wait behind it, so it is marked.

        Returns:
            list: (where to, datagram) of each answer.
        """
        if p.kind != UPDATE:
            self.counts["refused"] += 1
            return []
        if congested:
            p = p._replace(flags=p.flags | MARK)
        out: Out = []
        cell = self.cells[self.place(p.job, p.seq)]
        mine = cell.job == p.job and cell.seq == p.seq
        if p.flags & RESEND:  # something was lost: what is here goes to the server, and so does this
            self.counts["resent"] += 1
            return [*(self._evicted(cell) if mine else ()), (SERVER, p)]
        if not mine and cell.job != _FREE and now - cell.at > self.age:  # else a stray repeat would keep it for ever
            self.counts["aged"] += 1
            out = self._evicted(cell)
        if cell.job == _FREE:
            cell.take(p)
        elif not mine or not cell.fits(p):
            self.counts["collided"] += 1  # marked: without it windows grow until nearly all goes to the server
            return [*out, (SERVER, p._replace(flags=p.flags | MARK))]
        if p.bits & cell.bits:
            self.counts["repeated"] += 1
            return out
        cell.add(p, now)
        self.counts["added"] += 1
        return out + (self._evicted(cell) if cell.full else [])

    @staticmethod
    def _evicted(cell: Cell) -> Out:
        found = cell.packet(UPDATE)
        cell.job = _FREE
        return [(SERVER, found)]

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return len(self.cells) * CELL_BYTES
