"""Collective operations on a table: all ranks open, save and load it together.

Only rank 0 sends to the servers, between collectives: so a table has one number on all of them, and ranks that differ
raise before a server gets the request.

What a server could not do, every rank raises.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _core
from .._api import Handle, allgather_object, barrier, broadcast_object, rank
from .._core.byte_exchange import broadcast_bytes_async
from ..errors import HvdError, HvdMismatchError, HvdPeerLostError, HvdTimeoutError
from ..errors.codes import coded
from .client import Client

_NOTICE_S = 0.5  # how often rank 0 reports that it goes on


def opened(client: Client, spec: dict[str, Any]) -> int:
    """The number of a new table. HvdMismatchError where ranks differ, HvdError for what a server could not make."""
    specs = allgather_object(spec, name="hvd.ps.Table")
    for other, each in enumerate(specs):
        key = next((key for key in each if each[key] != specs[0][key]), None)
        if key is not None:
            differ = f"rank {other} has {key}={each[key]!r}, rank 0 has {key}={specs[0][key]!r}"
            raise HvdMismatchError(f"table {specs[0]['name']!r}: {differ} [HVD026]")
    if any(table.name == spec["name"] for table in client.tables):
        raise ValueError(f"table {spec['name']!r}: this job already has a table of this name [HVD025]")
    number = len(client.tables)

    def open_it() -> None:
        if len(client.alive()) < client.servers and spec["replicas"] < 2:
            text = f"table {spec['name']!r}: a server has ended, and there would be no copy (replicas=1)"
            raise HvdPeerLostError(f"{text} [HVD029]")
        for server in client.alive():
            client.call(server, "open", spec=spec, number=number)

    Work(client, open_it, spec).wait()
    return number


def met(client: Client) -> None:
    """Servers have all that ranks have pushed."""
    client.flush()
    barrier()


class Work:
    """What rank 0 does with servers for all ranks, in a thread of its own. All ranks make it, and all call `wait`.

    While it lasts, rank 0 reports twice a second that it goes on: so no collective is stuck, however long servers work.
    """

    def __init__(self, client: Client, call: Callable[[], Any], spec: dict[str, Any], again: bool = True) -> None:
        self._client, self._call, self._spec, self._again = client, call, spec, again
        self._outcome: tuple[Exception | None, Any] | None = None
        self._notice: tuple[Any, bytearray] | None = None
        self.is_known = False  # on all ranks
        self._thread = threading.Thread(target=self._run, name="hvdlite-tables", daemon=True)
        if rank() == 0:
            self._thread.start()

    def is_over(self) -> bool:
        """The same on all ranks, which all ask."""
        if not self.is_known:
            if self._notice is None:  # else Ctrl-C has interrupted the wait
                is_over = bytearray([self._outcome is not None])
                self._notice = broadcast_bytes_async(is_over, 0, "hvd.ps.over"), is_over
            pending, is_over = self._notice
            pending.wait()
            pending.release()
            self._notice = None
            if is_over[0]:
                self._outcome, self.is_known = broadcast_object(self._outcome, name="hvd.ps.done"), True
        return self.is_known

    def wait(self, seconds: float | None = None) -> Any:
        """What the call has returned. Raises what it has raised, on all ranks, and HvdTimeoutError after so long."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not self.is_known:
            is_late = False
            if rank() == 0:
                self.join(min(_NOTICE_S, until - time.monotonic()))
                is_late = time.monotonic() > until
            if not self.is_over() and seconds is not None and broadcast_object(is_late, name="hvd.ps.late"):
                raise HvdTimeoutError(
                    f"table {self._spec['name']!r}: servers were not done within {seconds} s [HVD031]"
                )
        assert self._outcome is not None
        error, value = self._outcome
        if isinstance(error, (HvdError, ValueError)):
            raise error
        if error is not None:
            raise HvdError(coded("HVD033", f"table {self._spec['name']!r}: {error}"))
        return value

    def join(self, seconds: float) -> Exception | None:
        """On rank 0: waits at most so long. What it has raised, or that it is not over."""
        self._thread.join(max(0.0, seconds))
        return self._outcome[0] if self._outcome else HvdError("it was not over [HVD033]")

    def _run(self) -> None:
        """If a server ends meanwhile and its rows have copies, all is done again, if that is asked for."""
        error: Exception | None = None
        value: Any = None
        alive = self._client.servers + 1
        while len(self._client.alive()) < alive:
            alive, error = len(self._client.alive()), None
            try:
                value = self._call()
                break
            except Exception as failed:
                is_ours = isinstance(failed, (HvdError, ValueError))
                error = failed if is_ours else OSError(f"{type(failed).__name__}: {failed}")
                if not self._again:
                    break
        self._outcome = error, value


class Saving(Handle):
    """A save in flight, for hvd.synchronize. All ranks wait for it, and ask whether it is done, together."""

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        super().__init__([], lambda pending: work.wait())
        self.work = work

    def done(self) -> bool:
        return self.work.is_over()

    def wait(self, timeout: Any = None) -> Any:
        self.work.wait(_core.seconds_of(timeout))
        return super().wait()
