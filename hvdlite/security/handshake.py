"""Handshake: both ends of a connection prove that they belong to one job, in three messages.

    acceptor:   greeting   magic with the version of this handshake, nonce
    connector:  answer     magic, nonce, the connection's two ends as the connector sees them, claim, proof
    acceptor:   verdict    a byte, the two ends as the acceptor sees them, proof

A proof is an HMAC-SHA256 with the secret over a label, what the connection is for, and everything sent before. Labels
of the two sides differ, so no proof can be reflected; nonces are fresh, so none can be replayed; the purpose is in it,
so none counts where a connection is for something else; both ends' addresses and ports are in it, so none can be passed
on: a relay has an end of its own, which one side sees and the other does not. Both sides know then, and say so
(`RELAYED`); what translates addresses (NAT, a mapped port, a proxy) looks like a stranger that does, and is refused
as well.

The claim is what a purpose lets the connector state of itself; each purpose has one size of it, 0 bytes where it has
none. The acceptor reads it only after the proof, and may refuse it by a verdict of its own (transport/peer_claim.py).

From the same words come two keys, one for each direction, that sign what follows (framing.Session; the core's streams).

Standard library only; pure but for nonces, `ends_of`, `shake_hands` and `receive`.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable

from .framing import Session

MAGIC = b"hvdlite5"  # its last byte grows with this handshake and with the frames that follow it
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ENDS_BYTES = 36  # connector's and acceptor's address (16 bytes, IPv4 as IPv6 maps it) and port
_CLAIM_AT = len(MAGIC) + NONCE_BYTES + ENDS_BYTES
ANSWER_BYTES = _CLAIM_AT + PROOF_BYTES  # and the claim
VERDICT_BYTES = 1 + ENDS_BYTES + PROOF_BYTES

WELCOME, UNKNOWN, RELAYED = range(1, 4)  # verdicts; no connection answers 0 by chance. Greater ones are of a purpose
_DENIED = bytes((UNKNOWN,)) + bytes(VERDICT_BYTES - 1)
FOREIGN, FALSE = -1, -2  # what only the connector sees: another version, or a peer that knows no secret
_PASSED_ON = (
    "the connection is not direct: this end sees {} connect to {}, the other end sees {} connect to {}. A proxy, "
    "NAT, a mapped container port or another user's relay forwards it, which is not supported. Let ranks and hosts "
    "reach each other at their own addresses (containers: --network=host) [HVD127]"
)

STORE, REPORT, LINK = b"store", b"report", b"link"  # what connections are for


class HandshakeError(Exception):
    """The other end is none of ours, or refuses our claim. verdict: UNKNOWN, RELAYED, FOREIGN, FALSE or one of the
    purpose; the text says it for RELAYED alone, since callers know which peer it should be."""

    def __init__(self, verdict: int, text: str = "") -> None:
        super().__init__(text)
        self.verdict = verdict


def ends_of(sock: socket.socket, connects: bool) -> bytes:
    """Both ends of a connection as this side sees them, the connector's first; all zeros for one that has no addresses
    (a unix socket). Raises OSError."""
    mine, theirs = _packed(sock, sock.getsockname()), _packed(sock, sock.getpeername())
    return mine + theirs if connects else theirs + mine


def _packed(sock: socket.socket, name: object) -> bytes:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(name, tuple):
        return bytes(ENDS_BYTES // 2)
    ip = socket.inet_pton(sock.family, name[0].partition("%")[0])
    return (b"\0" * 10 + b"\xff\xff" + ip if len(ip) == 4 else ip) + struct.pack("!H", name[1])


def passed_on(here: bytes, there: bytes) -> str:
    """What to tell of a connection whose sides see other ends."""
    return _PASSED_ON.format(*_shown(here), *_shown(there))


def _shown(ends: bytes) -> list[str]:
    found = []
    for at in (0, ENDS_BYTES // 2):
        ip, (port,) = ends[at : at + 16], struct.unpack_from("!H", ends, at + 16)
        mapped = ip[:12] == b"\0" * 10 + b"\xff\xff"
        found.append(
            f"{socket.inet_ntop(socket.AF_INET, ip[12:])}:{port}"
            if mapped
            else f"[{socket.inet_ntop(socket.AF_INET6, ip)}]:{port}"
        )
    return found


def greeting() -> bytes:
    """The acceptor's first message."""
    return MAGIC + os.urandom(NONCE_BYTES)


class Connector:
    """The connecting side. purpose: what the connection is for, the same on both sides. claim: of its size."""

    def __init__(self, secret: bytes, purpose: bytes, ends: bytes, claim: bytes = b"") -> None:
        self._secret, self._purpose, self._ends, self._claim = secret, purpose, ends, claim
        self._transcript = b""

    def answer(self, greeted: bytes) -> bytes:
        """What to send after a greeting of GREETING_BYTES. Raises HandshakeError for what greets otherwise."""
        if greeted[: len(MAGIC)] != MAGIC:
            raise HandshakeError(FOREIGN)
        body = MAGIC + os.urandom(NONCE_BYTES) + self._ends + self._claim
        self._transcript = greeted + body
        return body + prove(self._secret, b"connects", self._purpose, self._transcript)

    def session(self, verdict: bytes) -> Session:
        """The keys, after a verdict of VERDICT_BYTES. Raises HandshakeError."""
        ends, proof = verdict[1 : 1 + ENDS_BYTES], verdict[1 + ENDS_BYTES :]
        if verdict == _DENIED:
            raise HandshakeError(UNKNOWN)
        expected = prove(self._secret, b"accepts", self._purpose, self._transcript + verdict[: 1 + ENDS_BYTES])
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError(FALSE)
        if verdict[0] not in (WELCOME, RELAYED):
            raise HandshakeError(verdict[0])
        if verdict[0] == RELAYED or ends != self._ends:
            raise HandshakeError(RELAYED, passed_on(self._ends, ends))
        return session(self._secret, self._purpose, self._transcript, connects=True)


def shake_hands(sock: socket.socket, secret: bytes, purpose: bytes, limit: float) -> Session:
    """The connecting side on a socket, all of it until `limit` (a time.monotonic()), also if it comes byte by byte.
    Raises HandshakeError, EOFError, OSError."""
    me = Connector(secret, purpose, ends_of(sock, connects=True))
    sock.sendall(me.answer(receive(sock, GREETING_BYTES, limit)))
    return me.session(receive(sock, VERDICT_BYTES, limit))


def receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes. Raises EOFError, socket.timeout at the deadline, OSError."""
    held, at = bytearray(count), 0
    while at < count:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise socket.timeout("timed out")
        sock.settimeout(remaining)
        got = sock.recv_into(memoryview(held)[at:])
        if not got:
            raise EOFError("the connection was closed")
        at += got
    return bytes(held)


def judge(
    secret: bytes,
    purpose: bytes,
    ends: bytes,
    greeted: bytes,
    answer: bytes,
    verdict_on: Callable[[bytes], int] = lambda claim: WELCOME,
) -> tuple[bytes, Session | None]:
    """The accepting side, which sent `greeted` and got an answer of the purpose's size: the verdict to send, and the
    keys; None: it is to be dropped. A peer that proves nothing learns nothing. verdict_on: WELCOME for a proved claim,
    or a verdict of the purpose."""
    body, proof = answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    transcript = greeted + body
    if body[: len(MAGIC)] != MAGIC or not hmac.compare_digest(proof, prove(secret, b"connects", purpose, transcript)):
        return _DENIED, None
    verdict = verdict_on(claim_of(answer))
    if verdict == WELCOME and body[_CLAIM_AT - ENDS_BYTES : _CLAIM_AT] != ends:
        verdict = RELAYED
    verdict_and_ends = bytes((verdict,)) + ends
    reply = verdict_and_ends + prove(secret, b"accepts", purpose, transcript + verdict_and_ends)
    return reply, session(secret, purpose, transcript, connects=False) if verdict == WELCOME else None


def claim_of(answer: bytes) -> bytes:
    """What the connector states; to be believed only once `judge` gave keys for this answer."""
    return answer[_CLAIM_AT:-PROOF_BYTES]


def is_ours(answer: bytes) -> bool:
    """Whether an answer is one of this version of hvdlite, whatever its secret."""
    return answer.startswith(MAGIC)


def prove(secret: bytes, side: bytes, purpose: bytes, transcript: bytes) -> bytes:
    """A value that only holders of the secret can compute."""
    return hmac.digest(secret, b"hvdlite %b, %b: " % (purpose, side) + transcript, "sha256")


def session(secret: bytes, purpose: bytes, transcript: bytes, connects: bool) -> Session:
    """The keys, of 32 bytes, of what this side sends and receives on a connection with that transcript."""
    pair = [prove(secret, b"key of what %b sends" % side, purpose, transcript) for side in (b"connector", b"acceptor")]
    return Session(*(pair if connects else pair[::-1]))
