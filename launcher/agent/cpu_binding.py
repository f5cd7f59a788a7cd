"""CPU binding (`--bind-to`): all CPUs, cores of its own, its socket's or its NUMA node's.

    core        the host's cores are shared out evenly among its ranks, neighbours together: no CPU has two ranks
    socket      each rank has a whole socket, ranks in order: the first half on the first of two
    numa        the same with NUMA nodes; memory comes from there too, since the kernel gives it where it is first used

Shared out is what this process may use (a container's or a scheduler's share), not what the machine has. `share` is
pure; `cpus_of` reads /sys. An even share of cores, and not one core as mpirun gives, because a rank that trains has
threads: workers of its DataLoader, OpenMP, the engine. Without it nothing is bound: the kernel's scheduler is good.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MODES = ("none", "core", "socket", "numa")
_SYS = "/sys/devices/system/cpu"


class BindError(Exception):
    """Ranks cannot be bound so; the text says why."""


class Cpu(NamedTuple):
    """A logical CPU and what it is part of."""

    number: int
    core: int
    socket: int
    node: int


def share(mode: str, cpus: Sequence[Cpu], local_rank: int, local_size: int) -> set[int]:
    """The CPUs of one of `local_size` ranks. Raises BindError."""
    ordered = sorted(cpus, key=lambda cpu: (cpu.node, cpu.socket, cpu.core, cpu.number))
    parts: dict[tuple[int, ...], set[int]] = {}
    for cpu in ordered:
        of = {"core": (cpu.socket, cpu.core), "socket": (cpu.socket,), "numa": (cpu.node,)}[mode]
        parts.setdefault(of, set()).add(cpu.number)
    groups = list(parts.values())
    if mode != "core":
        return groups[local_rank * len(groups) // local_size]
    if len(groups) < local_size:
        raise BindError(
            f"--bind-to core: there are {len(groups)} cores here for {local_size} ranks; start fewer on this host, or "
            "leave the flag out [HVD717]"
        )
    first, end = (number * len(groups) // local_size for number in (local_rank, local_rank + 1))
    return set().union(*groups[first:end])


def cpus_of(mode: str, environ: Mapping[str, str]) -> set[int] | None:
    """The CPUs of the rank with this environment; None for all that this process has. Raises BindError."""
    if mode == "none":
        return None
    cpus = [_cpu(number) for number in os.sched_getaffinity(0)]
    return share(mode, cpus, int(environ["HVDLITE_LOCAL_RANK"]), int(environ["HVDLITE_LOCAL_SIZE"]))


def _cpu(number: int) -> Cpu:
    folder = f"{_SYS}/cpu{number}"
    try:
        nodes = [name for name in os.listdir(folder) if name.startswith("node") and name[4:].isdigit()]
    except OSError:
        nodes = []
    core, socket = (_number(f"{folder}/topology/{name}") for name in ("core_id", "physical_package_id"))
    return Cpu(number, number if core is None else core, socket or 0, int(nodes[0][4:]) if nodes else 0)


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
