"""Placement of ranks when the command line names no host: the allocation of a scheduler, if there is one.

One rank for each slot of the allocation, or as many as -np or --nproc-per-node says. On Slurm the agents come by srun
(starters/slurm.py), elsewhere by the scheduler's own agent (starters/rsh.py) or ssh. Where the allocation is this host
alone, no other agent is needed: the ranks start as on any host, and there -np may be more than the slots, which count
what the user has asked for and not what fits.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

from ..hosts import hosts, scheduler
from .host_flags import (
    PlaceError,
    RankPlacement,
    assign,
    come_and_go,
    forwarded,
    interfaces_of,
    is_here,
    number,
    per_node_of,
    port_of,
)


def placement(args: argparse.Namespace, environ: Mapping[str, str], timeout: float) -> RankPlacement | None:
    """The placement in this allocation; None outside of any. Raises PlaceError or HostError."""
    found = scheduler.allocation(environ, hosts.read)
    if found is None:
        return None
    if scheduler.crowd(environ) > 1:
        raise PlaceError(
            f"srun has started hvdlite-run {scheduler.crowd(environ)} times, and each would start all ranks: start it "
            "once, without srun, or start the script without hvdlite-run: srun python ... [HVD711]"
        )
    per_node = per_node_of(args)
    listed = found.hosts if per_node is None else [hosts.Host(host.name, per_node) for host in found.hosts]
    slots = sum(host.slots for host in listed)
    size = slots if args.np is None else number("-np", args.np, 1, "ranks")
    if len(listed) == 1 and is_here(listed[0].name):
        listed = [hosts.Host(listed[0].name, max(size, slots))]
    if size > sum(host.slots for host in listed):
        raise PlaceError(
            f"-np {size}: {found.title} has given this job {slots} slots on {len(listed)} "
            f"host{'s' if len(listed) > 1 else ''}: ask it for more tasks, or give --nproc-per-node [HVD709]"
        )
    assigned = assign(listed, size)
    used = {slot.host for slot in assigned}
    if len(used) == 1 and is_here(assigned[0].host) and not (come_and_go(args) and len(listed) > 1):
        return RankPlacement(assigned, assigned[0].host, listed=listed)
    return _elsewhere(args, environ, timeout, found, assigned)._replace(listed=listed)


def _elsewhere(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    timeout: float,
    found: scheduler.Allocation,
    assigned: list[hosts.Slot],
) -> RankPlacement:
    """Agents on other hosts, by what the scheduler offers."""
    from ..starters import agent_startup, rsh, slurm, ssh
    from ..starters.starter import Starter
    from . import dry_run

    here = None
    if found.title == "Slurm":  # srun starts them everywhere, also here
        starter: Starter = slurm.Srun([host.name for host in found.hosts], apart=come_and_go(args))
    else:
        here = next((slot.host for slot in assigned if is_here(slot.host)), None)
        port = port_of("--ssh-port", args.ssh_port)
        more = [*shlex.split(environ.get("OMPI_MCA_plm_rsh_args", "")), *(args.ssh_options or [])]
        starter = rsh.agent_of(environ, found.title) or ssh.Ssh(port, args.ssh_identity, more)
    gather = agent_startup.Gather(starter, interfaces_of(args), timeout, forwarded(args, environ))
    way = dry_run.way(starter, [host.name for host in found.hosts if host.name != here])
    return RankPlacement(assigned, here, gather, way=way)
