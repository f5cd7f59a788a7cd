"""Agent of one rank, which the mpirun of `hvdlite-run --mpi` starts instead of the rank.

The mpirun carries ranks to their hosts and tells them of their MPI; an agent between it and the rank does what agents
do elsewhere: it brings the rank's output to the launcher in whole, reports how the rank ended, and leaves nothing
behind. The rank inherits from it what an MPI gives its processes, variables and descriptors alike, and is to that MPI
the same process: an MPI watches connections and the ends of what it has started, and that is here until the launcher
lets all agents go at once. So no MPI has a reason to end ranks while others have their time to fail.

Ranks with a rendezvous over MPI do not know the launcher's store. They report a failure to their agent, over a pair of
sockets (hvdlite/mpi/launcher_agent.py), in the frames that they would send to the store; the agent passes that on
before it reports the rank's end.

What it has started is a process of its own, the carrier, above the agent and its watchdog (agent/watchdog.py): an
MPI_Abort kills that (mpi4py calls it for an uncaught exception), and nothing else. The agent goes on as long as the
launcher is there, which gets the rank's last words and its exit code, and decides when the ranks end
(starter_sessions.py).

The order comes in a variable, since an mpirun passes stdin on to one rank at most, and values of variables are in no
argument list. Ranks do not inherit it: their rendezvous is over MPI, and needs no secret of the launcher.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from hvdlite import config
from hvdlite.security import framing
from hvdlite.system import python_command

from ..agent import process, rank_environment, watchdog
from ..agent.agent import FORWARDED, READ_BYTES, Agent
from ..control import registration
from ..control.ending import LOST
from . import remote_agent

ORDER = "HVDLITE_AGENT_ORDER"
BOOT = (
    f"{python_command.WITHOUT_FOLDER}import os,json;g=json.loads(os.environ.pop('{ORDER}'));sys.path[:0]=g['path'];"
    "from hvdlite.launcher.starters import mpi_agent as agent;sys.exit(agent.main(g))"
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class _Carried(Agent):
    """Ends with its launcher. Signals that an MPI sends to its processes are not the launcher's."""

    def __init__(
        self,
        control: socket.socket,
        output: socket.socket,
        stdin: int,
        common: Mapping[str, Any],
        hangup: int,
        stays: bool,
        sessions: tuple[framing.Session, framing.Session],
    ) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.set_inheritable(True)  # nothing but the rank is started here
        name = f"{self._far.fileno()}:{os.fstat(self._far.fileno()).st_ino}"
        environ = {**common["environ"], f"{config.PREFIX}AGENT": name}
        super().__init__(control, output, stdin, {**common, "environ": environ}, hangup, stays, sessions)
        self._rank_reader = framing.FrameReader(framing.Session())
        self._numbers: list[int] = []  # of the launcher's ranks, by their ranks in the job that they have made
        self._selector.register(self._near, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        """What the rank reports of the end of the job."""
        try:
            while self._near.fileno() >= 0:
                for kind, body in self._rank_reader.feed(self._near.recv(READ_BYTES)):
                    if kind == framing.JOIN:
                        self._numbers = [int(number) for number in json.loads(body)]
                        self._report({"what": "joined"})
                    elif kind in (framing.LEAVING, framing.BYE):
                        self._report({"what": "left job"})
                    elif kind == framing.ABORT:
                        culprit, code, text = framing.unpack_end(body)
                        known = 0 <= culprit < len(self._numbers)
                        self._report(
                            {"what": "aborted", "record": [self._numbers[culprit] if known else -1, code, text]}
                        )
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, RecursionError):  # the writer is no rank
            self._selector.unregister(self._near)
            self._near.close()

    def _report(self, news: dict[str, Any]) -> None:
        if news["what"] == "ended":
            self._receive()
        super()._report(news)

    def _signalled(self, numbers: bytes) -> None:
        pass

    def _hung_up(self) -> None:
        self._selector.unregister(self._hangup)
        self._hangup = -1


def main(order: dict[str, Any]) -> int:
    """What an mpirun has started, from start to end. Returns its exit code."""
    ends, here = os.pipe()  # with the carrier
    process.become_subreaper()
    pid = os.fork()
    if pid:
        return _carry(pid)
    os.close(here)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    environ = config.environ()
    rank = next((environ[name] for name in _RANKS if name in environ), None)
    if rank is None:
        print(f"the launcher sets none of {', '.join(_RANKS)}: this MPI is not supported [HVD106]", file=sys.stderr)
        return LOST
    order.update(host=int(rank), environ=environ)
    rank_environment.put_in_front(environ, order["fronts"])
    return abs(watchdog.watched(partial(_serve, order), ends))


def _serve(order: dict[str, Any], hangup: int) -> int:
    try:
        remote_agent.serve(order, hangup, stays=True, secret_for_ranks=False, kind=_Carried)
    except registration.ReportError as error:
        print(error, file=sys.stderr)
        return LOST
    return 0


def _carry(watchdog_pid: int) -> int:
    """The carrier: there as long as the watchdog is. An MPI that sees another code than 0 ends the others' carriers."""
    for number in (*FORWARDED, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    status = os.waitpid(watchdog_pid, 0)[1]
    if status:
        process.sweep(())
    return process.exit_code(status) and LOST
