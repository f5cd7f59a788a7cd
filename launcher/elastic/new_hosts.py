"""Agents of hosts that join a running job, started in a thread beside the job's loop.

A name that no server knows, a host that does not answer or refuses, takes its time and delays no rank: the loop learns
of it when all is decided. Errors are reported, and the policy decides when the host is tried again.

Sessions are started by posix_spawn there: a fork of a process with other threads must not run Python.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from ..agent import process
from ..control.agent_link import AgentLink
from ..control.plan import Plan
from ..control.signals import Signals
from ..hosts import address
from ..starters.agent_startup import Gather
from ..starters.starter import Running, StartError

PATIENCE_S = 1.0


class Arrival(NamedTuple):
    """What has become of a host: its agent and the sessions that led to it, or what is wrong with it. name: "" where
    only its name could not be looked up."""

    name: str
    link: AgentLink | None
    sessions: list[Running]
    trouble: str = ""


class Arrivals:
    """Of one job. gather: the way to other hosts; None: there is none. wake: called when `turn` has something."""

    def __init__(self, plan: Plan, secret: bytes, gather: Gather | None, wake: Callable[[], None], number: int) -> None:
        self._plan, self._secret, self._gather, self._wake = plan, secret, gather, wake
        self._number = number  # of the next host
        self._coming: dict[str, tuple[threading.Thread, _Stop]] = {}
        self._looked_up: set[str] = set()
        self._decided: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def reached_at(self, others: Sequence[str]) -> str:
        """The address of this host at which these hosts, and those that come later, reach it."""
        try:
            return "127.0.0.1" if self._gather is None else self._gather.mine(others)
        except address.AddressError:
            return address.outward()

    def awaits(self, name: str) -> bool:
        """Whether the agent of this host is on its way."""
        return name in self._coming

    def send_for(self, name: str) -> None:
        """An agent is to come from this host."""
        if self._gather is None:
            self._decided.put(Arrival(name, None, [], f"{name}: this job cannot start ranks on other hosts [HVD715]"))
            return
        stop = _Stop()
        thread = threading.Thread(target=self._bring, args=(self._gather, name, self._number, stop), daemon=True)
        self._coming[name] = thread, stop
        self._number += 1
        thread.start()

    def look_up(self, name: str, call: Callable[[str], None]) -> None:
        """call(name) may take long; then the loop is woken."""
        if name not in self._looked_up:
            self._looked_up.add(name)
            threading.Thread(target=self._call, args=(call, name), daemon=True).start()

    def _call(self, call: Callable[[str], None], name: str) -> None:
        try:
            call(name)
        except Exception as error:
            self._decided.put(Arrival("", None, [], f"{name}: {type(error).__name__}: {error} [HVD712]"))
        self._wake()

    def turn(self) -> list[Arrival]:
        """What has been decided since."""
        decided = []
        while not self._decided.empty():
            decided.append(self._decided.get())
            coming = self._coming.pop(decided[-1].name, None)
            if coming is not None:
                coming[0].join()
                coming[1].close()
        return decided

    def close(self) -> None:
        """No host joins any more. What is on its way is ended; a name server is not waited for."""
        for _, stop in self._coming.values():
            stop.ask()
        for thread, _ in self._coming.values():
            thread.join(PATIENCE_S)
        for arrival in self.turn():
            for session in arrival.sessions:
                session.end()

    def _bring(self, gather: Gather, name: str, number: int, stop: _Stop) -> None:
        try:
            found = gather.bring(self._plan, self._secret, [(number, name)], cast(Signals, stop), process.spawn)
            arrival = Arrival(name, found[0][0], found[1])
        except StartError as error:
            arrival = Arrival(name, None, [], str(error))
        except Exception as error:  # whatever it is: no other code sees it
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            arrival = Arrival(name, None, [], f"{name}: {why} [HVD715]")
        self._decided.put(arrival)
        self._wake()


class _Stop:
    """What the start of a job's agents takes for the launcher's signals: says SIGTERM once it is asked to."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        return os.read(self._read, 16)

    def ask(self) -> None:
        os.write(self._write, bytes((signal.SIGTERM,)))

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
