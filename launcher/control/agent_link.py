"""Link to one agent: two streams, and what is known of its host.

The agent of this host is forked (`forked`); those of other hosts have registered (registration.py). Either way control
carries JSON frames both ways, and output carries what ranks write, one frame per read; the launcher may leave the
output stream unread as long as it likes, and the ranks there wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdlite.errors.codes import coded, uncoded
from hvdlite.security import framing

from ..agent import agent, process
from ..store.epochs import ranks_named
from . import registration

_READ_BYTES = 1 << 18


class AgentLink:
    """One host's agent. `pid` is its process if it is our child."""

    def __init__(
        self,
        name: str,
        control: socket.socket,
        output: socket.socket,
        pid: int | None = None,
        sessions: tuple[framing.Session, framing.Session] | None = None,
    ) -> None:
        self.name = name
        self.control, self.output = control, output
        self.pid = pid
        self.ranks: set[int] = set()  # those that are to run there
        self._started: set[int] = set()  # those that do
        self._ended: set[int] = set()  # those whose output has ended
        self.alive = True  # its control stream has not ended
        self.done = False  # it has reported that nothing is left there
        self.stays = False  # waits for the order to end, with the exit code of the job
        self.taking = False  # its output stream is watched
        self.pinged = self.started = False  # see heartbeat.py
        self.peer: str | None = None  # the address that its streams come from
        self.number = 0  # of its host, for its session
        self.hello: dict[str, Any] = {}  # the frame with which it registered
        self.why = ""  # its streams cannot be trusted any more
        self.session, output_session = sessions or (framing.Session(), framing.Session())
        self._news, self._output_reader = framing.FrameReader(self.session), framing.FrameReader(output_session)
        control.setblocking(True)
        output.setblocking(False)

    def order(self, **order: Any) -> None:
        """Sends an order; one that is gone already is noticed elsewhere."""
        self.send(agent.CONTROL, json.dumps(order).encode())

    def send(self, kind: int, body: bytes) -> None:
        """Sends a frame, as `order`."""
        try:
            self.control.sendall(self.session.pack(kind, body))
        except OSError:
            pass

    def news(self) -> list[dict[str, Any]] | None:
        """Reports of the agent, once control is readable; None: its stream has ended."""
        try:
            chunk = self.control.recv(_READ_BYTES)
        except OSError:
            chunk = b""
        frames, more = self._whole(self._news, chunk)
        reports = [json.loads(body) for _, body in frames]
        self._started |= {each["rank"] for each in reports if each["what"] == "started"}
        return reports if reports or more else None

    def read_output(self) -> list[tuple[int, int, bytes]] | None:
        """(kind, rank, text) of what ranks wrote, once output is readable; None: the stream has ended."""
        try:
            chunk = self.output.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        frames, more = self._whole(self._output_reader, chunk)
        pieces = [(kind, agent.RANK.unpack_from(body)[0], body[agent.RANK.size :]) for kind, body in frames]
        self._ended |= {rank for kind, rank, _ in pieces if kind == agent.ENDED}
        if pieces or more:
            return pieces
        if self._unheard:
            self._spoilt(self._unheard)
        return None

    @property
    def cut(self) -> str:
        """The error text where the agent has reported its end, and output is missing."""
        lost = self.done and self.output.fileno() < 0 and self._unheard
        return f"output from host {self.name} is lost: {self.why or lost} [HVD458]" if lost else ""

    @property
    def _unheard(self) -> str:
        """Of another host's output, where it has ended: what is lost. A frame marks the end of that of a rank."""
        ranks = sorted(self.ranks & self._started - self._ended) if self.pid is None else []
        return f"its connection ended before the output of {ranks_named(ranks)} did" if ranks else ""

    def _whole(self, reader: framing.FrameReader, chunk: bytes) -> tuple[list[tuple[int, bytes]], bool]:
        """The frames that are there, as far as they can be believed, and whether more may come. No bytes: it ended."""
        frames = []
        try:
            for frame in reader.feed(chunk):
                frames.append(frame)
            if not chunk:
                reader.end()
        except framing.WireError as error:
            self._spoilt(f"what came from it is not what it sent: {uncoded(str(error))}")
            return frames, False
        return frames, bool(chunk)

    def _spoilt(self, why: str) -> None:
        """A stream that cannot be believed counts as ended; the agent ends its ranks, as when the launcher is gone."""
        self.why = self.why or why
        for sock in (self.control, self.output):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def forked(name: str, stdin: int, close: Sequence[socket.socket]) -> AgentLink:
    """The agent of this host, forked. `close` are the launcher's own descriptors that it must not keep."""
    control, theirs = socket.socketpair()
    output, their_output = socket.socketpair()
    pid = _fork(theirs, their_output, stdin, close=(control, output, *close))
    theirs.close()
    their_output.close()
    return AgentLink(name, control, output, pid)


def reported(number: int, name: str, control: registration.Arrival, output: registration.Arrival) -> AgentLink:
    """The agent of another host, whose two streams have arrived."""
    for arrival in (control, output):
        registration.keep_watch(arrival.sock, arrival is control, float(arrival.hello["silence"]))
    link = AgentLink(name, control.sock, output.sock, sessions=(control.session, output.session))
    link.peer, link.number, link.hello = control.peer, number, control.hello
    return link


def _fork(control: socket.socket, output: socket.socket, stdin: int, close: Sequence[socket.socket]) -> int:
    """Forks the agent of this host; returns its pid. The caller has one thread, and closes these ends afterwards.

    `close` are the caller's own ends, of which the agent must hold no copy: their end is how it knows of the caller's.
    """
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for end in close:
            end.close()
        _serve(control, output, stdin)
    return pid


def _serve(control: socket.socket, output: socket.socket, stdin: int) -> NoReturn:
    """The agent, from start to end; never returns."""
    try:
        os.setsid()  # what kills the launcher's process group shall not kill the agent, which cleans up
        process.rename(b"hvdlite-agent")
        process.become_subreaper()
        stdin = os.dup(stdin) if stdin >= 0 else -1  # not inherited
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # held open, they would keep the reader of the launcher's output waiting
            os.dup2(null, standard)
        os.close(null)
        agent.Agent(control, output, stdin).run()
    except BaseException:
        import traceback  # late: slow to import, and hopefully never needed

        try:
            text = json.dumps({"what": "broken", "text": coded("HVD901", traceback.format_exc())})
            control.sendall(framing.Session().pack(agent.CONTROL, text.encode()))
        finally:
            os._exit(1)
    os._exit(0)
