"""Signed pickles: bytes are unpickled only if a rank of the job has sent them, unchanged.

Unpickling runs what the sender chose, and pickles travel as tensors do, which are not signed unless HVDLITE_WIRE_AUTH
says so. So each carries a seal of SEAL_BYTES before it: a number, which no other pickle of its sender has, and BLAKE2b
with a key of this incarnation of the job over the sender, the number, what the bytes are for, and the bytes. Nothing is
looked at before its seal has held. A pickle that was changed, made up, sent for something else, or sent twice is an
error that names the rank.

The key is drawn from the job's secret, its number and its epoch, all of which init() has agreed on.
"""

from __future__ import annotations

import struct
import threading

from ..errors import NOT_INITIALIZED, HvdNotInitializedError, HvdPeerLostError
from ..errors.codes import coded

SEAL_BYTES = 24
_NUMBER = struct.Struct("!Q")
_ABOUT = struct.Struct("!IQ")
_TAG_BYTES = SEAL_BYTES - _NUMBER.size
_REMEMBERED = 4096  # numbers of one sender; threads that send by several names may come out of order


class _Sender:
    """Which numbers of a rank have come: all up to `floor` count as such."""

    def __init__(self) -> None:
        self.floor, self.above = 0, set[int]()

    def is_new(self, number: int) -> bool:
        if number <= self.floor or number in self.above:
            return False
        self.above.add(number)
        if len(self.above) > _REMEMBERED:
            kept = sorted(self.above)[_REMEMBERED // 2 :]
            self.floor, self.above = kept[0], set(kept[1:])
        return True


class Seals:
    """Of one incarnation of a job. Any thread."""

    def __init__(self, secret: bytes, job: int, epoch: int, rank: int) -> None:
        import hashlib  # late: loads OpenSSL, and importing hvdlite is to be quick
        import hmac

        self._blake2b, self._same = hashlib.blake2b, hmac.compare_digest
        self.key = hmac.digest(secret, b"hvdlite objects of job %d, epoch %d" % (job, epoch), "sha256")
        self._rank, self._number = rank, 0
        self._senders: dict[int, _Sender] = {}
        self._lock = threading.Lock()

    def sealed(self, purpose: str, body: bytes) -> bytearray:
        """A block with a seal and the body. purpose: what it is for, the same on both sides."""
        with self._lock:
            self._number += 1
            number = self._number
        block = bytearray(SEAL_BYTES)
        block += body
        _NUMBER.pack_into(block, 0, number)
        block[_NUMBER.size : SEAL_BYTES] = self._tag(self._rank, number, purpose, memoryview(block)[SEAL_BYTES:])
        return block

    def opened(self, purpose: str, sender: int, block: bytes | bytearray) -> memoryview:
        """The body of a block that this rank (of the job) has sealed for this purpose, in the block's memory. Raises
        HvdPeerLostError for any other."""
        body, is_true = memoryview(block)[SEAL_BYTES:], False
        if len(block) >= SEAL_BYTES:
            (number,) = _NUMBER.unpack_from(block)
            tag = self._tag(sender, number, purpose, body)
            if self._same(tag, block[_NUMBER.size : SEAL_BYTES]):
                with self._lock:
                    is_true = self._senders.setdefault(sender, _Sender()).is_new(number)
        if not is_true:
            error = HvdPeerLostError(
                coded(
                    "HVD458",
                    f"data from rank {sender} for {purpose} was changed in transit or is forged: nothing of it was "
                    "unpickled",
                )
            )
            error.rank = sender
            raise error
        return body

    def _tag(self, sender: int, number: int, purpose: str, body: memoryview) -> bytes:
        named = purpose.encode("utf-8", "surrogatepass")
        head = _ABOUT.pack(sender, number) + _NUMBER.pack(len(named)) + named
        tag = self._blake2b(head, key=self.key, digest_size=_TAG_BYTES)
        tag.update(body)
        return tag.digest()


_current: Seals | None = None


def use_seals(seals: Seals) -> None:
    """These are in use from now on: init() has succeeded."""
    global _current
    _current = seals


def current() -> Seals:
    """Those in use. Raises HvdNotInitializedError."""
    if _current is None:
        raise HvdNotInitializedError(NOT_INITIALIZED)
    return _current
