"""Processes that outlive the ranks that started them: their output is discarded and reported.

Most end with the job, and a line names those that have been left by ranks that ended well (`unfinished`).

Where a job has ended well, a process that a rank has given a session of its own goes on (agent.py). If its stdout is
still that of the rank, its next line would end it by SIGPIPE as soon as the agent is gone. So the agent hands the pipes
on to a process that holds nothing else, reads them to their ends and ends with the last; the launcher does not wait.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Iterable, Mapping

from . import process

NAMED = 4  # processes in one line


def stuck(pids: Iterable[int]) -> list[str]:
    """What to tell the user of processes that SIGKILL has not ended."""
    return [f"pid {pid} ({process.name_of(pid)}) cannot be killed; left behind [HVD501]" for pid in pids]


def unfinished(pids: Collection[int], sessions: Mapping[int, int]) -> list[str]:
    """What to tell the user of processes that ranks have left running and that end now. sessions: with their ranks."""
    found = [(pid, sessions.get(process.session_of(pid))) for pid in pids if process.state_of(pid)[1] not in pids]
    left = [f"pid {pid} ({process.command_of(pid)}) of rank {rank}" for pid, rank in found if rank is not None]
    more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
    text = (
        f"ranks have ended and left processes running, which hvdlite-run ends: {', '.join(left[:NAMED])}{more}; wait "
        "for them in the script, or start them in a session of their own (setsid, start_new_session=True) [HVD501]"
    )
    return [text] if left else []


def handed_over(pipes: Mapping[int, int]) -> list[str]:
    """Forks the process that reads these descriptors, which do not block and are given with their ranks. Returns what
    to tell the user: the first process below that can write to one. The caller has one thread, and closes its own."""
    if not pipes:
        return []
    reports = _reports(pipes)
    if os.fork() == 0:
        try:
            _become_alone(pipes)
            _read(pipes)
        finally:
            os._exit(0)
    return reports


def _reports(pipes: Mapping[int, int]) -> list[str]:
    ranks = {f"pipe:[{os.fstat(descriptor).st_ino}]": rank for descriptor, rank in pipes.items()}
    for pid in process.descendants():
        held = [ranks[name] for name in _open(pid) if name in ranks]
        if held:
            what = f"pid {pid} ({process.name_of(pid)}), which rank {min(held)} has started in its own session"
            return [f"{what}, goes on; its output is not shown any more [HVD501]"]
    return []


def _open(pid: int) -> set[str]:
    """What this process has open, as /proc names it."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass  # it has ended, or is another user's
    return found


def _become_alone(pipes: Collection[int]) -> None:
    """Leaves all that others may wait for: session, folder, descriptors, handlers of signals."""
    os.setsid()
    process.rename(b"hvdlite-discard")
    os.chdir("/")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pipes:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that has listed them


def _read(pipes: Collection[int]) -> None:
    watch, left = select.poll(), set(pipes)
    for descriptor in pipes:
        watch.register(descriptor, select.POLLIN)
    while left:
        for descriptor, _ in watch.poll():
            try:
                more = os.read(descriptor, 1 << 16)
            except OSError:  # a terminal that no process has open any more
                more = b""
            if not more:
                watch.unregister(descriptor)
                left.remove(descriptor)
