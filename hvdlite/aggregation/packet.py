"""What a datagram holds: a header of 40 bytes, its MAC in it, and up to 256 integers. Pure: no socket, no clock.

A block is 256 numbers of a tensor as int32. Blocks of a job are numbered from 0 through all its operations, in 64 bits.
The MAC is 8 bytes of keyed BLAKE2s over all else (RFC 7693): any process can send UDP to an open port. What has another
length, another key, or a rank that its job does not have is None here and changes nothing.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]

BLOCK = 256  # numbers; 1,064 bytes fit every Ethernet
RANKS_MAX = 64  # bits of the mask
UPDATE, RESULT, HELLO, WELCOME, BYE = range(1, 6)  # kinds
MARK, RESEND, MAXIMUM = 1, 2, 4  # flags; MAXIMUM: numbers are combined by max
_HEAD = struct.Struct("<QQQBBBxhH8s")  # job seq bits kind flags n exponent count mac
HEAD_BYTES = _HEAD.size
KEY_BYTES = 32
_MAC_BYTES = 8


class Packet(NamedTuple):
    """One datagram. bits: the ranks whose numbers it holds; exponent: of the block one window later."""

    kind: int
    flags: int
    job: int
    n: int
    seq: int
    bits: int
    exponent: int
    numbers: Integers

    @property
    def rank(self) -> int:
        """The rank that sent it; of a sum, the last one in it; -1: none."""
        return self.bits.bit_length() - 1

    def pack(self, key: bytes) -> bytes:
        """The bytes that travel."""
        body = self.numbers.tobytes()
        values = (self.job, self.seq, self.bits, self.kind, self.flags, self.n, self.exponent, len(self.numbers))
        head = _HEAD.pack(*values, b"")[:-_MAC_BYTES]
        return b"".join((head, _mac(head, body, key), body))


def unpack(data: bytes, key: bytes) -> Packet | None:
    """None for what no holder of the key has sent."""
    if len(data) < HEAD_BYTES:
        return None
    job, seq, bits, kind, flags, n, exponent, count, mac = _HEAD.unpack_from(data)
    body = data[HEAD_BYTES:]
    if count > BLOCK or len(body) != 4 * count or not 0 < n <= RANKS_MAX or bits >> n:
        return None
    if _mac(data[: HEAD_BYTES - _MAC_BYTES], body, key) != mac:
        return None
    return Packet(kind, flags, job, n, seq, bits, exponent, np.frombuffer(body, np.int32))


def _mac(head: bytes, body: bytes, key: bytes) -> bytes:
    made = hashlib.blake2s(head, key=key, digest_size=_MAC_BYTES)
    made.update(body)
    return made.digest()


def control(kind: int, job: int, n: int, rank: int, numbers: object = ()) -> Packet:
    """A datagram that is no block; rank -1: of the job's server."""
    return Packet(kind, 0, job, n, 0, 1 << rank if rank >= 0 else 0, 0, np.array(numbers, np.int32))
