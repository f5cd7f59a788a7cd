"""Parameter servers that are connected to the store, and the notices to them.

A server sends SERVE once, with its number and address: ranks get all addresses when they have joined. From then on it
only listens. GONE: another server has ended, as the launcher has seen it. BYE: no rank runs, it may end. A server knows
the secret, and still its frame is read as a stranger's: its address goes to every rank.

Aggregators are numbered after the servers. Their addresses are of UDP, and no end is news to them or of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from hvdlite.security import framing

from .connection import Connection
from .epochs import LOST_CODE, Epochs, Refusal

_ADDRESS = re.compile(r"(tcp|udp)://([0-9.]{7,15}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


class Serving:
    """Of one store. epochs: its state machine; None: of an elastic job, which has no servers."""

    def __init__(self, epochs: Epochs | None, send: Callable[[Connection, bytes], None]) -> None:
        self._epochs, self._send = epochs, send
        self.connections: dict[int, Connection] = {}  # by server
        self._over = False

    def come(self, connection: Connection, body: bytes) -> None:
        """A SERVE frame. Raises Refusal."""
        try:
            announced = json.loads(body)
            number, address = int(announced["server"]), _ADDRESS.fullmatch(announced["address"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise Refusal("the SERVE frame is not what this launcher's version expects [HVD104]") from None
        there = self._epochs.servers if self._epochs is not None else []
        wanted = "tcp" if self._epochs is not None and number < self._epochs.tables else "udp"
        if not 0 <= number < len(there) or there[number] is not None or address is None or address[1] != wanted:
            raise Refusal(
                f"this job has no server {number} at this address, or the server is already connected [HVD119]"
            )
        self.connections[number] = connection
        if self._over:
            self._send_frame(number, framing.BYE)
        elif self._epochs is not None:
            self._epochs.served(number, address[0])

    def ended(self, number: int, text: str) -> None:
        """The launcher saw the end of a server's process; `text` says how."""
        if self._epochs is None:
            return
        self._epochs.server_ended(number, text)
        for other in [each for each in self.connections if each != number and max(each, number) < self._epochs.tables]:
            self._send_frame(other, framing.GONE, framing.pack_end(number, LOST_CODE, text))

    def end(self) -> None:
        """No rank runs: they may end, those too that are only about to come."""
        self._over = True
        for number in list(self.connections):
            self._send_frame(number, framing.BYE)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self.connections = {number: each for number, each in self.connections.items() if each is not connection}

    def _send_frame(self, number: int, kind: int, body: bytes = b"") -> None:
        connection = self.connections[number]
        if connection.session is not None:
            self._send(connection, connection.session.pack(kind, body))
