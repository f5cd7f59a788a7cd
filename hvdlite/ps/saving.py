"""How is a table saved by its servers, and loaded by others? Each server writes its rows, any servers take them.

A save is a folder of files of at most 64 MB (files.py says what is in them), which all servers must reach. A row with
two copies is written by the first of its servers that lives. One rank asks each server for one file after the other,
so that no question takes long, and writes the index last. For a load every server reads every file and keeps the rows
whose parts it holds now: how many servers there were does not matter. They lie beside the old rows until all files are
read.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from . import files
from .shard import Shard

if TYPE_CHECKING:  # a server loads nothing of a rank
    from .client import Client

_FILE_BYTES = 64 << 20


def save(client: Client, table: int, spec: dict[str, Any], folder: str) -> None:
    """Called by one rank, when all ranks' pushes are done and none pushes. Raises HvdError, OSError."""
    token = f"{time.time_ns():x}"
    alive = client.alive()
    pieces, dead = list[Any](), sorted(set(range(client.servers)) - set(alive))
    for server in alive:
        piece, more = 0, True
        while more:
            name = f"{token}-{server}-{piece}.npz"
            said = client.call(server, "save", table, folder=folder, name=name, piece=piece, dead=dead)
            pieces += [said["written"]] if said["written"]["rows"] else []
            piece, more = piece + 1, said["more"]
    files.write_index(folder, {key: spec[key] for key in ("name", "rows", "dim", "rule", "options")}, pieces)


def load(client: Client, table: int, spec: dict[str, Any], folder: str) -> None:
    """Called by one rank, as `save`. Raises ValueError for what cannot be loaded; then the table is as it was."""
    _, pieces = files.read_index(folder, spec["rows"], spec["dim"], spec["rule"])
    alive = client.alive()
    for server in alive:
        client.call(server, "load", table, folder=folder, piece=None)
    for piece in pieces:
        for server in alive:
            client.call(server, "load", table, folder=folder, piece=piece)
    for server in alive:
        client.call(server, "loaded", table)


def _failed(error: Exception) -> dict[str, str]:
    text = str(error)
    return {"error": text if "[HVD034]" in text else f"{type(error).__name__}: {text} [HVD033]"}


def _save(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    shard: Shard = table.shard
    owners = shard.placement.owners
    lives = ~np.isin(owners, asked["dead"])
    first = owners[np.arange(len(owners)), lives.argmax(axis=1)]  # the first that lives
    count = max(1, _FILE_BYTES // (8 + 4 * (shard.dim + shard.state_width)))
    at = asked["piece"] * count
    try:
        written = files.write_piece(asked["folder"], asked["name"], *shard.piece(at, count, first == server.me))
    except (OSError, ValueError) as error:
        return _failed(error)
    return {"written": written, "more": at + count < shard.used}


def _load(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    try:
        if asked["piece"] is None:
            table.incoming = Shard(table.spec, server.me, server.servers)
        else:
            ids, rows = files.read_piece(asked["folder"], asked["piece"])
            shard = table.incoming
            if rows.shape != (len(ids), shard.dim + shard.state_width) or (len(ids) and ids.max() >= shard.total):
                name = json.dumps(asked["piece"])
                raise ValueError(f"{name}: rows of shape {rows.shape} belong to another table [HVD034]")
            shard.put(ids, rows)
    except Exception as error:
        table.incoming = None
        return _failed(error)
    return {}


def _loaded(server: Any, table: Any, asked: dict[str, Any]) -> Any:
    table.replace(table.incoming)
    table.incoming = None
    return {}


CALLS = {"save": _save, "load": _load, "loaded": _loaded}
