"""End of a parameter server: by itself it ends nothing; the ranks that have tables there decide.

A server is no rank. Its number in the launcher is above those of all ranks: size + k. Its end is reported at once to
the user and to the store. The store reports it to the other servers, to ranks that still wait for it, and to all ranks
where no server is left. It starts no grace and gives the job no exit code. When no rank runs any more, the servers are
ordered to end, and those that stay are killed. A job that fails later names the first server that ended before, since
that may be why.

An aggregator (`--aggregators`) is treated as a server, and numbered after them. Its end harms no rank: all add without
it from then on, and it is no reason of a later failure.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from hvdlite.errors.codes import code_of, uncoded

from ..agent.process import exit_text
from ..hosts import hosts
from .agent_link import AgentLink
from .ending import blamed

if TYPE_CHECKING:
    from ..job import Job


class Servers:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._size = len(job.far.slots)
        self.hosts = hosts.of_servers(job.far.slots, job.plan.servers + job.plan.aggregators)
        self._living: set[int] = set()
        self._kill_at: float | None = None  # those that were let go and are still there
        self._let_go = False
        self._first = ""  # how the first has ended, while nothing else was wrong

    def __contains__(self, number: int) -> bool:
        return self._size <= number < self._size + len(self.hosts)

    def called(self, number: int) -> str:
        """ "server 1"."""
        return hosts.server_name(number - self._size, self._job.plan.servers)

    def who(self, number: int) -> str:
        """ "server 1 (nodeB, pid 4711)", without the host where that goes without saying."""
        pid = self._job.ending.pids.get(number, "?")
        host = f"{self.hosts[number - self._size]}, " if self._job.ending.far else ""
        return f"{self.called(number)} ({host}pid {pid})"

    def started(self, number: int) -> None:
        """Its process runs."""
        self._living.add(number)

    def ended(self, number: int, code: int) -> None:
        """Its process has ended, or was never there; code is negative for a signal."""
        self._job.drain()
        end = f"{self.who(number)} {exit_text(code)}"
        self._server_ended(number, end, blamed(end + self._job.console.last_words(number), code))

    def host_lost(self, each: AgentLink) -> None:
        """Those there are lost with it."""
        for number in [number for number in self._living if self.hosts[number - self._size] == each.name]:
            end = f"{self.who(number)} is lost with its host"
            self._server_ended(number, end, f"{end} [HVD403]")

    def _server_ended(self, number: int, end: str, text: str) -> None:
        self._living.discard(number)
        if self._let_go or self._job.ending.kills:
            return
        if number - self._size >= self._job.plan.servers:
            text = f"{uncoded(text)}; the ranks add without it from now on [{code_of(text)}]"
        elif self._job.ending.culprit() is None:
            self._first = self._first or end
        self._job.console.announce(text)
        self._job.store.servers.ended(number - self._size, text)

    def due(self) -> float | None:
        """When `act` has something to do; None: never."""
        return self._kill_at if self._living else None

    def act(self, now: float) -> None:
        """Tells them to end once no rank runs."""
        if self._job.ending.living or not self._living:
            return
        if not self._let_go:
            self._let_go, self._kill_at = True, now + self._job.plan.graces.term
            self._job.store.servers.end()
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for number in self._living:
                self._job.order(do="signal", number=int(signal.SIGKILL), group=True, rank=number)

    def headline(self, text: str) -> str:
        """The job's last words, with the end that came before."""
        if not self._first or self._first in text:
            return text
        return f"{uncoded(text)}; before that, {self._first} [{code_of(text)}]"
