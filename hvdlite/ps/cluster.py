"""Servers of this job: their addresses and their end. All ranks ask together, once, for the first table.

Under hvdlite-run --servers the launcher has started them, and the ranks got their addresses at the rendezvous. Under
srun, mpirun, torchrun and alone, ranks start them as children: server k belongs to the first rank of host k mod hosts.
That rank sees it end (a thread waits for it), and reports it to the other servers, which report it to all ranks. A rank
that has servers leaves as others do, and its process stays until they have left, too.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from typing import Any

from .. import config
from .._api import allgather_object, broadcast_object, cross_rank, cross_size, local_rank, rank, size
from ..errors import HvdError, HvdInitError, HvdPeerLostError
from ..errors.codes import coded
from ..lifecycle import engine_options, init
from ..process_sets import open
from ..security import curve, signed_pickle
from ..system import python_command
from . import messages
from .client import Client
from .staleness_wait import Limits

_LINGER_MS = 2000


class _Child:
    """A server that this rank has started. Its end is reported unless `expected`."""

    def __init__(self, number: int, order: dict[str, Any], patience: float) -> None:
        words = python_command.words("hvdlite.ps.server_child", "main()")
        self.number, self.expected = number, False
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({**order, "number": number}).encode() + b"\n")
            self._process.stdin.flush()
        came, _, _ = select.select([self._process.stdout], [], [], patience)
        self.address = self._process.stdout.readline().decode().strip() if came else ""
        if not self.address:
            self.end()
            how = "did not start in time" if not came else f"ended while it started ({_how(self._process.wait())})"
            raise HvdInitError(f"parameter server {number} on host {socket.gethostname()} {how} [HVD024]")

    def watch(self, report: Any) -> None:
        """Calls tell(number, text) when it has ended."""

        def wait() -> None:
            code = self._process.wait()
            if not self.expected:
                report(self.number, f"server {self.number} (pid {self._process.pid}{_host()}) {_how(code)}")

        threading.Thread(target=wait, name=f"hvdlite-server-{self.number}", daemon=True).start()

    def end(self) -> None:
        """It has nothing to lose: tables are in memory, and saves are whole."""
        self.expected = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def _host() -> str:
    return f", host {socket.gethostname()}" if cross_size() > 1 else ""


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


class _Serving:
    """Servers and keys of this incarnation of the job."""

    def __init__(self, addresses: list[str], children: list[_Child], secret: bytes, job: int, session: int) -> None:
        settings = config.load()
        values, (warn, end) = settings.values, settings.stall_limits()
        limits = Limits(values["peer_timeout"], warn, end, values["start_timeout"])
        self._encrypted, self._patience = values["ps_curve"], values["leave_timeout"]
        self.addresses, self._children, self._secret = addresses, children, secret
        self._session = session
        self.client = Client(rank(), addresses, secret, session, self._encrypted, limits)
        self.client.join_job(job, size())
        for each in children:
            each.watch(self._report)
        init.closers.append(self._close)

    def _report(self, number: int, text: str) -> None:
        """A child has ended. The client may be waiting in another thread, so this one has sockets of its own."""
        others = [other for other in self.client.alive() if other != number]
        if not others:
            lost = f"{text}: no parameter server is left"
            self.client.fail(HvdPeerLostError(coded("HVD029", lost)), f"lost {lost}")
            return
        zmq = curve.zmq_for("hvd.ps")
        context, keys = zmq.Context(), curve.Keys(self._secret, "ps", zmq)
        for other in others:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = _LINGER_MS  # also of one that the next replaces
            if self._encrypted:
                keys.connect_to(dealer, other)
            keys.connect(dealer, self.addresses[other])
            dealer.send_multipart(
                [messages.pack(messages.GONE, self.client.rank, other, self._session, number=number), text.encode()]
            )
        context.destroy()

    def _close(self, failed: bool) -> Any:
        """Before the ranks part. Returns what is to be done afterwards: ranks that wait for this one learn first that
        it has left, and may end by that."""
        global _serving
        _serving = None
        has_left = not failed and self._left_servers()
        for child in () if failed or has_left else self._children:  # others may still use it
            self._report(child.number, f"server {child.number} ended with rank {rank()}, which has left the job")
        return lambda: self._end(has_left)

    def _left_servers(self) -> bool:
        """Whether servers know that this rank has left, and have all that it has pushed."""
        with contextlib.suppress(HvdError):  # of a job that fails meanwhile
            for table in self.client.tables:
                table.saved(self._patience)
            self.client.flush(self._patience)
            for server in self.client.alive():
                self.client.ask(server, "bye", worker=rank())
            return True
        return False

    def _end(self, has_left: bool) -> None:
        with contextlib.suppress(HvdError):
            for child in self._children if has_left else ():
                self._wait_for_others(child.number)
        self.client.close()
        for child in self._children:
            child.end()

    def _wait_for_others(self, server: int) -> None:
        """Until all ranks have left it, or those that have not are lost: none has been connected for so long."""
        pause, seen = 0.01, time.monotonic()
        while (answer := self.client.ask(server, "left")) and answer["waiting"]:
            seen = time.monotonic() if answer["connected"] else seen
            if time.monotonic() - seen > self.client.limits.peer:
                return
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)


_serving: _Serving | None = None


def serve(servers: int | None = None) -> None:
    """Start parameter servers as child processes of the ranks. All ranks must call it with the same number.

    It is for jobs that ``hvdlite-run --servers`` does not start: those under srun, mpirun or torchrun, or a single
    script. The first ``Table`` calls it, so with ``HVDLITE_SERVERS`` set it is not needed. It does nothing if there are
    servers already.

    Args:
        servers (int, optional): the number of servers in the job. None: ``HVDLITE_SERVERS``.

    Raises:
        HvdInitError: no number is given, or a server did not start.
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        ModuleNotFoundError: pyzmq is not installed.

    Example:
        >>> hvd.ps.serve(2)  # doctest: +SKIP
        >>> # skipped in tests: it starts processes
    """
    global _serving
    rank()  # raises in a forked child, and before init
    if _serving is not None:
        return
    settings = config.load()
    curve.zmq_for("hvd.ps")
    session = time.time_ns()
    launched = list(getattr(init._state.store, "servers", ()))
    if launched:
        secret, job, _ = engine_options.of_job(settings, init._state.store, init.incarnations() - 1)
        session = broadcast_object(session, name="hvd.ps.serve")
        _serving = _Serving(launched, [], secret, job, session)
        return
    count = settings.values["servers"] if servers is None else servers
    nonce, job, session, count = broadcast_object(
        (os.urandom(32), int.from_bytes(os.urandom(7), "little"), session, count), name="hvd.ps.serve"
    )
    secret = hmac.digest(signed_pickle.current().key, nonce, "sha256")  # what is broadcast may be read on the way
    if count < 1:
        raise HvdInitError(
            "hvd.ps.Table: this job has no servers: start it with hvdlite-run --servers 2, or set HVDLITE_SERVERS"
            " [HVD024]"
        )
    children, addresses = _started(count, secret, job, settings)
    try:
        _serving = _Serving(addresses, children, secret, job, session)
    except BaseException:
        for each in children:
            each.end()
        raise


def _started(count: int, secret: bytes, job: int, settings: config.Settings) -> tuple[list[_Child], list[str]]:
    """This rank's children, and all servers' addresses. Raises on every rank where one did not start."""
    values, children, failed = settings.values, list[_Child](), None
    order = {"servers": count, "secret": secret.hex(), "job": job, "encrypted": values["ps_curve"]}
    order["host"] = open.address()
    try:
        for number in range(cross_rank(), count, cross_size()) if local_rank() == 0 else ():
            children.append(_Child(number, order, values["start_timeout"]))
    except (HvdInitError, OSError) as error:
        failed = str(error)
    of_all = allgather_object(({each.number: each.address for each in children}, failed), name="hvd.ps.addresses")
    texts = [text for _, text in of_all if text is not None]
    if texts:
        for each in children:
            each.end()
        raise HvdInitError(coded("HVD024", texts[0]))
    found = {number: where for part, _ in of_all for number, where in part.items()}
    return children, [found[number] for number in range(count)]


def client() -> Client:
    """This rank's. Collective where there is none yet."""
    serve()
    assert _serving is not None
    return _serving.client


def current() -> Client | None:
    """This rank's, or None where there is none."""
    return None if _serving is None else _serving.client
