"""A rank's end of the protocol: what it sends when, and what it does when no answer comes. Pure: no socket, no clock.

`begin(x, now)`, then `on_packet` and `on_timer` until `result` is there; `out` fills with (where to, datagram). Ranks
alone notice loss: the switch has no timer. All ranks of a job make the same operations in the same order.

Exponents are agreed one window ahead. An operation of floats begins with blocks that hold the exponents of its first
window, combined by max; block i carries the exponent of block i + window, and its answer the largest.

The timeout is measured (Jacobson, SIGCOMM 1988), not by blocks that were repeated (Karn). With a shared switch the
window follows ATP's rule in its plainest form: one more for each window of answers, half at a mark.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import HvdArgumentError, HvdNotFiniteError, HvdTimeoutError
from .fixed_point import LEAST, NOT_FINITE, decode, encode, exponents
from .packet import BLOCK, MARK, MAXIMUM, RANKS_MAX, RESEND, RESULT, UPDATE, Packet
from .switch import SERVER, SWITCH

Vector = NDArray[Any]  # of float32 or int32
_DOUBLINGS = 5  # of the timeout, at most
_WITHOUT_S = 5.0  # without the switch, once it is silent
_FIRST_WINDOW = 4.0
_OVERTAKEN = 3


class _Sent:
    """A block without its answer."""

    def __init__(self, now: float, direct: bool) -> None:
        self.first = self.at = now
        self.tries, self.direct = 1, direct
        self.overtaken = 0  # by answers of later blocks


class Worker:
    """One rank of a job.

    Args:
        job (int): the number of the job, below 2**64.
        rank (int): the rank.
        n (int): the number of ranks, at most 64.
        window (int): blocks in flight at most; of a ``Pool``, at most its slots.
        hashed (bool): the switch is shared, and there is a server. Default: ``False``.
        rto (float): seconds to the first repeat, until answers were measured. Default: 0.01.
        patience (float): seconds without an answer to one block, after which it raises. Default: 5.0.

    Example:
        >>> from hvdlite.aggregation import Network, Pool, Worker, run
        >>> network = Network([Worker(0, rank, 2, window=8) for rank in range(2)], Pool(slots=8), loss=0.01)
        >>> run(network, {(0, rank): np.full(1000, rank + 0.5, np.float32) for rank in range(2)})[0, 1][:2].tolist()
        [2.0, 2.0]
    """

    def __init__(
        self, job: int, rank: int, n: int, window: int, hashed: bool = False, rto: float = 0.01, patience: float = 5.0
    ) -> None:  # fmt: skip
        if not 0 < n <= RANKS_MAX:
            raise HvdArgumentError(f"an aggregator serves at most {RANKS_MAX} ranks, this job has {n} [HVD024]")
        self.job, self.rank, self.n, self.window, self.hashed, self.patience = job, rank, n, window, hashed, patience
        self.next = self.end = self.first = self.data = 0  # numbers of blocks: to be sent, and of this operation
        self.waiting: dict[int, _Sent] = {}
        self.out: list[tuple[int, Packet]] = []
        self.cwnd, self._recover = (min(float(window), _FIRST_WINDOW) if hashed else float(window)), -1
        self._rto, self._least, self._smooth, self._spread = rto, rto / 4, -1.0, 0.0
        self._direct_until, self._in_a_row, self._counted = -1.0, 0, -1.0
        self.counts: Counter[str] = Counter()
        self.trace: list[tuple[float, float]] = []  # of the window, where it is a list that somebody reads
        self.traced = False
        self.result: Vector | None = None
        self.name = ""

    def begin(self, x: Vector, now: float, name: str = "", divisor: int = 1) -> None:
        """Start to sum a vector.

        Args:
            x (array): float32 or int32. It must not change until the result is there.
            now (float): seconds of any clock.
            name (str): name of the operation, for messages.
            divisor (int): of sums of floats. Default: 1.

        Raises:
            HvdArgumentError: another dtype, or the previous operation is not complete.
        """
        if self.waiting or self.next != self.end:
            raise HvdArgumentError(f"'{name}': '{self.name}' is not complete yet [HVD430]")
        self.name, self.divisor, self.floats = name, divisor, x.dtype == np.float32
        self.x = require(x, name)
        blocks = -(-len(self.x) // BLOCK)
        self._own = exponents(self.x) if self.floats else np.full(blocks, LEAST, np.int32)
        self._agreed: dict[int, int] = {}
        self.first = self.next
        ahead = min(self.window, blocks) if self.floats else 0
        self.data = self.first + -(-ahead // BLOCK)  # before it: blocks that hold exponents
        self.end = self.data + blocks
        self._sums = np.zeros(len(self.x), self.x.dtype)
        self.result = None if blocks else self._sums
        self._send_more(now)

    def _block(self, seq: int) -> Packet:
        """What this rank has for a block: the same each time."""
        if seq < self.data:
            i = (seq - self.first) * BLOCK
            numbers = self._own[: self.window][i : i + BLOCK].copy()
            return Packet(UPDATE, MAXIMUM, self.job, self.n, seq, 1 << self.rank, LEAST, numbers)
        i = seq - self.data
        part = self.x[i * BLOCK : (i + 1) * BLOCK]
        numbers = encode(part, self._agreed[i], self.n) if self.floats else part
        later = int(self._own[i + self.window]) if i + self.window < len(self._own) else LEAST
        return Packet(UPDATE, 0, self.job, self.n, seq, 1 << self.rank, later, numbers)

    def _may_send(self, seq: int) -> bool:
        if seq >= self.end or (self.floats and seq >= self.data and seq - self.data not in self._agreed):
            return False
        oldest = next(iter(self.waiting), seq)
        return len(self.waiting) < int(self.cwnd) and seq - oldest < self.window

    def _send(self, seq: int, flags: int, direct: bool) -> None:
        p = self._block(seq)
        self.counts["bytes"] += p.numbers.nbytes
        self.out.append((SERVER if direct else SWITCH, p._replace(flags=p.flags | flags)))

    def _send_more(self, now: float) -> None:
        while self._may_send(self.next):
            direct = now < self._direct_until
            self.waiting[self.next] = _Sent(now, direct)
            self._send(self.next, RESEND if direct else 0, direct)
            self.next += 1

    def on_packet(self, p: Packet, now: float) -> None:
        """Take an answer.

        Args:
            p (Packet): the datagram.
            now (float): seconds of the same clock.

        Raises:
            HvdNotFiniteError: a rank gave NaN or infinities. It is raised on all ranks.
        """
        if p.kind != RESULT or p.job != self.job or p.seq not in self.waiting or p.bits != (1 << self.n) - 1:
            self.counts["ignored"] += 1
            return
        part: Vector = p.numbers
        i = p.seq - self.data
        if i >= 0 and len(part) != len(self.x[i * BLOCK : (i + 1) * BLOCK]):
            self.counts["ignored"] += 1
            return
        sent = self.waiting.pop(p.seq)
        if sent.tries == 1:
            self._measure(now - sent.at)
            self._in_a_row = self._in_a_row if sent.direct else 0
        if i < 0:
            self._agreed.update(enumerate(p.numbers.tolist(), (p.seq - self.first) * BLOCK))
        else:
            if self.floats:
                part = decode(p.numbers, self._agreed.pop(i), self.n, self.divisor)
                self._agreed[i + self.window] = p.exponent
            self._sums[i * BLOCK : i * BLOCK + len(part)] = part
        if self.floats and (p.exponent == NOT_FINITE or (i < 0 and NOT_FINITE in p.numbers)):
            self.give_up()
            raise HvdNotFiniteError(f"'{self.name}': a rank gave NaN or infinities, which have no fixed point [HVD430]")
        if self.hashed:
            self._control(p, now)
            if sent.tries == 1:
                self._overtaken(p.seq, now)
        self._send_more(now)
        if not self.waiting and self.next == self.end:
            self.result = self._sums

    def give_up(self) -> None:
        """End the operation without a result. The next one begins at the same block on all ranks."""
        self.waiting.clear()
        self.out.clear()
        self.next = self.end

    def _measure(self, took: float) -> None:
        if self._smooth < 0:
            self._smooth, self._spread = took, took / 2
        else:
            self._spread += (abs(took - self._smooth) - self._spread) / 4
            self._smooth += (took - self._smooth) / 8
        self._rto = max(self._least, self._smooth + 4 * self._spread)

    def _overtaken(self, seq: int, now: float) -> None:
        """Blocks before one that has its answer: after three of those one was lost, or is in parts, as ATP has it."""
        for other, sent in list(self.waiting.items()):
            if other < seq and sent.tries == 1:
                sent.overtaken += 1
                if sent.overtaken == _OVERTAKEN:
                    self._repeat(other, sent, now)

    def _control(self, p: Packet, now: float) -> None:
        """Half at a mark, once in a window; else one block more for a window of answers."""
        if not p.flags & MARK:
            self.cwnd = min(self.cwnd + 1 / self.cwnd, float(self.window))
        elif p.seq > self._recover:
            self.cwnd, self._recover = max(self.cwnd / 2, 1.0), self.next
            self.counts["halved"] += 1
        if self.traced:
            self.trace.append((now, self.cwnd))

    def on_timer(self, now: float) -> None:
        """Repeat what is due.

        Args:
            now (float): seconds of the same clock.

        Raises:
            HvdTimeoutError: a block has had no answer for ``patience`` seconds.
        """
        for seq, sent in list(self.waiting.items()):
            if now < self._due(sent):
                continue
            if now - sent.first > self.patience:
                which = f"block {seq - self.first} of '{self.name}' {sent.tries} times in {now - sent.first:.1f} s"
                other = "server" if self.hashed else "aggregator"
                raise HvdTimeoutError(
                    f"rank {self.rank} has sent {which} without an answer: the {other} or a rank has ended or is "
                    "stopped [HVD430]"
                )
            self._repeat(seq, sent, now)
        self._send_more(now)

    def _repeat(self, seq: int, sent: _Sent, now: float) -> None:
        sent.at, sent.tries = now, sent.tries + 1
        self.counts["resent"] += 1
        if not self.hashed:
            self._send(seq, 0, direct=False)
            return
        self._send(seq, RESEND, direct=sent.tries > 2)  # first by the switch, which then gives up what it has of it
        if sent.tries == 3 and sent.first > self._counted:  # once for each window: a rank that pauses delays all of it
            self._in_a_row, self._counted = self._in_a_row + 1, now
            if self._in_a_row >= 3:  # nothing comes by the switch any more
                self.without_switch(now)

    def without_switch(self, now: float) -> None:
        """Send to the server at once, for 5 s: the switch is silent, or its port is closed.

        Args:
            now (float): seconds of the same clock.
        """
        if now < self._direct_until:
            return
        self._direct_until, self._in_a_row = now + _WITHOUT_S, 0
        self.counts["without switch"] += 1
        for seq, sent in self.waiting.items():
            if not sent.direct and sent.tries < 3:
                sent.at, sent.tries, sent.direct = now, 3, True
                self._send(seq, RESEND, direct=True)

    def _due(self, sent: _Sent) -> float:
        return sent.at + self._rto * 2 ** min(sent.tries - 1, _DOUBLINGS)

    @property
    def due(self) -> float:
        """When `on_timer` has something to do."""
        return min(map(self._due, self.waiting.values()), default=float("inf"))


def require(x: Vector, name: str) -> Vector:
    """As a contiguous vector. Raises HvdArgumentError for a dtype that has no fixed point here."""
    if x.dtype not in (np.float32, np.int32):
        raise HvdArgumentError(
            f"'{name}': the aggregator adds float32 and int32, not {x.dtype}: cast it, or use hvd.allreduce [HVD202]"
        )
    return np.ascontiguousarray(x).reshape(-1)
