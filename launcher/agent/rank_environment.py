"""Environment of a rank. Pure but for the choice of a free port.

The launcher's own environment, the options given as flags, and the rank assignment in three spellings: HVDLITE_* (what
hvdlite.init reads first), HOROVOD_* and torchrun's (what scripts read, and what torch.distributed's env:// needs). The
secret is here and nowhere else: in no argument list and no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdlite import config

from ..hosts.hosts import Slot
from . import torch_environment

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(config.__file__)))
FRONTS = {  # folders that change what scripts import, by the flags that put them in front
    "as_horovod": os.path.join(_PACKAGE, "as_horovod", "front"),
    "tf_strategy": os.path.join(_PACKAGE, "tensorflow", "front"),
}
_STAYS = re.compile(
    r"(SSH_|SLURM_|SBATCH_|OMPI_|PMI_|PMIX_|PRTE_|HYDRA_|MPI_LOCAL|XDG_|DBUS_|BASH_FUNC_)|(DISPLAY|OLDPWD|PWD|SHLVL|_|TTY|"
    r"HOSTNAME|XAUTHORITY|WINDOWID|GPG_TTY|STY|TMUX|TMUX_PANE|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES)$"
)
_OF_HOST = re.compile(
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$|SLURMD_NODENAME$|"
    r"SLURM_(CONF$|CLUSTER_NAME$|JOB|ARRAY_|SUBMIT_|RESTART_COUNT$)"
)
THREADS_NOTE = (
    "OMP_NUM_THREADS=1 is set for each of {} ranks, because they share the CPUs; set it yourself to change it"
)


class StoreAccess(NamedTuple):
    """How the ranks of a job find and trust each other."""

    address: str
    port: int
    secret: bytes
    job: int


def shared(
    base: Mapping[str, str], options: Mapping[str, str], access: StoreAccess, slots: Sequence[Slot]
) -> dict[str, str]:
    """What all ranks of this host get. `options` are variables that flags stand for; they win over inherited ones."""
    return {**inherited(base, options, slots), **of_job(base, access, slots), **secret_of(access.secret)}


def inherited(
    base: Mapping[str, str], options: Mapping[str, str], slots: Sequence[Slot], fronts: Sequence[str] = ()
) -> dict[str, str]:
    """What ranks have from the environment and the flags of the launcher that was started for them."""
    environ = dict(base)
    environ.update(options)
    for option in config.OPTIONS:
        if option.alias_variable is not None and (option.scope == "rank" or option.variable in options):
            environ.pop(option.alias_variable, None)  # an inherited alias would contradict
    environ["PYTHONUNBUFFERED"] = "1"
    if sets_threads(base, slots):
        environ["OMP_NUM_THREADS"] = "1"
    put_in_front(environ, fronts)
    return environ


def of_job(
    base: Mapping[str, str], access: StoreAccess, slots: Sequence[Slot], leader: tuple[str, int] | None = None
) -> dict[str, str]:
    """What all ranks of a job get alike, but its secret. leader: rank 0's host, if not the store's, by its
    address, and a port that is free there."""
    environ = {"HVDLITE_STORE_ADDR": access.address, "HVDLITE_STORE_PORT": str(access.port)}
    environ["HVDLITE_JOB_ID"] = f"{access.job:016x}"
    environ["WORLD_SIZE"] = str(len(slots))
    environ.update(torch_environment.of_job(base, *(leader or (access.address, torch_environment.free_port()))))
    return environ


def of_attempt(attempt: int, limit: int) -> dict[str, str]:
    """The variables that give ranks the number of restarts."""
    variables = {"HVDLITE_RESTART_COUNT": str(attempt)}
    if limit:
        variables.update({"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(limit)})
    return variables


def secret_of(secret: bytes) -> dict[str, str]:
    """The variable that gives ranks the secret."""
    return {"HVDLITE_SECRET_KEY": secret.hex()}


def forwarded(base: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """What of the launcher's environment goes to other hosts: all but what is true of this host or login only.

    `also` are names that go nevertheless.
    """
    return {name: value for name, value in base.items() if name in also or not _STAYS.match(name)}


def of_host(base: Mapping[str, str]) -> dict[str, str]:
    """What ranks get of the environment that their host's agent has found: also the devices that a scheduler has given
    it there, and what it says of the job as a whole; not what it says of its step and task, which the agent was."""
    return {name: value for name, value in base.items() if _OF_HOST.match(name) or not _STAYS.match(name)}


def put_in_front(environ: dict[str, str], fronts: Sequence[str]) -> None:
    """Python finds these folders of FRONTS before any other that PYTHONPATH or the Python names."""
    folders = [FRONTS[name] for name in fronts]
    if folders:
        environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [environ.get("PYTHONPATH")])])


def sets_threads(base: Mapping[str, str], slots: Sequence[Slot]) -> bool:
    """As torchrun: one thread per rank where several ranks share a host, unless the user has set the number."""
    return "OMP_NUM_THREADS" not in base and any(slot.local_size > 1 for slot in slots)


def of_rank(slot: Slot, size: int) -> dict[str, str]:
    """What one rank gets beside `shared`."""
    numbers = {
        "RANK": slot.rank,
        "SIZE": size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
    }
    environ = {}
    for prefix in (config.PREFIX, config.ALIAS_PREFIX):
        for name, number in numbers.items():
            environ[prefix + name] = str(number)
    environ["HOROVOD_HOSTNAME"] = slot.host
    environ["RANK"] = str(slot.rank)
    environ["LOCAL_RANK"] = str(slot.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(slot.local_size)
    environ["GROUP_RANK"] = str(slot.host_rank)
    environ["GROUP_WORLD_SIZE"] = str(slot.host_size)
    return environ


def of_server(number: int, servers: int, size: int, aggregators: int = 0) -> dict[str, str]:
    """What one parameter server or aggregator gets beside `shared`: it is no rank."""
    variables = {"SERVER": number, "SERVERS": servers, "SIZE": size}
    variables.update({"AGGREGATORS": aggregators} if aggregators else {})
    return {config.PREFIX + name: str(value) for name, value in variables.items()}
