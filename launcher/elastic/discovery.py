"""Host discovery script: run again and again beside the job, its output checked.

The script prints `host:slots` or `host`, a line each, as Horovod's. It has a process group of its own and a time limit,
and nothing here waits for it: its ends of the pipes are watched by one descriptor (an epoll), which the job's loop
watches in its turn. An invalid answer (an exit code, no line with a host, no answer in time) changes nothing: the last
good one stays. A line that is no host is left out, and the others count. An error is reported once, with the last line
that the script has written to stderr, and again only after it has gone or changed.

The launcher has threads by the time of most runs, so the script is started by posix_spawn: no Python runs between fork
and exec. What the script leaves behind is killed with its group, and reaped, since orphans of the launcher become its
children. A script that SIGKILL does not end (it waits for a dead file server) is not waited for; it is just not
started again before it has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import time
from typing import Any

from hvdlite import config
from hvdlite.errors.codes import coded, uncoded

from ..agent import process
from ..hosts import hosts

EVERY_S = 1.0  # from the end of a run to the next, as Horovod has it
LIMIT_S = 30.0
ANSWER_MAX = 1 << 20
STEP_S = 0.05  # between looks at what no descriptor tells
READ_BYTES = 65536
WORDS_MAX = 300  # characters of the script's last line


class DiscoveryError(ValueError):
    """The first answer of the script is none; the text says why."""


class DiscoveryScript:
    """command: a shell's, as Horovod runs it. slots: of a host that names none. folder: where it runs; None: here."""

    def __init__(self, command: str, slots: int, folder: str | None = None) -> None:
        self._command, self._slots, self._folder = command, slots, folder
        self._poll = select.epoll()
        self._open: dict[int, bytearray] = {}  # pipes, and what has come from them
        self._out, self._err = bytearray(), bytearray()
        self._came = 0  # bytes of both
        self._since = self._next = 0.0
        self._killed = False
        self._group = 0  # of the last run, until all of it has been reaped
        self._trouble = ""
        self.broken = False  # there is no such command
        self.pid = 0  # of the script while it runs: for the code that reaps the children of this process
        self.latest: list[hosts.Host] = []

    def fileno(self) -> int:
        """Readable when `turn` has something to read. It stays the same."""
        return self._poll.fileno()

    def first(self) -> list[hosts.Host]:
        """Waits for one answer. Raises DiscoveryError where it has no host."""
        while not self.latest:
            _, trouble = self.turn(time.monotonic())
            if trouble and not self.latest:
                raise DiscoveryError(coded("HVD708", trouble))
            self._poll.poll(STEP_S / 5)
        return self.latest

    def due(self) -> float | None:
        """When `turn` is to be called at the latest. Before, when this is readable, or SIGCHLD has come."""
        if not self.pid:
            return self._next
        return self._since + LIMIT_S if self._open else time.monotonic() + STEP_S

    def turn(self, now: float) -> tuple[bool, str]:
        """(whether the offer is another now, what there is to report)."""
        before, trouble = self.latest, ""
        if self.pid:
            trouble = self._look(now)
        elif now >= self._next:
            trouble = self._start(now)
        news = trouble if trouble != self._trouble else ""
        self._trouble = trouble or self._trouble
        return self.latest is not before, news

    def close(self) -> None:
        """Ends a run. `turn` would begin the next."""
        if self.pid:
            self._kill()

    def _start(self, now: float) -> str:
        """What is wrong, if it cannot be started."""
        self._reap()
        self._out, self._err = bytearray(), bytearray()
        self._came, self._since, self._killed = 0, now, False
        command = self._command if self._folder is None else f"cd {shlex.quote(self._folder)} && {self._command}"
        pipes: list[tuple[int, int]] = []
        try:
            pipes += [os.pipe(), os.pipe()]
            actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, pipe[1], target) for target, pipe in enumerate(pipes, 1)]
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", command],
                config.environ(),
                file_actions=actions,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python, not by what comes next
            )
        except OSError as error:
            self._next = now + EVERY_S
            self.broken = True
            return self._text(f"cannot be started: {error.strerror}")
        finally:
            for read, write in pipes:
                os.close(write)
                if not self.pid:
                    os.close(read)
        for (read, _), output in zip(pipes, (self._out, self._err)):
            os.set_blocking(read, False)
            self._open[read] = output
            self._poll.register(read, select.EPOLLIN)
        return ""

    def _look(self, now: float) -> str:
        """What is wrong with the run, if it is over now or must be."""
        ended = _has_ended(self.pid)  # first: what comes until then is all
        while self._read() and ended:
            pass
        killed = self._killed
        if not killed and self._came > ANSWER_MAX:
            self._kill()
            return self._text(f"has printed more than {ANSWER_MAX >> 20} MB")
        if not ended and (killed or now < self._since + LIMIT_S):
            return ""
        self._kill()
        if not ended:
            return self._text(f"has not ended within {LIMIT_S:g} s")
        code = process.exit_code(process.waited(self.pid) or 0)
        self._group, self.pid, self._next = self.pid, 0, now + EVERY_S
        return "" if killed else self._taken(code)

    def _read(self) -> bool:
        """Whether something has come."""
        before = self._came
        for pipe, _ in self._poll.poll(0) if self._came <= ANSWER_MAX else ():
            try:
                chunk = os.read(pipe, READ_BYTES)
            except BlockingIOError:
                continue
            self._came += len(chunk)
            self._open[pipe] += chunk
            if not chunk:
                self._shut(pipe)
        return self._came > before

    def _taken(self, code: int) -> str:
        """What is wrong with the answer, which is taken if nothing is."""
        self.broken = code in (process.NOT_FOUND, process.NOT_RUNNABLE)
        if code:
            end = f"was killed by {process.signal_name(-code)}" if code < 0 else f"ended with code {code}"
            return self._text(end)
        found, wrong = hosts.parse_discovered(self._out.decode(errors="replace"), self._slots)
        if not found:
            return self._text(uncoded(wrong) or "prints no host that has a slot")
        if sorted(found) != sorted(self.latest):  # another order is no news
            self.latest = found
        if wrong:
            return self._text(f"{uncoded(wrong)}; this line is left out", "")
        self._trouble = ""
        return ""

    def _text(self, what: str, kept: str = "; the hosts stay as they were") -> str:
        lines = self._err.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        words = f", and says: {last[:WORDS_MAX]}" if last else ""
        return f"--host-discovery-script {self._command}: {what}{words}{kept if self.latest else ''} [HVD708]"

    def _kill(self) -> None:
        """The script, if it runs still, and all of its group. Its number is not used again, as it is not reaped."""
        process.send(self.pid, signal.SIGKILL, group=True)
        for pipe in list(self._open):
            self._shut(pipe)
        self._killed = True

    def _shut(self, pipe: int) -> None:
        self._poll.unregister(pipe)
        del self._open[pipe]
        os.close(pipe)

    def _reap(self) -> None:
        """Processes that the last run has left in its group: children of this process since, if of anybody's."""
        with contextlib.suppress(ChildProcessError):
            while self._group and os.waitpid(-self._group, os.WNOHANG)[0]:
                pass
        self._group = 0


def _has_ended(pid: int) -> bool:
    """It is not reaped yet; or other code has reaped it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
