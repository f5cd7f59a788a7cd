"""Split the command line into flags and command, and refuse flags that this version does not have.

argparse cannot stop at the first word that is no option without guessing, so this file asks the parser which flags it
knows and which of them take a value, and finds that word. An unknown flag is refused, and the error names the nearest
known one; one of Horovod, torchrun or mpirun that a later version will have is refused with the reason. One of Horovod
or torchrun that needs no successor is taken, its value checked, and its reason printed: what it asked for happens
anyway, or there is nothing left of what it was for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.errors.codes import coded

NOT_YET = {
    "--jsrun": "jsrun is not supported; start hvdlite-run inside the allocation",
}


_ALGORITHM = "the algorithm of an allreduce or allgather is chosen at run time"

OBSOLETE: dict[str, tuple[Callable[[str], Any] | None, str]] = {  # flag: type of its value, reason
    "--cycle-time-ms": (float, "there is no cycle: rounds are driven by events"),
    "--hierarchical-allreduce": (None, _ALGORITHM),
    "--no-hierarchical-allreduce": (None, _ALGORITHM),
    "--hierarchical-allgather": (None, _ALGORITHM),
    "--no-hierarchical-allgather": (None, _ALGORITHM),
    "--torus-allreduce": (None, _ALGORITHM),
    "--no-torus-allreduce": (None, _ALGORITHM),
    "--autotune-gaussian-process-noise": (float, "the noise is measured"),
    "--gloo-timeout-seconds": (int, "there is no Gloo; --start-timeout limits the start"),
    "--mpi-threads-disable": (None, "hvdlite calls MPI from a thread of its own, so MPI is started for threads"),
    "--no-mpi-threads-disable": (None, "MPI is started for threads anyway"),
    "--num-nccl-streams": (int, "hvdlite chooses its streams itself"),
    "--thread-affinity": (int, "the engine's thread runs on the CPUs of its rank, which --bind-to sets"),
    "--disable-cache": (None, "no cache is kept between launches"),
    "--rdzv-conf": (str, "there is one rendezvous; --start-timeout and --agent-timeout limit it"),
    "--monitor-interval": (float, "the end of a rank is reported at once"),
    "--start-method": (str, "ranks are separate programs, not forks of a Python process"),
    "--role": (str, "all ranks of a job have the same role"),
}


class FlagError(ValueError):
    """A flag that cannot be; the text names it."""


class _Obsolete(argparse.Action):
    """Keeps the flag in `obsolete`."""

    def __call__(self, parser: Any, args: Any, values: Any, option_string: Any = None) -> None:
        args.obsolete = [*(args.obsolete or []), option_string]


def add_fronts(add: Callable[..., object]) -> None:
    """Flags that change what scripts import: see agent/rank_environment.py."""
    front: dict[str, Any] = {"dest": "fronts", "action": "append_const", "default": []}
    add("--as-horovod", const="as_horovod", help="`import horovod` in the ranks imports hvdlite", **front)
    text = "tf.distribute.MultiWorkerMirroredStrategy in the ranks is hvd.Strategy"
    add("--tf-strategy", const="tf_strategy", help=text, **front)


def add_control(add: Callable[..., argparse.Action]) -> None:
    """Those of how the job runs."""
    add("-m", "--module", action="store_true", help="run the command as a Python module, like python -m")
    add(
        "--config-file",
        dest="file",
        metavar="FILE",
        help="YAML file of flags in Horovod's format; the command line overrides it",
    )
    add("--dry-run", dest="dry", action="store_true", help="start nothing; print which ranks would run on which hosts")
    add("--max-restarts", dest="restarts", metavar="N", help="restart a failed job, at most N times")
    add(
        "--bind-to",
        "-bind-to",
        dest="bind",
        choices=("none", "core", "socket", "numa"),
        help="CPUs of a rank: none (all CPUs, the default), core (an even share of the cores), socket or numa",
    )
    add(
        "--stdin",
        metavar="RANK",
        help="0: connect the stdin of this command to rank 0; by default ranks have no stdin, except that `python -` "
        "runs the program on stdin on all ranks",
    )
    add("--explain", metavar="CODE", help="print cause and remedy of an error: a code such as HVD301, or the message")
    add(
        "--wdir",
        dest="wdir",
        metavar="DIR",
        help="working folder of the ranks; default: the current folder, to which paths in flags and variables refer",
    )
    add(
        "--record",
        metavar="DIR",
        help="write the times of each step and gradient to DIR, from which hvdlite-trace predict estimates larger jobs "
        "(--trace-dir DIR --trace-steps --trace-every 1 --timeline-filename DIR/line.json)",
    )
    add("--oversubscribe", action="store_true", help="allow more ranks than slots")


def record(args: argparse.Namespace) -> None:
    """--record as the options that it stands for. Raises FlagError."""
    if args.record is None:
        return
    if not args.record or (os.path.lexists(args.record) and not os.path.isdir(args.record)):
        raise FlagError(f"--record {args.record!r}: name a folder, which may be a new one [HVD704]")
    for flag, value in (("--trace-dir", args.trace_dir), ("--timeline-filename", args.timeline)):
        if value is not None:
            raise FlagError(f"--record sets the place of all records: remove {flag} [HVD703]")
    args.trace_dir, args.trace_steps, args.trace_every = args.record, "1", "1"
    args.timeline = os.path.join(args.record, "line.json")


def add_output(add: Callable[..., argparse.Action]) -> None:
    """Those of the ranks' output."""
    add(
        "--output-filename",
        "--output-dir",
        "--log-dir",
        dest="folder",
        metavar="DIR",
        help="also write the output to DIR/rank.<rank>/stdout and stderr",
    )
    add("--output-file-mb", dest="file_mb", metavar="MB", help="rotate these files at this size; 3 older ones are kept")
    add("--ranks-to-console", dest="shown", metavar="0,2-3", help="ranks whose output is shown: numbers, all or none")
    add(
        "--local-ranks-filter",
        dest="local_shown",
        metavar="0,2-3",
        help="like --ranks-to-console, with the numbers on each host",
    )
    add("--pty", action="store_true", help="give rank 0 a pseudo-terminal, for progress bars and colours")
    add("--fold-output", dest="fold", action="store_true", help="print a line that several ranks share only once")
    add("--output-json", dest="as_json", action="store_true", help="print one JSON object for each line of output")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        "--timestamp-output",
        "-timestamp-output",
        dest="timestamps",
        action="store_true",
        help="prefix each line with the time",
    )


def add_obsolete(parser: argparse.ArgumentParser) -> None:
    """Make the parser take flags of OBSOLETE; `obsolete` of what it parses has those that were given, or is None."""
    for flag, (kind, _) in OBSOLETE.items():
        settings: dict[str, Any] = {"nargs": 0} if kind is None else {"type": kind}
        parser.add_argument(flag, dest="obsolete", action=_Obsolete, help=argparse.SUPPRESS, **settings)


def note_of(obsolete: Sequence[str] | None, more: Sequence[str] = ()) -> str | None:
    """One line on the flags that were given and change nothing; `more` of them, with their reasons."""
    reasons = [f"{flag} ({OBSOLETE[flag][1]})" for flag in dict.fromkeys(obsolete or [])] + list(more)
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
            raise FlagError(coded("HVD701", _unknown(flag, list(known))))
        if action.nargs != 0 and not complete:
            count = action.nargs if isinstance(action.nargs, int) else 1
            at += count
            if at >= len(argv):
                raise FlagError(f"{flag} needs {'a value' if count == 1 else f'{count} values'} [HVD701]")
        at += 1
    return list(argv[:at]), list(argv[at:])


def _unknown(flag: str, known: list[str]) -> str:
    import difflib

    spelled = flag.replace("_", "-")
    if spelled in NOT_YET:
        return f"not yet: {flag}: {NOT_YET[spelled]}"
    near = difflib.get_close_matches(spelled, [*known, *NOT_YET], n=1, cutoff=0.6)
    return f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else "")
