"""How is a table saved by its servers, and loaded by others? Each server writes its rows, any servers take them.

A save is a folder of files of at most 64 MB (files.py says what is in them), which all servers must reach. All servers
work at once (background.py). A row with two copies is written by the first of its servers that lives. Rank 0 tells
servers to begin, asks how far they are, and writes the index last. For a load each server reads those parts that it
holds now: how many servers there were does not matter. They lie beside the old rows until all servers have read.

Rows that nobody has touched are not in the files: the index has the seed and the scale that make them, and a table that
loads it goes on with these.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import background, files
from .shard import Shard

if TYPE_CHECKING:  # a server loads nothing of a rank
    from .client import Client

_PAUSE_S, _PAUSE_MAX_S = 0.002, 0.25  # between two questions about progress
_ABOUT = ("name", "rows", "dim", "rule", "options", "order", "scale", "seed", "tables")


def begin(client: Client, table: int, folder: str) -> list[int]:
    """All servers have their snapshot when this returns; which servers. Called by one rank, when all ranks' pushes are
    done and none pushes. Raises HvdError."""
    token, alive = f"{time.time_ns():x}", client.alive()
    dead = sorted(set(range(client.servers)) - set(alive))
    for server in alive:
        client.call(server, "save", table, folder=folder, token=token, dead=dead)
    return alive


def finish(client: Client, table: int, spec: dict[str, Any], folder: str, servers: Sequence[int]) -> None:
    """Waits until what `begin` has begun is written, and makes it valid. Raises HvdError, OSError."""
    written = [piece for said in _ends(client, table, servers) for piece in said["written"]]
    files.write_index(folder, {key: spec[key] for key in _ABOUT if key in spec}, written)


def load(client: Client, table: int, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """What makes rows that were not touched: {"scale": ..., "seed": ...}. Called by one rank, as `begin`. Raises
    ValueError for what cannot be loaded; then the table is as it was."""
    about, pieces = files.read_index(folder, spec["rows"], spec["dim"], spec["rule"], spec.get("tables"))
    first = {key: about.get(key, spec[key]) for key in ("scale", "seed")}  # saves of hvdlite 0.2 have none
    order, alive = about.get("order"), client.alive()
    for server in alive:
        client.call(server, "load", table, folder=folder, pieces=pieces, order=order, first=first)
    _ends(client, table, alive)
    for server in alive:
        client.call(server, "loaded", table)
    return first


def _ends(client: Client, table: int, servers: Sequence[int]) -> list[dict[str, Any]]:
    """What each of these servers says when its job is over. Raises the first error."""
    said, pause = dict[int, dict[str, Any]](), _PAUSE_S
    while True:
        for server in servers:
            if server not in said:
                came = client.call(server, "progress", table)
                said.update({server: came} if came else {})
        if len(said) == len(servers):
            return [said[server] for server in servers]
        time.sleep(pause)
        pause = min(_PAUSE_MAX_S, 1.5 * pause)


def _save(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    shard: Shard = table.shard
    owners = shard.placement.owners
    lives = ~np.isin(owners, asked["dead"])
    first = owners[np.arange(len(owners)), lives.argmax(axis=1)]  # the first that lives
    return _begun(table, lambda: background.Saving(shard, first == server.me, asked["folder"], asked["token"]))


def _load(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    def load() -> background.Loading:
        shard = Shard({**table.spec, **asked["first"]}, server.me, server.servers)
        return background.Loading(shard, asked["folder"], asked["pieces"], asked["order"])

    return _begun(table, load)


def _begun(table: Any, job: Any) -> Any:
    if table.job is not None:  # of a rank that has begun again, since a server was lost
        table.job.stop()
        table.job = None
    try:
        table.job = job()
    except Exception as error:
        return background.failed(error)
    return {}


def _progress(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    said = table.job.progress()
    if said is None:
        return {}
    if "loaded" not in said:
        table.job = None
    return said


def _loaded(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    table.replace(table.job.shard)
    table.job = None
    return {}


CALLS = {"save": _save, "load": _load, "progress": _progress, "loaded": _loaded}
