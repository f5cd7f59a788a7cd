"""Agent of one host: a process that starts its ranks, passes on their output, reports their ends and leaves nothing
behind. The launcher forks that of its own host; starters/remote_agent.py makes those of others.

It is the parent of the host's ranks and a child subreaper, and it decides nothing while the launcher runs: orders to
send signals come over the control stream. Only when that stream ends (the launcher is gone, be it by SIGKILL) does it
act by itself: SIGTERM, `ORPHAN_S`, SIGKILL. When the last rank has ended, everything still running below it gets
SIGTERM, `LEFTOVER_S` and SIGKILL; then the agent reports it and exits. Where all ranks have ended well, what has a
session of its own is left alone (output_discard.py reads what it writes), and the rest (it uploads a checkpoint, behind
nohup) has `FINISH_S` to end, and a line names it before it is ended. If the agent itself is killed, the kernel kills
the ranks (process.py).

Two streams lead to the launcher, signed where it is on another host. Control carries JSON frames both ways and never
waits for output; the output stream carries what ranks write, one frame per read. When the launcher is slow to take it
(a paused terminal), at most `UNSENT_MAX` is kept and the ranks' pipes fill up: the ranks wait, nothing is lost.

Parameter servers (`--servers`) and aggregators are started and reported as ranks are. They get only signals meant for
them, and their end is not a result of the job.

It waits for processes, not for the end of pipes, which a descendant may hold open. It has one thread.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from hvdlite.errors.codes import coded
from hvdlite.security import framing

from . import child, cpu_binding, output_discard, preload, process
from .stdin import INPUT, Intake

ORPHAN_S = 1.5
LEFTOVER_S = 0.5
FINISH_S = 1.0  # long enough for what ends with its rank, as the resource tracker of multiprocessing does
STUCK_S = 10.0  # after SIGKILL; GPUs and large memories take some seconds to be given back
POLL_S = 0.02  # while waiting for processes that are not our children
UNSENT_MAX = 1 << 20
READ_BYTES = 65536
DRAIN_BYTES = 1 << 20  # what a pipe can hold at most; more comes from a process that still runs

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAKING = (*FORWARDED, signal.SIGUSR1, signal.SIGUSR2)  # Slurm signals whole steps
CONTROL = 1  # the kind of all control frames
STDOUT, STDERR, ENDED = 1, 2, 3  # the kinds of output frames; the body starts with the rank
RANK = struct.Struct("!I")


class Agent:
    """One host's part of a job. `stdin` is the descriptor that rank 0 will read.

    On another host than the launcher's: `common` is what the order to start leaves out (command, cwd, environ), the end
    of `hangup` counts as the launcher's, and with `stays` the agent waits for the job's exit code (`code` then).
    Signals to it are reported to the launcher.
    """

    def __init__(
        self,
        control: socket.socket,
        output: socket.socket,
        stdin: int,
        common: Mapping[str, Any] | None = None,
        hangup: int = -1,
        stays: bool = False,
        sessions: tuple[framing.Session, framing.Session] | None = None,
    ) -> None:
        self._control, self._output = control, output
        self._stdin, self._hangup, self._stays = stdin, hangup, stays
        self._common = common or {"environ": {}}
        self.code: int | None = None  # of the job
        self.again = False  # the job is to be tried again
        self._intake: Intake | None = None
        self._session, self._output_session = sessions or (framing.Session(), framing.Session())
        self._reader = framing.FrameReader(self._session)
        self._unsent = bytearray()
        self._ranks: dict[int, int] = {}  # living ranks by pid, and servers
        self._servers: set[int] = set()  # which of these numbers are servers: they end when the launcher lets them go
        self._pipes: dict[int, tuple[int, int]] = {}  # descriptor: (rank, STDOUT or STDERR)
        self._paused = False  # too much is unsent: the pipes are not watched
        self._waiting = False  # the output stream is full: watched for room
        self._started = self._cleaning = self.orphan = self._done = False
        self._held = False  # more ranks may be started here
        self._sessions: dict[int, int] = {}  # of all ranks that have lived, with their ranks
        self._well = True  # no rank has failed, and the job has not been ended
        self._kill_at: float | None = None
        self._finish_by: float | None = None  # until then what ranks have left running may end by itself
        self._killed_at: float | None = None  # the first time
        self._terminated: set[int] = set()  # leftovers that have got their SIGTERM
        self._selector = selectors.DefaultSelector()
        self._preload = preload.Preload(self._selector)
        self._woken = process.woken_by(WAKING)
        control.setblocking(True)
        output.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        if hangup >= 0:
            self._selector.register(hangup, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the job is over and everything below is gone."""
        while not (self._done and not self._unsent and not self._stays):
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._control:
                    self._listen()
                elif key.data is not None:
                    key.data()
                elif key.fileobj is self._output:
                    self._flush()
                elif key.fd in self._pipes:
                    self._read(key.fd, READ_BYTES)
                elif key.fd == self._woken:
                    self._signalled(os.read(self._woken, 4096))
                elif key.fd == self._hangup and not os.read(self._hangup, 4096):
                    self._hung_up()
            self._collect()
            self._clean(time.monotonic())
            self._throttle()

    def _patience(self) -> float | None:
        if (self._finish_by is not None or self._killed_at is not None) and not self._done:
            return POLL_S
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _listen(self) -> None:
        chunk = b""
        try:
            chunk = self._control.recv(READ_BYTES)
        except OSError:
            pass
        try:
            for kind, body in self._reader.feed(chunk):
                self._obey(kind, body)
            if chunk:
                return
            self._reader.end()
        except framing.WireError as error:  # nothing more that comes over it can be believed
            text = f"hvdlite-agent: what came is not what the launcher sent: {error}"
            print(coded("HVD112", text), file=sys.stderr)
        self._orphaned()

    def _obey(self, kind: int, body: bytes) -> None:
        if kind == INPUT:
            assert self._intake is not None  # asked for
            self._intake.take(body)
            return
        order = json.loads(body)
        if order["do"] != "ping":
            self._preload.give_up()
        self._held &= order["do"] not in ("kill", "release")
        if order["do"] == "start":
            self._start(order)
        elif order["do"] == "signal":
            self._well &= order["number"] not in FORWARDED
            only, spared = order.get("rank"), {*order.get("spared", ()), *self._servers}
            for pid, rank in self._ranks.items():
                if rank == only or (only is None and rank not in spared):
                    process.send(pid, order["number"], group=order["group"])
        elif order["do"] == "kill":
            self._well = False
            self._kill_all()
        elif order["do"] == "ping":
            self._report({"what": "pong"})
        elif order["do"] == "end":
            self.code, self.again, self._stays = order["code"], order["again"], False

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FORWARDED:
                self._report({"what": "signalled", "number": number})

    def _start(self, order: dict[str, Any]) -> None:
        """Starts all ranks and servers, when what they import is imported (preload.py)."""
        self._held = bool(order.get("hold"))
        order = {**self._common, **order, "environ": {**self._common["environ"], **order["environ"]}}
        if order["stdin"]:
            self._intake = Intake(self._selector, lambda: self._report({"what": "took"}))
            self._stdin = self._intake.end
        self._preload.begin(order, self._stdin, lambda start: self._start_ranks(order, start))

    def _start_ranks(self, order: dict[str, Any], start: preload.Start) -> None:
        """As many as start before one fails. start: a process."""
        self._started, null = True, os.open(os.devnull, os.O_RDWR)
        self._servers.update(each["rank"] for each in order["servers"])
        for each in [*order["ranks"], *order["servers"]]:
            rank = each["rank"]
            try:
                pid, ends = child.begun(order, each, self._stdin, null, (STDOUT, STDERR), start)
            except (OSError, cpu_binding.BindError) as error:
                code = getattr(error, "code", process.NOT_RUNNABLE)
                self._report({"what": "unstarted", "rank": rank, "code": code, "text": coded("HVD715", str(error))})
                break
            for kind, read_end in ends.items():
                os.set_blocking(read_end, False)
                self._pipes[read_end] = (rank, kind)
                self._selector.register(read_end, selectors.EVENT_READ)
            self._ranks[pid] = self._sessions[pid] = rank
            self._report({"what": "started", "rank": rank, "pid": pid})
        os.close(null)
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def _collect(self) -> bool:
        """Takes note of every child that has ended. Whether there was one."""
        ended = process.reap()
        for pid, code in ended:
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue
            for descriptor in [d for d, (owner, _) in self._pipes.items() if owner == rank]:
                self._read(descriptor, DRAIN_BYTES)
            self._emit(ENDED, rank, b"")
            self._well &= code == 0 or rank in self._servers
            if self._held and code != 0:  # others go on here, without what it has left
                process.send(pid, signal.SIGKILL, group=True)
            self._report({"what": "ended", "rank": rank, "code": code})
        return bool(ended)

    def _clean(self, now: float) -> None:
        """Once no rank runs: everything else below is ended as well, then the agent is done."""
        if self.orphan and self._kill_at is not None and now >= self._kill_at and self._ranks:
            self._kill_all()
            self._kill_at = now + ORPHAN_S
        stuck = self._killed_at is not None and now >= self._killed_at + STUCK_S
        if not self._started or self._done or self._held or (self._ranks and not stuck):
            return
        left = self._below()
        while not left and self._collect():  # a child that ended meanwhile may have left others, unseen
            left = self._below()
        if stuck or process.childless() or (self._well and not left):
            for descriptor in list(self._pipes):
                self._read(descriptor, DRAIN_BYTES)
            kept = {d: rank for d, (rank, _) in self._pipes.items()} if self._well and not stuck else {}
            for text in output_discard.stuck(left) if stuck else output_discard.handed_over(kept):
                self._report({"what": "left", "text": text})
            for descriptor in kept:
                self._close(descriptor)
            self._done = True
            self._report({"what": "done"})
            return
        if self._finish_by is None:
            self._finish_by = now + FINISH_S
        if self._well and now < self._finish_by:
            return
        if not self._cleaning:
            self._cleaning, self._kill_at = True, now + (0.0 if self.orphan else LEFTOVER_S)
            for text in output_discard.unfinished(left, self._sessions) if self._well else ():
                self._report({"what": "left", "text": text})
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()
            return
        for pid in set(left) - self._terminated:
            process.send(pid, signal.SIGTERM)
            self._terminated.add(pid)

    def _below(self) -> list[int]:
        """The processes that are to end with the ranks."""
        below = process.descendants()
        return [pid for pid in below if process.session_of(pid) in self._sessions] if self._well else below

    def _kill_all(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        for pid in list(self._ranks):
            process.send(pid, signal.SIGKILL, group=True)
        for pid in self._below():
            process.send(pid, signal.SIGKILL)

    def _hung_up(self) -> None:
        """What has started this agent is gone, and with it the launcher."""
        self._orphaned()

    def _orphaned(self) -> None:
        """The launcher is gone: no process is left to decide, or to read the output of ranks."""
        if self.orphan:
            return
        self.orphan, self._stays, self._well = True, False, False
        self._preload.drop()
        self._selector.unregister(self._control)
        try:
            self._control.shutdown(socket.SHUT_RDWR)  # how ranks end from now on is not theirs
        except OSError:
            pass
        if self._hangup >= 0:
            self._selector.unregister(self._hangup)
        self._kill_at = time.monotonic() + ORPHAN_S
        self._started, self._held = True, False
        self._silence()
        for pid in [pid for pid, rank in self._ranks.items() if rank not in self._servers]:
            process.send(pid, signal.SIGTERM, group=True)

    def _silence(self) -> None:
        """The launcher takes no output any more: read and drop it, so that no rank blocks on its way out."""
        self._unsent.clear()
        if self._waiting:
            self._selector.unregister(self._output)
            self._waiting = False
        self._output.close()

    def _report(self, news: dict[str, Any]) -> None:
        try:
            self._control.sendall(self._session.pack(CONTROL, json.dumps(news).encode()))
        except OSError:
            self._orphaned()

    def _read(self, descriptor: int, limit: int) -> None:
        rank, kind = self._pipes[descriptor]
        taken = 0
        while taken < limit:
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._close(descriptor)
                return
            taken += len(chunk)
            self._emit(kind, rank, chunk)

    def _close(self, descriptor: int) -> None:
        if not self._paused:
            self._selector.unregister(descriptor)
        del self._pipes[descriptor]
        os.close(descriptor)

    def _emit(self, kind: int, rank: int, chunk: bytes) -> None:
        if self._output.fileno() >= 0:
            self._unsent += self._output_session.pack(kind, RANK.pack(rank) + chunk)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._output.send(memoryview(self._unsent)[:READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._silence()
            return
        if self._unsent and not self._waiting:
            self._selector.register(self._output, selectors.EVENT_WRITE)
        elif self._waiting and not self._unsent:
            self._selector.unregister(self._output)
        self._waiting = bool(self._unsent)

    def _throttle(self) -> None:
        """Reads no pipe while too much is unsent."""
        pause = len(self._unsent) > (UNSENT_MAX // 2 if self._paused else UNSENT_MAX)
        if pause == self._paused:
            return
        self._paused = pause
        for descriptor in self._pipes:
            if pause:
                self._selector.unregister(descriptor)
            else:
                self._selector.register(descriptor, selectors.EVENT_READ)
