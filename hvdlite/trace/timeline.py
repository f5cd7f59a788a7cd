"""The timeline: the ring of this rank, written to a file while the job runs, in the format of chrome://tracing.

A thread, which runs only while a timeline is written, has what is new in the ring turned into rows (spans.py) and
appends them. Nothing else of the process changes: the events are there anyway, no thread waits for this one, it needs
Python's lock for some microseconds each time it comes, and what runs on a GPU is not waited for. It comes often enough
that the ring does not overflow, the sooner the more there was last time; what was lost nevertheless is counted, and the
file says so.

The file is an array that is complete after each write: every batch is one write, over the closing bracket, and ends
with a closing bracket. So it is valid JSON whenever the process is killed, unless the kernel stops in the middle of a
write (a kill between two pages of it): then the bracket is missing, which chrome://tracing, Perfetto and
`hvdlite-trace merge` all put up with.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from .. import _core
from ..errors.codes import coded
from .spans import Row, Spans

SLOWEST_S, FASTEST_S = 0.1, 0.001
END = b"\n]\n"


class Timeline:
    """A timeline being written; its folder is made if it is missing. OSError if the file cannot be."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.path = path
        offset_ns, error_ns, host = _core.clock()
        rank = _core.rank()
        self._make_folder()
        incarnation = _core.keep(path)
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a reader is refused
        try:
            self._file = os.open(path, how, 0o666)
        except OSError as error:
            raise self._refusal(error) from None
        os.set_blocking(self._file, True)
        self._at = 0
        self._wrong: OSError | None = None  # why nothing is written any more
        self._reported_lost = 0
        self._spans = Spans(rank, f"rank {rank} ({host})", offset_ns, mark_cycles)
        self._spans.follow()
        about = {
            **incarnation,
            "rank": rank,
            "size": _core.size(),
            "host": host,
            "clock_offset_ns": offset_ns,
            "clock_error_ns": None if error_ns < 0 else error_ns,
            "start_time_since_epoch_in_micros": time.time_ns() // 1000,
            "start_ns": time.monotonic_ns() + offset_ns,
        }
        head = {"ph": "M", "name": "hvdlite_timeline", "pid": rank, "tid": 0, "args": about}
        try:
            self._put(head)
            self._write(self._spans.take(END))
        except OSError as error:
            os.close(self._file)
            raise self._refusal(error) from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite timeline", daemon=True)
        self._thread.start()

    def _make_folder(self) -> None:
        """As the recorder makes its own (csrc/engine/flight_recorder/dump.c), with the same mode: it may be the same,
        and all ranks of a host may be at it."""
        folder = os.path.dirname(self.path) or "."
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError:
            pass  # it is not a folder: opening the file raises the error
        except OSError as error:
            raise self._refusal(error, f"its folder {folder!r} cannot be made: ") from None

    def close(self) -> None:
        """Writes what there is, ends what is open, and closes the file."""
        self._closing.set()
        self._thread.join()
        try:
            if self._wrong is None:
                self._drain()
                self._spans.end()
                self._write(self._spans.take(END))
        except OSError as error:
            raise self._refusal(error) from None
        finally:
            os.close(self._file)

    def _refusal(self, error: OSError, part: str = "") -> OSError:
        why = f"{part}{error.strerror or error}"
        refusal = type(error)(coded("HVD725", f"the timeline {self.path!r} cannot be written: {why}"))
        refusal.errno = error.errno
        return refusal

    def _run(self) -> None:
        pause = SLOWEST_S / 10
        while not self._closing.wait(pause):
            try:
                count = self._drain()
            except OSError as error:
                self._wrong = error
                why = error.strerror or error
                print(
                    f"hvdlite: rank {_core.rank()}: cannot write the timeline {self.path} any more: {why} [HVD725]",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                return
            pause = max(FASTEST_S, pause / 2) if 8 * count > self._spans.room else min(SLOWEST_S, pause * 1.5)

    def _drain(self) -> int:
        count = 0
        while events := self._spans.follow():
            count += events
            self._write(self._spans.take(END))
            if count >= self._spans.room:
                break  # there is always more
        if self._spans.lost > self._reported_lost:
            self._reported_lost = self._spans.lost
            lost = {"ph": "M", "name": "hvdlite_lost_events", "pid": _core.rank(), "tid": 0}
            self._put({**lost, "args": {"lost": self._reported_lost}})
        return count

    def _put(self, row: Row) -> None:
        begin = b",\n" if self._at else b"[\n"
        self._write(memoryview(begin + json.dumps(row, separators=(",", ":")).encode() + END))

    def _write(self, rows: memoryview) -> None:
        """Rows with what stands before each, and END after them."""
        done = 0
        try:
            while done < len(rows) and len(rows) > len(END):
                done += os.pwrite(self._file, rows[done:], self._at + done)
        except OSError:  # a full disk, say: what was whole before stays, and there was room for its end
            if self._at:
                os.ftruncate(self._file, self._at)
                os.pwrite(self._file, END, self._at)
            raise
        self._at += len(rows) - len(END)
