"""Starter: processes (ssh, srun) start agents on other hosts; wait until all have registered.

A starter lists the processes to start (`sessions`), whether a failed one is worth another attempt, and what a user
should do about it. Here they are started, at most `AT_ONCE` that have not registered; each gets the job over stdin (one
line of JSON, see remote_agent.py), and stdin stays open as long as the job runs. The output of a session is kept, for
the diagnosis of one that ends too early and as a report of the host later.

Nothing is started anywhere unless all hosts report that they are well; if not, the errors of all of them are reported
at once. Everything here is one loop over descriptors, which signals to the launcher end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hvdlite import __version__
from hvdlite.errors.codes import coded
from hvdlite.system import python_command

from ..agent import process
from ..control.agent_link import AgentLink, reported
from ..control.registration import CONTROL, OUTPUT, Arrival, Registration
from ..control.signals import ENDING, Signals

AT_ONCE = 32
RETRY_S = (0.5, 1.0)
TEXT_MAX = 8192
BOOT = (
    f"{python_command.WITHOUT_FOLDER}import json;g=json.loads(sys.stdin.buffer.readline()or'0');g or sys.exit(255);"
    "sys.path[:0]=g['path'];from hvdlite.launcher import remote;sys.exit(remote.main(g))"
)


def far_command() -> list[str]:
    """What a session runs on its hosts: this Python, which must be there at the same path."""
    return [sys.executable, "-c", BOOT]


class Session(NamedTuple):
    """A process that starts the agents of some hosts (their numbers)."""

    words: list[str]
    hosts: list[int]
    title: str = ""  # what speaks where it does not speak for one host
    patience: float = 0.5  # seconds to end by itself, once all agents have ended


class Starter(Protocol):
    """A way to other hosts."""

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[Session]:
        """The processes that start agents on these hosts (number, name)."""
        ...

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host. Raises address.AddressError."""
        ...

    def again(self, code: int, text: str) -> bool:
        """Is a session that has ended so worth another attempt?"""
        ...

    def remedy(self, host: str, code: int, text: str) -> str:
        """One line: what is wrong with a host, and what to do. `text` is the output of the session."""
        ...


class StartError(Exception):
    """No rank was started; the text says why, a line for each host. `code` is the launcher's exit code."""

    def __init__(self, text: str, code: int = 1, by_signal: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.by_signal = by_signal


class Running:
    """A session under way."""

    def __init__(self, session: Session, payload: bytes, start: Callable[..., int]) -> None:
        self.session = session
        self._start = start
        self._payload = payload
        self.unsent = b""
        self.pid = 0
        self.stdin = self.output = -1
        self.text = b""
        self.attempts = 0
        self.due = 0.0  # when to start it

    def start(self, environ: Mapping[str, str]) -> None:
        """Forks. Raises process.StartError."""
        self.attempts += 1
        self.text, self.unsent = b"", self._payload
        theirs, self.stdin = os.pipe()
        self.output, their_output = os.pipe()
        try:
            self.pid = self._start(self.session.words, environ, os.getcwd(), (theirs, their_output, their_output))
        finally:
            os.close(theirs)
            os.close(their_output)
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.output, False)

    def feed(self) -> None:
        """Gives stdin what it takes."""
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended; its output tells why
            self.unsent = b""

    def listen(self) -> bytes | None:
        """Its output since; None at its end."""
        if self.output < 0:
            return None
        try:
            chunk = os.read(self.output, 65536)
        except BlockingIOError:
            return b""
        except OSError:
            chunk = b""
        self.text = (self.text + chunk)[-TEXT_MAX:]
        return chunk or None

    def end(self, whole: bool = False) -> int:
        """Ends it, if it has not; its exit code. whole: with all that it has left in its process group."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        pid, self.pid = self.pid, 0
        limit = time.monotonic() + self.session.patience
        while _over(pid) is False and time.monotonic() < limit:
            self.listen()  # no reader is waited for
            time.sleep(0.005)
        if self.output >= 0:
            os.close(self.output)
            self.output = -1
        if _over(pid) is None:
            return 0
        process.send(pid, signal.SIGKILL, group=whole)  # a zombie still: the number is not used again
        return process.exit_code(os.waitpid(pid, 0)[1])


def _over(pid: int) -> bool | None:
    """Has this child ended? It is not reaped. None: there is no such child, or other code has reaped it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None if pid else None
    except ChildProcessError:
        return None


class Start:
    """Starts agents on `hosts` (number and name) and waits for them. `run` once. start: process.start, or in a process
    that has other threads process.spawn."""

    def __init__(
        self,
        starter: Starter,
        hosts: Sequence[tuple[int, str]],
        registration: Registration,
        order: Mapping[str, Any],
        environ: Mapping[str, str],
        signals: Signals,
        timeout: float,
        start: Callable[..., int] = process.start,
    ) -> None:
        self._starter, self._registration, self._signals, self._environ = starter, registration, signals, environ
        self._names = dict(hosts)
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._arrived: dict[int, dict[str, Arrival]] = {number: {} for number in self._names}
        self._trouble: dict[int, tuple[str, int]] = {}
        self._printed = 0  # refused addresses
        self._selector = selectors.DefaultSelector()
        self.running: list[Running] = []
        for session in starter.sessions(hosts):
            alone = session.hosts[0] if len(session.hosts) == 1 else None
            line = json.dumps({**order, "host": alone, "hosts": session.hosts}).encode() + b"\n"
            self.running.append(Running(session, line, start))

    def run(self) -> list[AgentLink]:
        """The agents, once all have reported. Raises StartError; then nothing is left of the sessions."""
        links, trouble = self.visit()
        if trouble:
            self.abandon()
            lines = [coded("HVD715", f"{self._names[n]}: {trouble[n][0]}") for n in sorted(trouble)]
            raise StartError("\n".join(lines), trouble[min(trouble)][1])
        return links

    def visit(self) -> tuple[list[AgentLink], dict[int, tuple[str, int]]]:
        """Those that have reported and are well; and by the numbers of the other hosts what is wrong and its exit code.

        Raises StartError when a signal comes; then nothing is left of the sessions."""
        self._selector.register(self._registration, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        try:
            while self._open():
                self._launch()
                self._turn()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._selector.close()
        well = {number: each for number, each in self._arrived.items() if number not in self._trouble}
        return [reported(n, self._names[n], each[CONTROL], each[OUTPUT]) for n, each in well.items()], self._trouble

    def _open(self) -> list[int]:
        """Hosts that are neither here nor given up."""
        return [n for n, each in self._arrived.items() if len(each) < 2 and n not in self._trouble]

    def _launch(self) -> None:
        """Starts sessions that are due."""
        now = time.monotonic()
        open_hosts = set(self._open())
        in_flight = [each for each in self.running if each.pid and open_hosts.intersection(each.session.hosts)]
        room = AT_ONCE - len(in_flight)
        for each in self.running:
            if room <= 0 or each.pid or each.due > now or not open_hosts.intersection(each.session.hosts):
                continue
            try:
                each.start(self._environ)
            except process.StartError as error:
                self._give_up(each, f"cannot run {each.session.words[0]}: {error.strerror}", error.code)
                continue
            room -= 1
            self._selector.register(each.output, selectors.EVENT_READ, each)
            self._selector.register(each.stdin, selectors.EVENT_WRITE, each)

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            for number in self._open():
                title, words = self._words_of(number)
                refused = [] if self.running else list(self._registration.refused.values())
                what = f"no agent that {title} should start has reported" if title else "did not report"
                self._trouble[number] = (
                    f"{what} within {self._timeout:g} s (--start-timeout sets the limit){words}"
                    + (f"; {refused[0]}" if refused else ""),
                    255,
                )
            return
        waiting = [each.due for each in self.running if not each.pid]
        patience = max(0.0, min([self._deadline, *(due for due in waiting if due > now)]) - now)
        for key, events in self._selector.select(patience):
            if key.fileobj is self._registration:
                for arrival in self._registration.turn():
                    self._arrive(arrival)
                self._report_refused()
            elif key.fileobj is self._signals:
                for number in self._signals.read():
                    if number in ENDING:
                        text = f"{process.signal_name(number)} while the hosts were started"
                        raise StartError(coded("HVD715", text), 128 + number, by_signal=True)
            elif events & selectors.EVENT_WRITE:
                key.data.feed()
                if not key.data.unsent:
                    self._selector.unregister(key.fileobj)
            elif key.data.listen() is None:
                self._ended(key.data)

    def _report_refused(self) -> None:
        """Hosts that come by themselves and have another secret: at once, since the others are waited for longer."""
        for text in list(self._registration.refused.values())[self._printed :]:
            self._printed += 1
            if not self.running:
                print(f"hvdlite-run: {text}", file=sys.stderr, flush=True)

    def _words_of(self, number: int) -> tuple[str, str]:
        """The title of the session that leads to this host, and its last line."""
        for each in self.running:
            if number in each.session.hosts:
                text = each.text.strip().decode(errors="replace")
                return each.session.title, f"; its last words: {text.splitlines()[-1]}" if text else ""
        return "", ""

    def _arrive(self, arrival: Arrival) -> None:
        number, stream = self._number(arrival.hello), arrival.hello.get("stream")
        others = [each for each in self._arrived.get(number, {}).values() if each.hello["id"] != arrival.hello["id"]]
        nodes, expected = arrival.hello.get("nodes"), len(self._names) + 1
        if not self.running and nodes != expected and arrival.hello.get("version") == __version__:
            arrival.sock.close()
            text = f"was started with --nnodes {nodes}, this host with --nnodes {expected}: it must be the same on all"
            raise StartError(f"{arrival.hello.get('name')} {text} [HVD715]", 2)
        if others and not self.running:
            names = f"{others[0].hello['name']} and {arrival.hello['name']}"
            why = f"two hosts report as this one ({names}): --node-rank tells them apart"
            self._trouble.setdefault(number, (why, 2))
        if number not in self._arrived or stream not in (CONTROL, OUTPUT) or stream in self._arrived[number]:
            arrival.sock.close()  # a host that was given up or an attempt that was repeated
            return
        version = arrival.hello.get("version")
        problem = arrival.hello.get("problem")
        if version != __version__:
            problem = f"has hvdlite {version}, this host {__version__}: install the same version on all hosts"
        if problem:
            self._trouble.setdefault(number, (str(problem), int(arrival.hello.get("code") or 1)))
        self._arrived[number][stream] = arrival

    def _number(self, hello: Mapping[str, Any]) -> int:
        """Which host this is; those that do not know get a free number when they come."""
        number = hello.get("host")
        if number is not None:
            return int(number)
        known = {str(arrival.hello["id"]): n for n, each in self._arrived.items() for arrival in each.values()}
        free = [n for n, each in self._arrived.items() if not each]
        return known.get(str(hello["id"]), free[0] if free else -1)

    def _ended(self, running: Running) -> None:
        """A session has ended while its hosts were waited for, or (its output closed) is about to."""
        self._selector.unregister(running.output)
        if running.unsent:
            self._selector.unregister(running.stdin)
        code, text = running.end(whole=True), running.text.decode(errors="replace").strip()
        missing = [n for n in running.session.hosts if len(self._arrived[n]) < 2 and n not in self._trouble]
        if missing and running.attempts <= len(RETRY_S) and self._starter.again(code, text):
            running.due = time.monotonic() + RETRY_S[running.attempts - 1]
            for number in missing:
                for arrival in self._arrived[number].values():
                    arrival.sock.close()
                self._arrived[number] = {}
            return
        self._give_up(running, None, code or 1)

    def _give_up(self, running: Running, why: str | None, code: int) -> None:
        running.due = float("inf")
        text = running.text.decode(errors="replace").strip()
        for number in running.session.hosts:
            if len(self._arrived[number]) < 2:
                words = why or self._starter.remedy(self._names[number], code, text)
                self._trouble.setdefault(number, (words, code if code > 0 else 255))

    def abandon(self) -> None:
        """Ends all sessions and streams."""
        for streams in self._arrived.values():
            for arrival in streams.values():
                arrival.sock.close()
        for each in self.running:
            if each.pid:
                process.send(each.pid, signal.SIGTERM, group=True)
        for each in self.running:
            each.end(whole=True)
