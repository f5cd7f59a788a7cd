"""How does `hvdlite-run --mpi` become an mpirun? Finds it, asks what it is, and executes it in this process's place.

What is said to which MPI is in mpi.py, purely. Here is what touches the machine: the programs on PATH, their version,
the interfaces of this host, and exec. From then on the mpirun's process is this one: its pid, its signals, its exit
code. The environment goes with it; ranks find in it no place that another launcher has told (HVDLITE_RANK).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from hvdlite import config

from . import address, batch, environment, hosts, mpi
from .process import NOT_FOUND

VERSION_S = 20.0
_BRIDGE = re.compile(r"docker|br-|virbr|cni|podman|lxcbr|lxdbr")  # the same address on every host


class UnderMpiError(Exception):
    """There will be no mpirun; the text says why, `code` is the launcher's exit code."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those of --mpi."""
    add("--mpi", action="store_true", help="start the ranks by the mpirun or mpiexec that is first on PATH")
    add("--mpi-args", dest="mpi_args", metavar="WORDS", help="more for mpirun, as in --mpi-args='--map-by ppr:4:node'")
    add("--binding-args", dest="binding", metavar="WORDS", help="how mpirun binds ranks (Open MPI: not at all)")
    add("--tcp", action="store_true", help="let MPI and NCCL use TCP only")


def start(
    asked: argparse.Namespace,
    command: Sequence[str],
    environ: Mapping[str, str],
    options: Mapping[str, str],
    forward: Mapping[str, str],
    execute: Callable[[str, list[str], dict[str, str]], int] = os.execve,
) -> int:
    """Becomes the mpirun. forward: variables that all ranks get, whatever they are. Raises UnderMpiError."""
    try:
        listed, size = _places(asked, environ)
        program, kind = _found(environ)
        wanted = mpi.Wanted(
            size,
            listed,
            command,
            args=asked.mpi_args or "",
            binding=asked.binding,
            tcp=asked.tcp,
            interfaces=[name for each in asked.interfaces or [] for name in each.split(",") if name],
            ssh_port=None if asked.ssh_port is None else int(asked.ssh_port),
            ssh_identity=asked.ssh_identity,
            bridges=[name for _, name in socket.if_nameindex() if _BRIDGE.match(name)],
            route=_route(listed),
            folder=asked.folder,
            timestamps=asked.timestamps,
            root=os.geteuid() == 0,
            parameters=[name.partition("_MCA_")[2] for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))],
        )
        given = _environment(asked, environ, {**options, **forward, **mpi.variables(kind, wanted)}, listed, size)
        names = sorted(environment.forwarded(given, list(forward)))
        words = mpi.line(kind, program, wanted, names)
    except (mpi.MpiError, hosts.HostError) as error:
        raise UnderMpiError(str(error)) from None
    except ValueError:
        raise UnderMpiError(f"-np {asked.np}, --ssh-port {asked.ssh_port}: must be whole numbers from 1") from None
    if asked.folder is not None and kind.family != mpi.OPEN_MPI:
        for rank in range(size):  # hydra makes no folders
            os.makedirs(os.path.join(asked.folder, f"rank.{rank}"), exist_ok=True)
    if asked.verbose:
        print(f"hvdlite-run: {shlex.join(words)}", file=sys.stderr, flush=True)
    return execute(program, words, given)


def _places(asked: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[hosts.Host], int]:
    """The hosts to name (none: mpirun knows them), and the number of ranks. Raises HostError, ValueError."""
    size = None if asked.np is None else int(asked.np, 10)
    if size is not None and size < 1:
        raise ValueError
    if asked.hostfile is not None:
        listed = hosts.parse_hostfile(_read(asked.hostfile), asked.hostfile)
    elif asked.hosts is not None:
        listed = hosts.parse_hosts(asked.hosts)
    else:
        found = batch.allocation(environ, _read)
        if found is None and size is None:
            raise UnderMpiError("how many ranks? Say -np N, for example: hvdlite-run --mpi -np 2 python train.py")
        if found is not None and found.title in ("Slurm", "the MPI operator"):
            return [], size or found.slots
        listed = found.hosts if found is not None else [hosts.Host("localhost", size or 1)]
    size = size or sum(host.slots for host in listed)
    hosts.assign(listed, size)  # do they fit?
    return listed, size


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise hosts.HostError(f"{path}: {error.strerror}") from None


def _found(environ: Mapping[str, str]) -> tuple[str, mpi.Kind]:
    """The program, and what it is."""
    for name in mpi.PROGRAMS:
        program = shutil.which(name, path=environ.get("PATH", os.defpath))
        if program is None:
            continue
        try:
            done = subprocess.run(
                [program, "--version"], capture_output=True, text=True, errors="replace", timeout=VERSION_S
            )
            said = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnderMpiError(f"{program} --version: {error}", 1) from None
        kind = mpi.kind_of(said)
        if kind is not None:
            return program, kind
        first = next(iter(said.strip().splitlines()), "nothing")
        raise UnderMpiError(f"{program} is of no MPI that hvdlite-run knows: --version says {first!r}; run it yourself")
    srun = "; Slurm starts MPI programs itself: srun --mpi=pmix python ..." if "SLURM_JOB_ID" in environ else ""
    raise UnderMpiError(
        f"--mpi: neither {', '.join(mpi.PROGRAMS[:-1])} nor {mpi.PROGRAMS[-1]} is on PATH: install an MPI (pip install "
        f"mpich, apt-get install openmpi-bin), or leave --mpi out: hvdlite-run needs none{srun}",
        NOT_FOUND,
    )


def _route(listed: Sequence[hosts.Host]) -> str | None:
    """The interface of this host that leads to the others, if there is one."""
    others = [host.name for host in listed if not hosts.is_this_host(host.name, os.uname().nodename)]
    try:
        mine = address.towards(others) if others else None
    except (address.AddressError, OSError):
        return None
    for _, name in socket.if_nameindex():
        try:
            if address.of_interfaces([name]) == mine:
                return name
        except address.AddressError:
            continue  # one without an address
    return None


def _environment(
    asked: argparse.Namespace,
    environ: Mapping[str, str],
    said: Mapping[str, str],
    listed: Sequence[hosts.Host],
    size: int,
) -> dict[str, str]:
    """What the ranks start with."""
    given = {**environ, **said, "PYTHONUNBUFFERED": "1"}
    for option in config.OPTIONS:
        if option.scope == "rank":
            given.pop(option.variable, None)
        if option.alias_variable is not None and (option.scope == "rank" or option.variable in said):
            given.pop(option.alias_variable, None)
    if size > max(1, len(listed)):
        given.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks that share a host do not fight for its CPUs
    if asked.as_horovod:
        environment.put_horovod_in_front(given)
    return given
