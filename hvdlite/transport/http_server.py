"""HTTP server for a few pages, on this machine alone: the metrics of a job and its dashboard.

One thread serves all clients by non-blocking sockets. No client authenticates, so each is a stranger, and
security/connection_limits.py bounds their number, their requests and their time. A reply has time in proportion to its
size. A page is made once a second at most, and all clients are sent the same bytes: one that does not read costs no
copy.

A request must name this machine in its Host header: a page of another site whose name points here (DNS rebinding) gets
nothing. Nothing else is read from a client but the path, and there are no secrets behind it.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..security import connection_limits

FRESH_S = 1.0
SLOWEST = 200_000  # bytes a second that a client must read
_LAST_S = 0.5  # in which a client reads the end of a reply: what it sent unasked would else reset the connection
_WORDS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
          431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Page(NamedTuple):
    """made: returns whether all is well, and the parts of the body. Parts that stay the same are the same objects."""

    made: Callable[[], tuple[bool, Sequence[bytes]]]
    kind: str = TEXT


class _Client:
    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.deadline = sock, connection_limits.limit()
        self.received = b""
        self.unsent: list[memoryview] | None = None  # of the reply, once there is one


class Port:
    """Serves pages until `close`. OSError: the port is taken."""

    def __init__(self, host: str, number: int, pages: Mapping[str, Page]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, number), family=family, backlog=connection_limits.STRANGERS_MAX)
        self.number: int = self._listener.getsockname()[1]
        mine = socket.gethostname().lower()
        self._names = {"localhost", "127.0.0.1", "::1", mine, mine.partition(".")[0], host.lower()}
        self._full_name_known = False
        self._pages = pages
        self._made: dict[str, tuple[float, bool, Sequence[bytes]]] = {}
        self._clients: list[_Client] = []  # oldest first
        self._paused: float | None = None
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._woken):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hvdlite http", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is closed."""
        self._thread.join()

    def close(self) -> None:
        """Clients that are being answered lose their connection."""
        self._wake.send(b"\1")
        self._thread.join()
        for client in list(self._clients):
            self._drop(client)
        for sock in (self._listener, self._woken, self._wake):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            times = [client.deadline for client in self._clients] + ([self._paused] if self._paused is not None else [])
            patience = max(0.0, min(times) - time.monotonic()) if times else None
            for key, _ in self._selector.select(patience):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:  # else it made room in this very turn
                    self._turn(key.data)
            now = time.monotonic()
            for late in [client for client in self._clients if client.deadline <= now]:
                self._drop(late)
            if self._paused is not None and self._paused <= now:
                self._paused = None
                self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            for sock in connection_limits.accepted(self._listener, lambda: self._clients, self._drop):
                client = _Client(sock)
                self._clients.append(client)
                self._selector.register(sock, selectors.EVENT_READ, client)
        except OSError:  # out of descriptors
            self._selector.unregister(self._listener)
            self._paused = time.monotonic() + connection_limits.NO_DESCRIPTOR_S

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.sock)
        client.sock.close()

    def _turn(self, client: _Client) -> None:
        try:
            if client.unsent is None:
                self._receive(client)
            elif client.unsent:
                self._send(client)
            elif not client.sock.recv(4096):  # it has read all, and closes
                self._drop(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        part = client.sock.recv(4096)
        client.received += part
        if b"\r\n\r\n" in client.received or b"\n\n" in client.received:
            reply = self._answer(client)
        elif not part:
            raise ConnectionError
        elif len(client.received) > connection_limits.BYTES_MAX:
            reply = _reply(431, "the headers are too long\n")
        else:
            return
        client.received = b""
        client.unsent = [memoryview(each) for each in reply if each]
        client.deadline = connection_limits.limit() + sum(map(len, reply)) / SLOWEST
        self._send(client)

    def _send(self, client: _Client) -> None:
        unsent = client.unsent
        assert unsent is not None
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        while unsent:
            unsent[0] = unsent[0][client.sock.send(unsent[0]) :]
            if not unsent[0]:
                del unsent[0]
        client.sock.shutdown(socket.SHUT_WR)
        client.deadline = time.monotonic() + _LAST_S
        self._selector.modify(client.sock, selectors.EVENT_READ, client)

    def _answer(self, client: _Client) -> list[bytes]:
        lines = client.received.replace(b"\r\n", b"\n").split(b"\n\n")[0].split(b"\n")
        words = lines[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _reply(400, "this is no request of HTTP/1\n")
        hosts = [
            line.partition(b":")[2].strip().decode("latin-1") for line in lines if line.lower().startswith(b"host:")
        ]
        if not all(self._is_named(each, client) for each in hosts):
            return _reply(403, "the Host header does not name this machine: ask for it by its address or host name\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _reply(405, "only GET and HEAD\n", "Allow: GET, HEAD\r\n")
        path = words[1].split(b"?", 1)[0].decode("latin-1")
        if path not in self._pages:
            return _reply(404, "there are " + ", ".join(self._pages) + "\n")
        try:
            well, body = self._fresh(path)
        except Exception as error:
            return _reply(500, f"{type(error).__name__}: {error}\n")
        head = _head(200 if well else 503, self._pages[path].kind, sum(map(len, body)))
        return [head] if words[0] == b"HEAD" else [head, *body]

    def _fresh(self, path: str) -> tuple[bool, Sequence[bytes]]:
        made = self._made.get(path)
        if made is None or time.monotonic() >= made[0]:
            well, body = self._pages[path].made()
            self._made[path] = made = time.monotonic() + FRESH_S, well, body
        return made[1], made[2]

    def _is_named(self, host: str, client: _Client) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        reached = client.sock.getsockname()[0].partition("%")[0]
        if name in self._names or name in (reached, reached.removeprefix("::ffff:")):
            return True
        if not self._full_name_known:  # asked for late, and once: it may take the resolver seconds
            self._full_name_known = True
            self._names.add(socket.getfqdn().lower())
        return name in self._names


def _head(code: int, kind: str, length: int, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {code} {_WORDS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    ).encode()


def _reply(code: int, text: str, more: str = "") -> list[bytes]:
    body = text.encode()
    return [_head(code, TEXT, len(body), more), body]
