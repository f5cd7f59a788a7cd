"""Who adds what a shared switch did not: ATP's server, the authority for the sums of one job. Pure.

A mask of ranks for each open block. Disjoint masks are added, overlapping ones are dropped: the ranks repeat singly
until they are answered, so nothing is lost, and no rank is added twice. The last sums are kept for ranks that ask
again.
"""

from __future__ import annotations

from collections import Counter

from .packet import RESEND, RESULT, UPDATE, Packet
from .switch import ALL, Cell, Machine, Out


class Server(Machine):
    """The server of one or more jobs.

    Args:
        keep (int): sums kept for each job: twice the window, since no rank can be more than a window behind.

    Example:
        >>> from hvdlite.aggregation import Server
        >>> Server(keep=64).most
        0
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.open: dict[tuple[int, int], Cell] = {}
        self.done: dict[int, dict[int, Packet]] = {}
        self.counts: Counter[str] = Counter()
        self.most = 0  # blocks in memory at once

    def forget(self, job: int) -> None:
        """Free the memory of a job that has ended.

        Args:
            job (int): the number of the job.
        """
        self.done.pop(job, None)
        self.open = {at: cell for at, cell in self.open.items() if at[0] != job}

    def on_packet(self, p: Packet, now: float, congested: bool = False) -> Out:
        """Return the answers to one datagram, of a rank or of the switch.

        Args:
            p (Packet): the datagram.
            now (float): seconds of any clock.
            congested (bool): not used.

        Returns:
            list: (where to, datagram) of each answer.
        """
        if p.kind != UPDATE:
            self.counts["refused"] += 1
            return []
        done = self.done.setdefault(p.job, {})
        if p.seq in done:
            if not p.flags & RESEND:
                return []
            self.counts["asked again"] += 1
            return [(p.rank, done[p.seq])]
        if done and p.seq <= max(done) - self.keep:
            self.counts["stale"] += 1
            return []
        cell = self.open.get((p.job, p.seq))
        if cell is None:
            cell = self.open[p.job, p.seq] = Cell()
            cell.take(p)
        elif p.bits & cell.bits or not cell.fits(p):
            self.counts["overlapped"] += 1
            return []
        cell.add(p, now)
        ranks = bin(p.bits).count("1")
        self.counts["whole" if ranks == p.n else "single" if ranks == 1 else "partial"] += 1
        self.most = max(self.most, len(self.open) + sum(map(len, self.done.values())))
        if not cell.full:
            return []
        del self.open[p.job, p.seq]
        done[p.seq] = cell.packet(RESULT)
        for old in [seq for seq in done if seq <= p.seq - self.keep]:
            del done[old]
        return [(ALL, done[p.seq])]
