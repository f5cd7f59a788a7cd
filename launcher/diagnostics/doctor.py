"""`hvdlite-run doctor`: check whether a job will run here, and print remedies.

This host, and which rank a script would be that is started here without hvdlite-run. With -H, --hostfile or in an
allocation every host of the job: agents are brought there as for a job, all at once, and asked (probe/host_probe.py)
what they are like, whether they reach each other, and with --measure how fast. findings.py evaluates the answers. A
host that cannot be reached is a finding, and the others are examined.

Exit code 0 if nothing would keep a job from running, else 1. --check-build with hosts asks the same way, and prints
what each host has.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.security import framing

from ..control.agent_link import AgentLink
from ..control.signals import Signals
from ..hosts import hosts
from ..probe.host_probe import Examiner
from ..starters.agent_startup import Gather, order
from ..starters.starter import Start, StartError
from . import findings
from .findings import FAILURE, WARNING, WELL, Finding

ANSWER_S = 30.0
_CLOCKS = 5


class Lost(Exception):
    """A host has gone, or does not answer any more."""


class _Here:
    """This host, asked as others are."""

    def __init__(self, name: str, at: str, secret: bytes) -> None:
        self.name, self.at = name, at
        self.examiner = Examiner(secret)


class _There:
    """Another host."""

    def __init__(self, link: AgentLink) -> None:
        self.name, self.link = link.name, link
        self.at = str(link.peer)
        self.reader = framing.FrameReader(link.session)
        link.control.settimeout(ANSWER_S)

    def answer(self, asks: Mapping[str, Any]) -> Any:
        """Asks and waits. Raises Lost."""
        self.link.order(**asks)
        return self.receive()

    def receive(self) -> Any:
        """The next answer. Raises Lost."""
        try:
            while chunk := self.link.control.recv(1 << 18):
                for _, body in self.reader.feed(chunk):
                    return json.loads(body)
            self.reader.end()
        except (OSError, framing.WireError) as error:
            raise Lost(str(error)) from None
        raise Lost("its connection ended [HVD720]")


class Doctor:
    """The examination of hosts. `trouble` grows by those that are lost on the way."""

    def __init__(self, here: _Here | None, there: Sequence[_There]) -> None:
        self.here, self.there = here, list(there)
        self.trouble: list[Finding] = []

    def ask_all(self, asks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The answers of these hosts, which work at the same time."""
        examined = [each for each in self.there if each.name in asks]
        for each in examined:
            each.link.order(**asks[each.name])
        answers: dict[str, Any] = {}
        if self.here is not None and self.here.name in asks:
            answers[self.here.name] = self.here.examiner.answer(asks[self.here.name])
        with selectors.DefaultSelector() as waiting:
            for each in examined:
                waiting.register(each.link.control, selectors.EVENT_READ, each)
            until = time.monotonic() + ANSWER_S
            while waiting.get_map() and time.monotonic() < until:
                for key, _ in waiting.select(max(0.0, until - time.monotonic())):
                    waiting.unregister(key.fileobj)
                    try:
                        answers[key.data.name] = key.data.receive()
                    except Lost as error:
                        self._lose(key.data, str(error))
            for key in list(waiting.get_map().values()):
                self._lose(key.data, f"no answer within {ANSWER_S:g} s")
        return answers

    def _lose(self, host: _There, why: str) -> None:
        self.there.remove(host)
        self.trouble.append(Finding(FAILURE, host.name, f"lost while it was examined: {why}", "is it up?"))

    def names(self) -> list[str]:
        """Hosts that answer."""
        return [*([self.here.name] if self.here is not None else []), *(each.name for each in self.there)]

    def examine(self, slots: Mapping[str, int], measure: bool) -> list[Finding]:
        """Everything."""
        facts = self.ask_all({name: {"do": "facts"} for name in self.names()})
        found = findings.of_facts(facts, slots) if facts else []
        found += findings.of_clocks(self._clocks())
        if len(self.names()) > 1:
            listeners = self._listeners(found)
            found += findings.of_ways(self._ways(listeners))
            found += findings.of_speeds(self._speeds(listeners)) if measure else []
        return found + self.trouble

    def _clocks(self) -> dict[str, float]:
        skews = {}
        for each in list(self.there):
            tries = []
            try:
                for _ in range(_CLOCKS):
                    began = time.time()
                    theirs = each.answer({"do": "clock"})
                    ended = time.time()
                    tries.append((ended - began, theirs - (began + ended) / 2))
            except Lost as error:
                self._lose(each, str(error))
                continue
            skews[each.name] = min(tries)[1]
        return skews

    def _listeners(self, found: list[Finding]) -> dict[str, list[Any]]:
        """Where each host listens."""
        at = {each.name: each.at for each in self.there}
        if self.here is not None:
            at[self.here.name] = self.here.at
        answers = self.ask_all({name: {"do": "listen", "at": ip} for name, ip in at.items()})
        for name, listener in answers.items():
            if isinstance(listener, str):
                found.append(
                    Finding(FAILURE, name, listener, "is this address its own? --network-interface names another")
                )
        return {name: listener for name, listener in answers.items() if not isinstance(listener, str)}

    def _ways(self, listeners: Mapping[str, list[Any]]) -> dict[tuple[str, str], str | None]:
        """From each host to each other: why not."""
        to = {name: [other for other in listeners if other != name] for name in self.names()}
        asks = {name: {"do": "reach", "targets": [listeners[other] for other in others]} for name, others in to.items()}
        answers = self.ask_all(asks)
        return {(name, other): why for name, whys in answers.items() for other, why in zip(to[name], whys)}

    def _speeds(self, listeners: Mapping[str, list[Any]]) -> dict[tuple[str, str], Any]:
        """One pair after the other, so that they do not share what is measured."""
        speeds = {}
        names = [name for name in self.names() if name in listeners]
        for index, a in enumerate(names):
            for b in names[index + 1 :]:
                answers = self.ask_all({a: {"do": "measure", "target": listeners[b]}})
                if a in answers:
                    speeds[a, b] = answers[a]
        return speeds

    def close(self) -> None:
        """Lets hosts go."""
        if self.here is not None:
            self.here.examiner.close()
        for each in self.there:
            each.link.control.close()
            each.link.output.close()


def run(
    slots: Sequence[hosts.Slot],
    here: str | None,
    gather: object,
    environ: Mapping[str, str],
    measure: bool = False,
    check_build: bool = False,
) -> int:
    """Examines the hosts of these slots and prints what was found; the exit code."""
    names = list(dict.fromkeys(slot.host for slot in slots))
    counts = {name: sum(slot.host == name for slot in slots) for name in names}
    others = [(number, name) for number, name in enumerate(names) if name != here]
    secret = os.urandom(32)
    if not isinstance(gather, Gather) or not others:
        doctor = Doctor(_Here(here or "localhost", "127.0.0.1", secret), [])
        known = [] if check_build else findings.of_rank(environ)
        return _report(doctor, known, counts, measure, check_build)
    with Signals() as signals:
        try:
            registration = gather.listen([name for _, name in others], secret)
            order_line = order(registration, secret, gather.timeout, ANSWER_S, {**environ, **gather.also})
            order_line.update(cwd="/", environ={})
            start = Start(gather.starter, others, registration, order_line, environ, signals, gather.timeout)
            try:
                links, wrong = start.visit()
            finally:
                own_address = registration.address[0]
                registration.close()
        except StartError as error:
            print(f"hvdlite-run: {error}", file=sys.stderr)
            return error.code
        reached = [Finding(WELL, link.name, f"reached, at {link.peer}") for link in links]
        troubled = [_unreached(dict(others)[number], text) for number, (text, _) in sorted(wrong.items())]
        own = _Here(here, own_address, secret) if here is not None else None
        try:
            return _report(
                Doctor(own, [_There(each) for each in links]), reached + troubled, counts, measure, check_build
            )
        finally:
            start.abandon()


def _unreached(name: str, text: str) -> Finding:
    """A host that is not examined. The text has its remedy already."""
    what, colon, fix = text.partition(": ")
    return Finding(FAILURE, name, what, fix) if colon else Finding(FAILURE, name, text, "")


def _report(doctor: Doctor, known: list[Finding], slots: Mapping[str, int], measure: bool, check_build: bool) -> int:
    try:
        if check_build:
            answers = doctor.ask_all({name: {"do": "check_build"} for name in doctor.names()})
            for name, text in answers.items():
                print(f"==== {name}\n{text}\n")
            found = [each for each in known + doctor.trouble if each.grade == FAILURE]
        else:
            found = known + doctor.examine(slots, measure)
    finally:
        doctor.close()
    for each in found:
        print(each)
    failures = sum(each.grade == FAILURE for each in found)
    if not check_build:
        warnings = sum(each.grade == WARNING for each in found)
        print(f"{len(slots)} host{'s' * (len(slots) > 1)}: {failures} failures, {warnings} warnings")
    return 1 if failures else 0
