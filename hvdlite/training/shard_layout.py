"""Shard layout: which rank owns which elements of a model's parameters. Knows no framework, and no communication.

A parameter has a number, a count of elements and a kind (its dtype and device). Parameters are put into buckets, which
travel as one. A parameter of ALONE_BYTES or more is a bucket by itself, so it travels from and to its own memory; the
smaller ones of a kind share buckets, which are copied. Buckets are in the order in which a backward pass fills them:
the reverse of the parameters' order.

There are two ways to cut:

  * Anywhere: rank r owns the rows of a bucket that a reducescatter gives it: of t elements, with q, m = divmod(t, n),
    those from r * q + min(r, m). Shares differ by at most one element for each bucket, and nothing is padded.
  * Between tensors: each parameter has one owner, and so has each bucket. The greatest parameter is assigned first,
    always to the rank that has the fewest bytes.

Every rank computes the same layout, and a checkpoint is read by ranges of elements, never by ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

ALONE_BYTES = 256 << 10  # below it a copy costs less than a collective


class Item(NamedTuple):
    """A parameter. kind: those of one kind may share a bucket. bytes: of an element."""

    number: int
    elements: int
    kind: Any
    bytes: int


class Piece(NamedTuple):
    """Elements of a parameter that one rank owns: from `begin` to `end`; `offset`: of the first in the rank's share."""

    number: int
    begin: int
    end: int
    offset: int

    @property
    def stop(self) -> int:
        """Of its last element in the rank's share, plus one."""
        return self.offset + self.end - self.begin


class Bucket(NamedTuple):
    """Parameters that travel together. owner: the rank in the set that owns all; None: each rank has a section."""

    numbers: list[int]
    counts: list[int]
    kind: Any
    owner: int | None

    @property
    def total(self) -> int:
        """Elements."""
        return sum(self.counts)

    def section(self, rank: int, ranks: int) -> tuple[int, int]:
        """Begin and end of the elements that this one of so many ranks owns."""
        if self.owner is not None:
            return (0, self.total) if self.owner == rank else (0, 0)
        rows, more = divmod(self.total, ranks)
        begin = rank * rows + min(rank, more)
        return begin, begin + rows + (rank < more)

    def pieces(self, rank: int, ranks: int) -> list[Piece]:
        """What a rank owns, in the order of its share."""
        low, high = self.section(rank, ranks)
        found, start = [], 0
        for number, count in zip(self.numbers, self.counts):
            begin, end = max(low, start), min(high, start + count)
            if begin < end:
                found.append(Piece(number, begin - start, end - start, begin - low))
            start += count
        return found


def owners_of(items: Sequence[Item], loads: list[int]) -> dict[int, int]:
    """The owner of each parameter, cut between tensors. loads: bytes that each rank has already; they are added to."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owner = {}
    for item in sorted(items, key=lambda each: (-each.elements * each.bytes, each.number)):
        load, rank = heapq.heappop(heap)
        owner[item.number] = rank
        loads[rank] = load + item.elements * item.bytes
        heapq.heappush(heap, (loads[rank], rank))
    return owner


def lay_out(items: Sequence[Item], cap: int, owner: dict[int, int] | None) -> list[Bucket]:
    """The buckets of these parameters, in the order in which they travel.

    cap: most bytes of a bucket of several parameters. owner: of each parameter, cut between tensors; None: anywhere.
    """
    buckets: list[list[Item]] = []
    filling: dict[Any, tuple[list[Item], int]] = {}
    for item in reversed(items):
        size = item.elements * item.bytes
        if size >= ALONE_BYTES:
            buckets.append([item])
            continue
        key = item.kind, owner[item.number] if owner else None
        members, held = filling.get(key, ([], 0))
        if members and held + size > cap:
            buckets.append(members)  # after all of its parameters
            members, held = [], 0
        members.append(item)
        filling[key] = members, held + size
    buckets += [members for members, _ in filling.values()]
    return [
        Bucket([each.number for each in members], [each.elements for each in members], members[0].kind,
               owner[members[0].number] if owner else None)
        for members in buckets
    ]  # fmt: skip
