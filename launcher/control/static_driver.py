"""Driver of a job with a fixed number of ranks: a rank that fails ends the job.

This is the simple policy of a job; elastic/driver.py is the other. A policy opens the store that suits it and decides
what follows when a process ends, cannot be started, is reported by others or is lost with its host. What it decides
with is the Job: its streams, its Ending, its Console.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..agent.process import exit_text
from ..store.epochs import ranks_named
from ..store.server import StoreServer
from .agent_link import AgentLink
from .ending import LOST, Abort, blamed
from .parameter_servers import Servers

if TYPE_CHECKING:
    from ..job import Job

TIMEOUT = -7  # HVD_ETIMEOUT


class StaticDriver:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._servers = Servers(job)

    def open_store(self, number: int) -> StoreServer:
        """The store of this job's number."""
        far, missed, present = self._job.far, self._job.ending.missed, len(self._servers.hosts)
        aggregators = min(self._job.plan.aggregators, present)  # a rank that is alone has none
        numbers = (0, present - aggregators, aggregators)
        return StoreServer(len(far.slots), far.secret, number, self.aborted, missed, far.address, *numbers)

    @property
    def preempted(self) -> bool:
        """Whether the ranks have the order to save and to end."""
        return False

    def due(self) -> float | None:
        """When `act` has something to do; None: never."""
        return self._servers.due()

    def act(self, now: float) -> None:
        """Does what is due."""
        self._servers.act(now)

    def children(self) -> set[int]:
        """Processes of the launcher that the policy has started and waits for."""
        return set()

    def close(self) -> None:
        """The job is over."""

    def called(self, number: int) -> str:
        """ "rank 3"; a parameter server has a number above those of ranks."""
        return self._servers.called(number) if number in self._servers else f"rank {number}"

    def headline(self, text: str) -> str:
        """The job's last words."""
        return self._servers.headline(text)

    def started(self, rank: int) -> None:
        """Its process runs."""
        if rank in self._servers:
            self._servers.started(rank)

    def ended(self, rank: int, code: int) -> None:
        """Its process has ended; code is negative for a signal."""
        job = self._job
        if rank in self._servers:
            self._servers.ended(rank, code)
            return
        text = f"{job.ending.who(rank)} {exit_text(code)}"
        job.drain(rank)
        words = job.console.last_words(rank) if code else ""
        job.ending.ended(time.monotonic(), rank, code, words)  # first: a failed rank is not merely missing
        job.store.rank_ended(rank, blamed(text + words, code))
        job.log_verbose(f"{text} after {time.monotonic() - job.began:.2f} s")

    def unstarted(self, each: AgentLink, rank: int, code: int) -> None:
        """There is no process; those after it in the order were not started either."""
        self.ended(rank, code)
        if rank not in self._servers:
            self._job.ending.living -= each.ranks - set(self._job.ending.pids)

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A rank has reported why the job ends."""
        self._job.log_verbose(f"abort record of rank {reporter}: rank {culprit}, code {code}: {text}")
        self._job.ending.aborted(time.monotonic(), Abort(reporter, culprit, text, code == TIMEOUT))

    def signalled(self, number: int) -> bool:
        """The launcher got this signal: whether nothing else is to be done about it."""
        return False

    def host_lost(self, each: AgentLink, why: str) -> None:
        """Another host is silent or lost. Its living ranks follow by `lost`."""
        ending = self._job.ending
        lost = each.ranks & ending.living
        if ending.stop_signal is None and ending.culprit() in (None, *lost):
            self._job.fail(f"host {each.name} is lost: {why}; {ranks_named(sorted(lost))} ran there [HVD403]", LOST)
        self._servers.host_lost(each)

    def lost(self, rank: int) -> None:
        """It is lost with its host."""
        self._job.store.rank_ended(rank, f"{self._job.ending.who(rank)} is lost with its host [HVD403]")
        self._job.ending.ended(time.monotonic(), rank, LOST)
