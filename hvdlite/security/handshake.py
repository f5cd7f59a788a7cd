"""Handshake: both ends of a connection prove that they belong to one job, in three messages.

    acceptor:   greeting   magic with the version of this handshake, nonce
    connector:  answer     magic, nonce, the connection's two ends as the connector sees them, proof
    acceptor:   verdict    a byte, the two ends as the acceptor sees them, proof

A proof is an HMAC-SHA256 with the secret over a label, what the connection is for, and everything said before. Labels
of the two sides differ, so no proof can be reflected; nonces are fresh, so none can be replayed; both ends' addresses
and ports are in it, so none can be passed on: a relay has an end of its own, which one side sees and the other
does not. Both sides know then, and say so (`RELAYED`); what translates addresses (NAT, a mapped port, a proxy) cannot
be told from a stranger who does, and is refused as well.

From the same words come two keys, one for each direction, that sign every frame afterwards (_wire.Session).

Standard library only; pure but for nonces, `ends_of`, `shake_hands` and `receive`. transport/peer_auth.py says more in
its claim, and proves it likewise.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

from .framing import Session

MAGIC = b"hvdlite4"  # its last byte grows with this handshake and with the frames that follow it
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ENDS_BYTES = 36  # connector's and acceptor's address (16 bytes, IPv4 as IPv6 maps it) and port
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + ENDS_BYTES + PROOF_BYTES
VERDICT_BYTES = 1 + ENDS_BYTES + PROOF_BYTES

WELCOME, UNKNOWN, RELAYED = range(1, 4)  # verdicts; no connection answers 0 by chance
FOREIGN, FALSE = -1, -2  # what only the connector sees: another version, or a peer that knows no secret
_PASSED_ON = (
    "the connection is not direct: this end sees {} connect to {}, the other end sees {} connect to {}. A proxy, "
    "NAT, a mapped container port or another user's relay forwards it, which is not supported. Let ranks and hosts "
    "reach each other at their own addresses (containers: --network=host) [HVD127]"
)

STORE, REPORT = b"store", b"report"  # what connections are for


class HandshakeError(Exception):
    """The other end is none of ours. verdict: UNKNOWN, RELAYED, FOREIGN or FALSE; the text says it for RELAYED alone,
    since callers know which peer it should be."""

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
    """The connecting side. purpose: what the connection is for, the same on both sides."""

    def __init__(self, secret: bytes, purpose: bytes, ends: bytes) -> None:
        self._secret, self._purpose, self._ends = secret, purpose, ends
        self._said = b""

    def answer(self, greeted: bytes) -> bytes:
        """What to send after a greeting of GREETING_BYTES. Raises HandshakeError for what greets otherwise."""
        if greeted[: len(MAGIC)] != MAGIC:
            raise HandshakeError(FOREIGN)
        body = MAGIC + os.urandom(NONCE_BYTES) + self._ends
        self._said = greeted + body
        return body + prove(self._secret, b"connects", self._purpose, self._said)

    def session(self, verdict: bytes) -> Session:
        """The keys, after a verdict of VERDICT_BYTES. Raises HandshakeError."""
        ends, proof = verdict[1 : 1 + ENDS_BYTES], verdict[1 + ENDS_BYTES :]
        if verdict == bytes((UNKNOWN,)) + bytes(VERDICT_BYTES - 1):
            raise HandshakeError(UNKNOWN)
        expected = prove(self._secret, b"accepts", self._purpose, self._said + verdict[: 1 + ENDS_BYTES])
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError(FALSE)
        if verdict[0] != WELCOME or ends != self._ends:
            raise HandshakeError(RELAYED, passed_on(self._ends, ends))
        return session(self._secret, self._purpose, self._said, connects=True)


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


def judge(secret: bytes, purpose: bytes, ends: bytes, greeted: bytes, answer: bytes) -> tuple[bytes, Session | None]:
    """The accepting side, which sent `greeted` and got an answer of ANSWER_BYTES: the verdict to send, and the keys;
    None: it is to be dropped. A peer that proves nothing learns nothing."""
    body, proof = answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    said = greeted + body
    if body[: len(MAGIC)] != MAGIC or not hmac.compare_digest(proof, prove(secret, b"connects", purpose, said)):
        return bytes((UNKNOWN,)) + bytes(VERDICT_BYTES - 1), None
    direct = body[-ENDS_BYTES:] == ends
    verdict = bytes((WELCOME if direct else RELAYED,)) + ends
    reply = verdict + prove(secret, b"accepts", purpose, said + verdict)
    return reply, session(secret, purpose, said, connects=False) if direct else None


def is_ours(answer: bytes) -> bool:
    """Whether an answer is one of this version of hvdlite, whatever its secret."""
    return answer.startswith(MAGIC)


def prove(secret: bytes, side: bytes, purpose: bytes, said: bytes) -> bytes:
    """A value that only holders of the secret can compute."""
    return hmac.digest(secret, b"hvdlite %b, %b: " % (purpose, side) + said, "sha256")


def keys(secret: bytes, purpose: bytes, said: bytes, connects: bool) -> tuple[bytes, bytes]:
    """(key of what this side sends, key of what it receives), 32 bytes each, of a connection on which that was said."""
    pair = [prove(secret, b"key of what %b sends" % side, purpose, said) for side in (b"connector", b"acceptor")]
    return (pair[0], pair[1]) if connects else (pair[1], pair[0])


def session(secret: bytes, purpose: bytes, said: bytes, connects: bool) -> Session:
    """The keys in use."""
    return Session(*keys(secret, purpose, said, connects))
