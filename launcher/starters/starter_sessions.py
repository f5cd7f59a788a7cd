"""Sessions (ssh, srun, an MPI's launcher) behind the agents: their output, and what their end means.

Their output is shown: it is never good. The end of one means that its hosts are lost, or, where it has started the
agents of many hosts and they are there still, that it has ended the ranks.

An ssh or srun whose output is read here was started for one job and ends with it; see starter.py for how it came.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from ..agent.process import exit_text
from ..control.agent_link import AgentLink
from ..control.ending import KILL, LOST
from .starter import Running

if TYPE_CHECKING:
    from ..job import Job

ABORTED_S = 1.0  # after an MPI_Abort: a rank's own words and exit code tell more than the exit code of an mpirun


class Sessions:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running: list[Running] = []
        self._over: tuple[float, str, int] | None = None  # an MPI's launcher has ended the ranks: act then, text, code

    def admit(self, session: Running) -> None:
        """One more, whose output is read from now on."""
        self._running.append(session)
        if session.output >= 0:
            self._job.watch(session.output, partial(self._listen, session))

    def pids(self) -> set[int]:
        """Their processes."""
        return {session.pid for session in self._running}

    def end(self) -> None:
        """Ends all, at the end of the job."""
        for session in self._running:
            session.end()

    def due(self) -> float | None:
        """When `look` has something to do; None: never."""
        return None if self._over is None else self._over[0]

    def look(self, now: float) -> None:
        """Ends the ranks that an MPI's launcher has given up, unless one has reported an error. Their exit codes say
        less: that of MPICH is 15 after an MPI_Abort with any code."""
        if self._over is None or (now < self._over[0] and self._job.ending.living):
            return
        (_, text, code), self._over = self._over, None
        if self._job.ending.stop_signal is None and self._job.ending.abort is None:
            self._job.fail(text, code)
            self._job.send(KILL)

    def _listen(self, session: Running) -> None:
        job, title = self._job, session.session.title
        chunk = session.listen()
        if chunk is not None:
            names = title or ", ".join(each.name for each in self._led_to(session))
            over = all(each.done or not each.alive for each in job.links)  # an MPI speaks of its agents' ends then
            for line in () if over else chunk.decode(errors="replace").splitlines():
                job.console.announce(f"{names}: {line}")
            return
        job.watch_no_more(session.output)
        if title:  # its agents are there still
            code = session.end()
            if code:
                end = f"was {exit_text(code)} [HVD402]" if code < 0 else f"{exit_text(code)} [HVD401]"
                text = f"{title} has ended the ranks: it {end}"
                self._over = (time.monotonic() + ABORTED_S, text, code if code > 0 else LOST)
            return
        for each in self._led_to(session):
            if each.alive and not each.done:
                job.lose(each, f"{session.session.words[0]}, which led there, has ended")

    def _led_to(self, session: Running) -> list[AgentLink]:
        return [each for each in self._job.links if each.pid is None and each.number in session.session.hosts]
