"""Placement of rows on servers; every rank and every server computes the same.

A row's number is mixed by a bijection of k bits (2**k >= rows). The upper bits of the result say in which of at most
16,384 parts the row lies, the lower ones where in that part. So a part is dense and needs no hash table, rows whose
numbers have a pattern spread evenly, and parts, never rows, are placed on servers.

A part's servers are all servers in the order of hash(part, server), best first: rendezvous hashing (Thaler and
Ravishankar, 1998), a form of consistent hashing. Copies lie on the first `replicas` of the list. A server that joins
takes 1/(n+1) of the parts, evenly from the others, and nothing else moves. With order="range" rows keep their order:
each server has one slice.

NumPy defines all this. csrc/kernel/rows.c does the same in one call for ids that it accepts, which is what counts in
small messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._core import ffi, lib

U64 = np.uint64
PARTS_BITS = 14
_ODD = (U64(0x9E3779B97F4A7C15), U64(0xBF58476D1CE4E5B9))
_LAST_ODD = U64(0x94D049BB133111EB)


def mixed(ids: Any, bits: int) -> Any:
    """Row numbers (int64, non-negative, below 2**bits) through a bijection of [0, 2**bits): uint64."""
    mask, half = U64((1 << bits) - 1), U64(max(1, (bits + 1) // 2))
    x = ids.astype(U64)
    for odd in _ODD:  # multiplication by an odd number and a shift: both invertible
        x *= odd
        x &= mask
        x ^= x >> half
    x *= _LAST_ODD
    x &= mask
    return x


def hashed(a: Any, b: Any) -> Any:
    """64 bits of two numbers each (splitmix64's finalizer; Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):  # of scalars; arrays wrap around silently
        x = a.astype(U64) * U64(0x9E3779B97F4A7C15) + b.astype(U64) * U64(0xD1B54A32D192ED03) + U64(0x8CB92BA72F3D8DD7)
        x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def ranked(parts: int, servers: int) -> Any:
    """int16 [parts, servers]: for each part, the servers from best to last."""
    scores = hashed(np.arange(parts)[:, None], np.arange(servers)[None, :] + 1)
    return np.argsort(scores, axis=1)[:, ::-1].astype(np.int16)


class RowPlacement:
    """Of one table: rows over parts, parts over servers.

    `owners`: int16 [parts, replicas]; `parts`, `rows_per_part`: powers of two. order: "hash" or "range".
    """

    def __init__(self, rows: int, servers: int, replicas: int = 1, order: str = "hash") -> None:
        self.rows, self.order, self.servers = rows, order, servers
        self._bits = max(1, int(rows - 1).bit_length())
        part_bits = min(PARTS_BITS, self._bits)
        self._low = self._bits - part_bits
        self.parts, self.rows_per_part = 1 << part_bits, 1 << self._low
        if order == "hash":
            lists = ranked(self.parts, servers)
        else:  # equal slices of what is used; a copy lies on the next server
            used = ((rows - 1) >> self._low) + 1
            first = np.minimum(np.arange(self.parts), used - 1) * servers // used
            lists = (first[:, None] + np.arange(servers)[None, :]) % servers
        self.owners = np.ascontiguousarray(lists[:, :replicas].astype(np.int16))
        self.native = ffi.new("struct hvd_row_places *")
        self.native.rows, self.native.bits, self.native.low = rows, self._bits, self._low
        self.native.is_mixed, self.native.replicas = order == "hash", replicas
        self._borrowed: list[Any] = []
        self.set_arrays(owners=self.owners)

    def set_arrays(self, **arrays: Any) -> None:
        """Arrays for `native`, which must not move."""
        for name, array in arrays.items():
            self._borrowed.append(ffi.from_buffer(f"{array.dtype}_t[]", array))
            setattr(self.native, name, self._borrowed[-1])

    def places(self, ids: Any) -> tuple[Any, Any]:
        """(part, index in it) of each row: int64 arrays."""
        x = mixed(ids, self._bits).view(np.int64) if self.order == "hash" else ids
        return x >> self._low, x & (self.rows_per_part - 1)

    def owners_of(self, ids: Any) -> Any:
        """int16 [len(ids), replicas]: the servers that hold each row, the one to read from first."""
        if self.servers == 1:
            return np.zeros((len(ids), 1), np.int16)
        owners = np.empty((len(ids), self.owners.shape[1]), np.int16)
        if lib.hvd_row_owners(self.native, ffi.from_buffer(ids), len(ids), ffi.from_buffer("int16_t[]", owners)):
            return owners
        return self.owners[self.places(ids)[0]]
