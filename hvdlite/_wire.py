"""What does the store's connection say? Frames, and the handshake that must succeed before one is read.

Client and server share this file, so that the format is written once. A connection opens with a mutual proof that both
ends know the job's secret (HMAC-SHA256 over both sides' nonces, with different labels, so that a proof can be neither
replayed nor reflected); what a stranger sends is never parsed. After it come frames: a big-endian u32 length, one byte
of kind, the body. All integers are big-endian. The C engine writes ABORT frames and reads LOST frames on the same
socket, so their layout is a contract with csrc/.

Invariants: a reader never buffers more than one frame of the limit that it was given; no pickle, ever; standard library
only, since the launcher imports this and must stay fast.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator, Sequence

from ._coded import code_of

JOIN, JOINED, ALLGATHER, GATHERED, ABORT, LOST, BYE, REFUSED = range(1, 9)

FRAME_MAX = 16 << 20  # kind and body
TEXT_MAX = 1500  # bytes of text in an ABORT or LOST frame
NONCE_BYTES = 32
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REJECTED = bytes(PROOF_BYTES)  # sent in place of a proof: your answer is wrong (wrong secret)

_LENGTH = struct.Struct("!I")
_END = struct.Struct("!ii")


class WireError(ValueError):
    """The other end does not speak this protocol: an impossible length, a body of the wrong shape."""


def pack(kind: int, body: bytes = b"") -> bytes:
    """One frame, ready to send. Raises WireError if the body is above the limit."""
    if len(body) >= FRAME_MAX:
        raise WireError(f"a frame of {len(body)} bytes is above the limit of {FRAME_MAX}")
    return _LENGTH.pack(len(body) + 1) + bytes((kind,)) + body


def frame_length(header: bytes, limit: int = FRAME_MAX) -> int:
    """Checks the four bytes before a frame and says how many follow. Raises WireError."""
    (length,) = _LENGTH.unpack(header)
    if not 1 <= length <= limit:
        raise WireError(f"a frame announces {length} bytes; between 1 and {limit} are allowed")
    return length


class FrameReader:
    """Cuts a stream into frames. `limit` may be changed between frames."""

    def __init__(self, limit: int = FRAME_MAX) -> None:
        self.limit = limit
        self._held = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields every frame that `chunk` completes as (kind, body). Raises WireError at an impossible length."""
        self._held += chunk
        while len(self._held) >= 4:
            length = frame_length(bytes(self._held[:4]), self.limit)
            if len(self._held) < 4 + length:
                return
            kind, body = self._held[4], bytes(self._held[5 : 4 + length])
            del self._held[: 4 + length]
            yield kind, body


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def answer_challenge(secret: bytes, server_nonce: bytes) -> tuple[bytes, bytes]:
    """The client's half: (what to send, the proof that the server must send back)."""
    client_nonce = new_nonce()
    proof = hmac.digest(secret, b"hvdlite client" + server_nonce + client_nonce, "sha256")
    return client_nonce + proof, hmac.digest(secret, b"hvdlite server" + client_nonce + server_nonce, "sha256")


def check_answer(secret: bytes, server_nonce: bytes, answer: bytes) -> bytes | None:
    """The server's half: its own proof if the client's answer shows that it knows the secret, else None."""
    client_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    expected = hmac.digest(secret, b"hvdlite client" + server_nonce + client_nonce, "sha256")
    if not hmac.compare_digest(proof, expected):
        return None
    return hmac.digest(secret, b"hvdlite server" + client_nonce + server_nonce, "sha256")


def same_proof(got: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(got, expected)


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
        if all(said == length for said, _ in pairs):
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
