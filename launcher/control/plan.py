"""Plan of a job: what runs, where, and how the agents get there. The command line hands it to job.py.

A Plan for this host alone has its slots and no `gather`. With other hosts, `gather` is called once this host's agent is
forked: it starts agents there (starters/starter.py) or waits for them (starters/rendezvous.py), and returns
RemoteHosts, or raises starter.StartError when a host cannot take part; then nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..hosts.hosts import Host, Slot
from ..store.elastic_members import Terms
from .ending import Graces

if TYPE_CHECKING:
    from ..elastic.discovery import DiscoveryScript
    from ..starters.agent_startup import Gather
    from ..starters.starter import Running
    from .agent_link import AgentLink
    from .signals import Signals


class RemoteHosts(NamedTuple):
    """The other hosts of a job: their agents, and what was found out with them."""

    links: list[AgentLink]
    slots: Sequence[Slot]  # of the whole job
    address: str  # where the store is to listen
    secret: bytes
    sessions: Sequence[Running] = ()
    host_environ: Mapping[str, Mapping[str, str]] = {}  # variables that ranks of a host get in addition, by its name


class Look(NamedTuple):
    """What is shown of the ranks' output, and how."""

    timestamps: bool = False
    ranks: Collection[int] | None = None  # whose output is shown; None: all
    local_ranks: Collection[int] | None = None  # the same, by numbers on their hosts; both must agree
    fold: bool = False
    as_json: bool = False
    colours: Collection[int] = ()  # descriptors of terminals that get some
    redraws: Collection[int] = ()  # descriptors where a line may be written over, as on a terminal
    file_bytes: int | None = None  # of an output file, before a new one is begun


class Elastic(NamedTuple):
    """That ranks may come and go. script: of host discovery, None: the hosts stay; listed: hosts with all slots."""

    terms: Terms
    script: DiscoveryScript | None = None
    listed: Sequence[Host] = ()
    cooldown: tuple[float, float] = (5.0, 300.0)  # seconds without a new rank after a failure: the first time, at most
    failures: int = 5  # processes in a row that end before they are ranks: the host is left out
    tolerated: Collection[str] = ()  # exit codes, and "exception", that count as a loss
    gather: Gather | None = None  # the way to hosts that come later


class Plan(NamedTuple):
    """A job as the command line asks for it."""

    command: Sequence[str]
    slots: Sequence[Slot]  # may be left to `gather`
    environ: Mapping[str, str]  # the launcher's own
    options: Mapping[str, str]  # variables that flags stand for
    graces: Graces = Graces()
    silence: float = 5.0  # of an agent, before it counts as lost
    lingering: float = 0.0  # after the last good end, before ranks that still run are named; 0: never
    output_folder: str | None = None
    look: Look = Look()
    verbose: bool = False
    fronts: Sequence[str] = ()  # see rank_environment.FRONTS
    bind: str = "none"  # see agent/cpu_binding.py
    over_mpi: bool = False  # the rendezvous of ranks
    pty: tuple[int, int] | None = None  # rank 0 writes to a terminal of so many rows and columns
    stdin: bool | None = None  # rank 0 reads the launcher's; None: not given
    servers: int = 0  # parameter servers, beside the ranks
    aggregators: int = 0  # numbered after these
    max_restarts: int = 0
    attempt: int = 0  # how often it was tried before
    here: str | None = "localhost"  # what slots call this host; None: no rank runs here
    gather: Callable[[Plan, Signals], RemoteHosts] | None = None  # brings the agents of other hosts
    elastic: Elastic | None = None
    again: Callable[[Callable[[float], object]], Plan] | None = None  # of another attempt, on the hosts of that time
