"""Which words of the command line are ours? Splits it, and refuses flags that this version does not have.

argparse cannot stop at the first word that is no option without guessing, so this file asks the parser which flags it
knows and which of them take a value, and finds the place. A flag that nobody knows is refused with the nearest that
somebody does; one of Horovod, torchrun or mpirun that a later version will have is refused with the reason. One of
Horovod that needs no successor is taken, its value checked, and its reason told: what it asked for happens anyway, or
there is nothing left of what it was for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

_ELASTIC = "elastic training comes with a later version"
_MPI = "running under MPI comes with a later version"
_TUNING = "hvdlite has no such thing to tune in this version"
_TIMELINE = "the timeline comes with a later version"
_STALL = "stall reports come with a later version"
_LOG = "the core's log levels come with a later version"

NOT_YET = {
    "--min-np": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-np": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--host-discovery-script": _ELASTIC,
    "--max-restarts": _ELASTIC,
    "--mpi-threads-disable": "hvdlite calls MPI from a thread of its own: it needs MPI_THREAD_MULTIPLE",
    "--jsrun": "jsrun is not supported; start hvdlite-run inside the allocation",
    "--config-file": "the file of options comes with a later version; give flags or HVDLITE_ variables",
    "--thread-affinity": _TUNING,
    "--num-nccl-streams": _TUNING,
    "--timeline-filename": _TIMELINE,
    "--timeline-mark-cycles": _TIMELINE,
    "--no-timeline-mark-cycles": _TIMELINE,
    "--stall-check": _STALL,
    "--no-stall-check": _STALL,
    "--stall-check-warning-time-seconds": _STALL,
    "--stall-check-shutdown-time-seconds": _STALL,
    "--log-level": _LOG,
    "--log-with-timestamp": _LOG,
    "--log-without-timestamp": _LOG,
    "--log-hide-timestamp": _LOG,
    "--no-log-hide-timestamp": _LOG,
}


_ALGORITHM = "the way of an allreduce or allgather is chosen at run time"

OBSOLETE: dict[str, tuple[Callable[[str], Any] | None, str]] = {  # flag: type of its value, reason
    "--cycle-time-ms": (float, "there is no cycle: rounds are driven by events"),
    "--hierarchical-allreduce": (None, _ALGORITHM),
    "--no-hierarchical-allreduce": (None, _ALGORITHM),
    "--hierarchical-allgather": (None, _ALGORITHM),
    "--no-hierarchical-allgather": (None, _ALGORITHM),
    "--torus-allreduce": (None, _ALGORITHM),
    "--no-torus-allreduce": (None, _ALGORITHM),
    "--autotune-gaussian-process-noise": (float, "the noise is measured"),
    "--gloo-timeout-seconds": (int, "there is no Gloo; --start-timeout bounds the start"),
    "--no-mpi-threads-disable": (None, "MPI is started for threads anyway"),
    "--disable-cache": (None, "nothing is remembered between launches"),
}


class FlagError(ValueError):
    """A flag that cannot be; the text names it."""


class _Obsolete(argparse.Action):
    """Keeps the flag in `obsolete`."""

    def __call__(self, parser: Any, asked: Any, values: Any, option_string: Any = None) -> None:
        asked.obsolete = [*(asked.obsolete or []), option_string]


def add_obsolete(parser: argparse.ArgumentParser) -> None:
    """Make the parser take flags of OBSOLETE; `obsolete` of what it parses has those that were given, or is None."""
    for flag, (kind, _) in OBSOLETE.items():
        count = 0 if kind is None else None
        parser.add_argument(flag, dest="obsolete", action=_Obsolete, nargs=count, type=kind, help=argparse.SUPPRESS)


def note_of(obsolete: Sequence[str] | None) -> str | None:
    """One line on the flags that were given and change nothing."""
    reasons = [f"{flag} ({OBSOLETE[flag][1]})" for flag in dict.fromkeys(obsolete or [])]
    return f"without effect: {', '.join(reasons)}" if reasons else None


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the launcher's words, the command). Raises FlagError."""
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    argv = list(argv)
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return list(argv[:at]), list(argv[at + 1 :])
        if not word.startswith("-") or word == "-":
            break
        flag, equals, value = word.partition("=")
        if flag not in known and flag.replace("_", "-") in known:  # torchrun's spellings
            flag = flag.replace("_", "-")
            argv[at] = flag + equals + value
        action = known.get(flag)
        complete = bool(equals)
        if action is None and not word.startswith("--"):
            action = known.get(word[:2])  # -n2: the value is attached
            complete = True
            if action is not None and action.nargs == 0:
                action = None
        if action is None:
            raise FlagError(_unknown(flag, list(known)))
        if action.nargs != 0 and not complete:
            at += 1
            if at >= len(argv):
                raise FlagError(f"{flag} needs a value")
        at += 1
    return list(argv[:at]), list(argv[at:])


def _unknown(flag: str, known: list[str]) -> str:
    import difflib

    spelled = flag.replace("_", "-")
    if spelled in NOT_YET:
        return f"not yet: {flag}: {NOT_YET[spelled]}"
    near = difflib.get_close_matches(spelled, known, n=1, cutoff=0.6)
    return f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else "")
