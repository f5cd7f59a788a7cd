"""A network that loses, repeats and delays datagrams, from a seed, around the same machines that sockets drive.

One queue stands before each of switch and server: it marks what waits behind `mark_at` datagrams and drops what waits
behind `drop_at`. Time is simulated, so a run of seconds takes what its datagrams cost in Python. Events of one time
happen in the order of their making, so a seed gives the same run everywhere.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

from .packet import HEAD_BYTES, Packet
from .server import Server
from .switch import ALL, SERVER, SWITCH, Hashed, Out, Pool
from .worker import Vector, Worker

_NEVER = float("inf")
_LATE = 100  # times the delay, at most


class Network:
    """Workers of one or more jobs around a switch.

    Args:
        workers (list of Worker): all ranks of all jobs.
        switch (Pool or Hashed): the switch.
        server (Server, optional): of a ``Hashed`` switch.
        seed (int): of all that is random. Default: 0.
        loss, double, long (float): the parts of datagrams that are lost, come twice, and come up to 100 delays late.
        delay, jitter, service (float): seconds: of each way, random beside it, and of each datagram at a queue.
        mark_at, drop_at (int): datagrams in a queue.
        dies (float): when the switch stops for good. Default: never.

    Example:
        >>> from hvdlite.aggregation import Network, Pool, Worker
        >>> Network([Worker(0, 0, 1, window=8)], Pool(slots=8), loss=0.01).now
        0.0
    """

    def __init__(
        self, workers: list[Worker], switch: Pool | Hashed, server: Server | None = None, seed: int = 0,
        loss: float = 0.0, double: float = 0.0, long: float = 0.0, delay: float = 20e-6, jitter: float = 20e-6,
        service: float = 1e-6, mark_at: int = 32, drop_at: int = 256, dies: float = _NEVER
    ) -> None:  # fmt: skip
        self.workers = {(worker.job, worker.rank): worker for worker in workers}
        self.switch, self.server, self.random = switch, server, random.Random(seed)
        self.loss, self.double, self.long, self.delay, self.jitter = loss, double, long, delay, jitter
        self.service, self.mark_at, self.drop_at, self.dies = service, mark_at, drop_at, dies
        self._free = {SWITCH: 0.0, SERVER: 0.0}
        self._events: list[tuple[float, int, Any, Packet | None]] = []  # (time, number, where to or a job, datagram)
        self.now, self._number = 0.0, 0
        self.counts: Counter[str] = Counter()

    def put(self, to: Any, p: Packet | None, at: float) -> None:
        """Add an event: a datagram arrives, or a job begins.

        Args:
            to (int or tuple): where it arrives: the switch, the server, or (job, rank). A job that begins: its number.
            p (Packet, optional): the datagram. ``None``: a job begins.
            at (float): the time, in seconds.
        """
        self._number += 1
        heapq.heappush(self._events, (at, self._number, to, p))

    def _send(self, to: Any, p: Packet, after: float = 0.0) -> None:
        self.counts["datagrams"] += 1
        self.counts["bytes"] += p.numbers.nbytes + HEAD_BYTES
        copies = (self.random.random() >= self.loss) + (self.random.random() < self.double)
        self.counts["lost"] += copies == 0
        for _ in range(copies):
            late = self.random.random() * _LATE * self.delay if self.random.random() < self.long else 0.0
            self.put(to, p, max(self.now, after) + self.delay + self.random.random() * self.jitter + late)

    def flush(self, worker: Worker) -> None:
        """Put on the way what a worker has to send.

        Args:
            worker (Worker): one of this network.
        """
        for to, p in worker.out:
            self._send(to, p)
        worker.out.clear()

    def _relay(self, found: Out, job: int, place: int) -> None:
        for to, p in found:  # when its turn in the queue has come
            if to == SERVER:
                self._send(SERVER, p, self._free[place])
                continue
            for at in [at for at in self.workers if at[0] == job and to in (ALL, at[1])]:
                self._send(at, p, self._free[place])

    def timer(self) -> float:
        """Return when the first timer of a worker is due.

        Returns:
            float: the time in seconds; infinity without a timer.
        """
        return min((worker.due for worker in self.workers.values()), default=_NEVER)

    def step(self, begin: Any = None) -> bool:
        """Simulate one event.

        Args:
            begin (callable, optional): called with the number of a job that begins.

        Returns:
            bool: ``False`` if there is no event.
        """
        timer = self.timer()
        if not self._events and timer == _NEVER:
            return False
        if not self._events or timer < self._events[0][0]:
            self.now = timer
            for worker in self.workers.values():
                if worker.due <= self.now:
                    worker.on_timer(self.now + 1e-12)
                    self.flush(worker)
            return True
        self.now, _, to, p = heapq.heappop(self._events)
        if p is None:
            begin(to)
        elif to not in (SWITCH, SERVER):
            self.workers[to].on_packet(p, self.now)
            self.flush(self.workers[to])
        elif to == SERVER or self.now <= self.dies:
            self._arrive(to, p)
        return True

    def _arrive(self, place: int, p: Packet) -> None:
        start = max(self.now, self._free[place])
        queued = round((start - self.now) / self.service)
        if queued >= self.drop_at:
            self.counts["overrun"] += 1
            return
        self._free[place] = start + self.service
        machine: Any = self.server if place == SERVER else self.switch
        self._relay(machine.on_packet(p, self.now, queued >= self.mark_at), p.job, place)


def run(
    network: Network, inputs: dict[tuple[int, int], Any], starts: dict[int, float] | None = None
) -> dict[tuple[int, int], Vector]:
    """Run one operation of each job and return the results.

    Args:
        network (Network): with the workers of all jobs.
        inputs (dict): the vector of each (job, rank), float32 or int32.
        starts (dict, optional): seconds after which a job begins. Default: all at once.

    Returns:
        dict: the sum of each (job, rank).

    Raises:
        HvdTimeoutError: a block had no answer.
        HvdNotFiniteError: a rank gave NaN or infinities.
        HvdArgumentError: a dtype is neither float32 nor int32.

    Example:
        See ``Worker``.
    """
    begun: set[int] = set()

    def begin(job: int) -> None:
        begun.add(job)
        for (each, rank), x in inputs.items():
            if each == job:
                network.workers[job, rank].begin(x, network.now, f"x{job}")
                network.flush(network.workers[job, rank])

    jobs = sorted({job for job, _ in inputs})
    for job in jobs:
        network.put(job, None, network.now + (starts or {}).get(job, 0.0))
    results: dict[tuple[int, int], Vector] = {}
    while len(results) < len(inputs):
        moved = network.step(begin)
        results = {at: y for at in inputs if at[0] in begun and (y := network.workers[at].result) is not None}
        assert moved or len(results) == len(inputs), "no datagram is on its way, and a result is missing"
    return results
