"""Connection of the store: its authenticated peer, and what waits for it.

A stranger has proved nothing. A guest has a session, and its first frame tells what it is: a rank (JOIN), a parameter
server (SERVE), or a watcher of membership (WATCH). Only a rank sends more.

That frame is small, and no larger one is read before.
"""

from __future__ import annotations

import socket

from hvdlite.security import framing, handshake

FIRST_MAX = 4096  # of the first frame of a connection


class Connection:
    """One client: a stranger until it has proved the secret."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline: float | None = deadline
        self.greeting = handshake.greeting()
        self.answer = b""
        self.session: framing.Session | None = None  # once it has proved the secret
        self.reader = framing.FrameReader(framing.Session(), FIRST_MAX)
        self.unsent = bytearray()
        self.closing = False  # close once everything is sent
        self.open = True
        self.rank: int | None = None
        self.listens = False  # watches or serves: it gets news of ranks and servers, and sends nothing more

    def end(self) -> str:
        """The text for a stream that ends here."""
        try:
            self.reader.end()
        except framing.WireError as error:
            return str(error)
        return ""
