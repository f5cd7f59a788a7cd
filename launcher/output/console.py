"""Console: the output of ranks on the launcher's stdout and stderr, and in files if asked.

`Console` puts lines.py to work: one Screen per real destination (one for both when stdout and stderr are the same
terminal or file), a prefix per rank and stream (or whole lines only: whole_lines.py), a file per rank and stream with
the bytes as they came, begun anew at a line's end once it has its size, with `KEPT_FILES` older ones beside it. A
thread per destination does the writing, since a terminal may be paused and a pipe's reader slow, while the launcher
must go on serving the store and Ctrl-C; `full` tells the launcher to take no more from the agents, so the ranks wait
and nothing is lost.

A closed stdout (`| head`) is reported by `broken`; a file that cannot be written any more (disk full) is given up with
one note, because the training is worth more than its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hvdlite.errors.codes import ending

from ..control.plan import Look
from .lines import RECENT_LINES, Lines, Piece, Screen, Tail
from .tracebacks import Traces
from .whole_lines import WholeLines, words

KEPT_MAX = 4 << 20
TRACE_LINES = 80
LAST_WORDS = 300  # characters
KEPT_FILES = 3
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # by rank; red is for errors
STREAMS = {1: b"stdout", 2: b"stderr"}  # by descriptor, which is the kind of the agent's frames too


class Console:
    """Output of a job of `size` ranks, and of its parameter servers and aggregators. `wake` is called from the writing
    thread when there is room again. hosts: of all of them. servers: their names, by numbers that follow the ranks'."""

    def __init__(
        self,
        size: int,
        look: Look,
        wake: Callable[[], None],
        hosts: Sequence[str] = (),
        servers: Mapping[int, str] = {},
    ) -> None:
        self._prefixed = size > 1
        self._servers = servers
        self._look = look
        whole = look.as_json or (look.fold and size > 1)
        shown = range(size) if look.ranks is None else look.ranks
        self._whole = WholeLines(shown, look.fold, look.as_json, STREAMS, hosts, self._servers) if whole else None
        self._lines: dict[tuple[int, int], Lines] = {}
        for rank in range(size + len(servers)):
            self._lines.update(self._new_lines(rank))
        self._traces = Traces()
        self._tails = [Tail() for _ in range(size + len(servers))]
        one = _same(1, 2)
        out, writer = Screen(), _Writer(wake, self._note)
        self._screens = {1: out, 2: out if one else Screen()}
        self._writers = {1: writer, 2: writer if one else _Writer(wake, self._note)}
        self._files: dict[tuple[int, int], int] = {}
        self._folder: tuple[str, int, int] | None = None  # of these files, digits of a rank, mode to open them
        self._archive = _Archive(wake, self._note, look.file_bytes)

    def open_files(self, folder: str, again: bool = False) -> None:
        """One file per rank and stream below `folder`, which is made; `again`: they go on. Raises OSError."""
        mode = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if again else os.O_TRUNC)
        self._folder = folder, len(str(len(self._tails) - len(self._servers) - 1)), mode
        for rank in range(len(self._tails)):
            self._open_files(rank)

    def _open_files(self, rank: int) -> None:
        assert self._folder is not None
        folder, width, mode = self._folder
        name = self._servers[rank].replace(" ", ".") if rank in self._servers else f"rank.{rank:0{width}d}"
        target = os.path.join(folder, name)
        os.makedirs(target, exist_ok=True)
        for stream, name in STREAMS.items():
            path = os.path.join(target, name.decode())
            self._files[rank, stream] = os.open(path, mode, 0o666)
            self._archive.paths[self._files[rank, stream]] = path

    def admit(self, rank: int, host: str) -> None:
        """One more process, with the next number."""
        self._lines.update(self._new_lines(rank))
        self._tails.append(Tail())
        self._prefixed = True
        if self._whole is not None:
            self._whole.admit(rank, host)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # a full disk ends nothing that runs
                self._open_files(rank)

    def _new_lines(self, rank: int) -> dict[tuple[int, int], Lines]:
        return {(rank, stream): Lines(stream in self._look.redraws) for stream in STREAMS}

    def start(self) -> None:
        """Starts the writing threads: after the agents were forked."""
        for writer in self._each_writer():
            writer.start()

    @property
    def full(self) -> bool:
        """Too much waits for a slow reader: take no more output."""
        return any(writer.kept > KEPT_MAX for writer in self._each_writer())

    @property
    def broken(self) -> bool:
        """Stdout has no reader any more."""
        return self._writers[1].broken

    def take(self, rank: int, stream: int, chunk: bytes) -> None:
        """What a rank wrote."""
        if stream == 2:
            self._tails[rank].feed(chunk)
        if (rank, stream) in self._files:
            self._archive.put(self._files[rank, stream], chunk)
        if not self._shows(rank, stream):
            return
        if self._whole is not None:
            self._print(self._whole.feed(rank, stream, chunk, time.time()))
        else:
            self._show(rank, stream, self._lines[rank, stream].feed(chunk, time.monotonic()))

    def _shows(self, rank: int, stream: int) -> bool:
        return self._look.ranks is None or rank in self._look.ranks

    def finish(self, rank: int) -> None:
        """The rank has ended: its unfinished lines get their newline."""
        if self._whole is not None:
            self._print(self._whole.finish(rank, time.time()))
        for stream in STREAMS:
            self._show(rank, stream, self._lines[rank, stream].finish())
        self._show_trace(rank)

    def due(self) -> float | None:
        """When `tick` must be called next."""
        if self._whole is not None:
            due = self._whole.due()
            return None if due is None else due - time.time() + time.monotonic()
        dues = [self._traces.due(), *(lines.due() for lines in self._lines.values())]
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Shows what has waited long enough: unfinished lines, and those that other ranks might have printed, too."""
        if self._whole is not None:
            self._print(self._whole.tick(time.time()))
        for (rank, stream), lines in self._lines.items():
            due = lines.due()
            if due is not None and due <= now:
                self._show(rank, stream, lines.flush())
        for rank in self._traces.silent(now):
            self._show_trace(rank)

    def announce(self, text: str) -> None:
        """The launcher's own words, on stderr."""
        if self._look.as_json:
            self._print([(2, words(text, time.time()))])
            return
        self._put_pieces([Piece(f"hvdlite-run: {text}\n".encode("utf-8", "replace"), block=True)])

    def last_words(self, rank: int) -> str:
        """What else is known of a rank that has failed: ` (last words: ValueError: boom)`, or nothing."""
        lines = [line.decode("utf-8", "replace").strip() for line in self._tails[rank].lines(RECENT_LINES)]
        last = next((line for line in reversed(lines) if line), "")
        return f" (last words: {last[:LAST_WORDS]})" if last else ""

    def report(self, rank: int, headline: str) -> None:
        """The job's last words: how the culprit ended, and its own last lines unless they stand there already."""
        self._show_trace(rank)
        last = self._tails[rank].lines(TRACE_LINES)
        traces = [number for number, line in enumerate(last) if line.startswith(b"Traceback (most recent call last)")]
        last = last[traces[0] :] if traces else last[-RECENT_LINES:]
        shown = self._whole is None and self._screens[2].recent.count((rank, 2)) >= len(last)
        if traces:
            at = self._traces.line(b"\n".join([*last, b""]))
            shown = shown or (at is not None and self._screens[2].written - at <= len(last) + RECENT_LINES)
            if self._prefixed and re.search(r"^[^;]* exited with code \d+ \[HVD401\]$", headline):  # before init
                headline = ending("HVD401", headline[: -len(" [HVD401]")] + self.last_words(rank), 1500).decode()
        if self._look.as_json:
            self._print([(2, words(headline, time.time(), last, rank))])
            return
        self.announce(headline)
        if not shown and last:
            prefix = self._prefix(rank, 2)
            self._put_pieces([Piece(b"".join(prefix + line + b"\n" for line in last), block=True)])

    def close(self, give_up: Callable[[], bool]) -> None:
        """Waits until everything is written, or `give_up()` is true."""
        for rank in range(len(self._tails)):
            self.finish(rank)
        for writer in self._each_writer():
            writer.finish(give_up)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _each_writer(self) -> set[_Writer]:
        return {*self._writers.values(), self._archive} if self._files else set(self._writers.values())

    def _put_pieces(self, pieces: list[Piece]) -> None:
        self._writers[2].put(2, self._screens[2].render("launcher", b"", pieces))

    def _note(self, text: str) -> None:
        """From a writing thread: around the Screen, which belongs to the launcher's."""
        self._writers[2].put(2, f"hvdlite-run: {text}\n".encode("utf-8", "replace"))

    def _print(self, ready: list[tuple[int, bytes]]) -> None:
        for stream, text in ready:
            self._writers[stream].put(stream, text)

    def _show_trace(self, rank: int) -> None:
        """Of a rank that has written no more, or to stdout."""
        self._put(rank, 2, self._traces.flush(rank, time.monotonic(), self._screens[2].written))

    def _show(self, rank: int, stream: int, pieces: list[Piece]) -> None:
        if stream == 2 and self._prefixed and rank not in self._servers:
            pieces = self._traces.feed(rank, pieces, time.monotonic(), self._screens[2].written)
        elif pieces:
            self._show_trace(rank)
        self._put(rank, stream, pieces)

    def _put(self, rank: int, stream: int, pieces: list[Piece]) -> None:
        if pieces:
            prefix = self._prefix(rank, stream)
            self._writers[stream].put(stream, self._screens[stream].render((rank, stream), prefix, pieces))

    def _prefix(self, rank: int, stream: int) -> bytes:
        if not self._prefixed:
            return b""
        stamp = time.asctime().encode() if self._look.timestamps else b""
        source = self._servers.get(rank, str(rank))
        prefix = b"%s[%s]<%s>:" % (stamp, source.encode(), STREAMS[stream])
        if stream in self._look.colours:
            return b"\x1b[%dm%s\x1b[0m" % (COLOURS[rank % len(COLOURS)], prefix)
        return prefix


class _Writer:
    """A thread that writes, in order; destinations are descriptors. `note` tells what went wrong."""

    def __init__(self, wake: Callable[[], None], note: Callable[[str], None]) -> None:
        self._wake = wake
        self._note = note
        self._queue: list[tuple[int, bytes]] = []
        self._change = threading.Condition()
        self._closing = False
        self._dead: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="hvdlite output", daemon=True)
        self.kept = 0
        self.broken = False

    def start(self) -> None:
        self._thread.start()

    def put(self, descriptor: int, chunk: bytes) -> None:
        if not chunk:
            return
        with self._change:
            if self._queue and self._queue[-1][0] == descriptor and len(self._queue[-1][1]) < 16384:
                self._queue[-1] = (descriptor, self._queue[-1][1] + chunk)
            else:
                self._queue.append((descriptor, chunk))
            self.kept += len(chunk)
            self._change.notify()

    def finish(self, give_up: Callable[[], bool]) -> None:
        with self._change:
            self._closing = True
            self._change.notify()
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.05)

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    if self._closing:
                        return
                    self._change.wait()
                work, self._queue = self._queue, []
            for descriptor, chunk in work:
                self._write(descriptor, chunk)
                with self._change:
                    was_full = self.kept > KEPT_MAX
                    self.kept -= len(chunk)
                if was_full and self.kept <= KEPT_MAX:
                    self._wake()

    def _write(self, descriptor: int, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest and descriptor not in self._dead:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # another process made our stdout non-blocking
                select.select([], [descriptor], [])
            except OSError as error:
                self._dead.add(descriptor)
                if descriptor == 1 and isinstance(error, BrokenPipeError):
                    self.broken = True
                    self._wake()
                elif descriptor != 2:
                    name = "stdout" if descriptor == 1 else "an output file"
                    self._note(f"{name} cannot be written any more: {error.strerror} [HVD706]")


class _Archive(_Writer):
    """Writes files; one that has `limit` bytes becomes PATH.1, PATH.1 becomes PATH.2, and so on."""

    def __init__(self, wake: Callable[[], None], note: Callable[[str], None], limit: int | None) -> None:
        super().__init__(wake, note)
        self._limit = limit
        self._sizes: dict[int, int] = {}
        self.paths: dict[int, str] = {}  # by descriptor

    def _write(self, descriptor: int, chunk: bytes) -> None:
        if self._limit is None:
            super()._write(descriptor, chunk)
            return
        while chunk:
            size = self._sizes.get(descriptor)
            if size is None:
                size = os.fstat(descriptor).st_size
            end = chunk.find(b"\n", max(0, self._limit - size - 1)) + 1
            part = chunk[: end or len(chunk)]
            super()._write(descriptor, part)
            self._sizes[descriptor] = size + len(part)
            chunk = chunk[len(part) :]
            if end and descriptor not in self._dead:
                self._begin_anew(descriptor)

    def _begin_anew(self, descriptor: int) -> None:
        path = self.paths[descriptor]
        try:
            for number in range(KEPT_FILES, 0, -1):
                older = f"{path}.{number - 1}" if number > 1 else path
                if os.path.exists(older):
                    os.replace(older, f"{path}.{number}")
            fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.dup2(fresh, descriptor, inheritable=False)
            os.close(fresh)
        except OSError as error:
            self._note(f"{path} cannot be rotated and keeps growing: {error.strerror} [HVD706]")
            self._limit = None
        self._sizes[descriptor] = 0


def _same(one: int, other: int) -> bool:
    """Do two descriptors lead to the same terminal, pipe or file?"""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)
