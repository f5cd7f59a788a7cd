"""Driver of a job on the workers of Ray, Spark or Dask: ranks for the workers, results and errors back.

In the driver, `DriverStore` keeps the store that hvdlite-run keeps (launcher/store/server.py), in a thread, and makes
the environment of each rank. In the worker, `made` sets that environment, calls the user's function, and reports to the
other ranks how it ended: an engine catches the exception and keeps the worker, so no hook of ours sees it. What
comes of the call goes back as an `Answer`, also an exception: engines show that of any rank, among many lines of their
own. In the driver again, `WorkerAnswers` takes answers and losses as they come and raises the first that is no
consequence of another, with the traceback of its rank.

Engines stand above this (ray/, spark/, dask.py), and each adds how it places workers and how it sees that one is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .. import _core, config
from ..errors import HvdError, HvdPeerLostError, HvdRunError
from ..errors.codes import coded, uncoded
from ..lifecycle import init, uncaught
from ..rendezvous import store_client
from . import worker
from .run import error_of, packed

START_TIMEOUT_S = 600.0  # engines start workers when there is room
RETURNED, RAISED, SUFFERED = "returned", "raised", "suffered"
_GRACE_S = 1.0  # after the first failure: others that follow from it need not be waited for
_CAUSE_S = 1.5  # after a failure that must have a cause elsewhere
_TURN_S = 0.05
_REPORT_S = 3.0  # for the report of an end to reach the store
# What the driver or the engine may have of another job, for torch.distributed.
_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_PROBE = "hvdlite: returned"  # barriers of users have no name
_WAITS = re.compile(r", and waits for (?!no collective)")  # csrc/engine/stall/report_text.c
_probe: list[_core.Pending] = []
_job = threading.Lock()  # held by the job that this process is a rank of, but in Ray's actors between calls


def library(name: str, extra: str) -> Any:
    """The module of an engine. Raises ModuleNotFoundError that names our extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"hvdlite.{extra} needs the package {name}: pip install 'hvdlite[{extra}]' [HVD807]", name=error.name
        ) from None


class DriverStore:
    """The store of one job of `size` ranks, in a thread of this process. address: of this host, one that all workers
    reach. Ends with `close`, or without a reference to it. Raises OSError where it cannot listen."""

    def __init__(self, size: int, address: str, start_timeout: float = START_TIMEOUT_S) -> None:
        from ..launcher.store.server import StoreServer

        self.size, self._timeout, secret = size, start_timeout, secrets.token_bytes(32)
        self._job, self._ends, self._over = secrets.randbits(63) | 1, queue.SimpleQueue[Any](), threading.Event()
        store = StoreServer(size, secret, self._job, address=address)
        self._where, self._secret, self._process_of, self._store = store.address, secret, store.who, store
        args = (store, self._ends, self._over)
        self._thread = threading.Thread(target=_serve, args=args, name="hvdlite store", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._over.set)

    def environ(self, rank: int, local: tuple[int, int] | None = None) -> dict[str, str | None]:
        """Of this rank; None: a variable that must not be set. local: its number on its host and of how many, where
        that is known (by machine_id.host_id, never by the engine's nodes); else the ranks find out at the
        rendezvous."""
        found: dict[str, Any] = {
            "RANK": rank,
            "SIZE": self.size,
            "STORE_ADDR": self._where[0],
            "STORE_PORT": self._where[1],
            "SECRET_KEY": self._secret.hex(),
            "JOB_ID": f"{self._job:016x}",
            "START_TIMEOUT": f"{self._timeout:g}",
            "LOCAL_RANK": None if local is None else local[0],
            "LOCAL_SIZE": None if local is None else local[1],
            "CROSS_RANK": None,
            "CROSS_SIZE": None,
        }
        own = {config.PREFIX + name: None if value is None else str(value) for name, value in found.items()}
        return {**dict.fromkeys(_OTHERS), **{config.ALIAS_PREFIX + name: None for name in found}, **own}

    def who(self, rank: int) -> str:
        """`rank 1 (pid 7 on host)`, as far as it has reported it."""
        return self._process_of(rank)

    def lost(self, rank: int, why: str, who: str | None = None) -> str:
        """The engine reports that this worker is gone: the other ranks get the error, now or when they join. Returns
        the text. who: where the engine knows it; else what the rank has reported."""
        text = f"{who or self.who(rank)} is lost: {uncoded(why)}"
        self._ends.put((rank, coded("HVD450", text)))
        return text

    def emptied(self, seconds: float) -> None:
        """Waits until no rank is connected: at most so long."""
        until = time.monotonic() + seconds
        while self._store.peopled and time.monotonic() < until:
            time.sleep(_TURN_S)

    def end(self, why: str) -> None:
        """Ends the job: the next collective of each rank fails."""
        for rank in range(min(2, self.size)):  # one's end reaches all others, the other's end that one
            self.lost(rank, why)

    def close(self) -> None:
        """Ranks that are still in the job lose their store."""
        self._over.set()
        self._thread.join(5)


def _serve(store: Any, ends: queue.SimpleQueue[Any], over: threading.Event) -> None:
    """The store is for one thread only, so what the driver knows comes through the queue. No method of DriverStore: a
    thread would keep it alive."""
    while not over.is_set():
        with contextlib.suppress(queue.Empty):
            while True:
                store.rank_ended(*ends.get_nowait())
        store.turn(_TURN_S)
    with contextlib.suppress(queue.Empty):
        while True:
            store.rank_ended(*ends.get_nowait())
    store.turn()
    store.close()


class Answer(NamedTuple):
    """What came of the call on a rank. who: `(pid 7 on host)`; body: for worker.py; is_in: it has stayed in the job."""

    rank: int
    who: str
    kind: str
    body: bytes
    is_in: bool = False

    def value(self) -> Any:
        """The result. Raises HvdRunError."""
        if self.kind != RETURNED:
            raise error_of(self.body, self.who)
        return worker.result_of(self.body)


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """What users give for the environment of ranks. Raises TypeError."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: {name!r}: {value!r}: names and values must be str [HVD244]")
    return dict(env or {})


def call_of(function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> bytes:
    """For `made`. Raises TypeError where it cannot be sent."""
    if not callable(function):
        raise TypeError(f"a job needs a function, not {type(function).__name__} [HVD244]")
    return packed(function, tuple(args or ()), dict(kwargs or {}))


def made(environ: Mapping[str, str | None], call: bytes, stays: bool = False) -> Answer:
    """In a worker: makes the call as the rank of this environment, which is as before afterwards. stays: a rank whose
    call returns does not leave the job."""
    rank, process = int(environ["HVDLITE_RANK"] or 0), f"(pid {os.getpid()} on {socket.gethostname()})"
    try:
        with _alone(float(environ["HVDLITE_START_TIMEOUT"] or 0)), environment(environ):
            return _made(rank, process, call, stays, environ)
    except HvdRunError as error:
        ended(environ, error)
        return Answer(rank, process, RAISED, worker.described(error, rank))


def _made(rank: int, process: str, call: bytes, stays: bool, environ: Mapping[str, str | None]) -> Answer:
    """The same, in the environment of the rank."""
    answer, failure = None, None
    try:
        body = worker.made(call, rank)
        answer = Answer(rank, process, RETURNED, body, stays and init.is_initialized())
    except BaseException as error:
        failure = error
        tell(error)
        if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            raise
        return Answer(rank, process, SUFFERED if is_consequence(error) else RAISED, worker.described(error, rank))
    finally:
        if answer is None or not stays:
            leave()
        if not init.is_initialized():
            ended(environ, failure)
    return answer


@contextlib.contextmanager
def _alone(seconds: float) -> Iterator[None]:
    """A process is a rank of one job at a time: the next waits. A call that is left of a job which has ended may take a
    while to see it."""
    if not _job.acquire(timeout=seconds):
        raise HvdRunError(f"this process has been a rank of another job for {seconds:g} s [HVD406]")
    try:
        yield
    finally:
        _job.release()


def tell(error: BaseException) -> None:
    """Reports to the other ranks that this one ends by this exception."""
    init.abort(_raised(error), error)


def _raised(error: BaseException) -> str:
    return f"raised {uncaught.describe(type(error), error, error.__traceback__)}"


def ended(environ: Mapping[str, str | None], error: BaseException | None) -> None:
    """Reports to the store that the function of this rank has ended outside the job: ranks that wait for it in init()
    would not learn of it otherwise. A consequence of another failure is not reported."""
    if error is not None and is_consequence(error):
        return
    where = [environ.get(config.PREFIX + name) or "" for name in ("STORE_ADDR", "STORE_PORT", "SECRET_KEY", "RANK")]
    rank = int(where[3])
    how = "returned from its function" if error is None else _raised(error)
    text = coded("HVD401", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()}) {how}")
    store_client.ended(where[0], int(where[1]), bytes.fromhex(where[2]), rank, text, _REPORT_S)


def awaited() -> str:
    """On a rank that is idle until its next call: what others do that wait in a collective, in words; else empty. The
    core answers for a collective that is pending here, so one is, until `settled`."""
    try:
        probe = _probing()
        text = _core.missing(probe.native)
    except HvdError:  # the job has failed meanwhile
        return ""
    if probe.done():  # a rank that waits in join() takes part in all
        return "has joined"
    return text if _WAITS.search(text) else ""


def settled() -> bool:
    """On all ranks at once, after some were asked: it ends here. Returns whether this rank is still in the job."""
    try:
        _probing().wait()
        _probe.pop().release()
    except HvdError:
        leave()
    return init.is_initialized()


def _probing() -> _core.Pending:
    if not _probe:
        request = _core.request(_core.BARRIER, 0, 0, _PROBE, ())
        _probe.append(_core.Pending(request).start(0, 0, _core.NOW, None))
    return _probe[0]


def leave() -> None:
    """Leaves the job, if this process is in one."""
    _probe.clear()
    if init.is_initialized():
        init.shutdown()


def is_consequence(error: BaseException | None) -> bool:
    """Whether it only reports that another rank has failed."""
    while error is not None and not isinstance(uncaught.meant(error), HvdPeerLostError):
        error = error.__cause__
    return error is not None


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """With these variables; None removes one. As before afterwards."""
    before = {name: config.environ().get(name) for name in changes}
    become(changes)
    try:
        yield
    finally:
        become(before)


def become(changes: Mapping[str, str | None]) -> None:
    """Sets these variables of this process; None removes one."""
    for name, value in changes.items():
        config.write(name, value)


class WorkerAnswers:
    """What is known of the ranks of one call, in the order in which it came."""

    def __init__(self, size: int) -> None:
        self.size, self._until, self._came = size, float("inf"), dict[int, Answer | str]()
        self._first: int | None = None  # the rank that all others have failed for

    @property
    def missing(self) -> list[int]:
        """Ranks of which nothing is known yet."""
        return [rank for rank in range(self.size) if rank not in self._came]

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: all have answered, or it has failed and those still missing have had
        the time to report more."""
        return len(self._came) == self.size or time.monotonic() > self._until

    def answer(self, answer: Answer) -> None:
        """Of a rank that has made the call."""
        self._came.setdefault(answer.rank, answer)
        if answer.kind != RETURNED:
            self._failed(answer.rank, answer.kind == SUFFERED)

    def lost(self, rank: int, text: str) -> None:
        """A rank that will not answer; text: the rank and how it ended."""
        self._came.setdefault(rank, text)
        self._failed(rank, False)

    def _failed(self, rank: int, is_consequence: bool) -> None:
        if not is_consequence and self._first is None:
            self._first = rank
        self._until = min(self._until, time.monotonic() + (_CAUSE_S if is_consequence else _GRACE_S))

    def results(self) -> list[Any]:
        """By rank. Raises HvdRunError."""
        failed = [each for each in self._came.values() if isinstance(each, str) or each.kind != RETURNED]
        if failed:
            cause = failed[0] if self._first is None else self._came[self._first]
            if isinstance(cause, str):
                raise HvdRunError(coded("HVD405", cause), self._first)
            cause.value()
        return [each.value() for _, each in sorted(self._came.items()) if isinstance(each, Answer)]
