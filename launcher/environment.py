"""What does a rank find in its environment? Pure but for the choice of a free port.

The launcher's own environment, the options given as flags, and the rank's place in three spellings: HVDLITE_* (what
hvdlite.init reads first), HOROVOD_* and torchrun's (what scripts read, and what torch.distributed's env:// needs). The
secret is here and nowhere else: in no argument list and no file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdlite import config

from .hosts import Slot

HOROVOD = os.path.join(os.path.dirname(os.path.abspath(config.__file__)), "as_horovod", "front")
_TORCH_PORTS = (20000, 30000)  # below the ports that the kernel gives away by itself


class Meeting(NamedTuple):
    """How the ranks of a job find and trust each other."""

    address: str
    port: int
    secret: bytes
    job: int


def shared(
    base: Mapping[str, str], options: Mapping[str, str], meeting: Meeting, slots: Sequence[Slot]
) -> dict[str, str]:
    """What all ranks get. `options` are variables that flags stand for; they win over inherited ones."""
    environ = dict(base)
    environ.update(options)
    for option in config.OPTIONS:
        if option.alias_variable is not None and (option.scope == "rank" or option.variable in options):
            environ.pop(option.alias_variable, None)  # an inherited alias would contradict
    environ["HVDLITE_STORE_ADDR"] = meeting.address
    environ["HVDLITE_STORE_PORT"] = str(meeting.port)
    environ["HVDLITE_SECRET_KEY"] = meeting.secret.hex()
    environ["HVDLITE_JOB_ID"] = f"{meeting.job:016x}"
    environ["PYTHONUNBUFFERED"] = "1"
    environ["WORLD_SIZE"] = str(len(slots))
    if "MASTER_ADDR" not in base or "MASTER_PORT" not in base:
        environ["MASTER_ADDR"], environ["MASTER_PORT"] = meeting.address, str(_torch_port(meeting.address))
    if sets_threads(base, slots):
        environ["OMP_NUM_THREADS"] = "1"
    return environ


def put_horovod_in_front(environ: dict[str, str]) -> None:
    """`import horovod` finds the folder of hvdlite.as_horovod before any other that PYTHONPATH or the Python names."""
    before = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([HOROVOD, before]) if before else HOROVOD


def sets_threads(base: Mapping[str, str], slots: Sequence[Slot]) -> bool:
    """As torchrun: one thread per rank where several ranks share a host and nobody has said otherwise."""
    return "OMP_NUM_THREADS" not in base and any(slot.local_size > 1 for slot in slots)


def of_rank(slot: Slot, size: int) -> dict[str, str]:
    """What one rank gets beside `shared`."""
    place = {
        "RANK": slot.rank,
        "SIZE": size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
    }
    environ = {}
    for prefix in (config.PREFIX, config.ALIAS_PREFIX):
        for name, number in place.items():
            environ[prefix + name] = str(number)
    environ["HOROVOD_HOSTNAME"] = slot.host
    environ["RANK"] = str(slot.rank)
    environ["LOCAL_RANK"] = str(slot.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(slot.local_size)
    environ["GROUP_RANK"] = str(slot.cross_rank)
    return environ


def _torch_port(address: str) -> int:
    """A port that is free now. torch.distributed binds it by itself, later, so it cannot be kept for it."""
    for _ in range(100):
        port = _TORCH_PORTS[0] + int.from_bytes(os.urandom(4), "big") % (_TORCH_PORTS[1] - _TORCH_PORTS[0])
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
