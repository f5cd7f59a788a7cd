"""Framing of the connections of store, agents and function server; frames are signed once both ends are known.

Both ends share this file, so that the format is written once. A connection opens with the handshake (handshake.py);
what a stranger sends is never parsed. After it come frames, all integers big-endian:

    u32 length of kind, body and tag | first 4 bytes of the length's own tag | u8 kind | body | tag of all before it

A tag is BLAKE2b with the key of that direction over the number of frames that went before (u64) and what it is for. So
a byte that was changed, and a frame that is repeated, left out, moved or sent back, is seen before it is parsed, and
ends the connection. The length has one of its own, which is looked at before anything is waited for: one that was made
longer would be waited for, in silence. The C engine writes ABORT frames and reads LOST frames on the same socket, so
their layout is a contract with csrc/ (engine/state/store_frames.h).

Invariants: a reader never buffers more than one frame of the limit that it was given; no pickle, ever; standard library
only, since the launcher imports this and must stay fast.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterator, Sequence

from ..errors.codes import code_of

JOIN, JOINED, ALLGATHER, GATHERED, ABORT, LOST, BYE, REFUSED, REMOVED, WATCH, NEWS, SERVE, GONE = range(1, 14)
LEAVING = 14  # the core's: the script of this rank has ended, and exit handlers run
ENDED = 15  # an engine's worker, first and last: how the function of this rank has ended

FRAME_MAX = 16 << 20  # kind and body
TEXT_MAX = 1500  # bytes of text in an ABORT or LOST frame
KEY_BYTES = 32
TAG_BYTES = 16
CHECK_BYTES = 4  # of the length's tag; a guess has one try

_LENGTH = struct.Struct("!I")
_END = struct.Struct("!ii")
_COUNT = struct.Struct("!Q")


class WireError(ValueError):
    """The other end does not speak this protocol: an impossible length, a body of the wrong shape, a wrong tag."""


class Session:
    """The keys of one connection, and how many frames have gone each way. Without keys nothing is signed: for a pair of
    sockets that this process and its child have, which no other process can reach."""

    def __init__(self, sends: bytes = b"", receives: bytes = b"") -> None:
        self.keys = sends + receives
        self.counts = array("Q", (0, 0))  # frames sent and received; the core counts here while it has the socket
        self.tag_bytes = TAG_BYTES if sends else 0
        self.head_bytes = _LENGTH.size + (CHECK_BYTES if sends else 0)  # what is to be read before a length is known
        self._sends, self._receives = sends, receives

    def pack(self, kind: int, body: bytes = b"") -> bytes:
        """The next frame, ready to send; each is to be sent, in order. Raises WireError if the body is too large."""
        if len(body) >= FRAME_MAX:
            raise WireError(f"a frame of {len(body)} bytes is above the limit of {FRAME_MAX}")
        length, named = _LENGTH.pack(len(body) + 1 + self.tag_bytes), bytes((kind,))
        if not self._sends:
            return length + named + body
        head = length + _tag(self._sends, self.counts[0], length)[:CHECK_BYTES] + named
        tag = _tag(self._sends, self.counts[0], head, body)
        self.counts[0] += 1
        return b"".join((head, body, tag))

    def is_true(self, length: bytes, check: bytes) -> bool:
        """Is this the length of the frame that comes next?"""
        tag = _tag(self._receives, self.counts[1], length) if self._receives else b""
        return hmac.compare_digest(tag[:CHECK_BYTES], check)

    def opened(self, frame: bytes) -> tuple[int, bytes]:
        """(kind, body) of the frame that was received next, whole. Raises WireError if it is not the one that was sent
        next."""
        at, end = self.head_bytes, len(frame) - self.tag_bytes
        head, body = frame[: at + 1], frame[at + 1 : end]
        if self._receives:
            tag = _tag(self._receives, self.counts[1], head, body)
            if not hmac.compare_digest(tag, frame[end:]):
                raise self.forged()
            self.counts[1] += 1
        return frame[at], body

    def forged(self) -> WireError:
        """What to raise of the frame that comes next."""
        return WireError(
            f"frame {self.counts[1]} is not what the other end sent: it was changed, repeated or removed in transit "
            "[HVD458]"
        )


def _tag(key: bytes, count: int, head: bytes, body: bytes = b"") -> bytes:
    tag = hashlib.blake2b(_COUNT.pack(count) + head, key=key, digest_size=TAG_BYTES)
    tag.update(body)
    return tag.digest()


def frame_length(head: bytes, session: Session, limit: int = FRAME_MAX) -> int:
    """Checks the first `head_bytes` of a frame and says how many follow: at most `limit` for kind and body, and a tag.
    Raises WireError."""
    if not session.is_true(head[: _LENGTH.size], head[_LENGTH.size :]):
        raise session.forged()
    (length,) = _LENGTH.unpack_from(head)
    low, high = 1 + session.tag_bytes, limit + session.tag_bytes
    if not low <= length <= high:
        raise WireError(f"a frame announces {length} bytes; between {low} and {high} are allowed")
    return int(length)


class FrameReader:
    """Cuts a stream into frames. `limit` may be changed between frames."""

    def __init__(self, session: Session, limit: int = FRAME_MAX) -> None:
        self.limit = limit
        self._session = session
        self._held = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields every frame that `chunk` completes as (kind, body). Raises WireError at an impossible length, and at a
        frame that is not what was sent: after those before it, and from then on in every call."""
        self._held += chunk
        head_bytes = self._session.head_bytes
        while len(self._held) >= head_bytes:
            end = head_bytes + frame_length(bytes(self._held[:head_bytes]), self._session, self.limit)
            if len(self._held) < end:
                return
            opened = self._session.opened(bytes(self._held[:end]))
            del self._held[:end]
            yield opened

    def end(self) -> None:
        """The stream has ended. Raises WireError if that is within a frame."""
        if self._held:
            raise WireError(
                f"the connection ended within frame {self._session.counts[1]}: the other end stopped while it was "
                "sending, or the network cut the connection [HVD458]"
            )


def pack_end(culprit: int, code: int, text: str) -> bytes:
    """The body of ABORT and LOST; the text is cut at TEXT_MAX bytes, never inside a character. Its code stays."""
    encoded, name = text.encode("utf-8", "replace"), code_of(text)
    last = f" [{name}]".encode() if name and len(encoded) > TEXT_MAX else b""
    kept = encoded[: TEXT_MAX - len(last)].decode("utf-8", "ignore").encode("utf-8")
    return _END.pack(culprit, code) + kept + last


def unpack_end(body: bytes) -> tuple[int, int, str]:
    """(culprit, code, text) of an ABORT or LOST body. Raises WireError."""
    if len(body) < _END.size:
        raise WireError(f"an abort record of {len(body)} bytes is too short")
    culprit, code = _END.unpack_from(body)
    return culprit, code, body[_END.size :][:TEXT_MAX].decode("utf-8", "replace")


def pack_round(number: int, contribution: bytes) -> bytes:
    """The body of ALLGATHER."""
    return _LENGTH.pack(number) + contribution


def unpack_round(body: bytes) -> tuple[int, bytes]:
    """(sequence number, contribution) of an ALLGATHER body. Raises WireError."""
    if len(body) < 4:
        raise WireError(f"an allgather frame of {len(body)} bytes is too short")
    return _LENGTH.unpack_from(body)[0], body[4:]


def pack_gathered(number: int, parts: Sequence[bytes]) -> bytes:
    """The body of GATHERED: every rank's contribution, in rank order."""
    pieces = [_LENGTH.pack(number)]
    for part in parts:
        pieces += (_LENGTH.pack(len(part)), part)
    return b"".join(pieces)


def unpack_gathered(body: bytes, size: int) -> tuple[int, list[bytes]]:
    """(sequence number, one contribution per rank) of a GATHERED body. Raises WireError."""
    if len(body) < 4:
        raise WireError(f"a gathered frame of {len(body)} bytes is too short")
    number, at = _LENGTH.unpack_from(body)[0], 4
    length = _LENGTH.unpack_from(body, at)[0] if len(body) >= 8 else 0
    if (4 + length) * size == len(body) - 4:  # all may be as long: most rounds
        pairs = list(struct.iter_unpack(f"!I{length}s", memoryview(body)[4:]))
        if all(announced == length for announced, _ in pairs):
            return number, [part for _, part in pairs]
    parts: list[bytes] = []
    for _ in range(size):
        if at + 4 > len(body):
            raise WireError("a gathered frame ends before its last rank")
        length = _LENGTH.unpack_from(body, at)[0]
        at += 4
        if at + length > len(body):
            raise WireError("a gathered frame is shorter than it says")
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise WireError("a gathered frame has bytes left over")
    return number, parts
