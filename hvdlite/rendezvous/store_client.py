"""Client of the rendezvous store: connect, allgather, report a failure.

`connect` proves that both sides know the job's secret, joins the job and returns once every rank has joined;
`allgather` then exchanges bytes as often as needed. Afterwards the connection stays open as long as the job runs:
if a rank's connection ends without a `bye`, the store reports that rank as lost.

The thread that calls `hvdlite.init` is the only caller. While the C engine runs, it owns the socket (it writes ABORT
frames and reads LOST frames), so nothing here reads a byte beyond the frame that it returns, and nothing is kept in a
buffer between calls. Frames are signed and counted, and the core borrows keys and counts together with the socket. The
descriptor is non-blocking; waiting is done by poll, which Ctrl-C interrupts.

Deliberately not here: reconnecting (a lost store is a lost job), threads, and any knowledge of what is exchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from ..errors import HvdInitError, HvdPeerLostError, HvdRemoved, let_out
from ..errors.codes import coded
from ..security import framing, handshake

_RETRY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_ANSWER_S = 5.0  # how long the store has to answer during the handshake
_FOR_EVER_S = 1e6
_SLACK_S = (
    2.0  # the store names the missing ranks at the time limit; a client without an answer gives up this much later
)


class Rendezvous(Protocol):
    """The rendezvous of ranks, and their connection afterwards: a Store, or MPI's World."""

    job: int
    epoch: int
    secret: bytes  # the job's, where the option gives none
    failed: bool  # whether the job has; set before `bye`
    servers: Sequence[str]  # addresses of those that hold tables; none: the launcher has started none
    aggregators: Sequence[str]  # the same of aggregators; "": it has ended

    def allgather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes in rank order. Blocks."""
        ...

    def lend(self) -> int:
        """An MPI communicator for the tensors of the job; 0 where there is none."""
        ...

    def fileno(self) -> int:
        """A connection that the core borrows, or -1."""
        ...

    def session(self) -> framing.Session | None:
        """What signs the frames on that connection; None: nothing does."""
        ...

    def check(self) -> None:
        """Raises what is known of ranks that have ended."""
        ...

    def abort(self, culprit: int, code: int, text: str) -> None:
        """Reports to the other ranks why the job ends, if there is a way."""
        ...

    def bye(self) -> None:
        """Leaves cleanly."""
        ...

    def close(self) -> None:
        """Leaves without a word."""
        ...


class Store:
    """A rank's connection to the store. Made by `connect`."""

    def __init__(self, sock: socket.socket, session: framing.Session, rank: int, size: int, timeout: float) -> None:
        self._sock: socket.socket | None = sock
        self._session = session
        self._timeout = timeout
        self._round = 0
        self.rank = rank
        self.unfit = False  # a newcomer whose state is of another form: its end loses no rank
        self.size = size
        self.epoch = 0  # how many times this rank had joined the job before
        self.job = 0  # the job's number, the same on all ranks
        self.secret = bytes(32)  # the option's is used
        self.failed = False  # whether the job has; set before `bye`
        self.local_rank = self.local_size = -1  # of a member of an elastic job
        self.servers: Sequence[str] = ()
        self.aggregators: Sequence[str] = ()

    def lend(self) -> int:
        """0: there is no MPI."""
        return 0

    def fileno(self) -> int:
        """The connected socket, which the C core borrows; -1 after `bye`."""
        return self._sock.fileno() if self._sock is not None else -1

    def session(self) -> framing.Session:
        """The keys and counts of its frames. The owner of the socket counts in it."""
        return self._session

    def allgather(self, mine: bytes) -> list[bytes]:
        """Gives `mine`, returns every rank's bytes in rank order. Blocks.

        Raises HvdPeerLostError naming a rank that ended meanwhile, HvdInitError when the store refuses, when it is gone
        or when ranks are missing at the time limit.
        """
        self._round += 1
        self._send(framing.ALLGATHER, framing.pack_round(self._round, bytes(mine)))
        body = self._expect(framing.GATHERED, time.monotonic() + self._timeout + _SLACK_S)
        number, parts = framing.unpack_gathered(body, self.size)
        if number != self._round:
            raise HvdInitError(
                f"rank {self.rank}: the store answered round {number}, expected round {self._round} [HVD112]"
            )
        return parts

    def check(self) -> None:
        """Raises what the store has sent unasked: HvdPeerLostError where a rank has ended, HvdInitError. Never
        waits."""
        watch = select.poll()  # select() knows no descriptor above 1023
        watch.register(self._socket(), select.POLLIN)
        if watch.poll(0):
            self._expect(0, time.monotonic() + _ANSWER_S)

    def abort(self, culprit: int, code: int, text: str) -> None:
        """Reports to the store why the job ends. Best effort: raises nothing when the store is gone."""
        try:
            self._send(framing.ABORT, framing.pack_end(culprit, code, text))
        except (HvdInitError, OSError):
            pass

    def bye(self) -> None:
        """Leaves cleanly and closes the connection; may be called twice."""
        if self._sock is None:
            return
        try:
            self._send(framing.BYE, b"unfit" if self.unfit else b"")
        except (HvdInitError, OSError):
            pass
        self.close()

    def close(self) -> None:
        """Closes without a word: the others get the report that this rank is lost, unless `bye` came before."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _join(self, version: str, wire: int, commit: int | None = None) -> None:
        """commit: of a member of an elastic job, which receives rank and size; it waits as long as the store does."""
        request = {
            "rank": self.rank,
            "size": self.size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": version,
            "wire": wire,
            "timeout": self._timeout,
        }
        if commit is not None:
            request["commit"] = commit
        self._send(framing.JOIN, json.dumps(request).encode())
        patience = self._timeout + _SLACK_S if commit is None else _FOR_EVER_S
        joined = json.loads(self._expect(framing.JOINED, time.monotonic() + patience))
        self.epoch, self.job = int(joined["epoch"]), int(joined["job"])
        self.servers = [str(address) for address in joined.get("servers", ())]
        self.aggregators = [str(address) for address in joined.get("aggregators", ())]
        if commit is not None:
            self.rank, self.size = int(joined["rank"]), int(joined["size"])
            self.local_rank, self.local_size = int(joined["local_rank"]), int(joined["local_size"])

    def _expect(self, expected: int, deadline: float) -> bytes:
        kind, body = self._read_frame(deadline)
        if kind == expected:
            return body
        if kind == framing.LOST:
            culprit, _, text = framing.unpack_end(body)
            is_named = culprit < 0 or re.search(rf"\brank {culprit}\b", text)
            named = text if is_named else f"rank {culprit} ended the job: {text}"
            lost = HvdPeerLostError(coded("HVD401", named))
            lost.rank = culprit if culprit >= 0 else None  # a server's end
            raise lost
        if kind == framing.REMOVED:
            raise HvdRemoved(body.decode("utf-8", "replace"))
        if kind == framing.REFUSED:
            raise HvdInitError(coded("HVD121", f"rank {self.rank}: {body.decode('utf-8', 'replace')}"))
        raise HvdInitError(f"rank {self.rank}: the store sent a frame of kind {kind}, expected {expected} [HVD112]")

    def _read_frame(self, deadline: float) -> tuple[int, bytes]:
        try:
            head = handshake.receive(self._socket(), self._session.head_bytes, deadline)
            rest = handshake.receive(self._socket(), framing.frame_length(head, self._session), deadline)
            return self._session.opened(head + rest)
        except framing.WireError as error:
            self.close()  # nothing that comes over it can be believed
            raise HvdInitError(coded("HVD112", f"rank {self.rank}: the store sent invalid data: {error}")) from None
        except EOFError:
            raise HvdInitError(
                f"rank {self.rank}: the store closed the connection: read the launcher's output for the reason [HVD110]"
            ) from None
        except socket.timeout as error:
            let_out(error)
            raise HvdInitError(
                f"rank {self.rank}: no answer from the store within {self._timeout + _SLACK_S:g} s "
                "(HVDLITE_START_TIMEOUT sets the limit); is the launcher stopped? [HVD110]"
            ) from None
        except OSError as error:
            let_out(error)
            raise HvdInitError(f"rank {self.rank}: the connection to the store broke: {error} [HVD110]") from None

    def _send(self, kind: int, body: bytes = b"") -> None:
        sock = self._socket()
        sock.settimeout(self._timeout)
        try:
            sock.sendall(self._session.pack(kind, body))
        except OSError as error:
            let_out(error)
            raise HvdInitError(f"rank {self.rank}: the connection to the store broke: {error} [HVD110]") from None

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise HvdInitError(f"rank {self.rank} has left the store [HVD110]")
        return self._sock


def connect(
    address: str, port: int, secret: bytes, *, rank: int, size: int, version: str, wire: int, timeout: float = 30.0
) -> Store:
    """Connects to the store, proves the secret, joins the job; returns when all `size` ranks have joined.

    `timeout` in seconds bounds every wait for other ranks. Raises HvdInitError (no store there, wrong secret, refused,
    ranks missing at the time limit) or HvdPeerLostError (a rank ended before all had joined), each naming the rank.
    """
    sock, session = authenticate(address, port, secret, f"rank {rank}", time.monotonic() + timeout)
    store = Store(sock, session, rank, size, timeout)
    try:
        store._join(version, wire)
    except BaseException:
        store.close()
        raise
    return store


def connect_as(
    address: str, port: int, secret: bytes, *, member: int, commit: int, version: str, wire: int, timeout: float = 30.0
) -> Store:
    """The same for a process of an elastic job, whose rank is decided when the next epoch opens. commit: the number of
    its last one, -1 for none. Raises HvdRemoved where it is to go."""
    sock, session = authenticate(address, port, secret, f"rank {member}", time.monotonic() + timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # it may wait for long
    store = Store(sock, session, member, 0, timeout)
    try:
        store._join(version, wire, commit)
    except BaseException:
        store.close()
        raise
    return store


def ended(address: str, port: int, secret: bytes, rank: int, text: str, timeout: float) -> None:
    """Reports to the store how the function of a rank outside the job has ended, on a connection of its own.
    Returns once the store has it. Best effort: raises nothing when the store is gone."""
    limit = time.monotonic() + timeout
    try:
        sock, session = authenticate(address, port, secret, f"rank {rank}", limit)
        with sock:
            sock.sendall(session.pack(framing.ENDED, framing.pack_end(rank, 0, text)))
            with contextlib.suppress(EOFError):  # so it closes the connection
                handshake.receive(sock, 1, limit)
    except (HvdInitError, OSError):
        pass


class News:
    """A second connection, of rank 0 while it trains: has the launcher something to interrupt training for? It is only
    read, and only when asked. With `returned` it reports to the launcher that the training function has returned (None:
    has raised; False: begins again). Returns when the launcher knows. Raises HvdInitError, OSError, EOFError."""

    def __init__(
        self, address: str, port: int, secret: bytes, member: int, timeout: float, returned: bool | None = False
    ) -> None:
        limit = time.monotonic() + timeout
        self._sock, self._session = authenticate(address, port, secret, f"rank {member}", limit)
        request = {"member": member, "returned": returned}
        self._sock.sendall(self._session.pack(framing.WATCH, json.dumps(request).encode()))
        self._reader = framing.FrameReader(self._session, 4096)
        self._latest: dict[str, int] = {}
        try:
            self._sock.settimeout(timeout)
            self._take(self._sock.recv(4096))
            self._sock.setblocking(False)
        except BaseException:
            self.close()
            raise

    def _take(self, chunk: bytes) -> None:
        for _, body in self._reader.feed(chunk):
            self._latest = json.loads(body)

    def latest(self) -> dict[str, int]:
        """How many wait to come, how many are to go. What is not heard is no news: the launcher's end is heard
        elsewhere."""
        try:
            while chunk := self._sock.recv(4096):
                self._take(chunk)
        except (OSError, ValueError):
            pass
        return self._latest

    def close(self) -> None:
        self._sock.close()


def authenticate(
    address: str, port: int, secret: bytes, caller: str, deadline: float
) -> tuple[socket.socket, framing.Session]:
    """A connection on which both sides have proved the secret. caller: this side, for texts. A store under load may
    drop it: that is tried again. Raises HvdInitError."""
    failure: Exception = TimeoutError("no time left")
    attempt = 0
    while time.monotonic() < deadline:
        sock = None
        try:
            sock = socket.create_connection((address, port), timeout=max(0.01, deadline - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit = min(deadline, time.monotonic() + _ANSWER_S)
            return sock, handshake.shake_hands(sock, secret, handshake.STORE, limit)
        except (OSError, EOFError) as error:
            failure = error
            if sock is not None:
                sock.close()
            if isinstance(error, OSError):
                let_out(error)
            time.sleep(min(_RETRY_S[min(attempt, len(_RETRY_S) - 1)], max(0.0, deadline - time.monotonic())))
            attempt += 1
        except handshake.HandshakeError as error:
            assert sock is not None
            sock.close()
            raise HvdInitError(coded("HVD111", f"{caller}: {stranger(error, f'{address}:{port}')}")) from None
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    raise HvdInitError(
        f"{caller}: no store answers at {address}:{port} ({type(failure).__name__}: {failure}); "
        "is the launcher that started it still running? [HVD110]"
    )


def stranger(error: handshake.HandshakeError, where: str) -> str:
    """Why what listens there is no store of this job."""
    if error.verdict == handshake.UNKNOWN:
        return (
            f"the store at {where} refused this rank's secret: HVDLITE_SECRET_KEY, HVDLITE_SECRET_FILE or the user's "
            "key belongs to another job or user [HVD111]"
        )
    if error.verdict == handshake.FOREIGN:
        return (
            f"the program that listens at {where} is not a store of this hvdlite: install the same version for all "
            "ranks [HVD112]"
        )
    if error.verdict == handshake.RELAYED:
        return f"the store at {where}: {error}"
    return (
        f"the program that listens at {where} does not have the secret of this job: choose another port, or set the "
        "same HVDLITE_SECRET_KEY on all hosts [HVD111]"
    )
