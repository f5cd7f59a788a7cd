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
    flags.add_fronts(add)
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


def _answered(argv: Sequence[str], args: argparse.Namespace, command: list[str]) -> int | None:
    """The exit code of what starts no ranks; None: ranks are asked for."""
    if args.version:
        from hvdlite import __version__

        print(f"hvdlite-run {__version__}")
        return 0
    if args.completion:
        print(help.completion(_parser(), args.completion), end="")
        return 0
    if args.check or (command[:1] == ["doctor"] and not args.module):
        return _examine(argv, command)
    if args.explain is None:
        return None
    print(_explained(args.explain), end="")
    return 0


_WRONG_FLAGS = (HvdOptionError, horovodrun.HorovodsError, host_flags.PlaceError)
_WRONG_FLAGS += (output_flags.LookError, stdin.ProgramError)


def _run(argv: Sequence[str]) -> int:
    args, command = _parsed(argv)
    if (code := _answered(argv, args, command)) is not None:
        return code
    environ = config.environ()
    try:
        variables, notes = horovodrun.translate(args, environ)
        options = {**variables, **config.variables_of(vars(args))}
        forward = host_flags.forwarded(args, environ)
        host_flags.go_to(args, environ, options, forward)
        settings = config.read(_with_flags(environ, options))
        look = output_flags.of(args, environ)
        note = flags.note_of(args.obsolete, notes)
        if note is not None:
            print(f"hvdlite-run: {note}", file=sys.stderr, flush=True)
        command = _command(args, command)
        _check_flags(args)
        typed = argparse.Namespace(**vars(args))
        elastic = elastic_flags.of(args, environ, settings.values)
        if args.mpi:
            where = _by_mpi(args, environ, options, forward, settings.values["start_timeout"])
        elif args.mpi_args or args.binding or args.tcp:
            raise UsageError("--mpi-args, --binding-args and --tcp are for mpirun: they need --mpi [HVD703]")
        else:
            where = host_flags.of(args, environ, options, settings.values["start_timeout"])
        elastic = elastic_flags.placed(elastic, where)
        restarts = 0 if args.restarts is None else host_flags.number("--max-restarts", args.restarts, 0, "restarts")
    except _WRONG_FLAGS as error:
        raise UsageError(coded("HVD704", str(error))) from None
    if where.slots and (wrong := output_flags.missing(args, look, where.slots)) is not None:
        raise UsageError(coded("HVD703", wrong))
    environ.update(forward)
    if where.here is not None or where.join is not None:
        _check_command(command[0], environ)
    if where.join is not None and not args.dry:
        return where.join(command)
    job_plan = plan.Plan(
        command=command,
        slots=where.slots,
        environ=environ,
        options=options,
        graces=ending.Graces(*(settings.values[name] for name in ("failure_grace", "term_grace", "signal_grace"))),
        silence=settings.values["agent_timeout"],
        lingering=settings.stall_limits()[0],
        output_folder=args.folder,
        look=look,
        verbose=args.verbose,
        fronts=args.fronts,
        bind=args.bind or "none",
        over_mpi=args.mpi,
        pty=_room(args, len(where.slots)),
        stdin={"0": True, "none": False}.get(args.stdin),
        servers=0 if args.mpi else settings.values["servers"],  # ranks with a rendezvous over MPI start them
        aggregators=settings.values["aggregators"],
        max_restarts=restarts,
        here=where.here if elastic is None else where.here or "localhost",
        gather=where.gather,
        elastic=elastic,
    )
    job_plan = elastic_flags.with_again(job_plan, typed, environ, options, settings.values)
    return _start(job_plan, where, forward, args, settings.values["trace_dir"])


def _command(args: argparse.Namespace, command: list[str]) -> list[str]:
    """What ranks run. Raises UsageError, stdin.ProgramError."""
    if not command:
        raise UsageError("no command: give a program to run, for example: hvdlite-run -np 2 python train.py [HVD702]")
    if args.module:
        return [sys.executable, "-m", *command]
    return command if args.dry else stdin.with_program(command, args.stdin == "0")


def _by_mpi(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, str],
    forward: Mapping[str, str],
    timeout: float,
) -> host_flags.RankPlacement:
    """--mpi. Raises UsageError."""
    from .placement import under_mpirun

    try:
        return under_mpirun.placement(args, environ, options, forward, timeout)
    except under_mpirun.UnderMpiError as error:
        raise UsageError(coded("HVD716", str(error)), error.code) from None


def _start(
    job_plan: plan.Plan,
    where: host_flags.RankPlacement,
    forward: Mapping[str, str],
    args: argparse.Namespace,
    traces: str | None,
) -> int:
    """Runs the job, or tells what it would be. traces: the folder of --trace-dir. Raises UsageError."""
    if args.dry:
        from .placement import dry_run

        print(dry_run.text(job_plan, where.way, forward))
        return 0
    from . import restart_loop

    if job_plan.output_folder is not None:
        _check_folder(job_plan.output_folder)
    try:
        with dashboard.shown(args, traces, job_plan.options) as (address, options):
            if address is not None:
                print(f"hvdlite-run: dashboard: {address}", file=sys.stderr, flush=True)
            return restart_loop.run(job_plan._replace(options=options))
    except dashboard.DashboardError as error:
        raise UsageError(coded("HVD718", str(error))) from None


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What the flags ask for, those of --config-file included, and the command. Raises UsageError."""
    parser = _parser()
    try:
        own, command = flags.split(parser, argv)
    except flags.FlagError as error:
        raise UsageError(coded("HVD701", str(error))) from None
    own = mpirun.joined(own)
    args = parser.parse_args(own)
    if args.file is not None:
        from .command_line import config_file

        known = {flag for action in parser._actions for flag in action.option_strings}
        try:
            args = parser.parse_args([*config_file.words(args.file, known, own), *own])
        except config_file.FileError as error:
            raise UsageError(coded("HVD714", str(error))) from None
    try:
        flags.record(args)
    except flags.FlagError as error:
        raise UsageError(coded("HVD703", str(error))) from None
    return args, command


def _room(args: argparse.Namespace, size: int) -> tuple[int, int] | None:
    """Of the terminal of --pty."""
    if not args.pty:
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

    args, rest = _parsed([*argv[: len(argv) - len(command)], *command[1:]])
    if rest:
        raise UsageError(f"doctor examines hosts and runs no command: {rest[0]} [HVD703]")
    environ = config.environ()
    listed = args.hosts is not None or args.hostfile is not None
    try:
        if not listed and (args.check or scheduler.allocation(environ, hosts.read) is None):
            if args.check:
                return check_build.show()
            args.np = args.np or "1"
        timeout = config.read(_with_flags(environ, config.variables_of(vars(args)))).values["start_timeout"]
        where = host_flags.of(args, environ, {}, timeout)
    except (HvdOptionError, host_flags.PlaceError, ValueError) as error:
        raise UsageError(coded("HVD704", str(error))) from None
    if where.join is not None or not where.slots:
        raise UsageError(
            "doctor and --check-build reach hosts by ssh or through a scheduler: give -H, or run them on each host "
            "[HVD703]"
        )
    return doctor.run(where.slots, where.here, where.gather, environ, args.measure, args.check)


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


def _check_flags(args: argparse.Namespace) -> None:
    """Do they fit each other? Raises UsageError."""
    if args.stdin not in (None, "none", "0"):
        raise UsageError(f"--stdin {args.stdin}: must be 0 (rank 0 reads stdin) or none [HVD704]")
    if args.mpi and args.gloo:
        raise UsageError("--gloo and --mpi exclude each other [HVD703]")
    if args.mpi and args.bind:
        raise UsageError(
            f"--bind-to {args.bind}: does not work with --mpi: give mpirun's own flags in --binding-args [HVD704]"
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
        if re.fullmatch(r"(rank|server|aggregator)\.[0-9]+", name) and not os.path.isdir(os.path.join(folder, name)):
            raise UsageError(
                f"--output-filename {folder}: {name} there is not a folder: remove it, or name another folder [HVD706]"
            )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output-filename {folder}: cannot be written: permission denied [HVD706]")
