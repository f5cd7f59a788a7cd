"""Watchdog: the parent of an agent on another host, which cleans up when the agent is killed or stopped.

The kernel kills an agent's ranks with it, but not what these have started: a child in a session of its own, the Python
below `sh train.sh`. On the launcher's host the launcher ends those (job.py); on other hosts no process would end them.
So the agent is the child of a watchdog, which does nothing but wait, and is a child subreaper: what a dead agent leaves
becomes the watchdog's, and ends here; one that has ended well leaves only what may go on. An agent that is stopped
keeps its connection open, and cannot see that the launcher has closed it. So it lends the watchdog its control stream:
when the launcher's end of that closes, or `outer` ends, the agent has `GONE_S` to end its ranks by its own rules
(agent.py), and is then killed.

Signals to the watchdog are passed on to the agent, which is in a session of its own: a Ctrl-C at a terminal comes to it
once, and Ctrl-Z stops the watchdog alone. If it is the watchdog that is killed, the agent sees its `hangup` end, and
acts as if the launcher were gone. If both are killed, what they were to end remains: only a third process could see
that.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable

from . import process
from .agent import FORWARDED, ORPHAN_S, WAKING

GONE_S = ORPHAN_S + 2.5
_BORROWED, _BACK = b"L", b"B"
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def watched(serve: Callable[[int], int], outer: int = -1) -> int:
    """Returns in two processes: in a child with what `serve(hangup)` returns, in this one with the child's exit code
    (negative for a signal) when all that was below the child is gone.

    hangup: a descriptor whose end the child is to take for the launcher's. outer: one whose end this process takes for
    that before the child has its stream. Call it from the main thread of a process that has no other.
    """
    near, far = socket.socketpair()
    process.become_subreaper()
    pid = os.fork()
    if pid == 0:
        near.close()
        os.setsid()
        if outer >= 0:
            os.close(outer)
        return serve(far.fileno())
    far.close()
    return _Watchdog(pid, near, outer).run()


def lend(hangup: int, control: socket.socket) -> None:
    """As the child: from now on the watchdog watches this stream, too."""
    with socket.socket(fileno=os.dup(hangup)) as to_watchdog:
        socket.send_fds(to_watchdog, [_BORROWED], [control.fileno()])


def take_back(hangup: int, control: socket.socket) -> None:
    """As the child: the stream ends now, which is as it should be."""
    try:
        os.write(hangup, _BACK)
        control.shutdown(socket.SHUT_WR)  # closing it would leave it open in the watchdog
    except OSError:
        pass  # the other side was faster


class _Watchdog:
    def __init__(self, pid: int, near: socket.socket, outer: int) -> None:
        self._pid = pid
        self._near = near
        self._outer = outer
        self._control = -1
        self._kill_at: float | None = None
        self._woken = process.woken_by(WAKING)
        self._watch = select.poll()
        self._watch.register(self._woken, select.POLLIN)
        self._watch.register(near, select.POLLIN)
        if outer >= 0:
            self._watch.register(outer, select.POLLIN)

    def run(self) -> int:
        """Until the child has ended: its exit code."""
        while (status := process.waited(self._pid)) is None:
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for descriptor, events in self._watch.poll(None if left is None else 1000 * left + 1):
                if descriptor == self._woken:
                    self._pass_on()
                elif descriptor == self._near.fileno():
                    self._listen()
                elif descriptor == self._outer:
                    self._read_outer()
                elif descriptor == self._control and events & _ENDED:
                    self._watch.unregister(descriptor)  # closed when it is given back
                    self._launcher_lost()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                process.send(self._pid, signal.SIGKILL)
                self._kill_at += GONE_S
        self._give_back()  # its end is what the launcher waits for
        if status:
            process.sweep(())
        return process.exit_code(status)

    def _pass_on(self) -> None:
        for number in os.read(self._woken, 4096):
            if number in FORWARDED:
                process.send(self._pid, number)

    def _listen(self) -> None:
        try:
            message, borrowed, _, _ = socket.recv_fds(self._near, 1, 1)
        except OSError:
            message, borrowed = b"", []
        self._give_back()
        if not message:
            self._watch.unregister(self._near)
        elif borrowed:
            self._control = borrowed[0]
            self._watch.register(self._control, select.POLLRDHUP)

    def _read_outer(self) -> None:
        try:
            if os.read(self._outer, 4096):
                return
        except OSError:
            pass
        self._watch.unregister(self._outer)
        self._near.shutdown(socket.SHUT_WR)
        if self._control < 0:  # else the end of that decides
            self._launcher_lost()

    def _launcher_lost(self) -> None:
        """The launcher is."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GONE_S

    def _give_back(self) -> None:
        if self._control >= 0:
            try:
                self._watch.unregister(self._control)
            except KeyError:
                pass
            os.close(self._control)
            self._control = -1
