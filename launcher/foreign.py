"""What do flags of mpirun and torchrun mean here? Job files that were written for those start by another program name.

Most are other spellings of flags of ours, and stand there. Here are those that ask for what happens anyway, and those
whose values have to be read: `--map-by`, `-mca`, `--redirects`. Who is told that a flag has no effect can take it out;
who asks for what this launcher does not do is told so, and nothing is started.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

_BOUND = {"none": "none", "core": "core", "socket": "socket", "package": "socket", "numa": "numa", "node": "numa"}
_SILENT = ("--allow-run-as-root", "--tag-output", "--no-python")


class ForeignError(ValueError):
    """A flag of another launcher that asks for what this one does not do; the text names it."""


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those that are not other spellings of flags of ours."""
    add("--wdir", "-wdir", dest="wdir", metavar="DIR", help="the folder that ranks start in; by default this one")
    add("--oversubscribe", "-oversubscribe", action="store_true", help="more ranks than the hosts have slots may run")
    hidden = argparse.SUPPRESS
    add("--map-by", "-map-by", dest="map_by", help=hidden)
    add("-mca", "--mca", dest="mca", nargs=2, action="append", help=hidden)
    for flag in _SILENT:
        also = [flag[1:]] if flag != "--no-python" else []
        add(flag, *also, dest="silent", action="store_true", help=hidden)
    add("--numa-binding", dest="numa_binding", help=hidden)
    add(
        "-t",
        "--tee",
        dest="tee",
        metavar="N",
        help="as --redirects, but shown here, too; the files get all in any case",
    )
    add(
        "-r",
        "--redirects",
        dest="redirects",
        metavar="N",
        help="what is in the files of --log-dir only: 1 (stdout), 2 (stderr), 3 (both) or 0",
    )
    add(
        "--local-ranks-filter",
        dest="local_shown",
        metavar="0,2-3",
        help="as --ranks-to-console, by numbers on each host",
    )
    add("--signals-to-handle", dest="handled", help=hidden)
    add("--run-path", dest="run_path", action="store_true", help=hidden)


def translate(asked: argparse.Namespace) -> list[str]:
    """Turns them into what our own flags would have said, in `asked`; notes for people. Raises ForeignError."""
    notes = []
    if asked.run_path:
        raise ForeignError("--run-path: the command is a program, so leave it out and say: python train.py [HVD704]")
    if asked.map_by is not None:
        _map_by(asked)
    if asked.mca and asked.mpi:
        words = " ".join(f"--mca {name} {value}" for name, value in asked.mca)
        asked.mpi_args = f"{asked.mpi_args or ''} {words}".strip()
    elif asked.mca:
        notes.append(f"-mca {', '.join(name for name, _ in asked.mca)} (parameters of Open MPI: only with --mpi)")
    if asked.numa_binding is not None and asked.bind is None:
        asked.bind = asked.numa_binding
    if asked.bind is not None:
        if asked.mpi:
            raise ForeignError(f"--bind-to {asked.bind}: with --mpi say it as mpirun does, by --binding-args [HVD704]")
        name, _, how = asked.bind.partition(":")
        if name not in _BOUND or how not in ("", "if-supported", "overload-allowed"):
            raise ForeignError(f"--bind-to {asked.bind}: ranks are bound to none, core, socket or numa [HVD704]")
        asked.bind = _BOUND[name]
    _streams(asked)
    if asked.handled is not None:
        notes.append("--signals-to-handle (SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on)")
    return notes


def _streams(asked: argparse.Namespace) -> None:
    """torchrun's --redirects (to the files only) and --tee (to both): 1 stdout, 2 stderr, 3 both, 0 neither."""
    given = {"--redirects": asked.redirects, "--tee": asked.tee}
    for flag, value in given.items():
        if value not in (None, "0", "1", "2", "3"):
            raise ForeignError(
                f"{flag} {value}: 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), the same for all ranks [HVD704]"
            )
        if value not in (None, "0") and asked.folder is None:
            raise ForeignError(f"{flag} {value} needs a folder for the files: --log-dir DIR [HVD703]")
    away, both = (int(value or 0) for value in given.values())
    asked.streams = tuple(stream for stream in (1, 2) if not stream & away or stream & both)


def _map_by(asked: argparse.Namespace) -> None:
    match = re.fullmatch(r"ppr:(\d+):node", asked.map_by)
    if match and asked.per_node is None:
        asked.per_node = match[1]
    elif not match and asked.map_by.partition(":")[0] not in ("slot", "core"):
        raise ForeignError(
            f"--map-by {asked.map_by}: ranks fill hosts in order; slot and ppr:N:node can be had [HVD704]"
        )
