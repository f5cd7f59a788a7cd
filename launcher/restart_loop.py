"""Restarts: run a job once, and `--max-restarts` times more while it fails by itself.

Each attempt is a whole job (job.py): new agents on all hosts, a new store, a new secret, the same command. That is all
that a program needs which goes on from its last checkpoint, and all that can be had while the number of ranks stays.
Ranks find the number of restarts in HVDLITE_RESTART_COUNT, and where torchrun has it.

A job that a signal or a closed stdout has ended is not tried again, nor one that could not even be started at first: no
host, no command. A later attempt that cannot be started counts as one, because a host may need a moment to come back.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from hvdlite.trace import directory

from .agent import process, stdin
from .control import agent_link
from .control.plan import Plan, RemoteHosts
from .control.signals import ENDING, Signals
from .job import Job
from .output.whole_lines import words
from .placement.host_flags import PlaceError
from .starters import starter

PAUSE_S = 1.0  # between attempts: for ports, devices and hosts that come free


def run(plan: Plan) -> int:
    """Runs the job; the exit code of the launcher. Raises OSError when the output folder cannot be written."""
    for standard in (0, 1, 2):
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with Signals() as signals:
        process.become_subreaper()
        strangers = set() if process.childless() else set(process.descendants())
        for attempt in range(plan.max_restarts + 1):
            code, again = _attempt(plan._replace(attempt=attempt), signals, strangers)
            if not again or attempt == plan.max_restarts:
                if plan.stdin is None and (unread := stdin.unread()):
                    _announce(plan, unread)
                return code
            _announce(plan, f"restart {attempt + 1} of {plan.max_restarts}")
            try:
                _pause(signals, PAUSE_S)
                if plan.again is not None:
                    plan = plan.again(partial(_pause, signals))._replace(again=plan.again)
            except _Interrupted as interrupted:
                return 128 + interrupted.number
            except PlaceError as error:
                _announce(plan, str(error))
                return code
    raise AssertionError("unreachable: the last attempt returns")


class _Interrupted(Exception):
    """A signal ends the launcher between two attempts."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _pause(signals: Signals, seconds: float) -> None:
    """Raises _Interrupted."""
    if number := signals.awaited(seconds, ENDING):
        raise _Interrupted(number)


def _attempt(plan: Plan, signals: Signals, strangers: set[int]) -> tuple[int, bool]:
    """(exit code, whether it makes sense to try again)."""
    own = None
    if plan.here is not None:
        own = agent_link.forked(plan.here, stdin.own() if plan.stdin else -1, signals.ends)
    far = RemoteHosts([], plan.slots, "127.0.0.1", os.urandom(32))
    try:
        if plan.gather is not None:
            far = plan.gather(plan, signals)
    except starter.StartError as error:
        if own is not None and own.pid is not None:
            own.control.close()  # it knows what that means
            os.waitpid(own.pid, 0)
        for line in str(error).splitlines():
            _announce(plan, line)
        return error.code, plan.attempt > 0 and not error.by_signal
    job = Job(plan, signals, own, far, strangers)
    code = job.run()
    records = directory.last_words({**plan.environ, **plan.options}, job.number)
    if job.failed and records is not None:
        _announce(plan, records)
    return code, job.failed


def _announce(plan: Plan, text: str) -> None:
    """The launcher's own words, while no job has the console."""
    line = words(text, time.time()).decode() if plan.look.as_json else f"hvdlite-run: {text}\n"
    print(line, end="", file=sys.stderr, flush=True)
