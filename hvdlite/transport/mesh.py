"""Mesh of links of one incarnation of the job: a listener, the addresses of all, descriptors for the core.

Made by hvdlite/lifecycle/init.py after the rendezvous, where the core will need streams: a job on several hosts, or
one whose plane is p2p. `rows` connects what a process set needs and gives the descriptors away, by rank in the set, in
the form that the core takes. All members call it, for the same sets in the same order; its `title` keeps the streams of
one set from those of another.

Which ranks get a stream: all pairs for tensors; for votes the first local rank of each host with those of the hosts
next to it in a binary tree of hosts (`tree`), hosts counted in the order of their first ranks in the set. A job over
MPI can do without any (`find_links`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple

from ..errors import HvdInitError
from ..system import open_files
from .address import unpack
from .connector import connect
from .listener import Listener, Stream, listen

ROUTE_S = 10.0  # for streams that a job can do without
_NO_KEYS = bytes(64)


class Rows(NamedTuple):
    """Descriptors by rank in a set, -1 where there is none, and 64 bytes of keys for each, what this rank signs with
    and what its peer does. The owner of the descriptors closes them."""

    votes: list[int]
    tensors: list[int]
    vote_keys: bytes
    tensor_keys: bytes | None  # None: what crosses these is not signed


class JobLinks:
    """The streams of one incarnation of the job. `timeout`: seconds to wait for a rank. `signs`: sign also what
    crosses the streams of tensors (HVDLITE_WIRE_AUTH)."""

    def __init__(
        self,
        listener: Listener,
        addresses: Sequence[bytes],
        host_of: Sequence[int],
        timeout: float,
        signs: bool = False,
    ) -> None:
        self._listener = listener
        self._addresses = list(addresses)
        self._host_of = list(host_of)
        self._timeout = timeout
        self._signs = signs

    def rows(
        self,
        title: str,
        ranks: Sequence[int],
        check: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Rows:
        """Connects the streams of a set of these ranks, of which this rank is one. check: see `connect`. timeout: other
        than that of all sets.

        Raises HvdInitError naming ranks, addresses and the remedy, or what check raises; nothing is left open then.
        """
        me = ranks.index(self._listener.rank)
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        near = [ranks[at] for at in tree([self._host_of[rank] for rank in ranks], me)]
        streams = len(near) + len(ranks) - 1
        open_files.allow(streams, f"rank {ranks[me]}", f"for streams to {len(ranks) - 1} other ranks")
        votes = self._connect(f"{title} votes", near, deadline, check)
        try:
            tensors = self._connect(f"{title} tensors", set(ranks) - {ranks[me]}, deadline, check)
        except BaseException:
            for stream in votes.values():
                stream.close()
            raise
        vote_keys, tensor_keys = (
            b"".join(row[rank].keys if rank in row else _NO_KEYS for rank in ranks) for row in (votes, tensors)
        )
        made = [[row[rank].detach() if rank in row else -1 for rank in ranks] for row in (votes, tensors)]
        return Rows(made[0], made[1], vote_keys, tensor_keys if self._signs else None)

    def _connect(
        self, purpose: str, ranks: Iterable[int], deadline: float, check: Callable[[], None] | None
    ) -> dict[int, Stream]:
        return connect(self._listener, {rank: self._addresses[rank] for rank in ranks}, purpose, deadline, check)

    @property
    def ip(self) -> str:
        """The first address at which this rank listens."""
        return unpack(self._listener.address).ends[0].ip

    def close(self) -> None:
        """Stops listening; streams that were handed out stay open. Also for a forked child."""
        self._listener.close()


def open_links(
    towards: tuple[str, int] | None,
    secret: bytes,
    job: int,
    epoch: int,
    rank: int,
    allgather: Callable[[bytes], list[bytes]],
    host_of: Sequence[int],
    timeout: float,
    signs: bool = False,
) -> JobLinks:
    """Listens, and publishes the address to all ranks. allgather: the bootstrap's; all ranks call this."""
    listener = listen(towards, secret, job, epoch, rank)
    try:
        return JobLinks(listener, allgather(listener.address), host_of, timeout, signs)
    except BaseException:
        listener.close()
        raise


def find_links(
    towards: tuple[str, int] | None,
    secret: bytes,
    job: int,
    epoch: int,
    rank: int,
    allgather: Callable[[bytes], list[bytes]],
    host_of: Sequence[int],
    timeout: float,
    signs: bool = False,
) -> tuple[JobLinks, Rows] | str:
    """`open_links` and the streams of all ranks, for ranks that can do without: else why one of them has no route to
    another, the same text on all ranks, and nothing is left open. They try for ROUTE_S, or half of the timeout."""
    listener, links, rows, why, found = None, None, None, "", False
    try:
        try:
            listener = listen(towards, secret, job, epoch, rank)
        except HvdInitError as error:
            why = str(error)
        addresses = allgather(b"" if listener is None else listener.address)
        if listener is not None and all(addresses):
            links = JobLinks(listener, addresses, host_of, timeout, signs)
            try:
                rows = links.rows("set 0", range(len(addresses)), timeout=min(ROUTE_S, timeout / 2))
            except HvdInitError as error:
                why = str(error)
        problem = next(filter(None, allgather(why.encode())), b"").decode()
        if links is None or rows is None or problem:
            return problem
        found = True
        return links, rows
    finally:
        if not found:
            _close_all(listener, rows)


def _close_all(listener: Listener | None, rows: Rows | None) -> None:
    for descriptor in () if rows is None else (*rows.votes, *rows.tensors):
        if descriptor >= 0:
            os.close(descriptor)
    if listener is not None:
        listener.close()


def tree(host_of: Sequence[int], me: int) -> list[int]:
    """The ranks in a set whose votes cross to and from `me`: none unless it is the first of its host there."""
    hosts = sorted(set(host_of), key=list(host_of).index)
    leaders = [list(host_of).index(host) for host in hosts]
    if me not in leaders:
        return []
    mine = leaders.index(me)
    near = ([(mine - 1) // 2] if mine else []) + [2 * mine + 1, 2 * mine + 2]
    return [leaders[host] for host in near if host < len(leaders)]
