"""Levels of a process set: the ranks of each host, and the first ranks of all hosts.

Which ranks share a host, and which one of each host stands for it towards the other hosts? `levels_of` opens a
process set for the ranks of this host, and one for the first ranks of all hosts. It is a collective of the members of
the set, made once per job and set; where a host has one rank, or the set is on one host, nothing is opened.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _core
from .._core import byte_exchange, nan_guard
from .process_set import ProcessSet, host_of, number_of, on_new_incarnation, open_among

_known: dict[int, Levels] = {}  # by the number of the set


class Levels(NamedTuple):
    """inside: the ranks of this host, None if it has one. across: the first rank of each host, None on other ranks."""

    hosts: int
    inside: ProcessSet | None
    across: ProcessSet | None


def hosts_in(process_set: ProcessSet) -> int:
    """On how many hosts the ranks of a set are. Not a collective."""
    return len({host_of[rank] for rank in process_set.ranks}) if host_of else 1


def why_plain(process_set: ProcessSet) -> str | None:
    """Why tensors of this set travel as they are, though compression is asked for. None: they are compressed."""
    if hosts_in(process_set) == 1:
        return "all ranks are on one host"
    return "HVDLITE_NAN_GUARD looks at what is reduced" if nan_guard.looks() else None


def levels_of(process_set: ProcessSet) -> Levels:
    """The sets inside this host and across hosts. The first call is a collective of the members of `process_set`."""
    number, hosts = number_of(process_set), hosts_in(process_set)
    if hosts == 1:
        return Levels(1, None, None)
    if hosts == process_set.size():
        return Levels(hosts, None, process_set)
    if number not in _known:
        _known[number] = _opened(process_set, number, hosts)
    return _known[number]


def _opened(process_set: ProcessSet, number: int, hosts: int) -> Levels:
    me, ranks = _core.rank(), list(process_set.ranks)
    inside = [rank for rank in ranks if host_of[rank] == host_of[me]]
    firsts = [rank for rank in ranks if all(host_of[each] != host_of[rank] for each in ranks if each < rank)]
    left = 4  # exchanges, in all of which each rank takes part: two for each set that a rank opens

    def of(some: list[int]) -> ProcessSet:
        def exchange(mine: bytes) -> list[bytes]:
            nonlocal left
            left -= 1
            every = byte_exchange.allgather_bytes(mine, "process_set.levels", number)
            return [part for rank, part in zip(ranks, every) if rank in some]

        return open_among(some, exchange)

    def idle(until: int) -> None:
        nonlocal left
        while left > until:
            left -= 1
            byte_exchange.allgather_bytes(b"", "process_set.levels", number)

    try:
        here = of(inside) if len(inside) > 1 else None
        idle(2)
        across = of(firsts) if me in firsts else None
    finally:
        idle(0)
    return Levels(hosts, here, across)


on_new_incarnation(_known.clear)
