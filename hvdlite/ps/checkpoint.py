"""Checkpoint of a table: each server writes its rows, and any number of servers load them.

A save is a folder of files of at most 64 MB (checkpoint_files.py has their format), which all servers must reach. All
servers work at once (background_checkpoint.py). A row with two copies is written by the first of its servers that is
alive. Rank 0 starts the servers' jobs, asks for their progress, and writes the index last. For a load each server reads
those parts that it holds now: how many servers there were does not matter. They lie beside the old rows until all
servers have read.

Rows that were not touched are not in the files: the index has the seed and the scale that make them, and a table that
loads it goes on with these.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HvdError
from . import background_checkpoint, checkpoint_files
from .shard import Shard

if TYPE_CHECKING:  # a server loads nothing of a rank
    from .client import Client

_PAUSE_S, _PAUSE_MAX_S = 0.002, 0.25  # between two questions about progress
_ABOUT = ("name", "rows", "dim", "rule", "options", "order", "scale", "seed", "tables")


def save(client: Client, table: int, spec: dict[str, Any], folder: str) -> None:
    """Called by one rank, when all ranks' pushes are done and none pushes. Raises HvdError, OSError."""
    finish(client, table, spec, folder, begin(client, table, spec, folder))


def begin(client: Client, table: int, spec: dict[str, Any], folder: str) -> list[int]:
    """All servers have their snapshot when this returns; which servers. `finish` must follow, unless it raises."""
    other = client.folders.setdefault(folder, spec["name"])
    if other != spec["name"]:  # its pieces would be removed with those of the save before
        raise HvdError(
            f"table {spec['name']!r}: table {other!r} is being saved to {folder}: save each table to a folder of its "
            "own [HVD033]"
        )
    token, alive = f"{time.time_ns():x}", client.alive()
    dead = sorted(set(range(client.servers)) - set(alive))
    try:
        for server in alive:
            client.call(server, "save", table, folder=folder, token=token, dead=dead)
    except BaseException:
        del client.folders[folder]
        raise
    return alive


def finish(client: Client, table: int, spec: dict[str, Any], folder: str, servers: Sequence[int]) -> None:
    """Waits until what `begin` has begun is written, and makes it valid. Raises HvdError, OSError."""
    try:
        results, error = _ends(client, table, servers)
        written = [piece for each in results for piece in each["written"]]
        if error is not None:
            checkpoint_files.remove(folder, written)
            raise error
        checkpoint_files.write_index(folder, {key: spec[key] for key in _ABOUT if key in spec}, written)
    finally:
        del client.folders[folder]


def load(client: Client, table: int, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """What makes rows that were not touched: {"scale": ..., "seed": ...}. Called by one rank, as `begin`. Raises
    ValueError for what cannot be loaded; then the table is as it was."""
    about, pieces = checkpoint_files.read_index(folder, spec["rows"], spec["dim"], spec["rule"], spec.get("tables"))
    first = {key: about.get(key, spec[key]) for key in ("scale", "seed")}  # saves of hvdlite 0.2 have none
    if [_form(first[key]) for key in first] != [_form(spec[key]) for key in first]:
        raise ValueError(f"{folder}: its index has {first}, which do not make rows [HVD034]")
    order, alive = about.get("order"), client.alive()
    for server in alive:
        client.call(server, "load", table, folder=folder, pieces=pieces, order=order, first=first)
    _, error = _ends(client, table, alive)
    if error is not None:
        raise error
    for server in alive:
        client.call(server, "loaded", table)
    return first


def _form(value: Any) -> Any:
    """What scale or seed are: a number, or as many as a group has tables."""
    if isinstance(value, list):
        return [_form(each) for each in value]
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _ends(client: Client, table: int, servers: Sequence[int]) -> tuple[list[dict[str, Any]], Exception | None]:
    """The servers' answers when their jobs are over, and the first error, when all jobs are."""
    results, waited, pause = list[dict[str, Any]](), list(servers), _PAUSE_S
    error: Exception | None = None
    while waited:
        for server in list(waited):
            try:
                came = client.call(server, "progress", table)
            except (HvdError, ValueError) as failed:
                client.check()  # the job has not failed
                error = error or failed
                waited.remove(server)
                continue
            if came:
                results.append(came)
                waited.remove(server)
        time.sleep(pause if waited else 0)
        pause = min(_PAUSE_MAX_S, 1.5 * pause)
    return results, error


def _save(server: Any, table: Any, request: dict[str, Any]) -> Any:
    shard: Shard = table.shard
    owners = shard.placement.owners
    is_alive = ~np.isin(owners, request["dead"])
    first = owners[np.arange(len(owners)), is_alive.argmax(axis=1)]  # the first that is alive
    return _begun(
        table, lambda: background_checkpoint.Saving(shard, first == server.me, request["folder"], request["token"])
    )


def _load(server: Any, table: Any, request: dict[str, Any]) -> Any:
    def load() -> background_checkpoint.Loading:
        shard = Shard({**table.spec, **request["first"]}, server.me, server.servers)
        return background_checkpoint.Loading(shard, request["folder"], request["pieces"], request["order"])

    return _begun(table, load)


def _begun(table: Any, job: Any) -> Any:
    if table.job is not None:  # of a rank that has begun again, since a server was lost
        table.job.stop()
        table.job = None
    try:
        table.job = job()
    except Exception as error:
        return background_checkpoint.failed(error)
    return {}


def _progress(server: Any, table: Any, _request: dict[str, Any]) -> Any:
    if table.job is None:
        return {"error": f"nothing of table {table.shard.name!r} is being saved or loaded [HVD033]"}
    progress = table.job.progress()
    if progress is None:
        return {}
    if "loaded" not in progress:
        table.job = None
    return progress


def _loaded(server: Any, table: Any, request: dict[str, Any]) -> Any:
    table.replace(table.job.shard)
    table.job = None
    return {}


CALLS = {"save": _save, "load": _load, "progress": _progress, "loaded": _loaded}
