"""Flags of elastic jobs, with the names of horovodrun.

Any of --min-np, --max-np and --host-discovery-script makes a job elastic. As with Horovod, --min-np is -np where it is
not given, and without --max-np there are as many ranks as the hosts have slots for. Without -np a job begins with a
rank for each slot, and goes on as long as there is one.

The discovery script is asked once before anything is started, so that an error of it is reported at once; its hosts
become those of -H.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdlite import config
from hvdlite.errors.codes import coded, uncoded

from ..control.plan import Elastic, Plan
from ..hosts import hosts
from ..placement import host_flags
from ..starters import agent_startup, rsh, ssh
from ..store.elastic_members import Terms
from ..store.elastic_process_end import EXCEPTION
from .discovery import DiscoveryError, DiscoveryScript

Pause = Callable[[float], object]
COOLDOWN_S = ("5", "300")
STEP_S = 0.05
_MORE = (
    "slots_per_host",
    "elastic_timeout",
    "reset_limit",
    "blacklist_cooldown_range",
    "rendezvous_timeout",
    "tolerate",
)


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those of elastic jobs, except those in the table of options."""
    add("--min-np", "--min-num-proc", dest="min_np", metavar="N", help="continue with N or more ranks if some are lost")
    add(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        metavar="N",
        help="run at most N ranks, also with more slots",
    )
    add(
        "--host-discovery-script",
        dest="host_discovery_script",
        metavar="SCRIPT",
        help="command that runs every second and prints the hosts, one line `host:slots` each",
    )
    add("--slots-per-host", "--slots", metavar="N", help="slots of hosts for which the script prints none (default 1)")
    add(
        "--tolerate",
        metavar="WHAT",
        help="ends of a rank after which the others go on: exit codes, and `exception` for one of Python; for example "
        "exception,3. A signal and a lost host always are",
    )
    add("--reset-limit", metavar="N", help="end the job if the ranks change more than N times")
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds without a new rank on a host after a failure; LOW at first, then doubled up to HIGH (default "
        f"{' '.join(COOLDOWN_S)})",
    )


def of(
    args: argparse.Namespace, environ: Mapping[str, str], values: Mapping[str, Any], pause: Pause = time.sleep
) -> Elastic | None:
    """None: the ranks stay. values: of options. pause: between answers of the script; it may raise. May set args.hosts
    and args.np. Raises PlaceError."""
    if not host_flags.come_and_go(args):
        for name in _MORE:
            if getattr(args, name) is not None:
                raise host_flags.PlaceError(
                    f"{_flag(name)} is for jobs whose ranks come and go: it needs --min-np, --max-np or "
                    "--host-discovery-script [HVD703]"
                )
        return None
    _refuse(args, values["servers"], values["aggregators"])
    terms = _terms(args, environ, values)
    low, high = (
        host_flags.number("--blacklist-cooldown-range", each, 0, "seconds")
        for each in args.blacklist_cooldown_range or COOLDOWN_S
    )
    if low > high:
        raise host_flags.PlaceError(f"--blacklist-cooldown-range {low} {high}: LOW is more than HIGH [HVD704]")
    slots = _number(args, "slots_per_host", 1, "slots", 1)
    starter = rsh.agent_of(environ) or ssh.Ssh(
        host_flags.port_of("--ssh-port", args.ssh_port), args.ssh_identity, args.ssh_options or []
    )
    also = host_flags.forwarded(args, environ)
    later = agent_startup.Gather(starter, host_flags.interfaces_of(args), values["start_timeout"], also)
    script = None
    if args.host_discovery_script is not None:
        script = DiscoveryScript(args.host_discovery_script, slots or 1, args.script_folder)
        listed = _first_offer(script, terms, not args.dry, pause)
        args.hosts = ",".join(
            f"[{host.name}]:{host.slots}" if ":" in host.name else f"{host.name}:{host.slots}" for host in listed
        )
        room = sum(host.slots for host in listed)
        terms = terms._replace(np=terms.np or min(room, terms.max_np or room))
        args.np = str(min(terms.np, room))
    return Elastic(terms, script, (), (float(low), float(high)), gather=later, tolerated=_tolerated(args.tolerate))


def placed(elastic: Elastic | None, where: host_flags.RankPlacement) -> Elastic | None:
    """With the hosts that the command line has led to. Raises PlaceError."""
    if elastic is None:
        return None
    terms, size = elastic.terms, len(where.slots)
    if elastic.script is not None:
        return elastic._replace(listed=elastic.script.latest)
    if terms.np == 0:
        _in_order(terms.min_np, size, terms.max_np, f"the {size} slots of all hosts", ": write host:slots")
    if isinstance(where.gather, agent_startup.Gather):  # by the scheduler's way
        elastic = elastic._replace(gather=where.gather)
    return elastic._replace(listed=where.listed, terms=terms._replace(np=size))


def with_again(
    plan: Plan,
    args: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, str],
    values: Mapping[str, Any],
) -> Plan:
    """The plan, with what makes that of another attempt. args: as on the command line."""
    if plan.elastic is None or plan.elastic.script is None:
        return plan
    return plan._replace(again=partial(_again, plan, args, environ, options, values))


def _again(
    first: Plan,
    args: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, str],
    values: Mapping[str, Any],
    pause: Pause,
) -> Plan:
    """Of another attempt: the script is asked for the hosts of now. Raises PlaceError, and what pause raises."""
    args = argparse.Namespace(**vars(args))
    elastic = of(args, environ, values, pause)
    now = host_flags.of(args, environ, options, values["start_timeout"])
    return first._replace(
        slots=now.slots, here=now.here or "localhost", gather=now.gather, elastic=placed(elastic, now)
    )


def _refuse(args: argparse.Namespace, servers: int, aggregators: int) -> None:
    """What does not go with ranks that come and go."""
    named = next(_flag(name) for name in host_flags.ELASTIC if getattr(args, name) is not None)
    for flag, there in (("--nnodes", args.nodes), ("--rdzv-endpoint", args.endpoint), ("--mpi", args.mpi)):
        if there:
            raise host_flags.PlaceError(
                f"not yet: {named} with {flag}: name hosts by -H or a discovery script [HVD246]"
            )
    if servers:
        raise host_flags.PlaceError(
            f"not yet: {named} with --servers (HVDLITE_SERVERS): tables do not survive a change of ranks. Save them, "
            "and restart from the save (--max-restarts) [HVD246]"
        )
    if aggregators:
        raise host_flags.PlaceError(f"not yet: {named} with {host_flags.OWN_AGGREGATOR} [HVD246]")
    if args.host_discovery_script is None:
        if args.slots_per_host is not None:
            raise host_flags.PlaceError(
                "--slots-per-host needs --host-discovery-script, which names the hosts [HVD703]"
            )
        return
    for flag, there in (("-H", args.hosts), ("--hostfile", args.hostfile), ("--nproc-per-node", args.per_node)):
        if there is not None:
            more = ": give --slots-per-host" if flag == "--nproc-per-node" else ": hosts come from one of them"
            raise host_flags.PlaceError(f"--host-discovery-script and {flag} exclude each other{more} [HVD703]")


def _terms(args: argparse.Namespace, environ: Mapping[str, str], values: Mapping[str, Any]) -> Terms:
    """np is 0 where it is not known yet. Raises PlaceError."""
    np = 0 if args.np is None else host_flags.number("-np", args.np, 1, "ranks")
    least = _number(args, "min_np", 1, "ranks", np or 1)
    most = _number(args, "max_np", 1, "ranks", None)
    assert least is not None
    _in_order(least, np or least, most, f"-np {np}" if np else f"--min-np {least}")
    resets = _number(args, "reset_limit", 0, "changes", None)
    # A rank may be as busy as a collective may wait for it, unless the user has set a limit.
    by_user = args.rendezvous_timeout is not None or config.PREFIX + "RENDEZVOUS_TIMEOUT" in environ
    limit = values["rendezvous_timeout"] if by_user else max(values["rendezvous_timeout"], values["collective_timeout"])
    return Terms(least, most, np, values["elastic_timeout"], resets, limit)


def _tolerated(text: str | None) -> frozenset[str]:
    """Raises PlaceError."""
    found = frozenset(each.strip() for each in (text or "").split(",") if each.strip())
    for each in sorted(found - {EXCEPTION}):
        if not (each.isdecimal() and str(int(each)) == each and 1 <= int(each) <= 255):
            raise host_flags.PlaceError(
                f"--tolerate {each[:40]}: must be {EXCEPTION} or an exit code from 1 to 255 [HVD704]"
            )
    return found


def _in_order(least: int, np: int, most: int | None, named: str, remedy: str = "") -> None:
    if least > np:
        raise host_flags.PlaceError(f"--min-np {least} is more than {named}{remedy} [HVD703]")
    if most is not None and most < np:
        raise host_flags.PlaceError(f"--max-np {most} is less than {named} [HVD703]")


def _first_offer(script: DiscoveryScript, terms: Terms, wait: bool, pause: Pause) -> list[hosts.Host]:
    """The first offer that has room for --min-np ranks, or the first if there is no wait. Raises PlaceError."""
    end, listed, trouble, shown = time.monotonic() + terms.timeout, list[hosts.Host](), "", ""
    try:
        listed = [] if wait else script.first()
        while wait and sum(host.slots for host in listed) < terms.min_np:
            have = ", ".join(f"{host.name}:{host.slots}" for host in listed)
            now = time.monotonic()
            if now >= end:
                raise host_flags.PlaceError(
                    f"--host-discovery-script has offered fewer than {terms.min_np} slots (--min-np) for "
                    f"{terms.timeout:g} s (--elastic-timeout): {have or trouble or 'no answer'} [HVD421]"
                )
            if have != shown:
                _announce(f"--host-discovery-script offers {have}: waiting for {terms.min_np} slots (--min-np)")
                shown = have
            _, news = script.turn(now)
            if script.broken:
                raise DiscoveryError(coded("HVD708", news))
            if news:
                _announce(news)
                trouble = uncoded(news)
            pause(STEP_S)
            listed = script.latest
    except DiscoveryError as error:
        raise host_flags.PlaceError(coded("HVD708", str(error))) from None
    finally:
        script.close()
    return listed


def _announce(text: str) -> None:
    print(f"hvdlite-run: {text}", file=sys.stderr, flush=True)


def _number(args: argparse.Namespace, name: str, least: int, what: str, default: int | None) -> int | None:
    text = getattr(args, name)
    return default if text is None else host_flags.number(_flag(name), text, least, what)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
