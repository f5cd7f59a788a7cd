"""Placement of `hvdlite-run --mpi`: one mpirun starts an agent for each rank.

The command line for each MPI is in starters/mpirun.py, purely. Here is what touches the machine: the programs on PATH,
their version, the interfaces of this host, and the agents (starters/mpi_agent.py) as they report. From then on it is a
job as any other, with the same output, signals and exit code, but that the rendezvous of ranks is over MPI: their
environment has no rank assignment (HVDLITE_RANK) and no store. An mpirun that ends the ranks (MPI_Abort) is noticed,
too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdlite import config
from hvdlite.errors import HvdInitError
from hvdlite.errors.codes import coded
from hvdlite.system import open_files

from ..agent import rank_environment, torch_environment
from ..agent.process import NOT_FOUND, exit_text
from ..control.plan import Plan, RemoteHosts
from ..control.registration import Registration
from ..control.signals import Signals
from ..hosts import address, hosts, scheduler
from ..starters import agent_startup, mpi_agent, mpirun, starter
from ..store.epochs import ranks_named
from .host_flags import JOB_RANKS_MAX, OWN_AGGREGATOR, PlaceError, RankPlacement, assign, number, per_node_of

VERSION_S = 20.0
PATIENCE_S = 6.0  # for an mpirun to clean up on its hosts
_ANYWHERE = "192.0.2.1"  # an address that no host has: the route to it is the way out
_ELSEWHERE = {"-H", "-host", "--host", "-hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f"}
_BRIDGE = re.compile(r"docker|br-|virbr|cni|podman|lxcbr|lxdbr")  # the same address on every host


class UnderMpiError(Exception):
    """There will be no mpirun; the text says why, `code` is the launcher's exit code."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


class Carrier:
    """A Starter: one mpirun, which starts an agent for each rank, on its host."""

    def __init__(self, title: str, words: list[str]) -> None:
        self._title, self._words = title, words

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[starter.Session]:
        """One, for all of them."""
        return [starter.Session(self._words, [number for number, _ in hosts], self._title, PATIENCE_S)]

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host. Raises address.AddressError."""
        return address.resolve(name)

    def again(self, code: int, text: str) -> bool:
        """An mpirun that does not get to its hosts will not the next time."""
        return False

    def remedy(self, host: str, code: int, text: str) -> str:
        """What it printed itself: that is many lines with most MPIs, and the first are not always those that matter."""
        return f"{self._title} {exit_text(code)} before all ranks were there" + (f"; it said:\n{text}" if text else "")


def placement(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, str],
    forward: Mapping[str, str],
    timeout: float,
) -> RankPlacement:
    """Ranks that an mpirun starts. forward: variables that all ranks get, whatever they are. Raises UnderMpiError."""
    rows = {"--nnodes": args.nodes, "--node-rank": args.node, "--rdzv-endpoint": args.endpoint}
    for flag in (flag for flag, value in rows.items() if value is not None):
        raise UnderMpiError(
            f"{flag} does not work with --mpi, where mpirun starts the ranks: name the hosts with -H [HVD703]"
        )
    if config.read({**environ, **options}).values["aggregators"]:
        raise UnderMpiError(f"not yet: --mpi with {OWN_AGGREGATOR} [HVD246]")
    try:
        listed, size, names = _hosts_and_size(args, environ)
        elsewhere = not _ELSEWHERE.isdisjoint((args.mpi_args or "").replace("=", " ").split())
        _check_size(size, listed[0].name if len(listed) == 1 and not elsewhere else None)
        ssh = _ssh(args)
        program, kind = _found(environ)
        mpirun_options = mpirun.MpirunOptions(
            size,
            listed,
            [],
            args=args.mpi_args or "",
            binding=args.binding,
            tcp=args.tcp,
            interfaces=[name for each in args.interfaces or [] for name in each.split(",") if name],
            ssh=ssh,
            per_node=per_node_of(args),
            oversubscribe=args.oversubscribe,
            bridges=[name for _, name in socket.if_nameindex() if _BRIDGE.match(name)],
            route=_route(names),
            root=os.geteuid() == 0,
            parameters=[name.partition("_MCA_")[2] for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))],
        )
        job_environ = _environment(
            environ, {**options, **forward, **mpirun.variables(kind, mpirun_options)}, listed, size
        )
        passed = sorted([mpi_agent.ORDER, *rank_environment.forwarded(job_environ, list(forward))])
        words = mpirun.line(kind, program, mpirun_options, passed)
    except (mpirun.MpiError, hosts.HostError, PlaceError) as error:
        raise UnderMpiError(coded("HVD708", str(error))) from None
    others = [name for name in names if not hosts.is_this_host(name, os.uname().nodename)]
    alone = not others and bool(listed) and not elsewhere
    title = os.path.basename(program)
    where = _Where(mpirun_options.interfaces, others, alone)

    def gather(job: Plan, signals: Signals) -> RemoteHosts:
        return _gather(
            job, signals, Carrier(title, [*words, sys.executable, "-c", mpi_agent.BOOT]), job_environ, where, timeout
        )

    return RankPlacement(hosts.assign([hosts.Host("localhost", size)], size), None, gather, way=shlex.join(words))


def _check_size(size: int, host: str | None) -> None:
    """Does this version have so many? host: the only one, if it is. Raises PlaceError."""
    if size > JOB_RANKS_MAX:
        raise PlaceError(f"a job of {size} ranks: this version of hvdlite supports at most {JOB_RANKS_MAX} [HVD710]")
    if host is not None:
        assign([hosts.Host(host, size)], size)


class _Where(NamedTuple):
    """What decides at which address of this host agents find the launcher."""

    interfaces: Sequence[str]
    others: Sequence[str]  # hosts, as far as they are known
    alone: bool  # no other host has ranks


def _address(where: _Where) -> str:
    """Raises address.AddressError."""
    if where.interfaces:
        return address.of_interfaces(where.interfaces)
    if where.others:
        return address.towards(where.others)
    if where.alone:
        return "127.0.0.1"
    known = [ip for ip in address.resolve(os.uname().nodename) if not ip.startswith("127.") and ip != "::1"]
    mine = known[0] if known else address.source_towards(_ANYWHERE)
    if mine is None:
        raise address.AddressError(
            "the address at which other hosts reach this one is unknown: give --network-interface NAME [HVD712]"
        )
    return mine


def _gather(
    job: Plan,
    signals: Signals,
    carrier: Carrier,
    job_environ: Mapping[str, str],
    where: _Where,
    timeout: float,
) -> RemoteHosts:
    """What the Plan calls. Raises starter.StartError."""
    secret, size = os.urandom(32), len(job.slots)
    try:
        open_files.allow(2 * size, "the launcher", f"for the agents of {size} ranks")
        registration = Registration(secret, _address(where))
    except (address.AddressError, HvdInitError, OSError) as error:
        raise starter.StartError(coded("HVD715", str(error)), 2) from None
    order = {
        **agent_startup.order(registration, secret, timeout, job.silence, job_environ),
        "environ": {},
        "command": list(job.command),
    }
    environ = {**job_environ, mpi_agent.ORDER: json.dumps({**order, "fronts": list(job.fronts)})}
    session = carrier.sessions([(rank, "") for rank in range(size)])[0]
    if job.verbose:
        print(f"hvdlite-run: {shlex.join(session.words)}", file=sys.stderr, flush=True)
    start = starter.Start(
        carrier, [(rank, f"rank {rank}") for rank in range(size)], registration, {}, environ, signals, timeout
    )
    try:
        links, trouble = start.visit()
    finally:
        registration.close()
    if trouble:
        start.abandon()
        raise starter.StartError(coded("HVD715", _reasons(size, trouble)), trouble[min(trouble)][1])
    names = {}
    for each in links:
        names[each.number] = str(each.hello["name"])
        each.name, each.stays, each.ranks = names[each.number], True, {each.number}
    return RemoteHosts(links, _slots(names), order["address"][0], secret, start.running)


def _reasons(size: int, trouble: Mapping[int, tuple[str, int]]) -> str:
    """What is wrong with ranks, once where it is the same with several."""
    alike: dict[str, list[int]] = {}
    for rank, (text, _) in sorted(trouble.items()):
        alike.setdefault(text, []).append(rank)
    return "\n".join(text if len(ranks) == size else f"{ranks_named(ranks)}: {text}" for text, ranks in alike.items())


def _slots(names: Mapping[int, str]) -> list[hosts.Slot]:
    """The slots of ranks, wherever the MPI has put them, by the names of their hosts."""
    order = list(dict.fromkeys(names[rank] for rank in sorted(names)))
    by_host = [[rank for rank in sorted(names) if names[rank] == host] for host in order]
    slots = []
    for index, ranks in enumerate(by_host):
        for local, rank in enumerate(ranks):
            same = [other for other, each in enumerate(by_host) if len(each) > local]
            cross = same.index(index), len(same)
            slots.append(hosts.Slot(rank, order[index], local, len(ranks), *cross, index, len(order)))
    return sorted(slots)


def _ssh(args: argparse.Namespace) -> list[str]:
    """Words for the ssh of an MPI. Raises PlaceError."""
    words = [] if args.ssh_port is None else ["-p", str(number("--ssh-port", args.ssh_port, 1, "port"))]
    words += [] if args.ssh_identity is None else ["-i", args.ssh_identity]
    return words + [word for option in args.ssh_options or [] for word in shlex.split(option)]


def _hosts_and_size(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[hosts.Host], int, list[str]]:
    """The hosts to name (none: mpirun knows them), the number of ranks, and the names of hosts where they are known.

    Raises HostError, ValueError."""
    size = None if args.np is None else number("-np", args.np, 1, "rank")
    per_node = per_node_of(args)
    if args.hostfile is not None:
        listed = hosts.parse_hostfile(_read(args.hostfile), args.hostfile)
    elif args.hosts is not None:
        listed = hosts.parse_hosts(args.hosts)
    else:
        found = scheduler.allocation(environ, _read)
        if found is None and size is None and per_node is None:
            raise UnderMpiError(
                "the number of ranks is missing: give -np N, for example: hvdlite-run --mpi -np 2 python train.py "
                "[HVD702]"
            )
        if found is not None and found.title in ("Slurm", "the MPI operator"):
            slots = found.slots if per_node is None else per_node * len(found.hosts)
            return [], size or slots, [host.name for host in found.hosts]
        listed = found.hosts if found is not None else [hosts.Host("localhost", per_node or size or 1)]
    listed = listed if per_node is None else [hosts.Host(host.name, per_node) for host in listed]
    size = size or sum(host.slots for host in listed)
    if not args.oversubscribe:
        hosts.assign(listed, size)  # do they fit?
    return listed, size, [host.name for host in listed]


def _read(path: str) -> str:
    try:
        return hosts.read(path)
    except OSError as error:
        raise hosts.HostError(f"{path}: {error.strerror} [HVD708]") from None


def _found(environ: Mapping[str, str]) -> tuple[str, mpirun.Kind]:
    """The program, and what it is."""
    for name in mpirun.PROGRAMS:
        program = shutil.which(name, path=environ.get("PATH", os.defpath))
        if program is None:
            continue
        try:
            done = subprocess.run(
                [program, "--version"], capture_output=True, text=True, errors="replace", timeout=VERSION_S
            )
            output = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnderMpiError(f"{program} --version: {error} [HVD716]", 1) from None
        kind = mpirun.kind_of(output)
        if kind is not None:
            return program, kind
        first = next(iter(output.strip().splitlines()), "nothing")
        raise UnderMpiError(
            f"{program} belongs to an MPI that hvdlite-run does not support (--version prints {first!r}): start the "
            "ranks with it yourself [HVD716]"
        )
    srun = "; Slurm starts MPI programs itself: srun --mpi=pmix python ..." if "SLURM_JOB_ID" in environ else ""
    raise UnderMpiError(
        f"--mpi: neither {', '.join(mpirun.PROGRAMS[:-1])} nor {mpirun.PROGRAMS[-1]} is on PATH: install an MPI (pip "
        f"install mpich, apt-get install openmpi-bin), or leave out --mpi: hvdlite-run works without MPI{srun} "
        "[HVD716]",
        NOT_FOUND,
    )


def _route(names: Sequence[str]) -> str | None:
    """The interface of this host that leads to the others, if there is one."""
    others = [name for name in names if not hosts.is_this_host(name, os.uname().nodename)]
    try:
        mine = address.towards(others) if others else None
    except (address.AddressError, OSError):
        return None
    for _, name in socket.if_nameindex():
        try:
            if address.of_interfaces([name]) == mine:
                return name
        except address.AddressError:
            continue  # one without an address
    return None


def _environment(
    environ: Mapping[str, str],
    options: Mapping[str, str],
    listed: Sequence[hosts.Host],
    size: int,
) -> dict[str, str]:
    """What the ranks start with."""
    job_environ = {**environ, **options, "PYTHONUNBUFFERED": "1"}
    for name in torch_environment.RANK_VARIABLES:
        job_environ.pop(name, None)  # the assignment in another launcher's job; that MPI sets its own
    for option in config.OPTIONS:
        if option.scope == "rank":
            job_environ.pop(option.variable, None)
        if option.alias_variable is not None and (option.scope == "rank" or option.variable in options):
            job_environ.pop(option.alias_variable, None)
    if size > max(1, len(listed)):
        job_environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks of a host do not fight for its CPUs
    return job_environ
