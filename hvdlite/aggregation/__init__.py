"""Sums inside the network: an aggregator adds gradients as a switch would, in software (SwitchML, ATP).

On ordinary hosts it is slower than `hvd.allreduce`. It is for the study of these protocols and for tests of a real
switch. Each rank sends its tensor once, sums have the same bits in any order, the memory of the switch is bounded, and
its loss changes no bit.

    hvdlite-run -np 4 --aggregators 1 python train.py
    y = hvd.aggregation.allreduce(x, op=hvd.Average, name="gradients")    # float32 or int32, in all ranks

The machines are pure: Pool, Hashed and Server take datagrams and give answers, Worker is a rank's end, Network a
simulated network around them. sockets.py puts the same machines behind UDP; operation.py is the call of a job.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .server import Server
from .simulation import Network, run
from .switch import Hashed, Pool
from .worker import Worker

if TYPE_CHECKING:
    from .operation import allreduce, stats

__all__ = ["Hashed", "Network", "Pool", "Server", "Worker", "allreduce", "run", "stats"]


def __getattr__(name: str) -> Any:
    """What needs a job is imported when it is used."""
    if name not in ("allreduce", "stats"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".operation", __name__), name)
