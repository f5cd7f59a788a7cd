"""Start of one rank so that it cannot outlive its job, and search for all its descendants.

A rank is forked by the agent, leads a session of its own (a Ctrl-C at the terminal reaches the launcher alone, and a
rank that reads the terminal is not stopped by job control), and gets SIGKILL from the kernel when the agent's thread
ends (PR_SET_PDEATHSIG: it follows the *thread* that forked, so the agent forks from its main and only thread). The
agent is a child subreaper: an orphan below it, whatever session it made for itself, becomes the agent's child instead
of init's, so the process tree below the agent always holds everything that the job started.

subprocess is not used: it is slow to import and its preexec_fn is what would be needed anyway.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

NOT_FOUND = 127  # exit codes of a shell for a command that is not there, and for one that is no program
NOT_RUNNABLE = 126
COMMAND_MAX = 100  # characters of a command in a text


class StartError(OSError):
    """The command could not be started; `code` is what a shell would exit with."""

    def __init__(self, number: int, command: str) -> None:
        super().__init__(number, os.strerror(number), command)
        self.code = NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_RUNNABLE


def _prctl(what: int, value: object) -> None:
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    _libc.prctl(what, argument, *(ctypes.c_ulong(0),) * 3)


_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """From now on orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """From now on this signal comes when the thread that has started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def woken_by(numbers: Collection[int]) -> int:
    """A descriptor to read the numbers of signals from, as bytes: those of SIGCHLD and of each of `numbers` that is not
    ignored here. They get a handler, not "ignore", which a rank would inherit. Call it from the main thread."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*numbers, signal.SIGCHLD):
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
            signal.signal(number, lambda *_: None)
    return woken


def rename(name: bytes) -> None:
    """The name that ps shows for this process, at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name))


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    streams: tuple[int, int, int],
    cpus: Collection[int] | None = None,
) -> int:
    """Forks and executes `command` with stdin, stdout and stderr from `streams`; returns its pid. Raises StartError.

    cpus: those that it may run on; None: as this process.

    Call it from the main thread of a process that has no other.
    """
    parent = os.getpid()
    failure, report = os.pipe()  # closed by exec; carries errno if there is none
    pid = os.fork()
    if pid == 0:
        _become(command, environ, cwd, streams, parent, report, cpus)
    os.close(report)
    try:
        error = os.read(failure, 16)
    finally:
        os.close(failure)
    if error:
        os.waitpid(pid, 0)
        raise StartError(int(error), command[0])
    return pid


def spawn(command: Sequence[str], environ: Mapping[str, str], cwd: str, streams: tuple[int, int, int]) -> int:
    """As `start`, for a process that has other threads: no Python runs between fork and exec. The kernel does not end
    what is started when this process is killed, and cwd must be that of this process."""
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(streams)]
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    try:
        return os.posix_spawnp(
            command[0], list(command), dict(environ), file_actions=actions, setsid=True, setsigdef=ignored
        )
    except OSError as error:
        raise StartError(error.errno or errno.EIO, command[0]) from None


def _become(
    command: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    streams: tuple[int, int, int],
    parent: int,
    report: int,
    cpus: Collection[int] | None,
) -> NoReturn:
    """The child's side of `start`: never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by what comes next
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the agent was faster to die than we to ask
            os._exit(1)
        os.chdir(cwd)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        os.write(report, str(error.errno or errno.EIO).encode())
    except BaseException:
        os.write(report, str(errno.EIO).encode())
    os._exit(NOT_FOUND)


def waited(pid: int) -> int | None:
    """The wait status of a child, 0 for one that has been reaped already; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if ended else None


def reap() -> list[tuple[int, int]]:
    """Collects every ended child: (pid, exit code, negative for a signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, exit_code(status)))


def reap_adopted(spared: Collection[int]) -> None:
    """As process 1: children that are not ours by birth. The ends of `spared` are left to be read elsewhere."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in spared:
            return
        os.waitpid(found.si_pid, os.WNOHANG)


def sweep(spared: Collection[int]) -> None:
    """Kills and reaps all that is below this process but `spared`. Takes 5 s at most."""
    give_up = time.monotonic() + 5.0
    while time.monotonic() < give_up:
        left = set(descendants()).difference(spared)
        if not left:
            return
        for pid in left:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def childless() -> bool:
    """True if this process has no child at all, so that (it being a subreaper) nothing below it runs."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def exit_code(status: int) -> int:
    """Of a wait status: the exit code, or minus the signal's number."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def state_of(pid: int) -> tuple[str, int]:
    """The letter of a process's state ("T": stopped) and its parent, as /proc has them; ("", 0) where it shows none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, parent = stat.read().rpartition(b")")[2].split()[:2]
        return state.decode(), int(parent)
    except (OSError, ValueError):
        return "", 0


def children_by_parent() -> dict[int, list[int]]:
    """Every living process that /proc shows (zombies left out), by its parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        state, parent = state_of(int(name))
        if state not in ("", "Z", "X"):
            found.setdefault(parent, []).append(int(name))
    return found


def descendants(root: int | None = None) -> list[int]:
    """Every living process below `root` (default: this one), parents before children. Empty without /proc."""
    try:
        tree = children_by_parent()
    except OSError:
        return []
    below = list(tree.get(os.getpid() if root is None else root, []))
    for pid in below:
        below += tree.get(pid, [])
    return below


def session_of(pid: int) -> int:
    """The number of its session; 0 if there is no such process."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def name_of(pid: int) -> str:
    """As ps shows it; "?" if there is no such process."""
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def command_of(pid: int) -> str:
    """Its words, as far as they fit in a line; the name of a process that shows none."""
    try:
        with open(f"/proc/{pid}/cmdline", errors="replace") as file:
            words = " ".join("".join(c if c.isprintable() else " " for c in file.read(4096)).split())
    except OSError:
        words = ""
    return (words if len(words) <= COMMAND_MAX else f"{words[:COMMAND_MAX]}...") or name_of(pid)


def send(pid: int, number: int, group: bool = False) -> None:
    """A signal to a process or to the group that it leads; one that is gone already is fine."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int | None) -> str:
    """How a process ended: "killed by SIGSEGV"; None: it has not."""
    if code is None:
        return "is still running"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
