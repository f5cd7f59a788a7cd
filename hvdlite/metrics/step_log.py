"""rank-K.steps.jsonl: a line for each training step, written while training runs (HVDLITE_TRACE_STEPS=1).

The first line names the rank and the job; each further one is a step, in ns of this rank's CLOCK_MONOTONIC. Every so
many steps (HVDLITE_TRACE_EVERY) one also has its buckets and the memory in use.

A thread of its own does it, a few times a second: training does not wait for a disk. Steps shorter than half a
millisecond may be gone before they are written; their numbers are missing then. A file that cannot be written (a full
disk) is reported once, and is not tried again.

    negotiation_ns   as in hvd.stats: some tensor of this rank's waited to be agreed on; no time is counted twice
    exposed_ns       threads of the script waited for collectives, all together
    cpu_ns           this process's CPU time: of all steps that were written at once, shared out by their length

The first line also has what a prediction needs (hvdlite/predict): CPUs, ranks of this host, the fusion threshold.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from .. import _core
from .._core import ffi, lib
from ..errors import HvdError
from .step_rows import CARRIERS, History, Step
from .stragglers import clock_offset
from .summary import compute_ns, devices

FORMAT = "hvdlite-steps-1"
LOOK_S = 0.2
_BUCKETS = 512  # as many as the core keeps


class Journal:
    """Writes the file of one rank from now on, until `close`."""

    def __init__(
        self, folder: str, rank: int, every: int, host: str, history: History, about: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(folder) / f"rank-{rank}.steps.jsonl"
        self._rank, self._every, self._host, self._history, self._about = rank, every, host, history, about or {}
        self._cpu = (time.monotonic_ns(), time.process_time_ns())
        self._written, self._bucket = 0, 1
        self._file: TextIO | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            incarnation = _core.keep(str(self.path))
            self._file = open(self.path, "w", encoding="utf-8", opener=_at_once)
            self._write_line(self._head(incarnation))
        except OSError as error:
            self._give_up(error)
            return
        _core.checked(lib.hvd_look_closely(every, ffi.NULL, 0))
        self._thread = threading.Thread(target=self._run, name="hvdlite steps", daemon=True)
        self._thread.start()

    def _head(self, incarnation: dict[str, Any]) -> dict[str, Any]:
        clock = clock_offset()
        offset = None if clock is None else {"offset_ns": clock[0], "error_ns": clock[1]}
        return {
            "format": FORMAT, **incarnation, "rank": self._rank, "size": _core.size(), "host": self._host,
            "begun": int(time.time()), "clock": offset, "cores": len(os.sched_getaffinity(0)),
            "local_size": _core.local_size(), **self._about,
        }  # fmt: skip

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.write()

    def write(self) -> None:
        """All steps that are over and not written."""
        if self._file is None:
            return
        try:
            steps = self._history.steps(self._written)
            buckets = self._buckets() if any(step.number % self._every == 0 for step in steps) else {}
            share = self._cpu_share() if steps else 0.0
            for step in steps:
                self._write_line(self._line(step, buckets.get(step.number), share))
                self._written = step.number
            self._file.flush()
        except (HvdError, ValueError):  # the job has ended meanwhile
            self._ended.set()
        except OSError as error:
            self._give_up(error)

    def _cpu_share(self) -> float:
        """CPU time by wall time since the last call; above 1 where several threads compute."""
        now, before = (time.monotonic_ns(), time.process_time_ns()), self._cpu
        self._cpu = now
        return (now[1] - before[1]) / max(now[0] - before[0], 1)

    def _line(self, step: Step, buckets: list[dict[str, Any]] | None, cpu: float) -> dict[str, Any]:
        used = [carrier for carrier in CARRIERS if step.of(f"messages.{carrier}")]
        line: dict[str, Any] = {
            "step": step.number, "t": step.begin_ns, "step_ns": step.ns, "compute_ns": compute_ns(step),
            "exposed_ns": step.of("exposed_ns"), "negotiation_ns": step.of("negotiation_ns"),
            "data_wait_ns": step.of("data_ns") or None, "optimizer_ns": step.of("optimizer_ns") or None,
            "bytes": {carrier: step.of(f"bytes.{carrier}") for carrier in used},
            "messages": {carrier: step.of(f"messages.{carrier}") for carrier in used},
            "arrived_ns": step.arrived_ns or None, "cpu_ns": int(cpu * step.ns),
        }  # fmt: skip
        if step.number % self._every == 0:
            line.update({"buckets": buckets or [], "memory": devices()})
        return line

    def _buckets(self) -> dict[int, list[dict[str, Any]]]:
        """New ones by their step."""
        seen = ffi.new("struct hvd_bucket_seen[]", _BUCKETS)
        found: dict[int, list[dict[str, Any]]] = {}
        for index in range(_core.checked(lib.hvd_buckets(self._bucket, seen, _BUCKETS))):
            each = seen[index]
            self._bucket = each.number + 1
            names = [_core.text_of(name) for name in each.name]
            found.setdefault(each.step, []).append({
                "tensors": each.tensors, "bytes": each.bytes, "start": each.begin_ns, "end": each.end_ns,
                "plane": CARRIERS[each.carrier], "names": [name for name in names if name],
            })  # fmt: skip
        return found

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        self._ended.set()
        print(
            f"hvdlite: rank {self._rank} cannot write steps any more: {self.path}: {error.strerror or error} [HVD805]",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        _shut(file)

    def close(self) -> None:
        """Writes what is left; the thread has ended when this returns."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.write()
        file, self._file = self._file, None
        _shut(file)


def _at_once(path: str, how: int) -> int:
    """Opens for `open`; a pipe without a reader is an OSError, and no wait."""
    file = os.open(path, how | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file


def _shut(file: TextIO | None) -> None:
    """Closes it; what could not be written is lost."""
    if file is not None:
        try:
            file.close()
        except OSError:
            pass
