"""Store server: the TCP server of the rendezvous, in the launcher. Client: hvdlite/rendezvous/store_client.py.

It knows three things. The ranks that have joined each epoch (the epoch of a rank is how many times it has joined
before; an epoch opens when all ranks are in it); the allgather round that an open epoch is in; and the ranks that are
gone. Each rank keeps its connection as long as its epoch lasts, so the end of a connection without a BYE is a death.
The first loss ends an epoch: all ranks in it, and those that join it later, get the lost rank and the reason, once.
Parameter servers connect here, too (parameter_servers.py), and the workers of an engine, to report how a rank has ended
that is not in the job (hvdlite/executors/driver.py).

One thread, no blocking call: `turn` serves what is ready, `deadline` says when it must be called at the latest,
`fileno` (an epoll) lies in the launcher's own loop. No connection is trusted before the handshake;
hvdlite/security/connection_limits.py bounds those that wait for it. A frame's size is bounded before it is read, and
what a slow reader makes us keep is bounded too.

Deliberately not here: processes (the launcher tells us of their ends by `rank_ended`), and what the ranks exchange.
"""

from __future__ import annotations

import errno
import json
import select
import selectors
import socket
import time
from typing import Callable

from hvdlite.errors import HvdInitError
from hvdlite.security import connection_limits, framing, handshake
from hvdlite.system import open_files

from .connection import FIRST_MAX, Connection
from .elastic_membership import Membership
from .epochs import LOST_CODE, Epochs, OnLate, Refusal, SendFrame
from .parameter_servers import Serving

KEPT_MAX = 64 << 20  # bytes waiting for one reader

OnAbort = Callable[[int, int, int, str], None]


class StoreServer:
    """The server, at one address of this host: loopback, or for a job on several hosts one that all of them reach.

    `on_abort(reporter, culprit, code, text)` is called for every abort record of a rank, and where ranks are missing at
    the time limit `on_late(waiting, missing, text)` instead. port: 0 for any. servers, aggregators: how many there
    are. membership: of an elastic job. Raises OSError, also where this process may not open so many files."""

    def __init__(
        self,
        size: int,
        secret: bytes,
        job: int,
        on_abort: OnAbort | None = None,
        on_late: OnLate | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        servers: int = 0,
        aggregators: int = 0,
        membership: Callable[[SendFrame], Membership] | None = None,
    ) -> None:
        try:  # a connection to each rank, and pipes
            open_files.allow(3 * (size + servers + aggregators), "the launcher", f"to hear of {size} ranks")
        except HvdInitError as error:
            raise OSError(errno.EMFILE, str(error)) from None
        self._secret = secret
        self._on_abort = on_abort
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        both = address == "::"  # all addresses: those of IPv4, too
        self._listener = socket.create_server((address, port), family=family, backlog=512, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self._selector = selectors.EpollSelector() if hasattr(select, "epoll") else selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[Connection] = []  # oldest first; those that have not proved the secret
        self._guests: list[Connection] = []  # those that have, and are about to say JOIN
        self._members: dict[int, Connection] = {}  # the live connection of each rank
        self._watchers: list[Connection] = []
        self.left: set[int] = set()  # ranks that have sent LEAVING or BYE and have not joined again
        self._epochs: Epochs | Membership = (
            membership(self._send_frame)
            if membership
            else Epochs(size, job, self._send_frame, on_late, servers, aggregators)
        )
        self.servers = Serving(self._epochs if isinstance(self._epochs, Epochs) else None, self._send)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: (host, port)."""
        return self._listener.getsockname()[:2]

    @property
    def peopled(self) -> bool:
        """Whether a rank is connected."""
        return bool(self._members)

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""
        return self._selector.fileno()

    def deadline(self) -> float | None:
        """The time.monotonic() by which `turn` must be called even if nothing is readable; None: no limit."""
        times = [c.deadline for c in self._strangers[:1] + self._guests[:1] if c.deadline is not None]
        due = self._epochs.deadline()
        return min(times + ([due] if due is not None else []), default=None)

    def turn(self, timeout: float | None = 0.0) -> None:
        """Serves what is ready, waiting at most `timeout` seconds for something to become so."""
        due = self.deadline()
        if due is not None:
            left = max(0.0, due - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.open:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and key.data.open:
                    self._read(key.data)
        now = time.monotonic()
        for connection in [c for c in self._strangers + self._guests if c.deadline is not None and c.deadline <= now]:
            self._close(connection)
        self._epochs.tick(now)

    def rank_ended(self, rank: int, text: str, finished: bool = False) -> None:
        """The launcher saw the rank's process end; `text` says how. No-one waits for it any longer."""
        self.receive_from(rank)
        if isinstance(self._epochs, Membership):
            self._epochs.ended(rank, text, finished)
        else:
            self._epochs.ended(rank, text)

    def who(self, rank: int) -> str:
        """`rank 1 (pid 7 on host)`, as far as its JOIN has them."""
        try:
            return self._epochs.who(rank)
        except KeyError:
            return f"rank {rank}"

    def receive_from(self, rank: int) -> None:
        """Its last words (an ABORT, a BYE) come before its end."""
        connection = self._members.get(rank)
        if connection is not None:
            self._read(connection)

    def news(self) -> None:
        """Sends the membership of now to those that watch."""
        for connection in list(self._watchers):
            self._inform(connection)

    def _inform(self, connection: Connection) -> None:
        assert connection.session is not None
        self._send(connection, connection.session.pack(framing.NEWS, json.dumps(self._epochs.news()).encode()))

    def close(self) -> None:
        known = [*self._members.values(), *self.servers.connections.values()]
        for connection in self._strangers + self._guests + self._watchers + known:
            self._close(connection, silently=True)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            for sock in connection_limits.accepted(self._listener, lambda: self._strangers, self._close):
                connection = Connection(sock, connection_limits.limit())
                self._strangers.append(connection)
                self._selector.register(sock, selectors.EVENT_READ, connection)
                self._send(connection, connection.greeting)
        except OSError:  # out of descriptors: the listener stays readable, and the caller comes again at once
            time.sleep(connection_limits.NO_DESCRIPTOR_S)

    def _read(self, connection: Connection) -> None:
        """Everything up to a megabyte that this client has sent; more waits for the next turn."""
        for _ in range(16):
            known = connection.session is not None or connection.closing
            want = 65536 if known else handshake.ANSWER_BYTES - len(connection.answer)
            try:
                chunk = connection.sock.recv(want)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._close(connection, why=connection.end())
                return
            if connection.closing:
                continue
            if connection.session is None:
                self._check(connection, chunk)
            else:
                try:
                    for kind, body in connection.reader.feed(chunk):
                        self._frame(connection, kind, body)
                        if not connection.open or connection.closing:
                            break
                except (framing.WireError, Refusal) as error:
                    self._refuse(connection, str(error))
            if not connection.open:
                return

    def _check(self, connection: Connection, chunk: bytes) -> None:
        connection.answer += chunk
        if len(connection.answer) < handshake.ANSWER_BYTES:
            return
        try:
            ends = handshake.ends_of(connection.sock, connects=False)
        except OSError:  # it has gone
            self._close(connection)
            return
        verdict, session = handshake.judge(self._secret, handshake.STORE, ends, connection.greeting, connection.answer)
        if session is None:
            connection.closing = True
        else:
            connection.session, connection.reader = session, framing.FrameReader(session, FIRST_MAX)
            self._strangers.remove(connection)
            self._guests.append(connection)
        self._send(connection, verdict)

    def _frame(self, connection: Connection, kind: int, body: bytes) -> None:
        if connection.listens:
            raise Refusal(f"a watcher or a server sends no frames, but sent one of kind {kind} [HVD112]")
        if connection.rank is None and kind in (framing.WATCH, framing.SERVE):
            if kind == framing.SERVE:
                self.servers.come(connection, body)
            else:
                self._watched(body)
            connection.listens, connection.deadline = True, None
            self._guests.remove(connection)
            if kind == framing.WATCH:
                self._watchers.append(connection)
                self._inform(connection)
        elif connection.rank is None and kind == framing.ENDED:
            rank, _, text = framing.unpack_end(body)
            if not isinstance(self._epochs, Epochs) or not 0 <= rank < self._epochs.size:
                raise Refusal(f"there is no rank {rank} in this job that could have ended [HVD119]")
            self.rank_ended(rank, text)
            self._close(connection)
        elif connection.rank is None:
            if kind != framing.JOIN:
                raise Refusal(f"the first frame must be JOIN, not kind {kind} [HVD112]")
            self._join(connection, body)
        elif kind == framing.ALLGATHER:
            self._epochs.contribute(connection.rank, *framing.unpack_round(body))
        elif kind == framing.ABORT:
            culprit, code, text = framing.unpack_end(body)
            culprit = self._epochs.named(connection.rank, culprit)
            if self._on_abort is not None and not self._epochs.given_up(connection.rank):
                self._on_abort(connection.rank, culprit, code, text)
            self._epochs.aborted(connection.rank, culprit, code, text)
        elif kind == framing.LEAVING:
            self.left.add(connection.rank)
        elif kind == framing.BYE:
            self.left.add(connection.rank)
            self._epochs.left(connection.rank, bool(body))
            self._close(connection)
        else:
            raise Refusal(f"a rank does not send frames of kind {kind} [HVD112]")

    def _watched(self, body: bytes) -> None:
        """A rank of an elastic job asks for news, and may tell where it is."""
        try:
            fields = json.loads(body)
            member, returned = int(fields["member"]), fields["returned"]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise Refusal("the WATCH frame is not what this launcher's version expects [HVD104]") from None
        if isinstance(self._epochs, Membership):
            self._epochs.trains(member, None if returned is None else bool(returned))

    def _join(self, connection: Connection, body: bytes) -> None:
        try:
            fields = json.loads(body)
            rank, pid = int(fields["rank"]), int(fields["pid"])
            size, timeout = int(fields["size"]), float(fields.get("timeout", 30.0))
            build = (str(fields["version"]), str(fields["wire"]))
            host, commit = str(fields.get("host", ""))[:64], int(fields.get("commit", -1))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise Refusal("the JOIN frame is not what this launcher's version expects [HVD104]") from None
        living = self._members.get(rank)
        if living is not None:
            self._read(living)  # its BYE may lie unread beside the new JOIN
        self._epochs.check(rank, size, pid, build, rank in self._members)
        connection.rank = rank
        connection.deadline = None
        connection.reader.limit = framing.FRAME_MAX
        self._guests.remove(connection)
        self._members[rank] = connection
        self.left.discard(rank)
        self._epochs.join(rank, pid, build, timeout if 0 < timeout < 1e7 else 30.0, host, commit)

    def _send_frame(self, rank: int, kind: int, body: bytes) -> None:
        connection = self._members.get(rank)
        if connection is not None and connection.session is not None:
            self._send(connection, connection.session.pack(kind, body))

    def _refuse(self, connection: Connection, text: str) -> None:
        if connection.rank is not None:
            name = self._epochs.who(connection.rank)
            self._epochs.aborted(connection.rank, connection.rank, LOST_CODE, f"{name}: {text}")
        connection.closing = True
        connection.deadline = connection.deadline or connection_limits.limit()
        if connection.session is not None:
            text_bytes = text.encode("utf-8", "replace")[: framing.TEXT_MAX]
            self._send(connection, connection.session.pack(framing.REFUSED, text_bytes))

    def _send(self, connection: Connection, message: bytes) -> None:
        if not connection.open:
            return
        if len(connection.unsent) + len(message) > KEPT_MAX:
            self._close(connection)
            return
        sent = 0
        if not connection.unsent:  # mostly all of it leaves, and is copied nowhere
            try:
                sent = connection.sock.send(message)
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return
        connection.unsent += memoryview(message)[sent:]
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.sock.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if connection.closing and not connection.unsent:
            self._close(connection)
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != interest:
            self._selector.modify(connection.sock, interest, connection)

    def _close(self, connection: Connection, silently: bool = False, why: str = "") -> None:
        if not connection.open:
            return
        connection.open = False
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for waiting in (self._strangers, self._guests, self._watchers):
            if connection in waiting:
                waiting.remove(connection)
        self.servers.forget(connection)
        if connection.rank is not None and self._members.get(connection.rank) is connection:
            del self._members[connection.rank]
            if not silently:
                self._epochs.disconnected(connection.rank, why)
