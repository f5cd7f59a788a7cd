"""Allocation of a batch scheduler: environment and the files that it names in, hosts out. Pure.

    Slurm   SLURM_JOB_NODELIST with SLURM_TASKS_PER_NODE: of the job, not of the step that this may run in
    LSF     LSB_MCPU_HOSTS ("a 4 b 4"), else LSB_DJOB_RANKFILE or LSB_HOSTS, a host for each slot
    PBS     PBS_NODEFILE, a line for each slot
    SGE     PE_HOSTFILE, `host slots queue processors` a line
    the MPI operator of Kubernetes   the host file that its launcher pod has for mpirun (Open MPI, Hydra, Intel MPI)

One rank for each slot, unless the command line says otherwise. What is present but cannot be read is an error that
names the variable: half an allocation is worse than none. Nothing here starts anything (starters/slurm.py,
starters/ssh.py do).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdlite.errors import HvdInitError
from hvdlite.errors.codes import coded
from hvdlite.rendezvous import slurm

from . import hosts
from .hosts import Host, HostError

OPERATOR = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)


class Allocation(NamedTuple):
    """What the job has been given. `title` is the scheduler's name, for messages."""

    title: str
    hosts: list[Host]

    @property
    def slots(self) -> int:
        """Ranks that have a slot."""
        return sum(host.slots for host in self.hosts)


def allocation(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    """The allocation that this environment describes; None outside of any. read(path): the text of a file.

    Raises HostError naming the variable.
    """
    for title, find in (
        ("Slurm", _slurm_hosts),
        ("LSF", _lsf_hosts),
        ("PBS", _pbs_hosts),
        ("SGE", _sge_hosts),
        ("the MPI operator", _operator_hosts),
    ):
        try:
            found = find(environ, read)
        except OSError as error:
            raise HostError(f"{title}: {error.filename}: {error.strerror} [HVD711]") from None
        except HvdInitError as error:
            raise HostError(coded("HVD711", f"{title}: {error}")) from None
        if found:
            return Allocation(title, found)
    return None


def crowd(environ: Mapping[str, str]) -> int:
    """How many of this process srun has started: more than 1 is a mistake for a launcher."""
    count = environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    return int(count) if count.isdecimal() else 1


def _slurm_hosts(environ: Mapping[str, str], read: Callable[[str], str]) -> list[Host]:
    if "SLURM_JOB_ID" not in environ and "SLURM_JOBID" not in environ:
        return []
    variable = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    names = slurm.nodes(environ.get(variable, ""), variable) if environ.get(variable) else []
    if not names:
        return []
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1")
    counts = slurm.tasks_per_node(tasks, "SLURM_TASKS_PER_NODE")
    counts *= len(names) if len(counts) == 1 else 1
    if len(counts) != len(names):
        raise HostError(f"SLURM_TASKS_PER_NODE={tasks} does not match the {len(names)} nodes of {variable} [HVD711]")
    return [Host(name, count) for name, count in zip(names, counts) if count]


def _lsf_hosts(environ: Mapping[str, str], read: Callable[[str], str]) -> list[Host]:
    if "LSB_JOBID" not in environ:
        return []
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words:
        lines = [" slots=".join(words[at : at + 2]) for at in range(0, len(words), 2)]
        return hosts.parse_hostfile("\n".join(lines), f"LSB_MCPU_HOSTS={environ['LSB_MCPU_HOSTS']!r}")
    path = environ.get("LSB_DJOB_RANKFILE") or environ.get("LSB_DJOB_HOSTFILE")
    text = read(path) if path else environ.get("LSB_HOSTS", "")
    return hosts.parse_hostfile("\n".join(text.split()), path or "LSB_HOSTS")


def _pbs_hosts(environ: Mapping[str, str], read: Callable[[str], str]) -> list[Host]:
    path = environ.get("PBS_NODEFILE")
    return hosts.parse_hostfile(read(path), f"PBS_NODEFILE {path}") if path else []


def _sge_hosts(environ: Mapping[str, str], read: Callable[[str], str]) -> list[Host]:
    path = environ.get("PE_HOSTFILE")
    lines = [" slots=".join(row.split()[:2]) for row in read(path).splitlines()] if path else []
    return hosts.parse_hostfile("\n".join(lines), f"PE_HOSTFILE {path}") if path else []


def _operator_hosts(environ: Mapping[str, str], read: Callable[[str], str]) -> list[Host]:
    path = next((environ[name] for name in OPERATOR if environ.get(name)), None)
    return hosts.parse_hostfile(read(path), path) if path is not None else []
