"""Aggregation of all ranks' counts on rank 0: a small collective every two seconds that no step waits for.

A thread of each rank, which is there only if HVDLITE_METRICS_PORT asks for it, submits an alltoall in which only rank 0
gets something, and looks later whether it is over; only then it submits the next. So ranks take part one by one,
whatever the training does meanwhile, and none of them ever waits: a rank that is busy, has joined or has ended delays
the others' next report, and nothing else. The last report of a rank stays, with its age.

A report that fails is a report less: where a rank has joined, gathers are refused until all have; where one has left or
the job has failed, there are no more, and its collectives report that to the training.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .. import _core
from .._core import ffi, lib
from ..transport.http_server import Page, Port
from .payload import packed, report, unpacked
from .prometheus import exposition
from .step_rows import History
from .stragglers import judge

NAME = "hvdlite.metrics"
STEPS_JUDGED = 1024  # the last, of which lateness is
LOOK_S = 0.05


class Reports:
    """What rank 0 knows of all ranks."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._size = size
        self._reports: dict[int, tuple[dict[str, Any], float]] = {}
        self._arrived: list[dict[int, int]] = [{} for _ in range(size)]

    def take(self, reports: Mapping[int, dict[str, Any]]) -> None:
        """Of each rank its newest."""
        now = time.monotonic()
        with self._lock:
            for rank, each in reports.items():
                self._reports[rank] = each, now
                self._arrived[rank].update(each["arrived"])
            for arrived in self._arrived:
                for number in sorted(arrived)[:-STEPS_JUDGED]:
                    del arrived[number]

    def text(self) -> str:
        """For /metrics."""
        now = time.monotonic()
        with self._lock:
            known = [self._reports[rank] for rank in sorted(self._reports)]
            late = judge(self._arrived) or {}
            return exposition(self._size, [each for each, _ in known], [now - then for _, then in known], late)

    def page(self) -> tuple[bool, list[bytes]]:
        """/metrics."""
        return True, [self.text().encode()]

    def health(self) -> tuple[bool, list[bytes]]:
        """For /healthz: whether the job goes on, and in words."""
        failure = _core.failure_of_job()
        with self._lock:
            status = f"{len(self._reports)} of {self._size} ranks have reported\n"
        return failure is None, [(status if failure is None else f"the job has failed: {failure[2]}\n").encode()]


class Gathering:
    """The thread of a rank, and rank 0's port, until `close`."""

    def __init__(self, values: Mapping[str, Any], rank: int, host: str, history: History) -> None:
        self._interval: float = values["metrics_interval"]
        self._rank, self._size, self._host, self._history = rank, _core.size(), host, history
        self._ended = threading.Event()
        self._received = Reports(self._size)
        self._pending: _core.Pending | None = None
        self.port: Port | None = None
        if rank == 0:
            self.port = _opened(values["metrics_host"], values["metrics_port"], self._received)
        self._thread = threading.Thread(target=self._run, name="hvdlite metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = 0.0
        try:
            while not self._ended.wait(LOOK_S if self._pending is not None else max(LOOK_S, due - time.monotonic())):
                if self._pending is not None and self._pending.done():
                    self._collect()
                if self._pending is None and time.monotonic() >= due:
                    due = time.monotonic() + self._interval
                    self._send()
        except Exception:  # the job has failed or ended; the training thread raises the cause
            self._pending = None

    def _send(self) -> None:
        mine = report(self._rank, self._host, self._history)
        if self._rank == 0:
            self._received.take({0: mine})
        if self._size == 1:
            return
        payload = packed(mine)
        block = ffi.from_buffer(payload)
        splits = (len(payload), *[0] * (self._size - 1))
        self._pending = _core.submit(
            _core.ALLTOALL, 0, _core.DTYPES["uint8"], NAME, (len(payload),), int(ffi.cast("uintptr_t", block)), 0,
            (payload, block), quiet=lib.HVD_ASIDE, splits=splits,
        )  # fmt: skip

    def _collect(self) -> None:
        """It is over, well or not."""
        pending, self._pending = self._pending, None
        assert pending is not None
        try:
            pending.wait()
        except Exception:
            if _core.failure_of_job() is not None or lib.hvd_initialized() != 1:
                raise
            return
        gathered, at, reports = pending.gathered(), 0, {}
        for rank, count in enumerate(gathered.rows_of):
            payload = bytes(ffi.buffer(ffi.cast("char *", gathered.address) + at, count)) if count else b""
            at += count
            found = unpacked(payload) if self._rank == 0 else None
            if found is not None:
                reports[rank] = found
        pending.release()
        if self._rank == 0:
            self._received.take(reports)

    def close(self) -> None:
        """The thread has ended and the port is free when this returns; soon."""
        self._ended.set()
        self._thread.join()
        self._pending = None
        if self.port is not None:
            self.port.close()


def _opened(host: str, number: int, reports: Reports) -> Port | None:
    """A port that is taken is no reason to end a job that may have waited for hours to begin."""
    try:
        port = Port(host, number, {"/metrics": Page(reports.page), "/healthz": Page(reports.health)})
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address
        print(
            f"hvdlite: cannot open metrics port {number} on {host} ({why}): the job goes on without metrics. "
            "HVDLITE_METRICS_PORT=0 takes a free port [HVD718]",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return None
    shown = f"[{host}]" if ":" in host else host
    print(f"hvdlite: metrics: http://{shown}:{port.number}/metrics", file=sys.stderr, flush=True)
    return port
