"""A rank's end: what it has asked servers and pushed to them, and what of that is not answered yet.

No thread: a caller that waits does the work, and ZeroMQ's own thread moves bytes and heartbeats meanwhile. Several
threads may call. One of those that wait watches the sockets and notifies the others when something has come; none waits
with the lock. A request without an answer is sent again under its number after 1, 2, 4, 8 s, so a lost message or a
broken connection changes nothing. A push goes to every server that holds a copy of its rows, and is done when all of
these that are alive have confirmed it.

Only the process that has started a server reports it dead, since it has seen it end: two ranks never disagree about it.
A server that is silent for HVDLITE_PEER_TIMEOUT is an error of the rank that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from ..errors import HvdError, HvdInitError, HvdPeerLostError
from ..errors.codes import uncoded
from ..lifecycle import init
from ..security import curve
from ..system.interrupts import Deferred
from . import messages
from .pending_requests import Link, Question, Sent
from .protocol import WINDOW
from .server import SILENCE_MS, send
from .socket_watch import SocketWatch
from .staleness_wait import Limits

_AGAIN_MAX = 8  # times that
_SLICE_S = 0.05  # of a wait, after which other news is looked at
WINDOW_BYTES = 32 << 20  # of pushes to one server that are not done


class Client:
    """All links of this rank. A thread that uses sockets or changes this object holds `lock`, and does not wait
    then."""

    AGAIN_S = 1.0  # until a message is sent again, at first

    def __init__(
        self, rank: int, addresses: Sequence[str], secret: bytes, session: int, encrypted: bool, limits: Limits
    ) -> None:
        self._zmq = curve.zmq_for("hvd.ps")
        self.rank, self.session, self.limits, self.servers = rank, session, limits, len(addresses)
        self._context, self._watch = self._zmq.Context(), SocketWatch()
        self._links: list[Link] = []
        keys = curve.Keys(secret, "ps", self._zmq)
        for number, address in enumerate(addresses):
            dealer = self._context.socket(self._zmq.DEALER)
            curve.bounded(dealer, SILENCE_MS)
            dealer.linger = 0
            dealer.setsockopt(self._zmq.ROUTING_ID, b"%d" % rank)
            if encrypted:
                keys.connect_to(dealer, number)
            keys.connect(dealer, address)
            self._watch.register(dealer.FD)
            self._links.append(Link(dealer))
        self.lock = threading.RLock()
        self._came = threading.Condition(self.lock)  # something has come, or no thread watches any more
        self._watched_until = 0.0  # a thread waits for the sockets
        # Wakes it: another thread has used the sockets, which takes its news.
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._watch.register(self._rung.fileno())
        self.tables: list[Any] = []
        self.folders: dict[str, str] = {}  # to which a table is being saved
        self.failed: Exception | None = None
        self._numbers, self._look = 0, 0.0
        self.bytes_out = self.bytes_in = self.messages_out = self.messages_in = self.sent_again = 0

    # ---- one message

    def alive(self) -> list[int]:
        """Numbers of the servers that have not ended."""
        return [number for number, link in enumerate(self._links) if not link.ended]

    def is_alive(self) -> Any:
        """bool [servers]."""
        return np.array([not link.ended for link in self._links])

    def pushes_to(self, server: int) -> int:
        """How many numbers of pushes to this server were given out."""
        return self._links[server].pushes

    def _put(self, server: int, frames: list[Any]) -> None:
        self.check()
        self.bytes_out += send(self._links[server].socket, frames)
        self.messages_out += 1
        self._ring()

    def _head(self, kind: int, server: int, **more: Any) -> bytes:
        return messages.pack(kind, self.rank, server, self.session, **more)

    def _ask(self, question: Question, server: int, kind: int, number: int, frames: list[Any], where: Any) -> None:
        link = self._links[server]
        if not any(link.sent.values()):
            link.last_received = time.monotonic()  # it had nothing to send
        question.left += 1
        link.sent[kind][number] = Sent(question, frames, where, self.AGAIN_S)
        self._put(server, frames)

    def pull(self, question: Question, server: int, ids: Any, where: Any) -> None:
        """Asks for rows, of one piece at most; they go to question.rows[where]. Called with the lock."""
        self._numbers += 1
        head = self._head(
            messages.PULL, server, table=question.table.number, number=self._numbers, clock=question.clock,
            rows=len(ids), after=self._links[server].pushes,
        )  # fmt: skip
        self._ask(question, server, messages.PULL, self._numbers, [head, ids], where)

    def push(self, question: Question, server: int, table: int, clock: int, body: list[Any], flags: int = 0) -> None:
        """Sends rows' gradients, of one piece at most. Waits while too many pushes to this server are not done."""
        link = self._links[server]

        def sent() -> bool:
            if len(link.sent[messages.PUSH]) >= WINDOW or link.push_bytes >= WINDOW_BYTES:
                return False
            if not link.ended:
                link.pushes += 1
                link.push_bytes += sum(each.nbytes for each in body)
                head = self._head(
                    messages.PUSH, server, table=table, number=link.pushes, clock=clock, flags=flags,
                    rows=len(body[0]) if body else 0, rate=question.table.lr or 0.0,
                )  # fmt: skip
                self._ask(question, server, messages.PUSH, link.pushes, [head, *body], None)
            return True

        self.until(sent)

    def ask(self, server: int, do: str, table: int = 0, **more: Any) -> Any:
        """What a server answers; None: it has ended. A server answers one call of a rank at a time."""
        link, question = self._links[server], Question()

        def sent() -> bool:
            if link.sent[messages.CALL]:
                return False
            if not link.ended:
                self._numbers += 1
                head = self._head(messages.CALL, server, table=table, number=self._numbers)
                body = json.dumps({"do": do, **more}).encode()
                self._ask(question, server, messages.CALL, self._numbers, [head, body], None)
            return True

        self.until(sent)
        self.wait(question)
        return question.answer

    def call(self, server: int, do: str, table: int = 0, **more: Any) -> Any:
        """Asks a server to do something, and waits for it. Raises what it could not do."""
        answer = self.ask(server, do, table, **more)
        if answer is None:
            raise HvdPeerLostError(f"{self._links[server].ended} during the request {do} [HVD029]")
        if "error" in answer:
            text = f"server {server}: {answer['error']}"
            raise ValueError(text) if "[HVD034]" in text else HvdError(text)
        return answer

    # ---- waiting

    def check(self) -> None:
        """Raises what a server or the job has failed by."""
        if self.failed is not None:
            raise self.failed

    def wait(self, question: Question) -> None:
        """Until it is answered."""
        self.until(lambda: not question.left)

    def until(self, over: Callable[[], bool]) -> None:
        """Does what is to be done until that is so. over() is called with the lock and must not wait. Call this without
        the lock. Raises what a server or the job has failed by."""
        with Deferred() as whole, self.lock:
            try:
                while not over():
                    if self._is_watched():
                        self._rest(whole, lambda: self._came.wait(_SLICE_S))
                        self.check()
                    elif not self.turn():
                        self._rest(whole, self._watch_sockets)
            finally:
                self._came.notify_all()

    def _rest(self, whole: Deferred, wait: Callable[[], Any]) -> None:
        """Waits, and lets Ctrl-C interrupt that. The lock is held before and afterwards, and not while it waits."""
        try:
            whole.open()
            wait()
        finally:
            whole.close()
            self._hold()

    def _watch_sockets(self) -> None:
        self._watched_until = time.monotonic() + 2 * _SLICE_S
        self.lock.release()
        ready = self._watch.wait(1000 * _SLICE_S)
        self._hold()
        self._watched_until = 0.0
        if self._rung.fileno() in ready:
            with contextlib.suppress(BlockingIOError):  # another thread's watch has just ended, too
                self._rung.recv(4096)

    def _hold(self) -> None:
        """Takes the lock again, if a wait has not, since it was interrupted."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.acquire()

    def _is_watched(self) -> bool:
        """A thread waits for the sockets. One that was interrupted has not reported its end."""
        return time.monotonic() < self._watched_until

    def _ring(self) -> None:
        if self._watched_until:
            with contextlib.suppress(BlockingIOError):  # it rings already
                self._bell.send(b"\0")

    def turn(self) -> bool:
        """Takes what has come, and sends again what is due. Whether something had come. Called with the lock."""
        self.check()
        before = self.messages_in
        for server, link in enumerate(self._links):
            for frames in link.received():
                head = messages.unpack(frames[0].buffer, server)
                if head is not None and head.session == self.session:
                    self.bytes_in += sum(len(each) for each in frames)
                    self.messages_in += 1
                    link.last_received = time.monotonic()
                    self._take(server, head, [each.buffer for each in frames[1:]])
        self._ring()
        if self.messages_in != before:
            self._came.notify_all()
        self.check()
        now = time.monotonic()
        if now >= self._look:
            if now - self._look > self.AGAIN_S:  # this rank did something else: it has not listened
                for link in self._links:
                    link.last_received = now
            self._look = now + _SLICE_S
            _core.raise_failure()
            self._send_again(now)
        return self.messages_in != before

    def _send_again(self, now: float) -> None:
        for server, link in enumerate(self._links):
            waiting = [sent for of_kind in link.sent.values() for sent in of_kind.values()]
            if waiting and not link.ended and now - link.last_received > self.limits.peer:
                self._fail(
                    f"server {server} of tables has said nothing for {self.limits.peer:g} s (HVDLITE_PEER_TIMEOUT sets "
                    "the limit): it is stopped, or its host cannot be reached"
                )
                return
            if waiting and now - link.last_received > 2 * self.AGAIN_S and self.tables:
                self.ask_clock(0)  # of the other servers, which also report whether it has ended
            for sent in waiting:
                if now - sent.at >= sent.wait:
                    sent.at, sent.wait = now, min(2 * sent.wait, _AGAIN_MAX * self.AGAIN_S)
                    self.sent_again += 1
                    self._put(server, sent.frames)

    def _take(self, server: int, head: messages.Head, frames: list[Any]) -> None:
        link = self._links[server]
        if head.kind == messages.DONE:
            pushes = link.sent[messages.PUSH]
            for number in [number for number in pushes if number <= head.number]:
                link.push_bytes -= sum(each.nbytes for each in pushes[number].frames[1:])
                pushes.pop(number).question.left -= 1
        elif head.kind == messages.ROWS:
            sent = link.sent[messages.PULL].pop(head.number, None)
            if sent is not None:  # else an answer that came twice
                question = sent.question
                question.rows[sent.where] = np.frombuffer(frames[0], np.float32).reshape(head.rows, -1)
                question.left -= 1
        elif head.kind in (messages.CLOCK, messages.WAITS):
            self.tables[head.table].on_clock(server, head.clock, np.frombuffer(frames[0], np.int64) if frames else None)
        elif head.kind == messages.ANSWER:
            sent = link.sent[messages.CALL].pop(head.number, None)
            if sent is not None:
                sent.question.answer, sent.question.left = json.loads(bytes(frames[0])), 0
        elif head.kind == messages.REFUSED:
            self.failed = messages.refusal(head, bytes(frames[0]).decode())
        elif head.kind == messages.GONE:
            self.server_ended(int(head.number), bytes(frames[0]).decode())

    # ---- servers that end

    def server_ended(self, server: int, text: str) -> None:
        """Its process has ended: what waits for it goes to the copies, or fails."""
        link = self._links[server]
        if link.ended:
            return
        link.ended = uncoded(text)
        self._watch.unregister(link.socket.FD)
        ended = [each for each in self._links if each.ended]
        single = next((table.name for table in self.tables if table.replicas < 2), None)
        if len(ended) > 1 or single is not None:
            texts = "; ".join(each.ended for each in ended)
            lost = f"its rows of table {single!r} are lost, because they have no copy (replicas=1)"
            lost = lost if single is not None else "both copies of some rows are lost (replicas=2)"
            self._fail(f"{texts}: {lost}")
            return
        if self.rank == 0:
            note = f"{link.ended}: its rows are read from their copies; the loss of a second server would end the job"
            print(f"hvdlite: {note} [HVD030]", file=sys.stderr, flush=True)
        kinds, link.sent = link.sent, {kind: {} for kind in link.sent}
        for sent in (each for of_kind in kinds.values() for each in of_kind.values()):
            sent.question.left -= 1
            if sent.where is not None:  # a pull; the server with the copy of a push has it, or will
                where = np.arange(len(sent.question.rows))[sent.where]
                sent.question.table.pull_pieces(sent.question, np.asarray(sent.frames[1]), where)

    def _fail(self, text: str) -> None:
        self.fail(HvdPeerLostError(f"{text} [HVD029]"), f"needs rows that are lost: {text}")

    def fail(self, error: Exception, what: str) -> None:
        """The job cannot go on: ranks that wait for something else get the error, too."""
        self.failed = error
        init.abort(what)

    def ask_clock(self, table: int) -> None:
        """The slowest worker's clock was announced when it changed; that may have been lost."""
        for server in self.alive():
            self._put(server, [self._head(messages.CLOCK, server, table=table)])

    def join_job(self, job: int, workers: int) -> None:
        """Greets every server. HvdInitError names those that do not answer in time."""
        question = Question()
        hello = json.dumps({"do": "hello", "job": job, "workers": workers}).encode()
        until = time.monotonic() + self.limits.start
        with self.lock:
            self._numbers += 1
            for server in range(self.servers):
                head = self._head(messages.CALL, server, number=self._numbers)
                self._ask(question, server, messages.CALL, self._numbers, [head, hello], None)

        def met() -> bool:
            ended = "; ".join(link.ended for link in self._links if link.ended)
            if ended:
                raise HvdInitError(f"{ended} before the first table was created [HVD024]")
            waited = [k for k, link in enumerate(self._links) if link.sent[messages.CALL]]
            if waited and time.monotonic() > until:
                raise HvdInitError(
                    f"parameter server {', '.join(map(str, waited))} did not answer within {self.limits.start:g} "
                    "s (HVDLITE_START_TIMEOUT sets the limit) [HVD024]"
                )
            return not waited

        self.until(met)

    def flush(self, seconds: float = 1e9) -> None:
        """Until all pushes are done, at most so long."""
        until = time.monotonic() + seconds
        self.until(lambda: not any(link.sent[messages.PUSH] for link in self._links) or time.monotonic() > until)

    def close(self) -> None:
        """No call may follow; one that another thread waits for raises HvdError."""
        with self.lock:
            self.failed = self.failed or HvdError(
                "the job was shut down while a call to servers was under way [HVD035]"
            )
            self._ring()
            self._context.destroy(linger=0)
            for each in (self._bell, self._rung):
                each.close()
