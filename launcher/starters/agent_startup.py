"""Start of all agents of a Plan: a port for registration, the starter's command, and the wait for all hosts.

The address is that of this host on the route to the others, or on an interface that the user has named; the port is
whatever is free, and is not listened at any longer than until all hosts have registered. What goes to a host over stdin
is made here, so that nothing of it need stand anywhere else. The doctor takes the same way, without a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.errors.codes import coded

from ..agent import process, rank_environment
from ..control.plan import Plan, RemoteHosts
from ..control.registration import Registration
from ..control.signals import Signals
from ..hosts import address
from .starter import Running, Start, Starter, StartError

if TYPE_CHECKING:
    from ..control.agent_link import AgentLink


class Gather:
    """What a Plan calls. interfaces: as address.of_interfaces; also: variables that go with the environment whatever
    they are."""

    def __init__(self, starter: Starter, interfaces: Sequence[str], timeout: float, also: Mapping[str, str]) -> None:
        self.starter, self.interfaces, self.timeout, self.also = starter, interfaces, timeout, also

    def listen(self, names: Sequence[str], secret: bytes) -> Registration:
        """Opens the port at which these hosts register. Raises StartError."""
        try:
            return Registration(secret, self.mine(names))
        except (address.AddressError, OSError) as error:
            raise StartError(coded("HVD715", str(error)), 2) from None

    def mine(self, names: Sequence[str]) -> str:
        """The address of this host that these reach. Raises AddressError."""
        if self.interfaces:
            return address.of_interfaces(self.interfaces)
        return address.towards(names, self.starter.resolve)

    def __call__(self, plan: Plan, signals: Signals) -> RemoteHosts:
        """Brings the agents of a job. Raises StartError."""
        names = list(dict.fromkeys(slot.host for slot in plan.slots))
        hosts = [(number, name) for number, name in enumerate(names) if name != plan.here]
        secret = os.urandom(32)
        links, sessions, mine = self.bring(plan, secret, hosts, signals, process.start)
        return RemoteHosts(links, plan.slots, mine, secret, sessions)

    def bring(
        self,
        plan: Plan,
        secret: bytes,
        hosts: Sequence[tuple[int, str]],
        signals: Signals,
        start: Callable[..., int],
    ) -> tuple[list[AgentLink], list[Running], str]:
        """The agents of these hosts (number, name), the sessions that lead there, and the address of this host to which
        they have connected. start: as starter.Start. Raises StartError."""
        registration = self.listen([name for _, name in hosts], secret)
        environ = rank_environment.inherited(rank_environment.forwarded(plan.environ), plan.options, plan.slots)
        environ.update(self.also)
        rank_environment.put_in_front(environ, plan.fronts)
        start_order = order(registration, secret, self.timeout, plan.silence, environ)
        start_order["command"] = list(plan.command)
        try:
            start_in_progress = Start(
                self.starter, hosts, registration, start_order, plan.environ, signals, self.timeout, start
            )
            links = start_in_progress.run()
        finally:
            registration.close()
        return links, start_in_progress.running, start_order["address"][0]


def order(
    registration: Registration, secret: bytes, timeout: float, silence: float, environ: Mapping[str, str]
) -> dict[str, Any]:
    """What every host gets over stdin, without its ranks (remote_agent.py)."""
    return {
        "secret": secret.hex(),
        "address": registration.address,
        "timeout": timeout,
        "silence": silence,
        "cwd": os.getcwd(),
        "environ": dict(environ),
        "path": [os.path.abspath(folder) for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder],
    }
