"""`hvd.aggregation.allreduce`: one vector of all ranks through the aggregator, and what happens where that cannot be.

The core's engine frames each operation by two allreduces of a few integers. The first compares what the ranks have
passed, and says whether all can take part. The second says whether all have their result. So ranks begin together, none
begins the next operation while another still waits for this one, and all take the same way:

* The aggregator is gone or silent, on any rank: all add the same integers by the engine, with the same bits, here and
  from then on. A warning names the reason once.
* A rank gave NaN or infinities, or has joined: `hvd.allreduce` does this operation.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections import Counter
from typing import Any

import numpy as np

from .. import _core, config
from .. import numpy as hvd
from ..errors import HvdArgumentError, HvdInitError, HvdMismatchError, HvdStateError, HvdTimeoutError
from ..errors.codes import coded, uncoded
from ..errors.user_warning import warn
from ..lifecycle import engine_options, init
from ..process_sets.process_set import ProcessSet, global_process_set
from . import sockets
from .fixed_point import decode, encode, exponents
from .packet import BLOCK, BYE, RANKS_MAX, control
from .server import Server
from .switch import SERVER, SWITCH
from .worker import Worker, require

_RTO_S = 0.03
_NONE = "this job has no aggregator: start it with hvdlite-run --aggregators 1, or pass --aggregator HOST:PORT"
_busy: set[tuple[int, ...]] = set()  # ranks of process sets whose operation is in the making here
_answered: set[str] = set()  # aggregators that this process has used
_connections: dict[tuple[int, ...], _Connection] = {}  # by the ranks of a process set


class _Connection:
    """Of one process set, from its first operation to `hvd.shutdown`."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.set, self.n, self.rank = process_set, process_set.size(), process_set.rank()
        self.counts: Counter[str] = Counter()
        self.lost = ""  # why the aggregator is not used any more
        self._warned = False
        self.unfinished: tuple[Any, str, int] | None = None  # an operation that an exception has interrupted here
        self.ends: dict[int, socket.socket] = {}
        self.worker: Worker | None = None
        self.server: Server | None = None
        self._thread: threading.Thread | None = None
        self._stop: tuple[socket.socket, ...] = ()
        self.key, self.job, self.address = b"", 0, ""
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        """The first rank greets, and has the server where the switch is shared; then the others greet both."""
        root, mine, problem, gone = self.set.ranks[0], None, "", ""
        settings = config.load().values
        self._limit = settings["start_timeout"]
        try:
            self.address, self.key = _address(settings, self.set)
        except (HvdInitError, ValueError) as error:
            problem = str(error)
        known = settings["aggregator"] is None or self.address in _answered
        self._known = any(hvd.allgather_object(known, "aggregation.known", self.set))
        if self.rank == 0 and not problem:
            try:
                mine = self._begin() if self.address else None
                gone = "" if self.address else "it ended before the first operation"
            except (HvdInitError, HvdTimeoutError, OSError) as error:
                problem, gone = self._kind(error)
        given = hvd.broadcast_object(mine, root, "aggregation.meet", self.set)
        if given is not None and not problem:
            try:
                self._join(*given)
            except (HvdInitError, HvdTimeoutError, OSError) as error:
                problem, gone = self._kind(error)
        found = hvd.allgather_object((problem, gone), "aggregation.met", self.set)
        for each in [each for each, _ in found if each]:
            raise HvdInitError(coded("HVD024", each))
        for each in [each for _, each in found if each][:1]:
            self.give_up(each)
        _answered.add(self.address)

    def _kind(self, error: Exception) -> tuple[str, str]:
        """(what is wrong, why the aggregator is gone), one of them empty."""
        if isinstance(error, HvdTimeoutError):
            return "", str(error)
        what = f"rank {hvd.rank()}: the aggregator at {self.address}: "
        return f"{'' if isinstance(error, HvdInitError) else what}{error}", ""

    def _begin(self) -> tuple[str, int, int, str]:
        """The first rank's part: address, number of the job, window, and the address of the server, "" without one."""
        self.job = sockets.job_number()
        hashed, slots, capacity = self._greet(SWITCH, self.address)
        window = max(1, min(slots, capacity // self.n))  # what all ranks send at once fits the buffers
        return self.address, self.job, window, self._serve(window) if hashed else ""

    def _join(self, address: str, job: int, window: int, server: str) -> None:
        self.address, self.job = address, job
        self.worker = Worker(job, self.rank, self.n, window, bool(server), rto=_RTO_S)
        if self.rank:
            self._greet(SWITCH, address)
        if server:
            self._greet(SERVER, server)

    def _greet(self, place: int, address: str) -> tuple[int, ...]:
        self.ends[place] = sock = sockets.connected(*sockets.parsed(address))
        what = f"rank {hvd.rank()}: the {'server' if place == SERVER else 'aggregator'}"
        return sockets.greet(sock, self.key, self.job, self.n, self.rank, self._limit, what, known=self._known)

    def _serve(self, window: int) -> str:
        """Starts the thread of the server; its address. The switch learns it by a greeting from its socket."""
        switch = self.ends[SWITCH]
        sock = sockets.opened(switch.getsockname()[0])
        self.server, self._stop = Server(2 * window), (*socket.socketpair(), sock)
        what = f"rank {hvd.rank()}: the aggregator"
        sockets.greet(sock, self.key, self.job, self.n, -1, self._limit, what, switch.getpeername())
        words = (self.server, sock, self.key, self._stop[1], lambda: True)
        self._thread = threading.Thread(target=sockets.serve, args=words, name="hvdlite-aggregation", daemon=True)
        self._thread.start()
        return sockets.named(sock)

    def give_up(self, why: str) -> None:
        """The engine adds from now on, on all ranks."""
        self.lost = uncoded(why)
        if self.rank == 0:
            warn(f"the aggregator is gone: {self.lost}; the ranks add the same integers without it [HVD430]")

    def warn_of_silence(self) -> None:
        """After an operation: a shared switch that is gone changes no result, but all passes the server."""
        assert self.worker is not None
        if self.worker.counts["without switch"] and self.rank == 0 and not self._warned:
            self._warned = True
            warn(
                f"the aggregator at {self.address} is silent: the server on rank {hvd.rank()} adds without it [HVD430]"
            )

    def close(self) -> None:
        """No operation is in the making on any rank."""
        for sock in self.ends.values():
            with contextlib.suppress(ConnectionRefusedError):
                sockets.send(sock, control(BYE, self.job, self.n, self.rank).pack(self.key))
            sock.close()
        self.ends = {}
        if self._thread is not None:
            self._stop[0].close()
            self._thread.join()
        for sock in self._stop:
            sock.close()


def _address(settings: dict[str, Any], process_set: ProcessSet) -> tuple[str, bytes]:
    """Of the aggregator, "" where it has ended; and the key of its datagrams."""
    if process_set.size() > RANKS_MAX:
        raise HvdInitError(f"an aggregator serves at most {RANKS_MAX} ranks, not {process_set.size()} [HVD024]")
    store = init._state.store
    started = list(getattr(store, "aggregators", ()))
    if settings["aggregator"] is not None:
        sockets.parsed(settings["aggregator"])
        return settings["aggregator"], sockets.secret(sockets.key_of_user(settings["aggregator_key"]))
    if not started:
        raise HvdInitError(f"hvd.aggregation: {_NONE} [HVD024]")
    job = engine_options.of_job(config.load(), store, init.incarnations() - 1)
    return started[0].partition("udp://")[2], sockets.secret(job[0])


def allreduce(
    array: Any, op: int = hvd.Average, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sum or average a vector of all ranks through the aggregator of this job.

    All ranks of ``process_set`` must call it with the same shape, dtype and op. Floats travel as 32-bit integers with
    a power-of-two scale for each 256 of them. So the result has the same bits whatever is lost or late. The error of a
    sum is at most ``n**2 * 2**-30`` times the largest value among those 256. Its rounding to float32 is added to that.
    Integer sums wrap.

    If the aggregator ends or is silent for 5 s, the ranks add the same integers by ``hvd.allreduce``, from then on.
    One thread of a rank may call it at a time for each process set, in the same order on all ranks.

    Args:
        array (array): float32 or int32, any shape; of any framework whose tensors NumPy can view.
        op (int): ``hvd.Average`` (float32 only) or ``hvd.Sum``. Default: ``hvd.Average``.
        name (str, optional): name of the operation, the same on all ranks. Default: calls without a name are matched
            by their order.
        process_set (ProcessSet): ranks that take part, at most 64. Default: all ranks.

    Returns:
        numpy.ndarray: a new array of the same shape and dtype.

    Raises:
        HvdArgumentError: another dtype or op.
        HvdInitError: the job has no aggregator, or it does not answer.
        HvdMismatchError: shape, dtype or op differ between ranks.
        HvdPeerLostError: a rank was lost.
        HvdStateError: another thread of this rank is in a call for the same process set.

    Example:
        >>> hvd.aggregation.allreduce(np.float32([1.5]) * (hvd.rank() + 1), op=hvd.Sum)  # doctest: +SKIP
        array([4.5], dtype=float32)
        >>> # skipped in tests: this job has no aggregator
    """
    x = np.asarray(array)
    name = "unnamed" if name is None else name  # operations follow each other, so one name is enough
    if op not in (hvd.Average, hvd.Sum) or (op == hvd.Average and x.dtype != np.float32):
        raise HvdArgumentError(f"'{name}': the aggregator has Sum, and Average of float32; use hvd.allreduce [HVD204]")
    vector = require(x, name)
    if process_set.size() == 1:
        return hvd.allreduce(x, op=op, name=f"aggregation.{name}", process_set=process_set)
    ranks = tuple(process_set.ranks)
    if ranks in _busy:
        raise HvdStateError(f"'{name}': another thread of this rank is in hvd.aggregation.allreduce [HVD430]")
    _busy.add(ranks)
    try:
        return _reduced(process_set, x, vector, op, name)
    finally:
        _busy.discard(ranks)


def _reduced(process_set: ProcessSet, x: Any, vector: Any, op: int, name: str) -> Any:
    ranks, divisor = tuple(process_set.ranks), process_set.size() if op == hvd.Average else 1
    connection = _connections.get(ranks)
    if connection is not None:
        connection.set = process_set  # it may have been removed and added again
        if connection.unfinished is not None:  # others wait for the end of that one
            unfinished, connection.unfinished = connection.unfinished, None
            _settled(connection, *unfinished, connection.lost)
    way = _way(connection, process_set, x, vector, op, name)
    if connection is None and way == "aggregator":  # all ranks are here
        connection = _connected(process_set)
        way = "engine" if connection.lost else way
    if connection is not None:
        connection.counts[way] += 1
    if connection is None or way in ("joined", "not finite"):
        return hvd.allreduce(x, op=op, name=f"aggregation.{name}", process_set=process_set)
    add = _by_aggregator if way == "aggregator" else _by_engine
    return add(connection, vector, name, divisor).reshape(x.shape)


def stats(process_set: ProcessSet = global_process_set) -> dict[str, Any]:
    """Return what the aggregator has done for this rank.

    Args:
        process_set (ProcessSet): the set of the operations. Default: all ranks.

    Returns:
        dict: the ``aggregator``'s address; ``lost``: why it is not used any more, or ``""``; the number of
        ``operations`` by each way (aggregator, engine, not finite, joined); the ``window``; ``bytes`` sent; blocks
        ``resent``; ``server``: what it has added, on the rank that has it. Empty before the first operation.

    Example:
        >>> hvd.aggregation.stats()
        {}
    """
    connection = _connections.get(tuple(process_set.ranks))
    if connection is None:
        return {}
    found: dict[str, Any] = {"aggregator": connection.address, "lost": connection.lost}
    found["operations"] = dict(connection.counts)
    if connection.worker is not None:
        found.update(window=connection.worker.cwnd, **connection.worker.counts)
    return {**found, "server": dict(connection.server.counts)} if connection.server else found


def _connected(process_set: ProcessSet) -> _Connection:
    if not _connections:
        init.closers.append(_close)
    return _connections.setdefault(tuple(process_set.ranks), _Connection(process_set))


def _close(failed: bool) -> Any:
    """`hvd.shutdown`, before the ranks part."""
    for connection in _connections.values():
        connection.close()
    _connections.clear()
    return lambda: None


def _way(connection: _Connection | None, process_set: ProcessSet, x: Any, vector: Any, op: int, name: str) -> str:
    """How all ranks do this operation. Raises HvdMismatchError on all of them."""
    form = f"shape {x.shape}, {x.dtype}, {'Average' if op == hvd.Average else 'Sum'}"
    mark = zlib.crc32(form.encode()) & 0xFFFFFF
    finite = vector.dtype != np.float32 or bool(np.isfinite(vector).all())
    is_lost = connection is not None and bool(connection.lost)
    mine = np.array([1, not finite, is_lost, mark, mark * mark], np.int64)
    label = f"aggregation.{name}.begin"
    n, infinite, lost, once, twice = hvd.allreduce(mine, op=hvd.Sum, name=label, process_set=process_set).tolist()
    if n * twice != once * once:  # equal only where all marks are (Cauchy and Schwarz)
        forms = hvd.allgather_object(form, f"{label}.forms", process_set)
        other = next(rank for rank, each in enumerate(forms) if each != forms[0])
        first, second = (f"rank {process_set.ranks[rank]} has {forms[rank]}" for rank in (0, other))
        raise HvdMismatchError(f"'{name}': {first}, {second}; pass the same on all ranks [HVD301]")
    if lost and connection is not None and not connection.lost:
        connection.give_up("another rank does not use it any more")
    return "joined" if n < process_set.size() else "not finite" if infinite else "engine" if lost else "aggregator"


def _by_aggregator(connection: _Connection, vector: Any, name: str, divisor: int) -> Any:
    worker, problem = connection.worker, ""
    assert worker is not None
    try:
        worker.begin(vector, time.monotonic(), name, divisor)
        sockets.complete(worker, connection.ends, connection.key, lambda: _core.failure_of_job() is not None)
    except HvdTimeoutError as error:
        problem = str(error)
    except BaseException:  # its worker is not where those of the others are any more
        connection.lost = f"'{name}' was interrupted on rank {hvd.rank()}"
        connection.unfinished = vector.copy(), name, divisor
        raise
    return _settled(connection, vector, name, divisor, problem)


def _settled(connection: _Connection, vector: Any, name: str, divisor: int, problem: str) -> Any:
    """The result, once all ranks have theirs. Where one has none, the engine adds the same, and from then on."""
    label = f"aggregation.{name}.end"
    if hvd.allreduce(np.array([not problem]), op=hvd.Min, name=label, process_set=connection.set)[0]:
        connection.warn_of_silence()
        assert connection.worker is not None
        return connection.worker.result
    problems = hvd.allgather_object(problem, f"{label}.problems", connection.set)
    connection.give_up(next(each for each in problems if each))
    connection.counts.update(aggregator=-1, engine=1)
    return _by_engine(connection, vector, name, divisor)


def _by_engine(connection: _Connection, vector: Any, name: str, divisor: int) -> Any:
    """The same integers, added by the core."""
    label = f"aggregation.{name}"
    if vector.dtype == np.int32:
        return hvd.allreduce(vector, op=hvd.Sum, name=label, process_set=connection.set)
    most = hvd.allreduce(exponents(vector), op=hvd.Max, name=f"{label}.e", process_set=connection.set)
    each = np.repeat(most, BLOCK)[: len(vector)]
    total = hvd.allreduce(encode(vector, each, connection.n), op=hvd.Sum, name=label, process_set=connection.set)
    return decode(total, each, connection.n, divisor)
