"""Rendezvous of hosts without ssh: the same command on each of them, and one address.

    HVDLITE_SECRET_KEY=... hvdlite-run --nnodes 2 --node-rank 0 --nproc-per-node 4 --rdzv-endpoint a:29400 python t.py

Node 0, the host of that address, is the launcher of the job: it waits for the others, assigns ranks to all in the order
of their numbers, shows the output of all, and gives all the exit code. On the other hosts the launcher is the agent of
its own host, with the environment and the flags that it was started with. A signal to any of them ends the job as if
node 0 had got it.

All must know a secret beforehand, since no starter carries it: HVDLITE_SECRET_KEY. A launcher that listens on the
network without one runs code for strangers.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdlite.errors.codes import code_of, coded, uncoded
from hvdlite.system.machine_id import host_id

from ..agent import process, rank_environment, watchdog
from ..agent.agent import FORWARDED
from ..control import registration
from ..control.ending import LOST
from ..control.plan import Plan, RemoteHosts
from ..control.signals import ENDING, Signals
from ..hosts import hosts
from . import remote_agent, starter


class Rendezvous(NamedTuple):
    """Where `nodes` hosts register; `slots` ranks run on this one. node: its number; None: assigned then."""

    ip: str
    port: int
    secret: bytes
    nodes: int
    node: int | None
    slots: int
    timeout: float
    silence: float


class _Nobody:
    """A Starter that starts nothing: the other hosts come by themselves."""

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[starter.Session]:
        return []

    def resolve(self, name: str) -> list[str]:
        return []

    def again(self, code: int, text: str) -> bool:
        return False

    def remedy(self, host: str, code: int, text: str) -> str:
        return text


def gather(rdzv: Rendezvous) -> Callable[[Plan, Signals], RemoteHosts]:
    """Node 0's way to the other hosts."""

    def by_rendezvous(plan: Plan, signals: Signals) -> RemoteHosts:
        assert plan.here is not None  # node 0 has ranks
        try:
            listener = registration.Registration(rdzv.secret, rdzv.ip, rdzv.port)
        except OSError as error:
            text = f"cannot listen at {rdzv.ip}:{rdzv.port} for the other hosts: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                text += (
                    "; if another job meets there, take another port, and if this is not the first node: --node-rank"
                )
            raise starter.StartError(coded("HVD715", text)) from None
        expected = [(number, f"node {number}") for number in range(1, rdzv.nodes)]
        try:
            links = starter.Start(_Nobody(), expected, listener, {}, {}, signals, rdzv.timeout).run()
        finally:
            listener.close()
        named = [hosts.Host(plan.here, rdzv.slots)]
        for link in sorted(links, key=lambda each: each.number):
            taken = {host.name for host in named}
            name = str(link.hello["name"])
            link.name = name if name not in taken else f"{name} (node {link.number})"  # as cloned machines are
            link.stays = True
            registration.keep_watch(link.control, True, plan.silence)  # as it is asked for here
            named.append(hosts.Host(link.name, int(link.hello["slots"])))
        slots = hosts.assign(named, sum(host.slots for host in named))
        machines = {plan.here: machine(plan.environ), **{each.name: str(each.hello["machine"]) for each in links}}
        return RemoteHosts(links, slots, rdzv.ip, rdzv.secret, host_environ=_apart(machines))

    return by_rendezvous


def machine(environ: Mapping[str, str]) -> str:
    """What tells this machine from those of other nodes."""
    return environ.get("HVDLITE_HOST_ID") or host_id()


def _apart(machines: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Nodes on one machine, as one tries them out, are hosts to each other: the variables of their ranks for that."""
    shared = [each for each, count in Counter(machines.values()).items() if count > 1]
    return {name: {"HVDLITE_HOST_ID": f"{each} {name}"} for name, each in machines.items() if each in shared}


def join(
    rdzv: Rendezvous,
    command: Sequence[str],
    environ: Mapping[str, str],
    options: Mapping[str, str],
    fronts: Sequence[str],
) -> int:
    """The launcher on any other host than node 0's, from start to end: the exit code."""
    base = rank_environment.inherited(environ, options, hosts.assign([hosts.Host("", rdzv.slots)], rdzv.slots))
    rank_environment.put_in_front(base, fronts)
    order = {
        "secret": rdzv.secret.hex(),
        "address": (rdzv.ip, rdzv.port),
        "timeout": rdzv.timeout,
        "host": rdzv.node,
        "nodes": rdzv.nodes,
        "silence": rdzv.silence,
        "machine": machine(environ),
        "command": list(command),
        "cwd": os.getcwd(),
        "environ": base,
    }
    code = watchdog.watched(partial(_serve, rdzv, order))
    if code >= 0:
        return code
    if -code in FORWARDED:
        return 128 - code
    print(
        f"hvdlite-run: the agent of this host was killed by {process.signal_name(-code)} [HVD402]",
        file=sys.stderr,
        flush=True,
    )
    return LOST


def _serve(rdzv: Rendezvous, order: Mapping[str, Any], hangup: int) -> int:
    where = f"{rdzv.ip}:{rdzv.port}"
    try:
        again = True
        while again:
            _end_by_signals()
            code, again = remote_agent.serve(order, hangup, stays=True, slots=rdzv.slots)
    except registration.ReportError as error:
        text, code = str(error), code_of(str(error))
        if code == "HVD110":
            text = f"{uncoded(text)}; is the launcher started there, too? [HVD110]"
        elif code == "HVD111":
            text = f"{uncoded(text)}: give the same HVDLITE_SECRET_KEY and --rdzv-id on all hosts [HVD111]"
        print(f"hvdlite-run: {text}", file=sys.stderr, flush=True)
        return LOST
    if code == LOST:
        print(
            f"hvdlite-run: the launcher of node 0 at {where} has ended, or never started [HVD110]",
            file=sys.stderr,
            flush=True,
        )
    return code


def _end_by_signals() -> None:
    """While node 0 is waited for, signals end this process; an agent that was here before has caught them."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
