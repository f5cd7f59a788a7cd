"""Start orders for each agent: ranks and their environment. Pure but for the choice of a port.

The agent of the launcher's own host, a fork of it, gets all: command, folder, the whole environment with the secret.
Those of other hosts have these already, from a starter or their own command line (starters/agent_startup.py,
starters/rendezvous.py). Only what the start itself decides goes over the network, and nothing of it is secret. Ranks
with a rendezvous over MPI get no rank assignment.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..agent import rank_environment
from ..hosts import hosts
from ..hosts.hosts import Slot
from .plan import Plan, RemoteHosts

if TYPE_CHECKING:
    from .agent_link import AgentLink


class Orders:
    """Of one job. first: the agent of rank 0's host."""

    def __init__(self, plan: Plan, far: RemoteHosts, access: rank_environment.StoreAccess, first: AgentLink) -> None:
        leader = None if first.peer is None else (first.peer, int(first.hello["torch_port"]))
        self._plan, self._far, self._secret = plan, far, access.secret
        self._environ = {} if plan.over_mpi else rank_environment.of_job(plan.environ, access, far.slots, leader)
        self._environ.update(rank_environment.of_attempt(plan.attempt, plan.max_restarts))
        if plan.servers:  # by a flag on this host alone, where the same command is not given on all
            self._environ["HVDLITE_SERVERS"] = str(plan.servers)
        if plan.aggregators:
            kind = {**plan.environ, **plan.options}.get("HVDLITE_AGGREGATOR_KIND", "pool")
            self._environ.update(HVDLITE_AGGREGATORS=str(plan.aggregators), HVDLITE_AGGREGATOR_KIND=kind)

    def of(self, ranks: Collection[int], host: str, own: bool, slots: Sequence[Slot] | None = None) -> dict[str, Any]:
        """The order to start these ranks. own: for the agent of the launcher's own host. slots: of ranks that come
        later; None: those of the job's start."""
        plan, slots = self._plan, self._far.slots if slots is None else slots
        size = len(slots)
        environ = {**self._environ, **self._far.host_environ.get(host, {})}
        order: dict[str, Any] = {"do": "start", "bind": plan.bind, "pty": plan.pty}
        order["ranks"] = [
            {"rank": slot.rank, "environ": {} if plan.over_mpi else rank_environment.of_rank(slot, size)}
            for slot in slots
            if slot.rank in ranks
        ]
        order["servers"] = [
            {"rank": size + number, "environ": rank_environment.of_server(number, plan.servers, size, plan.aggregators)}
            for number, name in enumerate(hosts.of_servers(slots, plan.servers + plan.aggregators))
            if name == host
        ]
        if own:
            base = rank_environment.inherited(plan.environ, plan.options, slots, plan.fronts)
            environ = {**base, **environ, **rank_environment.secret_of(self._secret)}
            order.update(command=list(plan.command), cwd=os.getcwd())
        if plan.elastic is not None:
            order["hold"] = True  # the agent does not end with its last rank
            for each in order["ranks"]:
                each["environ"]["HVDLITE_MEMBER"] = str(each["rank"])
        order["stdin"] = plan.stdin and 0 in ranks and not own  # see agent/stdin.py; the own agent has the descriptor
        return {**order, "environ": environ}


def shown(order: Mapping[str, Any], host: str) -> list[str]:
    """The rank assignment in an order, a line for each rank and server."""
    lines = []
    for each in [*order["ranks"], *order["servers"]]:
        environ, title = each["environ"], f"rank {each['rank']}"
        pairs = " ".join(f"{name}={value}" for name, value in sorted(environ.items()))
        if "HVDLITE_SERVER" in environ:
            title = hosts.server_name(int(environ["HVDLITE_SERVER"]), int(environ["HVDLITE_SERVERS"]))
        lines.append(f"{title} on {host}: {pairs}")
    return lines
