"""Model of the network: time of a bucket on other ranks or another network, one formula for each medium.

    own   each host has a wire of its own. Reduction on n hosts moves 2 (n - 1) / n S bytes over each (Patarasuk and
          Yuan, JPDC 2009; Thakur et al., IJHPCA 2005). Its latency is the lesser of two, as the core chooses: `direct`,
          where each further host costs two messages, and `halving`, where it grows by doublings.
    bus   one medium for all: 2 (n - 1) S bytes pass it.
    shm   ranks of one host: a + b S. What copies needs a processor: n ranks on fewer processors take n / cores times as
          long. CPU work is conserved by that; how the system schedules it is not known.

With int8 or int4, an alltoall and an allgather of coded tensors pass between hosts. Each moves (n - 1) / n of their
bytes over each wire, so the formula above holds with fewer bytes. Coding takes its time, and the chain of collectives
needs further agreements of the ranks. Inside hosts nothing changes.

A fit on k ranks becomes one on n. A link that is given ("25gbit,20us") takes the place of a fit for what passes wires.
`of_plan` takes a table of hvdlite.plan in place of a formula. The plan "aggregator" gets a switch that adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .fit import Fit

MEDIA = ("own", "bus", "shm")
BUSY = 5e3  # ns that a message holds its sender or receiver, as the core reckons (csrc/algo/registry.c)
PLAYED_MAX = 40_000  # moves of a plan: a second
AGGREGATOR = "aggregator"  # the one plan that is played around a switch that adds
BLOCKS = 200  # pieces in which its tensors are played: more would change their time by less than 0.5 %
# Of a datagram of 1024 bytes of numbers: its own header, and those of UDP, IP and Ethernet. All are counted, though the
# other plans count none: theirs are 4 % of a full segment of TCP, which the comparison leaves to them.
HEADERS = (40 + 42) / 1024
SHARING = 0.08  # what ranks that share processors lose beyond the sharing
Cost = Callable[[float], float]  # bytes: ns


class Coding(NamedTuple):
    """A form of float32 tensors between hosts: bytes for each of theirs, and ns of coding for each of theirs."""

    share: float
    each: float


# Encode, sum and decode, with residuals, on one core of a server of 2024 with AVX2 (csrc/kernel/quantize.c).
CODINGS = {"int8": Coding(260 / 1024, 0.3), "int4": Coding(132 / 1024, 0.3)}


@dataclass(frozen=True)
class Cluster:
    """n ranks on so many hosts, of so many processors each; medium: between hosts, or inside the only one. each: what
    counts as a rank is a copy of the model on so many."""

    ranks: int
    hosts: int
    cores: int
    medium: str
    each: int = 1


def crowd(cluster: Cluster, need: float = 1.0) -> float:
    """How many times longer work takes that keeps `need` processors of each rank busy, where processors are fewer."""
    return max(1.0, cluster.ranks / cluster.hosts * need / cluster.cores) if cluster.cores else 1.0


def stretch_of(cluster: Cluster, was: Cluster, need: float) -> float:
    """How many times longer a rank computes than recorded, since more ranks share the processors. All wait for the last
    rank: where they cannot be shared evenly, it is taken halfway to the next whole number of ranks for each."""
    now, before = crowd(cluster, need), crowd(was, need)
    if now <= before:
        return now / before
    full = -(-cluster.ranks // (cluster.hosts * cluster.cores)) * cluster.cores * cluster.hosts
    return (1 + SHARING) * (now + crowd(replace(cluster, ranks=full), need)) / 2 / before


def cost(
    fit: Fit, recorded: Cluster, cluster: Cluster, link: tuple[float, float] | None, coding: Coding | None = None,
    agreement: float = 0.0
) -> Cost:  # fmt: skip
    """ns of a bucket by its bytes on `cluster`, from a fit at `recorded`. link: (ns, ns a byte) of the wires there.
    coding: of tensors between hosts, agreement: ns of each further one that its chain of collectives needs."""
    if cluster.ranks == 1:
        return lambda size: 0.0
    near = fit.a, fit.b
    if recorded.medium != "shm" or cluster.hosts == cluster.ranks:
        near = 0.0, 0.0  # what ranks of a host do among themselves was not measured, or there is nothing of it
    elif recorded.ranks == 1:
        near = 0.0, 0.0
    share = crowd(cluster, cluster.each) / crowd(recorded, recorded.each)
    near = near[0] * share, near[1] * share
    n = cluster.hosts
    if n == 1:
        return lambda size: near[0] + near[1] * size
    if link is not None:
        late, each = 2 * link[0], 2 * link[1]
    else:
        late, each = fit.a / _latency(recorded.hosts, fit.a), fit.b / _share(recorded.hosts, cluster.medium)
    late, each = late * _latency(n, late), each * _share(n, cluster.medium)
    if coding is not None:  # hosts of several ranks: a reduce before, a broadcast after
        late += agreement * (1 if cluster.ranks * cluster.each == n else 3)
        each = each * coding.share + coding.each
    return lambda size: near[0] + late + (near[1] + each) * size


def _share(hosts: int, medium: str) -> float:
    """Of 2 S bytes, how many pass the wire that is busiest."""
    return (hosts - 1) / hosts if medium == "own" else float(hosts - 1)


def _latency(hosts: int, two: float) -> float:
    """The latency on so many hosts by that on two, which is `two`."""
    return min(math.ceil(math.log2(hosts)), 1 + 2 * (hosts - 2) * min(BUSY, two / 2) / two) if two else 1.0


def of_plan(name: str, cluster: Cluster, link: tuple[float, float], biggest: float) -> Cost:
    """The algorithm of that name, or file, played where each rank is a host with its ports, or on a bus; "aggregator"
    around a switch that adds. Four sizes, between them lines. Raises PlanError, ValueError."""
    from ..plan.links import Links
    from ..plan.registry import file, make
    from ..plan.simulator import time_of

    if cluster.ranks == 1:
        return lambda size: 0.0
    if cluster.hosts != cluster.ranks:
        raise ValueError(
            f"a plan can be simulated with one rank per host, not with {cluster.ranks} ranks on "
            f"{cluster.hosts} [HVD008]"
        )
    if name == AGGREGATOR:
        if cluster.medium == "bus":
            raise ValueError(f"plan {name!r} needs a switch that adds, but a bus has none: use medium own [HVD008]")
        # Ranks share nothing on these links, so any number of them takes as long as two (test_plan_aggregator.py).
        links = Links.switch(3, link[0], link[1] * (1 + HEADERS))
        table = make(name, 3, root=2, pieces=BLOCKS)
    else:
        links = (Links.bus if cluster.medium == "bus" else Links.uniform)(cluster.ranks, *link)
        table = file(name) if name.endswith(".json") else make(name, cluster.ranks, links=links)
    if len(table.moves) > PLAYED_MAX:
        raise ValueError(
            f"plan {table.name!r} has {len(table.moves)} moves: more than {PLAYED_MAX} take too long [HVD008]"
        )
    sizes = np.geomspace(4096, max(biggest, 8192), 4)
    times = [time_of(table, int(size), links) for size in sizes]
    return lambda size: float(np.interp(size, sizes, times))
