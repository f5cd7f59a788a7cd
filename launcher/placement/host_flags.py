"""Flags that name hosts, and the starter that gets agents there: the host part of a Plan.

Three ways: ranks on this host only (names and addresses of it included), hosts that are reached over ssh (-H,
--hostfile), and hosts on which the same command is given (--nnodes, with torchrun's spellings; starters/rendezvous.py).
Names of this host are one host, whatever they are; what the resolver does not know, ssh may.

What cannot be is refused here, before anything is started or any host is asked.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdlite import config
from hvdlite.errors import HvdOptionError
from hvdlite.errors.codes import coded
from hvdlite.security import job_secret as _secret_files

from ..control.plan import Plan, RemoteHosts
from ..control.signals import Signals
from ..hosts import address, hosts

RANKS_MAX = 64  # on one host, as the core has it (HVD_LOCAL_MAX)
JOB_RANKS_MAX = 1024  # of a job (HVD_RANKS_MAX)
RENDEZVOUS_S = 600.0  # for hosts on which people or a scheduler start the command
RENDEZVOUS_PORT = 29400  # torchrun's, as the next one
MASTER_PORT = 29500
PORT_MAX = 65535
_BACKENDS = ("static", "tcp", "c10d")


class PlaceError(ValueError):
    """Hosts or numbers that cannot be; the text says why."""


ELASTIC = ("min_np", "max_np", "host_discovery_script")
OWN_AGGREGATOR = (  # what does not go together with the role, and the remedy
    "--aggregators (HVDLITE_AGGREGATORS): start one by itself with hvdlite-aggregator, and give --aggregator HOST:PORT"
)


class RankPlacement(NamedTuple):
    """See Plan. join: what this host does instead of being the launcher."""

    slots: Sequence[hosts.Slot]
    here: str | None = "localhost"
    gather: Callable[[Plan, Signals], RemoteHosts] | None = None
    join: Callable[[Sequence[str]], int] | None = None
    way: str = ""  # to other hosts, in words
    listed: Sequence[hosts.Host] = ()  # with all their slots


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those of several hosts."""
    add("-p", "--ssh-port", dest="ssh_port", metavar="PORT", help="port of the hosts' sshd")
    add("-i", "--ssh-identity-file", dest="ssh_identity", metavar="FILE", help="private key for ssh")
    add("--ssh-opt", dest="ssh_options", action="append", metavar="WORDS", help="ssh arguments, as -o Name=value")
    add(
        "--network-interface",
        "--network-interfaces",
        dest="interfaces",
        action="append",
        metavar="NAME,...",
        help="interface or network (10.0.0.0/8) on which this host listens; default: the route to the others",
    )
    add("-x", dest="forward", action="append", metavar="NAME[=VALUE]", help="set or forward a variable for all ranks")
    add("--nnodes", dest="nodes", metavar="N", help="number of hosts; run this same command on each, without ssh")
    add("--node-rank", dest="node", metavar="K", help="number of this host, from 0; node 0 has the rendezvous endpoint")
    add("--nproc-per-node", dest="per_node", metavar="N", help="number of ranks of this host: N, gpu, cpu or auto")
    add("--rdzv-endpoint", dest="endpoint", metavar="HOST[:PORT]", help="address of node 0; needs HVDLITE_SECRET_KEY")
    add("--rdzv-id", dest="rendezvous_id", metavar="ID", help="name of the job, unique at its address")
    add("--rdzv-backend", dest="backend", metavar="NAME", help="static, tcp or c10d: all mean the same")
    add("--master-addr", dest="master", metavar="HOST", help="like --rdzv-endpoint, without the port")
    add("--master-port", dest="master_port", metavar="PORT", help="port of --master-addr")
    add("--standalone", action="store_true", help="use this host only")


def of(
    args: argparse.Namespace, environ: Mapping[str, str], options: Mapping[str, str], timeout: float
) -> RankPlacement:
    """Where the job runs. Raises PlaceError."""
    rows = (args.hosts is not None, args.hostfile is not None, args.nodes is not None or args.endpoint is not None)
    if sum(rows) > 1:
        raise PlaceError("-H, --hostfile and --nnodes exclude each other [HVD703]")
    try:
        if args.interfaces:
            address.of_interfaces(interfaces_of(args))  # one that is not there is a mistake, also where none is needed
        if _nodes(args) > 1:
            return _rendezvous(args, environ, options, timeout)
        if sum(rows) == 0 and not args.standalone:
            from . import allocation

            found = allocation.placement(args, environ, timeout)
            if found is not None:
                return found
        return _listed(args, environ, timeout)
    except (hosts.HostError, address.AddressError) as error:
        raise PlaceError(coded("HVD708", str(error))) from None
    except OSError as error:
        raise PlaceError(f"--hostfile {args.hostfile}: {error.strerror} [HVD708]") from None


def number(flag: str, text: str, least: int, what: str) -> int:
    """A whole number of a flag, of `what` (in the plural). Raises PlaceError."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise PlaceError(f"{flag} {text[:40]}: must be a whole number of {what} [HVD704]")
    value = int(text, 10)
    if value < least:
        raise PlaceError(f"{flag} {text}: there must be at least {least} {what[:-1] if least == 1 else what} [HVD704]")
    return value


def come_and_go(args: argparse.Namespace) -> bool:
    """Whether ranks may come and go: any of the flags that make a job elastic is there."""
    return any(getattr(args, name) is not None for name in ELASTIC)


def port_of(flag: str, text: str | None) -> int | None:
    """A port, if one is given. Raises PlaceError."""
    if text is not None and not (re.fullmatch(r"[0-9]{1,5}", text) and 1 <= int(text) <= PORT_MAX):
        raise PlaceError(f"{flag} {text[:40]}: must be a port, 1 to {PORT_MAX} [HVD704]")
    return None if text is None else int(text)


def forwarded(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of -x. Raises PlaceError for one that is not set."""
    found = {}
    for word in args.forward or []:
        name, equals, value = word.partition("=")
        if not name:
            raise PlaceError(f"-x {word}: needs the name of a variable before its value [HVD719]")
        if not equals and name not in environ:
            raise PlaceError(f"-x {name}: there is no such variable here: give -x {name}=value [HVD719]")
        found[name] = value if equals else environ[name]
    return found


def per_node_of(args: argparse.Namespace) -> int | None:
    """Ranks of one host by torchrun's flag."""
    if args.per_node is None:
        return None
    if args.per_node in ("gpu", "auto"):
        devices = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
        if devices or args.per_node == "gpu":
            return number("--nproc-per-node gpu:", str(len(devices)), 1, "GPUs")
    if args.per_node in ("cpu", "auto"):
        return os.cpu_count() or 1
    return number("--nproc-per-node", args.per_node, 1, "ranks")


def _listed(args: argparse.Namespace, environ: Mapping[str, str], timeout: float) -> RankPlacement:
    """Ranks on this host, or on hosts of a list."""
    per_node = per_node_of(args)
    size = per_node if args.np is None else number("-np", args.np, 1, "ranks")
    if args.hostfile is not None:
        listed = hosts.parse_hostfile(hosts.read(args.hostfile), args.hostfile)
    elif args.hosts is not None:
        listed = hosts.parse_hosts(args.hosts)
    elif size is None:
        raise PlaceError(
            "the number of ranks is missing: give -np N, for example: hvdlite-run -np 2 python train.py [HVD702]"
        )
    else:
        listed = [hosts.Host("localhost", size)]
    if per_node is not None and args.np is None and (args.hosts or args.hostfile):
        listed, size = [hosts.Host(host.name, per_node) for host in listed], None
    own = [host for host in listed if is_here(host.name)]
    if len(own) == len(listed) and len(own) > 1:  # several names of this host
        listed = [hosts.Host("localhost", sum(host.slots for host in own))]
        own = listed
    elif len(own) > 1:
        listed = hosts.merged(listed, [host.name for host in own])
        own = [host for host in listed if host.name == own[0].name]
    total = sum(host.slots for host in listed)
    if size is not None and size > total and args.oversubscribe:
        listed = [hosts.Host(host.name, host.slots * -(-size // total)) for host in listed]
        own = [host for host in listed if own and host.name == own[0].name]
    slots = assign(listed, total if size is None else size)
    used = {slot.host for slot in slots}
    here = own[0].name if own and own[0].name in used else None
    if used == {here}:
        if args.interfaces:
            address.of_interfaces(interfaces_of(args))  # is there such a one? The job needs none
        return RankPlacement(slots, here, listed=listed)
    from ..starters import agent_startup, rsh, ssh
    from . import dry_run

    also = forwarded(args, environ)
    port = port_of("--ssh-port", args.ssh_port)
    starter = rsh.agent_of(environ) or ssh.Ssh(port, args.ssh_identity, args.ssh_options or [])
    gather = agent_startup.Gather(starter, interfaces_of(args), timeout, also)
    return RankPlacement(slots, here, gather, way=dry_run.way(starter, sorted(used - {here or ""})), listed=listed)


def assign(listed: Sequence[hosts.Host], size: int) -> list[hosts.Slot]:
    """A slot for each rank, after a look whether so many may be. Raises PlaceError, HostError."""
    left = size if size <= sum(host.slots for host in listed) else 0  # it is for hosts.assign to refuse them
    for host in listed:
        if min(host.slots, left) > RANKS_MAX:
            raise PlaceError(
                f"more than {RANKS_MAX} ranks on one host ({host.name}): this version of hvdlite supports {RANKS_MAX} "
                f"there and {JOB_RANKS_MAX} in all; spread them over more hosts [HVD710]"
            )
        left -= min(host.slots, left)
    if JOB_RANKS_MAX < size <= sum(host.slots for host in listed):
        raise PlaceError(f"a job of {size} ranks: this version of hvdlite supports at most {JOB_RANKS_MAX} [HVD710]")
    return hosts.assign(listed, size)


def go_to(args: argparse.Namespace, *variables: dict[str, str]) -> None:
    """The ranks start in this folder, or that of --wdir: is it there? Paths among variables mean this one.

    Raises PlaceError."""
    try:
        os.getcwd()
        for each in variables:
            each.update(config.absolute(each))
        args.script_folder = None
        if args.wdir is not None:
            args.script_folder = os.getcwd()  # of --host-discovery-script
            for name in ("hostfile", "folder", "ssh_identity"):  # as this folder has them
                if getattr(args, name) is not None:
                    setattr(args, name, os.path.abspath(getattr(args, name)))
            os.chdir(args.wdir)
    except OSError as error:
        folder = "the current folder" if args.wdir is None else f"--wdir {args.wdir}"
        raise PlaceError(f"{folder} cannot be used: {error.strerror} [HVD707]") from None


def interfaces_of(args: argparse.Namespace) -> list[str]:
    return [name for each in args.interfaces or [] for name in each.split(",") if name]


def is_here(name: str) -> bool:
    if hosts.is_this_host(name, os.uname().nodename):
        return True
    try:
        return any(map(address.is_own, address.resolve(name)))
    except address.AddressError:
        return False  # ssh may know it by this name


def _nodes(args: argparse.Namespace) -> int:
    if args.standalone or args.nodes is None:
        return 1
    low, colon, high = args.nodes.partition(":")
    if colon and low != high:
        raise PlaceError(
            f"not yet: --nnodes {args.nodes}: this version cannot train on a changing number of hosts [HVD246]"
        )
    nodes = number("--nnodes", low, 1, "hosts")
    if nodes > JOB_RANKS_MAX:
        raise PlaceError(f"--nnodes {nodes}: this version of hvdlite supports at most {JOB_RANKS_MAX} ranks [HVD710]")
    return nodes


def _rendezvous(
    args: argparse.Namespace, environ: Mapping[str, str], options: Mapping[str, str], timeout: float
) -> RankPlacement:
    """One of several hosts on which the same command is given."""
    from ..starters import rendezvous

    nodes = _nodes(args)
    if args.endpoint is None and args.master is None:
        raise PlaceError("--nnodes needs the address of node 0: --rdzv-endpoint HOST:PORT [HVD713]")
    if args.backend not in (None, *_BACKENDS):
        raise PlaceError(f"--rdzv-backend {args.backend}: not supported: remove the flag [HVD713]")
    host, port = _endpoint(args)
    slots = per_node_of(args) or 1
    if args.np is not None:
        size = number("-np", args.np, nodes, "ranks, one for each host")
        if args.per_node is not None and size != nodes * slots or size % nodes:
            raise PlaceError(
                f"-np {size} does not match --nnodes {nodes}: remove it and give --nproc-per-node [HVD713]"
            )
        slots = size // nodes
    node = None if args.node is None else number("--node-rank", args.node, 0, "nodes before it")
    if node is not None and node >= nodes:
        raise PlaceError(
            f"--node-rank {node}: the {nodes} hosts of --nnodes have the numbers 0 to {nodes - 1} [HVD713]"
        )
    found = address.resolve(host)
    own = [ip for ip in found if address.is_own(ip)]
    if node == 0 and not own:
        raise PlaceError(f"{host} ({', '.join(found)}) is not an address of this host, which is node 0 [HVD713]")
    first = node == 0 or (node is None and bool(own))
    merged = {**environ, **options}
    rdzv = rendezvous.Rendezvous(
        own[0] if first else found[0],
        port,
        _secret(args, environ),
        nodes,
        node,
        slots,
        timeout if "HVDLITE_START_TIMEOUT" in merged else RENDEZVOUS_S,
        config.read({name: merged[name] for name in ("HVDLITE_AGENT_TIMEOUT",) if name in merged}).values[
            "agent_timeout"
        ],
    )
    assign([hosts.Host("localhost", slots)], slots)
    also = {**options, **forwarded(args, environ)}
    if first:
        way = f"{nodes - 1} more join at {rdzv.ip}:{port} and get their ranks there; {slots} here"
        return RankPlacement((), os.uname().nodename, rendezvous.gather(rdzv), way=way)
    way = f"the launcher at {rdzv.ip}:{port} assigns the ranks of this host: {slots}"

    def join(command: Sequence[str]) -> int:
        return rendezvous.join(rdzv, command, environ, also, args.fronts)

    return RankPlacement((), None, None, join, way)


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    text = args.endpoint if args.endpoint is not None else args.master
    default = RENDEZVOUS_PORT if args.endpoint is not None else MASTER_PORT
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.lstrip(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    port = port or args.master_port
    return host, port_of("the port of --rdzv-endpoint", port or None) or default


def _secret(args: argparse.Namespace, environ: Mapping[str, str]) -> bytes:
    """The key that all hosts were given, for this rendezvous."""
    import hmac

    text, file = environ.get("HVDLITE_SECRET_KEY"), environ.get("HVDLITE_SECRET_FILE")
    if text is None and file is None:
        raise PlaceError(
            "--nnodes needs the same secret on all hosts: for example\n"
            "  export HVDLITE_SECRET_KEY=$(openssl rand -hex 32)   # once; then the same value on every host\n"
            "or set HVDLITE_SECRET_FILE to a file of mode 0600 with the secret"
            " [HVD713]"
        )
    try:
        if text is not None:
            key = config.parse(config.option_of("secret_key"), text, "HVDLITE_SECRET_KEY")
        else:
            key = _secret_files.of_file(file or "")
    except (HvdOptionError, _secret_files.SecretError) as error:
        raise PlaceError(coded("HVD713", str(error))) from None
    return hmac.digest(key, f"rendezvous {args.rendezvous_id or ''}".encode(), "sha256")
