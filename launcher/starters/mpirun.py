"""Command lines of mpirun, by the MPI that it belongs to. Pure.

`hvdlite-run --mpi` is for users who must start jobs by an MPI's own launcher, or prefer its options. That launcher
starts an agent for each rank (mpi_agent.py), which starts the rank; the rendezvous is over MPI (hvdlite/mpi). Three
families differ in their options:

    Open MPI            4 and 5 differ in what shared memory is called
    MPICH, hydra        and MPIs built on it (MVAPICH, Cray's in this respect)
    Intel MPI           hydra, too, but pins ranks by itself, and well

Inside of a Slurm allocation an mpirun finds the hosts by itself and starts its daemons by srun, so it is given none.
Values of variables are in no argument list: Open MPI gets their names (-x), hydra passes on all by itself.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..hosts.hosts import Host

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"
PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra")  # in the order in which they are looked for
_NAME = re.compile(r"[A-Za-z_]\w*")


class Kind(NamedTuple):
    """An MPI: its family and its first number (5 for 5.0.2; 0: it does not tell)."""

    family: str
    major: int


class MpirunOptions(NamedTuple):
    """What the command line asks for."""

    size: int
    hosts: Sequence[Host]  # none: the mpirun finds them by itself
    command: Sequence[str]
    args: str = ""  # --mpi-args
    binding: str | None = None  # --binding-args
    tcp: bool = False
    interfaces: Sequence[str] = ()
    ssh: Sequence[str] = ()  # words for it
    per_node: int | None = None  # ranks on each host
    oversubscribe: bool = False
    bridges: Sequence[str] = ()  # interfaces that several hosts have with one address, as docker0
    route: str | None = None  # the interface of this host on the route to the others
    root: bool = False
    parameters: Sequence[str] = ()  # of Open MPI that the environment sets


class MpiError(ValueError):
    """This MPI has no option for what is asked for; the text says why."""


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those of --mpi."""
    add("--mpi", action="store_true", help="start the ranks with the first mpirun or mpiexec on PATH")
    add("--mpi-args", dest="mpi_args", metavar="WORDS", help="arguments of mpirun: --mpi-args='--map-by ppr:4:node'")
    add("--binding-args", dest="binding", metavar="WORDS", help="mpirun arguments for binding (Open MPI default: none)")
    add("--tcp", action="store_true", help="restrict MPI and NCCL to TCP")


def kind_of(output: str) -> Kind | None:
    """The MPI that prints this for --version; None: an unknown one."""
    number = re.search(r"(?:\(\S+ ?MPI\)|OpenRTE\)|Version:?|Open MPI v?)\s*(\d+)\.", output, re.IGNORECASE)
    major = int(number[1]) if number else 0
    if re.search(r"Open ?MPI|OpenRTE|PRTE|PRRTE|Spectrum MPI", output, re.IGNORECASE):
        return Kind(OPEN_MPI, major)
    if re.search(r"Intel\(R\) MPI|impi", output, re.IGNORECASE):
        return Kind(INTEL, major)
    if re.search(r"HYDRA|MPICH|MVAPICH", output, re.IGNORECASE):
        return Kind(MPICH, major)
    return None


def line(kind: Kind, program: str, options: MpirunOptions, names: Sequence[str]) -> list[str]:
    """The command line. names: of the variables that all ranks get. Raises MpiError."""
    try:
        own = shlex.split(options.args)
        binding = None if options.binding is None else shlex.split(options.binding)
    except ValueError as error:
        raise MpiError(
            f"--mpi-args or --binding-args: {error} in {options.args or options.binding!r} [HVD704]"
        ) from None
    make = _open_mpi if kind.family == OPEN_MPI else _hydra
    return [program, *make(kind, options, own, binding, names), *own, *options.command]


def variables(kind: Kind, options: MpirunOptions) -> dict[str, str]:
    """The variables that configure this MPI."""
    environ = {"NCCL_IB_DISABLE": "1"} if options.tcp else {}
    if kind.family != OPEN_MPI:
        if options.tcp:
            environ.update({"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self,sm"})
        ssh = shlex.join(options.ssh)
        if ssh:
            environ[
                "HYDRA_LAUNCHER_EXTRA_ARGS" if kind.family == MPICH else "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
            ] = ssh
    return environ


def joined(words: Sequence[str]) -> list[str]:
    """The launcher's words, with values that start with a dash joined to their flags, for a parser that is strict."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in ("--mpi-args", "--binding-args", "--explain"):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _open_mpi(
    kind: Kind, options: MpirunOptions, own: Sequence[str], binding: Sequence[str] | None, names: Sequence[str]
) -> list[str]:
    """The words of Open MPI. A parameter that the user sets is not set twice."""
    five = kind.major >= 5
    words = ["--allow-run-as-root"] if options.root else []
    words += ["-np", str(options.size)]
    if options.hosts:
        words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    by = "slot" if options.per_node is None else f"ppr:{options.per_node}:node"
    words += ["--bind-to", "none", "--map-by", by] if binding is None else binding
    words += ["--oversubscribe"] if options.oversubscribe else []
    parameters = {}
    if options.tcp:
        parameters = {"pml": "ob1", "btl": f"self,{'sm' if five else 'vader'},tcp"}
    elif kind.major in (3, 4):
        parameters["btl"] = "^openib"  # it warns on every host that has no such device
    if options.interfaces:
        listed = ",".join(options.interfaces)
        parameters.update({"btl_tcp_if_include": listed, "oob_tcp_if_include": listed})
    elif options.bridges and len(options.hosts) != 1:
        listed = ",".join(["127.0.0.0/8", *options.bridges])
        parameters.update({"btl_tcp_if_exclude": listed, "oob_tcp_if_exclude": listed})
    ssh = shlex.join(options.ssh)
    if ssh:
        parameters["plm_rsh_args"] = ssh
    for name, value in parameters.items():
        if not {name, name.replace("_exclude", "_include")}.intersection([*own, *options.parameters]):
            words += ["--mca", name, value]
    if len(options.hosts) != 1:
        named = {own[i + 1].partition("=")[0] for i, word in enumerate(own[:-1]) if word == "-x"}
        for name in names:
            if _NAME.fullmatch(name) and name not in named:
                words += ["-x", name]
    return words


def _hydra(
    kind: Kind, options: MpirunOptions, own: Sequence[str], binding: Sequence[str] | None, names: Sequence[str]
) -> list[str]:
    """The words of MPICH's and Intel's hydra, which passes on the whole environment by itself."""
    words = ["-n", str(options.size)]
    if options.hosts:
        intel = kind.family == INTEL
        if intel and len({host.slots for host in options.hosts}) > 1:
            raise MpiError(
                "Intel MPI takes hosts with different numbers of ranks from a file only: give "
                "--mpi-args='-machinefile FILE' (lines like a:4), and remove -H [HVD716]"
            )
        names_of = [host.name if intel else f"{host.name}:{host.slots}" for host in options.hosts]
        words += ["-hosts", ",".join(names_of), *(["-ppn", str(options.hosts[0].slots)] if intel else [])]
    elif options.per_node is not None:
        words += ["-ppn", str(options.per_node)]
    words += [] if binding is None else binding
    if len(options.interfaces) > 1:
        raise MpiError(f"{kind.family} takes one network interface, not {', '.join(options.interfaces)} [HVD716]")
    led_astray = options.bridges and options.route and len(options.hosts) > 1 and "-iface" not in own
    chosen = options.interfaces or ([str(options.route)] if led_astray else [])
    return words + [word for name in chosen for word in ("-iface", name)]
