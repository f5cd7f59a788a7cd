"""Authentication of two ranks on a stream: three fixed messages and one byte; nothing else is read before.

    acceptor:   greeting   magic, nonce
    connector:  claim      magic, wire version, job, epoch, who I am, whom I want, purpose, both ends, nonce, proof
    acceptor:   answer     verdict, both ends as it sees them, proof
    connector:  CONFIRMED  one byte: I have seen your proof, the stream is ours

A proof is an HMAC-SHA256 with the job's secret over a label, the acceptor's nonce and the whole claim (and so both
nonces, both ranks, the incarnation of the job, the purpose, and the addresses and ports of both ends). The labels of
the two sides differ, so that no message of one side can be reflected to it; the nonces are fresh, so that no message
can be replayed; the ends are in it, so that no message can be relayed (security/handshake.py). A peer's claim is read
only after its proof has been verified. The last byte confirms that the stream is used: without it, an acceptor that was
asked twice (an answer was lost) could keep the wrong one of two streams.

From the nonces and the claim come two keys, one for each direction, by which the core signs what crosses the stream.

Pure but for the nonces. All integers are big-endian.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import NamedTuple

from ..security import handshake
from ..security.handshake import ENDS_BYTES

MAGIC = b"hvdlink2"
NONCE_BYTES = PROOF_BYTES = 32
PURPOSE_BYTES = 64  # the first is the length of the rest
CONFIRMED = b"\x06"

_CLAIM = struct.Struct(f"!8sIQIII{PURPOSE_BYTES}s{ENDS_BYTES}s{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"!I{ENDS_BYTES}s{PROOF_BYTES}s")
_GREETING = struct.Struct(f"!8s{NONCE_BYTES}s")

GREETING_BYTES = _GREETING.size
CLAIM_BYTES = _CLAIM.size + PROOF_BYTES
ANSWER_BYTES = _ANSWER.size

WELCOME, UNKNOWN, WIRE, JOB, EPOCH, TARGET, PURPOSE, FULL, RELAYED = range(9)
_REASONS = {
    UNKNOWN: "it does not know this rank's secret: HVDLITE_SECRET_KEY is that of another job",
    WIRE: "it runs another version of hvdlite: install the same version for all ranks",
    JOB: "it belongs to another job",
    EPOCH: "it is in another life of this job (an earlier or a later init)",
    TARGET: "it is another rank than the one that is wanted there: do several hosts have this address?",
    PURPOSE: "it cannot read what the stream is for",
    FULL: "it keeps too many streams that nobody there has asked for yet",
}


class Claim(NamedTuple):
    """The two ranks of a stream, the incarnation of the job, and the purpose."""

    wire: int
    job: int
    epoch: int
    source: int  # the rank that connects
    target: int  # the rank that accepts
    purpose: str
    ends: bytes = bytes(ENDS_BYTES)  # of the connection, as handshake.ends_of has them


def greeting() -> tuple[bytes, bytes]:
    """(the acceptor's first message, the nonce in it)."""
    nonce = os.urandom(NONCE_BYTES)
    return _GREETING.pack(MAGIC, nonce), nonce


def nonce_of(message: bytes) -> bytes | None:
    """The nonce of a greeting; None if it is not one of ours."""
    magic, nonce = _GREETING.unpack(message)
    return nonce if magic == MAGIC else None


def make_claim(secret: bytes, claim: Claim, nonce: bytes) -> bytes:
    """The connector's message to an acceptor that sent `nonce`. ValueError for a purpose that is too long."""
    purpose = claim.purpose.encode()
    if len(purpose) >= PURPOSE_BYTES:
        raise ValueError(f"the purpose of a stream has at most {PURPOSE_BYTES - 1} bytes: {claim.purpose!r} [HVD901]")
    told = bytes((len(purpose),)) + purpose.ljust(PURPOSE_BYTES - 1, b"\0")
    body = _CLAIM.pack(MAGIC, *claim[:5], told, claim.ends, os.urandom(NONCE_BYTES))
    return body + _prove(secret, b"hvdlite link, connects:", nonce + body)


def read_claim(secret: bytes, nonce: bytes, message: bytes) -> Claim | None:
    """The claim in a message of CLAIM_BYTES; None if its sender does not know the secret and our nonce."""
    body, proof = message[: _CLAIM.size], message[_CLAIM.size :]
    if not hmac.compare_digest(proof, _prove(secret, b"hvdlite link, connects:", nonce + body)):
        return None
    magic, wire, job, epoch, source, target, told, ends, _ = _CLAIM.unpack(body)
    if magic != MAGIC:
        return None
    length = told[0]
    purpose = told[1 : 1 + length] if length < PURPOSE_BYTES and not any(told[1 + length :]) else b"\xff"
    return Claim(wire, job, epoch, source, target, purpose.decode("utf-8", "replace"), ends)


def verdict_on(claim: Claim, expected: Claim) -> int:
    """Is this proved claim for us? `expected` is ours, with the ends that we see; its source and purpose are not
    looked at."""
    wrong = (
        (WIRE, claim.wire != expected.wire),
        (JOB, claim.job != expected.job),
        (EPOCH, claim.epoch != expected.epoch),
        (TARGET, claim.target != expected.target or claim.source <= claim.target),
        (RELAYED, claim.ends != expected.ends),
        (PURPOSE, "\ufffd" in claim.purpose),
    )
    return next((verdict for verdict, is_wrong in wrong if is_wrong), WELCOME)


def answer(secret: bytes, nonce: bytes, message: bytes, verdict: int, ends: bytes) -> bytes:
    """The acceptor's message about a claim. It proves nothing to a peer that has proved nothing."""
    if verdict == UNKNOWN:
        return _ANSWER.pack(UNKNOWN, bytes(ENDS_BYTES), bytes(PROOF_BYTES))
    return _ANSWER.pack(verdict, ends, _prove(secret, _accepting(verdict, ends), nonce + message))


def read_answer(secret: bytes, nonce: bytes, message: bytes, said: bytes) -> tuple[int, bytes] | None:
    """The acceptor's verdict on our claim `message`, and the ends that it sees; None if its sender does not know
    the secret."""
    verdict, ends, proof = _ANSWER.unpack(said)
    if verdict == UNKNOWN:
        return UNKNOWN, ends
    if verdict >= 256:
        return None
    expected = _prove(secret, _accepting(verdict, ends), nonce + message)
    return (verdict, ends) if hmac.compare_digest(proof, expected) else None


def _accepting(verdict: int, ends: bytes) -> bytes:
    return b"hvdlite link, accepts:" + bytes((verdict,)) + ends


def keys(secret: bytes, nonce: bytes, message: bytes, connects: bool) -> bytes:
    """The key of what this side sends and that of what it receives, 64 bytes, after a claim that was welcome."""
    return b"".join(handshake.keys(secret, b"link", nonce + message, connects))


def reason(verdict: int) -> str:
    """Why an acceptor refuses, for an error's text."""
    return _REASONS.get(verdict, f"it refuses for a reason that this version does not know ({verdict})")


def _prove(secret: bytes, label: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, label + message, "sha256")
