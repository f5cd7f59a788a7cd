"""The page of a job while it trains: its steps as they are written, in any browser.

A process of its own, so that drawing costs the training nothing. It listens on this machine only unless it is told
otherwise, answers two addresses, knows no way to write anything, and asks a browser's name of the machine back: a
foreign page that has its own name point here gets nothing.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .page import content, page, plotly_js
from .read import Folder, ReadError
from .table import Table

FRESH_S = 1.0  # no more often is anything read or drawn, however many look
PATIENCE_S = 10.0  # for a client that says nothing
ENDING_S = 5.0  # for ranks whose launcher is gone


class Board:
    """What there is to be seen now."""

    def __init__(self, folder: str) -> None:
        self._folder = Folder(folder)
        self._lock = threading.Lock()
        self._until = 0.0
        self._said: dict[str, Any] | None = None

    def said(self) -> dict[str, Any]:
        """As `content` has it. A folder that is not there yet has no ranks."""
        with self._lock:
            if self._said is None or time.monotonic() >= self._until:
                try:
                    came = self._folder.look()
                    problems = self._folder.problems
                except ReadError as error:
                    came, problems = True, [str(error)]
                if came or self._said is None:
                    self._said = content(Table(self._folder.ranks), problems)
                self._until = time.monotonic() + FRESH_S
            return self._said


class _Handler(BaseHTTPRequestHandler):
    board: Board
    names: frozenset[str]
    timeout = PATIENCE_S
    server_version, sys_version = "hvdlite", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host.strip("[]").lower() not in self.names and not _is_address(host):
            self._answer(403, "text/plain", "ask for this machine by its address\n")
        elif self.path in ("/", "/index.html"):
            self._answer(200, "text/html", page(self.board.said(), live=True))
        elif self.path == "/numbers.json":
            self._answer(200, "application/json", json.dumps(self.board.said(), separators=(",", ":")))
        else:
            self._answer(404, "text/plain", "there are / and /numbers.json\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no news."""


def server(folder: str, host: str, port: int) -> ThreadingHTTPServer:
    """Listens, and answers once somebody calls its serve_forever. Raises OSError, MissingLibraryError."""
    plotly_js()
    names = frozenset({"localhost", socket.gethostname().lower(), host.lower()})
    handler = type("Handler", (_Handler,), {"board": Board(folder), "names": names})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return type("Server", (_Server,), {"address_family": family})((host, port), handler)


def end_with(parent: int, own: str | None = None) -> None:
    """Ends this process as soon as its parent is another one: who has started it is gone.

    own: a folder that nobody removes then but this process. Ranks that are still ending may write there for a while,
    and make it anew.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        until = time.monotonic() + ENDING_S
        while own is not None and time.monotonic() < until:
            shutil.rmtree(own, ignore_errors=True)
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
