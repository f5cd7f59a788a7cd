"""A few texts over HTTP, to whoever asks: no more of it than Prometheus, curl and a load balancer need.

Each connection has a thread that answers one request and closes. What a client may do is bounded: it has seconds to ask
and to read, a request has a few kilobytes, and there are eight clients at most; whoever comes then is told so (503) and
sent away at once. So one that is slow or hostile costs a sleeping thread, and the training nothing. Nothing is ever
read from a client but the path; there are no secrets behind it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

CLIENTS_MAX = 8
REQUEST_BYTES = 8192
SECONDS = 5.0
AWAY_S = 0.05
_WORDS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error",
          503: "Service Unavailable"}  # fmt: skip
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Port:
    """Serves pages, each a function to (whether all is well, text), until `close`. OSError: the port is taken."""

    def __init__(self, host: str, number: int, pages: Mapping[str, Callable[[], tuple[bool, str]]]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, number), family=family, backlog=16)
        self._listener.settimeout(0.2)  # between looks whether it shall end
        self.number: int = self._listener.getsockname()[1]
        self._pages = pages
        self._room = threading.BoundedSemaphore(CLIENTS_MAX)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="hvdlite metrics port", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except socket.timeout:
                continue
            except OSError:  # no descriptor left, or closed
                self._ended.wait(0.2)
                continue
            if not self._room.acquire(blocking=False):
                _turn_away(client)
                continue
            try:
                threading.Thread(target=self._serve, args=(client,), name="hvdlite metrics client", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._room.release()
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                until = time.monotonic() + SECONDS
                asked = _asked(client, until)
                if asked is not None:
                    _send(client, self._answer(asked), until)
        except OSError:  # it went away, or took too long
            pass
        finally:
            self._room.release()

    def _answer(self, asked: bytes) -> bytes:
        words = asked.split(b"\n", 1)[0].rstrip(b"\r").split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _page(400, "this is no request of HTTP/1\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _page(405, "only GET and HEAD\n", more="Allow: GET, HEAD\r\n")
        page = self._pages.get(words[1].split(b"?", 1)[0].decode("latin-1"))
        if page is None:
            return _page(404, "there are " + ", ".join(self._pages) + "\n")
        try:
            well, text = page()
        except Exception as error:
            return _page(500, f"{type(error).__name__}: {error}\n")
        return _page(200 if well else 503, text, head=words[0] == b"HEAD")

    def close(self) -> None:
        """Nobody is accepted any more; clients that are being answered have their time."""
        self._ended.set()
        self._thread.join()
        self._listener.close()


def _page(code: int, text: str, head: bool = False, more: str = "") -> bytes:
    body = text.encode()
    lines = f"HTTP/1.1 {code} {_WORDS[code]}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n"
    return f"{lines}{more}Connection: close\r\n\r\n".encode() + (b"" if head else body)


def _turn_away(client: socket.socket) -> None:
    """By whoever accepts, so it takes next to no time. What the client says is read: what is not would be a reset, and
    that may overtake the answer."""
    try:
        with client:
            client.settimeout(AWAY_S)
            try:
                client.recv(REQUEST_BYTES)
            except socket.timeout:
                pass
            client.send(_page(503, f"{CLIENTS_MAX} clients are being answered: ask again\n"))
            client.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _asked(client: socket.socket, until: float) -> bytes | None:
    """A request up to its empty line. None: it went away or is too long."""
    held = b""
    while b"\r\n\r\n" not in held and b"\n\n" not in held:
        if len(held) > REQUEST_BYTES:
            return None
        client.settimeout(max(0.01, until - time.monotonic()))
        part = client.recv(4096)
        if not part or time.monotonic() > until:
            return None
        held += part
    return held


def _send(client: socket.socket, answer: bytes, until: float) -> None:
    view = memoryview(answer)
    while view:
        client.settimeout(max(0.01, until - time.monotonic()))
        view = view[client.send(view[:65536]) :]
        if time.monotonic() > until:
            return
