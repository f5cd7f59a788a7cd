"""Forwarding of the launcher's stdin: to no rank, or with `--stdin 0` to rank 0, on any host.

A job that took it unasked would swallow the rest of a shell's `while read` loop, and stop in the background when it
looks at the terminal. So ranks read /dev/null by default.

On the launcher's host rank 0 gets the descriptor itself: a terminal stays one. To another host it goes over the control
stream: `Feed` reads a piece and sends it, an empty one at the end; `Intake` hands it to rank 0 through a pipe and asks
for more. So at most one piece is under way, and control never waits for a rank that does not read.

A program is no input: where the command is `python -`, stdin is read before the start and all ranks run that program.
What comes for another command (`bash -s < script`) is left there, and a line reports it at the end of the job
(`unread`).
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import stat
import termios
from collections.abc import Callable, Sequence

from . import process

INPUT = 2  # the kind of its frames, beside agent.CONTROL
PIECE = 1 << 14
_PYTHON = re.compile(r"(.*/)?(python|pypy)[0-9.]*t?")
_FLAG = re.compile(r"-[bBdEiIOPqRsSuvx]+|-[XW].+")  # of Python, and takes no value, or has it
_SHELL = re.compile(r"-?(.*/)?(ba|da|a|k|mk|z)?sh[0-9.]*")
_READS = re.compile(r"\b(read|readarray|mapfile)\b")
_SCRIPT_MAX = 1 << 18  # characters of it that are looked at
_ARGUMENT_MAX = (1 << 17) - 1  # bytes, as Linux has it


class ProgramError(ValueError):
    """There is no program for the ranks to run; the text says why."""


def with_program(command: Sequence[str], reads: bool) -> list[str]:
    """`python - words` as `python -c PROGRAM words`, with the program that comes at stdin; other commands as they are.

    reads: rank 0 reads stdin, so a terminal is left to it. Raises ProgramError.
    """
    words = list(command)
    if not words or not _PYTHON.fullmatch(words[0]):
        return words
    at = 1
    while at < len(words) and (_FLAG.fullmatch(words[at]) or words[at] in ("-X", "-W")):
        at += 2 if words[at] in ("-X", "-W") else 1
    if words[at : at + 1] not in ([], ["-"]) or (reads and os.isatty(0)):
        return words
    program = b""
    if not os.isatty(0):
        try:
            with open(0, "rb", closefd=False) as source:
                program = source.read()
        except OSError:
            pass  # it is closed
    if not program.strip():
        start = f"hvdlite-run -np 2 {words[0]}"
        raise ProgramError(f"{words[0]} has no program to run: {start} train.py, or {start} - < train.py [HVD702]")
    if len(program) > _ARGUMENT_MAX:
        raise ProgramError(f"the program at stdin is longer than {_ARGUMENT_MAX >> 10} KiB: name its file [HVD705]")
    return [*words[:at], "-c", os.fsdecode(program), *words[at + 1 :]]


def own() -> int:
    """This process's stdin; -1 if reading it would take the terminal from another process."""
    try:
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return -1
    except OSError:
        pass  # not our controlling terminal: reading it takes it from no process
    return 0


def unread() -> str | None:
    """The text for the user where a pipe or file was given to this process and is unread. What a shell above
    has as stdin too may be the shell's: a `while read` loop, a script that it reads from there."""
    status, waits = os.fstat(0), False
    if stat.S_ISREG(status.st_mode):
        waits = status.st_size > 0 and os.lseek(0, 0, os.SEEK_CUR) == 0  # else a process reads it by and by
    elif stat.S_ISFIFO(status.st_mode):
        waits = any(fcntl.ioctl(0, termios.FIONREAD, bytes(4))) and not _shells(status)
    text = "no rank has read the data at stdin: --stdin 0 gives it to rank 0 [HVD703]"
    return text if waits else None


def _shells(file: os.stat_result) -> bool:
    """Whether a process above has the same stdin and is a shell that may read it. Others (timeout, sudo, a job script)
    only hand it on."""
    pid = os.getppid()
    try:
        while pid and os.path.samestat(file, os.stat(f"/proc/{pid}/fd/0")):
            with open(f"/proc/{pid}/cmdline", errors="replace") as words:
                if _may_read(pid, words.read().split("\0")[:-1]):
                    return True
            pid = process.state_of(pid)[1]
    except OSError:
        pass  # it has none, or is another user's
    return False


def _may_read(pid: int, words: Sequence[str]) -> bool:
    """Whether a process with this command is a shell that reads stdin: its program has a `read`, or comes from it."""
    if not words or not _SHELL.fullmatch(words[0]):
        return False
    at = 1
    while at < len(words) and words[at][:1] in "-+" and words[at]:
        if "c" in words[at] and not words[at].startswith("--"):
            return any(_READS.search(word) for word in words[at + 1 :])
        at += 2 if words[at] in ("-o", "-O", "+o", "+O") else 1
    if at >= len(words):
        return True
    try:
        with open(os.path.join(f"/proc/{pid}/cwd", words[at]), errors="replace") as script:
            return _READS.search(script.read(_SCRIPT_MAX)) is not None
    except OSError:
        return True


class Feed:
    """The launcher's end. send: to the agent of rank 0. selector: of the loop; its entries have what to call."""

    def __init__(self, send: Callable[[bytes], None], selector: selectors.BaseSelector) -> None:
        self._send, self._selector, self._source = send, selector, own()

    def more(self) -> None:
        """The agent has room."""
        if self._source < 0:  # nothing can come: the end
            self._piece()
            return
        try:
            self._selector.register(self._source, selectors.EVENT_READ, self._give)
        except OSError:  # a file cannot be waited for, and need not be
            self._piece()

    def _give(self) -> None:
        self._selector.unregister(self._source)
        self._piece()

    def _piece(self) -> None:
        try:
            piece = os.read(self._source, PIECE) if self._source >= 0 else b""
        except OSError:
            piece = b""
        self._send(piece)


class Intake:
    """The agent's end: `end` is what rank 0 reads. wants: called when there is room for more."""

    def __init__(self, selector: selectors.BaseSelector, wants: Callable[[], None]) -> None:
        self.end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._selector, self._wants = selector, wants
        self._left = b""

    def take(self, piece: bytes) -> None:
        """A piece has come; an empty one is the last."""
        self._left = piece
        if piece:
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self.flush)
        else:
            os.close(self._pipe)

    def flush(self) -> None:
        """The pipe has room, or no reader any more."""
        try:
            self._left = self._left[os.write(self._pipe, self._left) :]
        except BlockingIOError:
            pass
        except OSError:  # rank 0 reads no more; nothing more is asked for
            self._selector.unregister(self._pipe)
            return
        if not self._left:
            self._selector.unregister(self._pipe)
            self._wants()
