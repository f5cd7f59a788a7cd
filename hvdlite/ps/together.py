"""What do all ranks do together with a table? They open it, save it and load it.

Servers are told by rank 0 alone, between collectives: so a table has one number on all of them, and ranks that differ
hear it before a server does.

What a server could not do, every rank raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .._coded import coded
from .._public import allgather_object, barrier, broadcast_object, rank
from ..errors import HvdError, HvdMismatchError, HvdPeerLostError
from .client import Client


def opened(client: Client, spec: dict[str, Any]) -> int:
    """The number of a new table. HvdMismatchError where ranks differ, HvdError for what a server could not make."""
    specs = allgather_object(spec, name="hvd.ps.Table")
    for other, said in enumerate(specs):
        key = next((key for key in said if said[key] != specs[0][key]), None)
        if key is not None:
            differ = f"rank {other} has {key}={said[key]!r}, rank 0 has {key}={specs[0][key]!r}"
            raise HvdMismatchError(f"table {specs[0]['name']!r}: {differ} [HVD026]")
    if any(table.name == spec["name"] for table in client.tables):
        raise ValueError(f"table {spec['name']!r}: this job already has a table of this name [HVD025]")
    number = len(client.tables)

    def open_it() -> None:
        if len(client.alive()) < client.servers and spec["replicas"] < 2:
            text = f"table {spec['name']!r}: a server has ended, and there would be no copy (replicas=1)"
            raise HvdPeerLostError(f"{text} [HVD029]")
        for server in client.alive():
            client.call(server, "open", spec=spec, number=number)

    _by_rank_0(client, open_it, spec)
    return number


def act(client: Client, what: Callable[..., None], number: int, spec: dict[str, Any], path: Any) -> None:
    """saving.save or saving.load, once servers have all that was pushed."""
    client.flush()
    barrier()
    whole = os.path.abspath(os.fsdecode(path))  # servers may be in another folder
    _by_rank_0(client, lambda: what(client, number, spec, whole), spec)


def _by_rank_0(client: Client, call: Callable[[], None], spec: dict[str, Any]) -> None:
    """Where a server ends meanwhile of whose rows there are copies, all of it is done again."""
    error: Exception | None = None
    alive = client.servers + 1
    while rank() == 0 and len(client.alive()) < alive:
        alive, error = len(client.alive()), None
        try:
            call()
            break
        except (HvdError, ValueError) as failed:
            error = failed
        except Exception as failed:
            error = OSError(f"{type(failed).__name__}: {failed}")
    error = broadcast_object(error, name="hvd.ps.done")
    if isinstance(error, (HvdError, ValueError)):
        raise error
    if error is not None:
        raise HvdError(coded("HVD033", f"table {spec['name']!r}: {error}"))
