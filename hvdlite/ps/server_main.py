"""Main of a parameter server that hvdlite-run has started: it runs as long as the launcher's store.

The environment has the server's number, the number of servers, and the store's address. A rank holds a pipe to a server
that it has started itself; here the connection to the store replaces it. The server sends the address at which it
listens, and gets the numbers of servers that have ended. BYE, or the end of the connection, ends the server.

SIGINT, SIGTERM and SIGHUP are ignored: a scheduler or a terminal may send them to all processes, and ranks that save
then need their tables. The server listens only where the route to the store leaves, never on all addresses of its host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable

from .. import config
from ..errors import HvdInitError
from ..errors.codes import coded
from ..rendezvous import store_client
from ..security import framing


class StoreLine:
    """The connection to the store: where the server has its news from."""

    def __init__(self, sock: socket.socket, session: framing.Session, number: int) -> None:
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
                raise HvdInitError(coded("HVD024", f"server {self._number}: {body.decode('utf-8', 'replace')}"))
            if kind == framing.GONE:
                number, _, text = framing.unpack_end(body)
                report(number, text)
        return not chunk


def main() -> int:
    """The process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    from .server import ServerOptions, run  # NumPy and ZeroMQ take their time, in which a signal may come

    values = config.load().values
    number, secret = values["server"], values["secret_key"]
    limit = time.monotonic() + values["start_timeout"]
    where = values["store_addr"], values["store_port"]
    line = StoreLine(*store_client.authenticate(*where, secret, f"server {number}", limit), number)
    order = ServerOptions(
        number=number,
        servers=values["servers"],
        secret=secret,
        job=values["job_id"],
        encrypted=values["ps_curve"],
        host=line.host,
    )
    run(order, line, line.announce)
    return 0
