"""Host layout: the ranks that share a host, compared with what the launcher assigned. Pure.

A launcher, or a hand-made environment, gives a rank its local rank and the number of ranks on its host. If these are
wrong, ranks wait for memory that they cannot share, or two of them take the same GPU. So every rank sends the identity
of its host to the rendezvous (address.host_id), and each rank checks all claims. `misplaced` names the wrong claim and
the true value in one sentence, the same on every rank. `completed` computes what a launcher does not set (srun has no
cross rank as Horovod counts it).

cross_rank counts as in Horovod: among the hosts that have a rank of the same local rank. The number of the host instead
is accepted as well, if no two ranks have the same local rank and host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors.rank_ranges import as_runs
from .discovery import Place

Record = Mapping[str, Any]
_REMEDY = "Start the job with hvdlite-run, or set HVDLITE_LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK and _CROSS_SIZE right"


class HostLayout(NamedTuple):
    """Where all ranks are: the number of each rank's host (in the order of first ranks) and the host's name."""

    host_of: list[int]
    host_name: list[str]

    @property
    def hosts(self) -> int:
        """How many hosts the job has."""
        return max(self.host_of) + 1

    @property
    def homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len(set(Counter(self.host_of).values())) == 1

    def on_host_of(self, rank: int) -> list[int]:
        """The ranks of the host of `rank`, in order."""
        return [other for other, host in enumerate(self.host_of) if host == self.host_of[rank]]


def claims(place: Place, identity: str, host: str) -> dict[str, Any]:
    """A rank's part of its record: the host numbers that it was given, and the host that it is on."""
    claimed = {name: getattr(place, name) for name in ("local_rank", "local_size", "cross_rank", "cross_size")}
    return {**claimed, "host": host, "host_id": identity}


def layout_of(records: Sequence[Record]) -> HostLayout:
    """The host layout, from the records of all ranks in rank order. A number distinguishes hosts of one name."""
    numbers: dict[str, int] = {}
    host_of = [numbers.setdefault(record["host_id"], len(numbers)) for record in records]
    names = [str(record["host"]) for record in records]
    hosts_called: dict[str, set[int]] = {}
    for name, host in zip(names, host_of):
        hosts_called.setdefault(name, set()).add(host)
    shown = [f"{name}#{host}" if len(hosts_called[name]) > 1 else name for name, host in zip(names, host_of)]
    return HostLayout(host_of, shown)


def completed(place: Place, layout: HostLayout) -> Place:
    """The rank assignment, with the numbers that the launcher has not set."""
    local = layout.on_host_of(place.rank)
    local_rank = local.index(place.rank) if place.local_rank is None else place.local_rank
    fellows = sorted(host for host, ranks in Counter(layout.host_of).items() if ranks > local_rank)
    mine = layout.host_of[place.rank]
    return place._replace(
        local_rank=local_rank,
        local_size=len(local),
        cross_rank=fellows.index(mine) if place.cross_rank is None else place.cross_rank,
        cross_size=len(fellows) if place.cross_size is None else place.cross_size,
    )


def misplaced(records: Sequence[Record]) -> str | None:
    """The wrong claim of a rank about its host, in one sentence; None if all claims are true."""
    layout = layout_of(records)
    ranks_of: dict[int, list[int]] = {}
    claimed = Counter((host, record["local_rank"]) for host, record in zip(layout.host_of, records))
    for rank, host in enumerate(layout.host_of):
        ranks_of.setdefault(host, []).append(rank)
    for rank, record in enumerate(records):
        local = ranks_of[layout.host_of[rank]]
        size, number, name = record["local_size"], record["local_rank"], layout.host_name[rank]
        if size is not None and size != len(local):
            others = "" if len(local) == len(records) else f"; the others are on {_elsewhere(layout, rank)}"
            return (
                f"rank {rank} was told that {size} of {len(records)} ranks are on its host, but {len(local)} "
                f"{'is' if len(local) == 1 else 'are'} on {name} (ranks {as_runs(local)}){others}. {_REMEDY}; "
                "HVDLITE_HOST_ID tells hosts apart that look like one, or joins what looks like several."
            )
        if number is not None and claimed[layout.host_of[rank], number] > 1:
            same = [other for other in local if records[other]["local_rank"] == number]
            return f"ranks {as_runs(same)} on {name} were all told that they are local rank {number}. {_REMEDY}."
    return _crossed(records, layout)


def _crossed(records: Sequence[Record], layout: HostLayout) -> str | None:
    taken: dict[tuple[int, int], int] = {}
    fellows_of = Counter(record["local_rank"] for record in records)
    hosts = layout.hosts
    for rank, record in enumerate(records):
        number, cross, size = record["local_rank"], record["cross_rank"], record["cross_size"]
        if number is None or cross is None:
            continue
        other = taken.setdefault((number, cross), rank)
        if other != rank:
            return (
                f"rank {other} on {layout.host_name[other]} and rank {rank} on {layout.host_name[rank]} were both told "
                f"that they are local rank {number} of host {cross} (HVDLITE_CROSS_RANK). {_REMEDY}."
            )
        fellows = fellows_of[number]
        if size is not None and size not in (fellows, hosts):
            return (
                f"rank {rank} was told that {size} hosts have a local rank {number} (HVDLITE_CROSS_SIZE), but "
                f"{fellows} of {hosts} do. {_REMEDY}."
            )
    return None


def _elsewhere(layout: HostLayout, rank: int) -> str:
    """`nodeB (ranks 2-3)`, for up to three hosts other than that of `rank`."""
    first = {host: other for other, host in reversed(list(enumerate(layout.host_of))) if host != layout.host_of[rank]}
    shown = [
        f"{layout.host_name[other]} (ranks {as_runs(layout.on_host_of(other))})" for _, other in sorted(first.items())
    ]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
