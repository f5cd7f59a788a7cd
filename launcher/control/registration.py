"""Registration of the agents of several hosts, before any rank is started.

An agent on another host connects here twice: a stream for control and one for output. Each connection proves the job's
secret (hvdlite/security/handshake.py) before a byte of it is parsed, then sends HELLO: a small JSON frame that names
this host, the stream, and what prevents a start there. From then on the socket belongs to an AgentLink, with the
session that signs its frames.

`Registration` is the launcher's side: it listens at one address, never waits (`turn` serves what is ready), bounds
strangers as every port does (hvdlite/security/connection_limits.py), and is closed once all are there. `report` is the
agent's side, which may wait.

A host that vanishes sends nothing, not even an end. So both sides ask the kernel to probe a silent connection
(`keep_watch`): a stopped launcher or a busy one answers still, a dead host does not.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvdlite.errors.codes import coded
from hvdlite.security import connection_limits, framing, handshake

HELLO = 1
HELLO_MAX = 8192
CONTROL, OUTPUT = "control", "output"
SILENCE_S = 5.0  # of the far end, where nothing else was asked for
_PROBES_MAX = 60  # the kernel counts to 127
_REFUSED_MAX = 8  # addresses that are reported
_OTHER_SECRET = "it has another secret (HVDLITE_SECRET_KEY) or --rdzv-id than this host [HVD111]"
_PROXY = "a proxy, NAT or mapped port forwards its connection [HVD127]"
_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)


class Arrival(NamedTuple):
    """A connection that has proved the secret, and its HELLO."""

    sock: socket.socket
    hello: dict[str, Any]
    peer: str
    session: framing.Session


class _Stranger:
    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.peer = sock, ""
        self.deadline = connection_limits.limit()
        self.greeting = handshake.greeting()
        self.answer = b""
        self.session: framing.Session | None = None  # once it has proved the secret
        self.reader = framing.FrameReader(framing.Session(), HELLO_MAX)


class Registration:
    """Listens at `address` (port 0: any that is free). Raises OSError when that is not possible."""

    def __init__(self, secret: bytes, address: str, port: int = 0) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=512)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[_Stranger] = []
        self.refused: dict[str, str] = {}  # by the address of a host that cannot prove this secret: why

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: (host, port)."""
        return self._listener.getsockname()[:2]

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self) -> list[Arrival]:
        """Serves what is ready; those that have sent HELLO."""
        arrivals = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
                continue
            stranger: _Stranger = key.data
            if stranger not in self._strangers:  # it made room for a newer one in this very turn
                continue
            try:
                hello = self._read(stranger)
            except (OSError, EOFError, ValueError):  # a WireError is a ValueError
                self._drop(stranger)
                continue
            if hello is not None and stranger.session is not None:
                self._forget(stranger)
                arrivals.append(Arrival(stranger.sock, hello, stranger.peer, stranger.session))
        now = time.monotonic()
        for late in [each for each in self._strangers if each.deadline <= now]:
            self._drop(late)
        return arrivals

    def close(self) -> None:
        """No agent can register any more."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            for sock in connection_limits.accepted(self._listener, lambda: self._strangers, self._drop):
                stranger = _Stranger(sock)
                self._strangers.append(stranger)
                self._selector.register(sock, selectors.EVENT_READ, stranger)
                try:
                    stranger.peer = sock.getpeername()[0]
                    sock.send(stranger.greeting)
                except OSError:
                    self._drop(stranger)
        except OSError:  # out of descriptors: the listener stays readable, and its caller comes again at once
            time.sleep(connection_limits.NO_DESCRIPTOR_S)

    def _read(self, stranger: _Stranger) -> dict[str, Any] | None:
        try:
            known = stranger.session is not None
            most = 4096 if known else handshake.ANSWER_BYTES - len(stranger.answer)
            chunk = stranger.sock.recv(most)
        except BlockingIOError:
            return None
        if not chunk:
            raise EOFError
        if stranger.session is not None:
            for _, body in stranger.reader.feed(chunk):
                hello = json.loads(body)
                if not isinstance(hello, dict):
                    raise ValueError
                return hello
            return None
        stranger.answer += chunk
        if len(stranger.answer) == handshake.ANSWER_BYTES:
            ends = handshake.ends_of(stranger.sock, connects=False)
            verdict, session = handshake.judge(self._secret, handshake.REPORT, ends, stranger.greeting, stranger.answer)
            stranger.sock.send(verdict)
            if session is None:
                if handshake.is_ours(stranger.answer) and len(self.refused) < _REFUSED_MAX:
                    why = _PROXY if verdict[0] == handshake.RELAYED else _OTHER_SECRET
                    self.refused.setdefault(stranger.peer, f"refused {stranger.peer}: {why}")
                raise ValueError
            stranger.session, stranger.reader = session, framing.FrameReader(session, HELLO_MAX)
        return None

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.sock)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()


class ReportError(Exception):
    """The launcher could not be reached, or does not know the secret; the text says which."""


def report(
    address: tuple[str, int],
    secret: bytes,
    hello: Mapping[str, Any],
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[socket.socket, framing.Session]:
    """Connects to a Registration and says `hello`, trying again until time.monotonic() is `deadline` or `given_up()` is
    true; the connection, and what signs its frames.

    Raises ReportError.
    """
    where = f"{address[0]}:{address[1]}"
    failure, attempt = "no time left", 0
    while time.monotonic() < deadline and not given_up():
        try:
            sock = socket.create_connection(address, timeout=max(0.01, min(2.0, deadline - time.monotonic())))
        except OSError as error:
            failure = str(error)
        else:
            try:
                limit = min(deadline, connection_limits.limit())
                session = handshake.shake_hands(sock, secret, handshake.REPORT, limit)
                sock.settimeout(connection_limits.HANDSHAKE_S)
                sock.sendall(session.pack(HELLO, json.dumps(hello).encode()))
                return sock, session
            except handshake.HandshakeError as error:
                sock.close()
                raise ReportError(coded("HVD111", _stranger(error, where))) from None
            except (OSError, EOFError) as error:
                sock.close()
                failure = str(error) or "the connection was closed"
        time.sleep(min(_RETRY_S[min(attempt, len(_RETRY_S) - 1)], max(0.0, deadline - time.monotonic())))
        attempt += 1
    raise ReportError(f"no launcher answers at {where}: {failure} [HVD110]")


def _stranger(error: handshake.HandshakeError, where: str) -> str:
    if error.verdict == handshake.RELAYED:
        return f"the launcher at {where}: {error}"
    if error.verdict == handshake.FOREIGN:
        return (
            f"the program that listens at {where} is not this version of hvdlite: install the same on all hosts "
            "[HVD112]"
        )
    return f"the program that listens at {where} has another secret (HVDLITE_SECRET_KEY) than this host [HVD111]"


def keep_watch(sock: socket.socket, control: bool, silence: float = SILENCE_S) -> None:
    """Lets the kernel end this connection once the other host has not answered for about `silence` seconds.

    Only `control` also counts bytes that wait: those of the output stream may wait for a reader as long as they like.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, int(silence // _PROBES_MAX))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(silence / pause) - 1))
    if control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence))
