"""Connection of a parameter server or an aggregator to the launcher's store: how it knows what becomes of its job.

It sends SERVE once, with the address at which it listens. A parameter
server gets GONE for each other one that has ended. BYE, or the end of the connection, ends the process. A rank's
connection is another: store_client.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from ..errors import HvdInitError
from ..errors.codes import coded
from ..security import framing


class StoreLine:
    """The connection to the store: where the server has its news from. what: its name in errors, "aggregator 0"; by
    default "server" and its number."""

    def __init__(self, sock: socket.socket, session: framing.Session, number: int, what: str | None = None) -> None:
        self._what = what or f"server {number}"
        self._sock, self._session, self._number = sock, session, number
        self._reader = framing.FrameReader(session)
        self.host: str = sock.getsockname()[0]  # where the route to the store leaves
        sock.settimeout(None)

    def fileno(self) -> int:
        """Readable when `ended` has something to do."""
        return self._sock.fileno()

    def announce(self, address: str) -> None:
        """The server listens there from now on."""
        announced = {"server": self._number, "address": address, "pid": os.getpid(), "host": socket.gethostname()}
        self._sock.sendall(self._session.pack(framing.SERVE, json.dumps(announced).encode()))

    def ended(self, report: Callable[[int, str], None]) -> bool:
        """Reads what is there; tell(number, text): another server has ended. Returns whether this one is to end.
        Raises HvdInitError where the store refuses it, _wire.WireError for what the store has not sent."""
        try:
            chunk = self._sock.recv(65536)
        except OSError:  # the launcher has ended
            return True
        for kind, body in self._reader.feed(chunk):
            if kind == framing.BYE:
                return True
            if kind == framing.REFUSED:
                raise HvdInitError(coded("HVD024", f"{self._what}: {body.decode('utf-8', 'replace')}"))
            if kind == framing.GONE:
                number, _, text = framing.unpack_end(body)
                report(number, text)
        return not chunk
