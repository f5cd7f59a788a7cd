"""Claim of a rank that connects to another: its own identity, the rank it wants, and the purpose of the stream.

security/handshake.py proves the claim, and gives the keys by which the core signs what crosses the stream. Here are its
bytes (big-endian), and the acceptor's verdict on one that is proved. One byte follows the handshake:

    connector:  CONFIRMED  I have seen your proof, the stream is ours

Without it, an acceptor that was asked twice (an answer was lost) could keep the wrong one of two streams. Pure.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..security import handshake
from ..security.handshake import RELAYED, UNKNOWN, WELCOME

PURPOSE_MAX = 63  # bytes; zeros fill up a shorter one
CONFIRMED = b"\x06"

_CLAIM = struct.Struct(f"!IQIII{PURPOSE_MAX}s")
ANSWER_BYTES = handshake.ANSWER_BYTES + _CLAIM.size

WIRE, JOB, EPOCH, TARGET, PURPOSE, FULL = range(RELAYED + 1, RELAYED + 7)
_REASONS = {
    handshake.FOREIGN: "what listens there is no rank of hvdlite",
    handshake.FALSE: "what listens there does not know the secret of this job",
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


def pack(claim: Claim) -> bytes:
    """ValueError for a purpose that is too long."""
    purpose = claim.purpose.encode()
    if len(purpose) > PURPOSE_MAX:
        raise ValueError(f"the purpose of a stream has at most {PURPOSE_MAX} bytes: {claim.purpose!r} [HVD901]")
    return _CLAIM.pack(*claim[:5], purpose)


def unpack(packed: bytes) -> Claim:
    """Any bytes of that size; a purpose that is no text has a U+FFFD."""
    wire, job, epoch, source, target, purpose = _CLAIM.unpack(packed)
    return Claim(wire, job, epoch, source, target, purpose.rstrip(b"\0").decode("utf-8", "replace"))


def verdict_on(claim: Claim, expected: Claim) -> int:
    """Is this proved claim for us? `expected` is ours; its source and purpose are not looked at."""
    wrong = (
        (WIRE, claim.wire != expected.wire),
        (JOB, claim.job != expected.job),
        (EPOCH, claim.epoch != expected.epoch),
        (TARGET, claim.target != expected.target or claim.source <= claim.target),
        (PURPOSE, "\ufffd" in claim.purpose),
    )
    return next((verdict for verdict, is_wrong in wrong if is_wrong), WELCOME)


def reason(verdict: int) -> str:
    """Why there is no stream, for an error's text."""
    return _REASONS.get(verdict, f"it refuses for a reason that this version does not know ({verdict})")
