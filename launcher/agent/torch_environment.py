"""MASTER_ADDR and MASTER_PORT for scripts that use env:// of torch.distributed, its default.

The user's own stay, where both are given. Else it is an address of rank 0's host and a port that is free there: the
agent of each other host names one when it registers, because the launcher cannot see what is taken there. Rank 0 binds
it by itself, later, so no process can hold it until then. It is below the ports that the kernel gives away by itself,
and a random one, so that jobs that start together have different ones; each attempt of a job has a new one.

What an outer torchrun sets is not for these ranks: at its MASTER_PORT its own store may listen, and with
TORCHELASTIC_USE_AGENT_STORE rank 0 would be a client there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
_PORTS = (20000, 30000)  # the kernel's own begin at 32768
_TRIES = 100


def from_user(base: Mapping[str, str]) -> dict[str, str]:
    """The user's own MASTER_ADDR and MASTER_PORT; empty where one is missing or they are torchrun's."""
    whole = all(base.get(name) for name in MASTER) and "TORCHELASTIC_RUN_ID" not in base
    return {name: base[name] for name in MASTER} if whole else {}


def of_job(base: Mapping[str, str], address: str, port: int) -> dict[str, str]:
    """What all ranks of a job get alike. address, port: of rank 0's host."""
    master = from_user(base) or dict(zip(MASTER, (address, str(port))))
    return {**master, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def free_port() -> int:
    """A port that is free now at all IPv4 addresses of this host, as rank 0 listens at all of them."""
    for port in (*(_PORTS[0] + _random() % (_PORTS[1] - _PORTS[0]) for _ in range(_TRIES)), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return 0  # the host has no port left; rank 0 reports it


def _random() -> int:
    return int.from_bytes(os.urandom(4), "big")  # the module random is slow to import
