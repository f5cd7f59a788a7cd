"""What does the launcher hold of one host of the job? Two streams to the host's agent, and what is known of it.

The agent of this host is forked (`forked`); those of other hosts have reported (muster.py). Either way control carries
JSON frames both ways, and output carries what ranks write, one frame per read; the launcher may leave the output
stream unread as long as it likes, and the ranks there wait.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from hvdlite import _wire

from . import agent, muster

_READ_BYTES = 1 << 18


class Branch:
    """One host's agent. `pid` is its process if it is our child."""

    def __init__(self, name: str, control: socket.socket, output: socket.socket, pid: int | None = None) -> None:
        self.name = name
        self.control, self.output = control, output
        self.pid = pid
        self.ranks: set[int] = set()  # those that are to run there
        self.alive = True  # its control stream has not ended
        self.done = False  # it says that nothing is left there
        self.stays = False  # waits for the order to end, with the exit code of the job
        self.taking = False  # its output stream is watched
        self.asked = self.started = False  # see pulse.py
        self.peer: str | None = None  # the address that its streams come from
        self.number = 0  # of its host, for its session
        self.hello: dict[str, Any] = {}  # what it said when it reported
        self._news, self._said = _wire.FrameReader(), _wire.FrameReader()
        control.setblocking(True)
        output.setblocking(False)

    def order(self, **order: Any) -> None:
        """Sends an order; one that is gone already is noticed elsewhere."""
        try:
            self.control.sendall(_wire.pack(agent.CONTROL, json.dumps(order).encode()))
        except OSError:
            pass

    def news(self) -> list[dict[str, Any]] | None:
        """What the agent tells, once control is readable; None: its stream has ended."""
        try:
            chunk = self.control.recv(_READ_BYTES)
        except OSError:
            chunk = b""
        return [json.loads(body) for _, body in self._news.feed(chunk)] if chunk else None

    def said(self) -> Iterator[tuple[int, int, bytes]] | None:
        """(kind, rank, text) of what ranks wrote, once output is readable; None: the stream has ended."""
        try:
            chunk = self.output.recv(_READ_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            chunk = b""
        if not chunk:
            return None
        frames = self._said.feed(chunk)
        return ((kind, agent.RANK.unpack_from(body)[0], body[agent.RANK.size :]) for kind, body in frames)


def forked(name: str, stdin: int, close: Sequence[socket.socket]) -> Branch:
    """The agent of this host, forked. `close` are the launcher's own descriptors that it must not keep."""
    control, theirs = socket.socketpair()
    output, their_output = socket.socketpair()
    pid = agent.fork(theirs, their_output, stdin, close=(control, output, *close))
    theirs.close()
    their_output.close()
    return Branch(name, control, output, pid)


def reported(number: int, name: str, control: muster.Arrival, output: muster.Arrival) -> Branch:
    """The agent of another host, whose two streams have arrived."""
    for arrival in (control, output):
        muster.keep_watch(arrival.sock, control=arrival is control)
    branch = Branch(name, control.sock, output.sock)
    branch.peer, branch.number, branch.hello = control.peer, number, control.hello
    return branch
