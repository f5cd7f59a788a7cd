"""`hvdlite-run [options] command ...`: read and check the command line, then start the job.

Options are read up to the first word that is none; all from there on is the command, so its own flags need no quoting.
Flags that mean an option of the library come from the table in hvdlite/config/__init__.py; those of Horovod that this
version does not do yet are refused with the reason (command_line/flags.py), because a flag that is ignored is a lie.
Mistakes end it before anything starts: exit code 2, or as a shell 127 for a missing command, 126 for no program.

Imports are few and late: the launcher's start is part of every job's, so it loads neither NumPy nor the extension.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hvdlite import config
from hvdlite.errors import HvdOptionError
from hvdlite.errors.codes import coded

from . import output_flags
from .agent import process, stdin
from .command_line import flags, help, horovodrun
from .control import ending, plan
from .elastic import flags as elastic_flags
from .output import dashboard
from .placement import host_flags
from .starters import mpirun

USAGE_ERROR = 2


class UsageError(ValueError):
    """The command line asks for what cannot be; `code` is the launcher's exit code."""

    def __init__(self, text: str, code: int = USAGE_ERROR) -> None:
        super().__init__(text)
        self.code = code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(coded("HVD704", message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdlite-run",
        usage=help.USAGE,
        description="Start N ranks of a script on one or several hosts. The first failed rank decides the exit code.",
        epilog="The command starts at the first word without a dash: hvdlite-run -np 2 python train.py --lr 0.1.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=help.Formatter,
    )
    help.add_flags(parser)
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="np", metavar="N", help="number of ranks")
    add("-H", "--hosts", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots, reached over ssh: a:4,b:4")
    add("-hostfile", "--hostfile", dest="hostfile", metavar="FILE", help="file of hosts, one line `host slots=N` each")
    add("--as-horovod", dest="as_horovod", action="store_true", help="`import horovod` in the ranks imports hvdlite")
    add("--gloo", action="store_true", help="use the built-in transport (the default)")
    add("--verbose", action="store_true", help="print the processes that are started, their environment and their end")
    add("-cb", "--check-build", dest="check", action="store_true", help="print the frameworks and libraries found")
    add("--measure", action="store_true", help="with the command doctor: also measure the connections between hosts")
    add("-v", "--version", dest="version", action="store_true", help="print the version")
    flags.add_control(add)
    flags.add_output(parser.add_argument_group("output of the ranks").add_argument)
    dashboard.add_flags(parser.add_argument_group("dashboard").add_argument)
    host_flags.add_flags(parser.add_argument_group("several hosts").add_argument)
    elastic_flags.add_flags(parser.add_argument_group("elastic jobs").add_argument)
    mpirun.add_flags(parser.add_argument_group("MPI").add_argument)
    horovodrun.add_flags(parser.add_argument_group("options of horovodrun").add_argument)
    config.add_flags(parser.add_argument_group("options of the library"))
    flags.add_obsolete(parser)
    return parser


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """What these flags, without a command, ask for. Raises UsageError."""
    return _parser().parse_args(list(words))


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. `argv` without the program's name; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        print(f"hvdlite-run: {error}", file=sys.stderr)
        if error.code == USAGE_ERROR:
            print("Try hvdlite-run --help.", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _answered(argv: Sequence[str], asked: argparse.Namespace, command: list[str]) -> int | None:
    """The exit code of what starts no ranks; None: ranks are asked for."""
    if asked.version:
        from hvdlite import __version__

        print(f"hvdlite-run {__version__}")
        return 0
    if asked.completion:
        print(help.completion(_parser(), asked.completion), end="")
        return 0
    if asked.check or (command[:1] == ["doctor"] and not asked.module):
        return _examine(argv, command)
    if asked.explain is None:
        return None
    print(_explained(asked.explain), end="")
    return 0


_WRONG_FLAGS = (HvdOptionError, horovodrun.HorovodsError, host_flags.PlaceError)
_WRONG_FLAGS += (output_flags.LookError, stdin.ProgramError)


def _run(argv: Sequence[str]) -> int:
    asked, command = _asked(argv)
    if (code := _answered(argv, asked, command)) is not None:
        return code
    environ = config.environ()
    try:
        variables, notes = horovodrun.translate(asked, environ)
        options = {**variables, **config.variables_of(vars(asked))}
        forward = host_flags.forwarded(asked, environ)
        host_flags.go_to(asked, environ, options, forward)
        settings = config.read(_with_flags(environ, options))
        look = output_flags.of(asked, environ)
        note = flags.note_of(asked.obsolete, notes)
        if note is not None:
            print(f"hvdlite-run: {note}", file=sys.stderr, flush=True)
        command = _command(asked, command)
        _check_flags(asked)
        given = argparse.Namespace(**vars(asked))
        elastic = elastic_flags.of(asked, environ, settings.values)
        if asked.mpi:
            where = _by_mpi(asked, environ, options, forward, settings.values["start_timeout"])
        elif asked.mpi_args or asked.binding or asked.tcp:
            raise UsageError("--mpi-args, --binding-args and --tcp are for mpirun: they need --mpi [HVD703]")
        else:
            where = host_flags.of(asked, environ, options, settings.values["start_timeout"])
        elastic = elastic_flags.placed(elastic, where)
        restarts = 0 if asked.restarts is None else host_flags.number("--max-restarts", asked.restarts, 0, "restarts")
    except _WRONG_FLAGS as error:
        raise UsageError(coded("HVD704", str(error))) from None
    wrong = output_flags.missing(asked, look, where.slots) if where.slots else None
    if wrong is not None:
        raise UsageError(coded("HVD703", wrong))
    environ.update(forward)
    if where.here is not None or where.join is not None:
        _check_command(command[0], environ)
    if where.join is not None and not asked.dry:
        return where.join(command)
    asked_for = plan.Plan(
        command=command,
        slots=where.slots,
        environ=environ,
        options=options,
        graces=ending.Graces(*(settings.values[name] for name in ("failure_grace", "term_grace", "signal_grace"))),
        silence=settings.values["agent_timeout"],
        lingering=settings.stall_limits()[0],
        output_folder=asked.folder,
        look=look,
        verbose=asked.verbose,
        as_horovod=asked.as_horovod,
        bind=asked.bind or "none",
        over_mpi=asked.mpi,
        pty=_room(asked, len(where.slots)),
        stdin={"0": True, "none": False}.get(asked.stdin),
        servers=0 if asked.mpi else settings.values["servers"],  # ranks with a rendezvous over MPI start them
        max_restarts=restarts,
        here=where.here if elastic is None else where.here or "localhost",
        gather=where.gather,
        elastic=elastic,
    )
    asked_for = elastic_flags.with_again(asked_for, given, environ, options, settings.values)
    return _start(asked_for, where, forward, asked, settings.values["trace_dir"])


def _command(asked: argparse.Namespace, command: list[str]) -> list[str]:
    """What ranks run. Raises UsageError, stdin.ProgramError."""
    if not command:
        raise UsageError("no command: give a program to run, for example: hvdlite-run -np 2 python train.py [HVD702]")
    if asked.module:
        return [sys.executable, "-m", *command]
    return command if asked.dry else stdin.with_program(command, asked.stdin == "0")


def _by_mpi(
    asked: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, str],
    forward: Mapping[str, str],
    timeout: float,
) -> host_flags.RankPlacement:
    """--mpi. Raises UsageError."""
    from .placement import under_mpirun

    try:
        return under_mpirun.placement(asked, environ, options, forward, timeout)
    except under_mpirun.UnderMpiError as error:
        raise UsageError(coded("HVD716", str(error)), error.code) from None


def _start(
    asked_for: plan.Plan,
    where: host_flags.RankPlacement,
    forward: Mapping[str, str],
    asked: argparse.Namespace,
    traces: str | None,
) -> int:
    """Runs the job, or tells what it would be. traces: the folder of --trace-dir. Raises UsageError."""
    if asked.dry:
        from .placement import dry_run

        print(dry_run.text(asked_for, where.way, forward))
        return 0
    from . import restart_loop

    if asked_for.output_folder is not None:
        _check_folder(asked_for.output_folder)
    try:
        with dashboard.shown(asked, traces, asked_for.options) as (address, options):
            if address is not None:
                print(f"hvdlite-run: dashboard: {address}", file=sys.stderr, flush=True)
            return restart_loop.run(asked_for._replace(options=options))
    except dashboard.DashboardError as error:
        raise UsageError(coded("HVD718", str(error))) from None


def _asked(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What the flags ask for, those of --config-file included, and the command. Raises UsageError."""
    parser = _parser()
    try:
        own, command = flags.split(parser, argv)
    except flags.FlagError as error:
        raise UsageError(coded("HVD701", str(error))) from None
    own = mpirun.joined(own)
    asked = parser.parse_args(own)
    if asked.file is not None:
        from .command_line import config_file

        known = {flag for action in parser._actions for flag in action.option_strings}
        try:
            asked = parser.parse_args([*config_file.words(asked.file, known, own), *own])
        except config_file.FileError as error:
            raise UsageError(coded("HVD714", str(error))) from None
    try:
        flags.record(asked)
    except flags.FlagError as error:
        raise UsageError(coded("HVD703", str(error))) from None
    return asked, command


def _room(asked: argparse.Namespace, size: int) -> tuple[int, int] | None:
    """Of the terminal of --pty."""
    if not asked.pty:
        return None
    from .agent import terminal

    return terminal.room(0 if size == 1 else len("[0]<stdout>:"))


def _explained(text: str) -> str:
    from hvdlite.errors import catalogue

    try:
        return "\n".join(map(catalogue.explained, catalogue.meant(text)))
    except ValueError as error:
        raise UsageError(coded("HVD704", str(error))) from None


def _examine(argv: Sequence[str], command: Sequence[str]) -> int:
    """`doctor`, before or after its flags, and --check-build."""
    from .diagnostics import doctor
    from .hosts import hosts, scheduler
    from .probe import check_build

    asked, rest = _asked([*argv[: len(argv) - len(command)], *command[1:]])
    if rest:
        raise UsageError(f"doctor examines hosts and runs no command: {rest[0]} [HVD703]")
    environ = config.environ()
    listed = asked.hosts is not None or asked.hostfile is not None
    try:
        if not listed and (asked.check or scheduler.allocation(environ, hosts.read) is None):
            if asked.check:
                return check_build.show()
            asked.np = asked.np or "1"
        timeout = config.read(_with_flags(environ, config.variables_of(vars(asked)))).values["start_timeout"]
        where = host_flags.of(asked, environ, {}, timeout)
    except (HvdOptionError, host_flags.PlaceError, ValueError) as error:
        raise UsageError(coded("HVD704", str(error))) from None
    if where.join is not None or not where.slots:
        raise UsageError(
            "doctor and --check-build reach hosts by ssh or through a scheduler: give -H, or run them on each host "
            "[HVD703]"
        )
    return doctor.run(where.slots, where.here, where.gather, environ, asked.measure, asked.check)


def _with_flags(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a flag overrides a variable, in whichever spelling."""
    merged = dict(environ)
    for option in config.OPTIONS:
        if option.variable in options and option.alias_variable is not None:
            merged.pop(option.alias_variable, None)
        if option.scope == "rank":  # of a rank that launches a job of its own; replaced for the new ranks
            merged.pop(option.variable, None)
            merged.pop(option.alias_variable or "", None)
    merged.update(options)
    return merged


def _check_flags(asked: argparse.Namespace) -> None:
    """Do they fit each other? Raises UsageError."""
    if asked.stdin not in (None, "none", "0"):
        raise UsageError(f"--stdin {asked.stdin}: must be 0 (rank 0 reads stdin) or none [HVD704]")
    if asked.mpi and asked.gloo:
        raise UsageError("--gloo and --mpi exclude each other [HVD703]")
    if asked.mpi and asked.bind:
        raise UsageError(
            f"--bind-to {asked.bind}: does not work with --mpi: give mpirun's own flags in --binding-args [HVD704]"
        )


def _check_command(command: str, environ: Mapping[str, str]) -> None:
    """Is there such a program? Reports it once, instead of each rank by itself. Raises UsageError."""
    folders = [""] if os.sep in command else environ.get("PATH", os.defpath).split(os.pathsep)
    for candidate in (os.path.join(folder, command) for folder in folders):
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return
    found = command if os.sep in command or os.path.exists(command) else None
    if found is None or not os.path.exists(found):
        raise UsageError(f"{command}: command not found [HVD705]", process.NOT_FOUND)
    if os.path.isdir(found):
        raise UsageError(f"{command}: is a directory [HVD705]", process.NOT_RUNNABLE)
    hint = f"; did you mean: python {command}" if command.endswith(".py") else ""
    if os.sep not in command and os.access(found, os.X_OK):
        raise UsageError(f"{command}: command not found; did you mean ./{command} [HVD705]", process.NOT_FOUND)
    raise UsageError(f"{command}: permission denied (it is not executable){hint} [HVD705]", process.NOT_RUNNABLE)


def _check_folder(folder: str) -> None:
    """Can the ranks' files be written there? Raises UsageError."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-filename {folder}: cannot be written: {error.strerror} [HVD706]") from None
    for name in os.listdir(folder) if os.access(folder, os.R_OK) else []:
        if re.fullmatch(r"(rank|server)\.[0-9]+", name) and not os.path.isdir(os.path.join(folder, name)):
            raise UsageError(
                f"--output-filename {folder}: {name} there is not a folder: remove it, or name another folder [HVD706]"
            )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output-filename {folder}: cannot be written: permission denied [HVD706]")
