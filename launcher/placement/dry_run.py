"""Text of `--dry-run`: what would run where, with which environment. Pure.

What follows from the command line is shown as it will be; what only the start decides (ports, the secret) is named
without a value. Of the launcher's own environment, which ranks get as well, only what they get differently is shown.
No host is asked and nothing is opened, so hosts may be named that are not there. A host discovery script is asked once.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ..agent import rank_environment, torch_environment
from ..control.plan import Plan
from ..hosts import hosts
from ..starters.starter import Starter

AT_START = ("HVDLITE_STORE_ADDR", "HVDLITE_STORE_PORT", "HVDLITE_JOB_ID", "HVDLITE_SECRET_KEY")


def way(starter: Starter, names: Sequence[str]) -> str:
    """How a starter reaches these hosts, for people."""
    program = starter.sessions(list(enumerate(names)))[0].words[0]
    return f"{', '.join(names)} by {program}"


def text(plan: Plan, way: str, also: Mapping[str, str]) -> str:
    """way: how other hosts are reached, in words. also: variables that all ranks get, whatever they are."""
    inherited_environ = rank_environment.inherited(plan.environ, plan.options, plan.slots, plan.fronts)
    changed = {name: value for name, value in inherited_environ.items() if plan.environ.get(name) != value}
    changed.update(also)
    changed.update(rank_environment.of_attempt(0, plan.max_restarts))
    if plan.over_mpi:
        lines = [f"command: {way} {shlex.join(plan.command)}", f"ranks: {len(plan.slots)}, placed by that MPI"]
        return "\n".join([*lines, f"all ranks: {_pairs(changed)}"])
    changed["WORLD_SIZE"] = str(len(plan.slots))
    later = [*AT_START, *(() if torch_environment.from_user(plan.environ) else torch_environment.MASTER)]
    lines = [f"command: {shlex.join(plan.command)}"]
    if way:
        lines.append(f"other hosts: {way}")
    if plan.bind != "none":
        lines.append(f"bound to: {plan.bind}")
    if plan.elastic is not None:
        lines.append(_elastic(plan))
    if plan.max_restarts:
        lines.append(f"restarts: {plan.max_restarts} at most")
    for slot in plan.slots:
        lines.append(f"rank {slot.rank} on {slot.host}: {_pairs(rank_environment.of_rank(slot, len(plan.slots)))}")
    for number, host in enumerate(hosts.of_servers(plan.slots, plan.servers + plan.aggregators)):
        environ = rank_environment.of_server(number, plan.servers, len(plan.slots), plan.aggregators)
        lines.append(f"{hosts.server_name(number, plan.servers)} on {host}: {_pairs(environ)}")
    lines.append(f"all ranks: {_pairs(changed)}")
    lines.append(f"all ranks, chosen at the start: {' '.join(later)}")
    return "\n".join(lines)


def _elastic(plan: Plan) -> str:
    """How many ranks there may be, and where."""
    assert plan.elastic is not None
    terms, script = plan.elastic.terms, plan.elastic.script
    most = "as many as the hosts have slots for" if terms.max_np is None else str(terms.max_np)
    source = "the command line" if script is None else "--host-discovery-script, for now"
    listed = ", ".join(f"{host.name}:{host.slots}" for host in plan.elastic.listed)
    short = f"; the job waits for {terms.min_np} slots" if len(plan.slots) < terms.min_np else ""
    return f"elastic job: at least {terms.min_np}, at most {most}; hosts of {source}: {listed}{short}"


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(values.items()))
