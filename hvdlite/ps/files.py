"""How does a table lie on a disk? A folder of pieces, files of at most 64 MB, and an index.json that names them.

    5f0c9a31-0-0.npz  token of the save, server, number: ids (int64 [n]), rows with their state (float32 [n, width])
    index.json        {"format": 1, "about": {rows, dim, rule, ...}, "pieces": [{file, rows, width, last, bytes}, ...]}

Servers write pieces, rank 0 the index, by rename, when all pieces are on the disk: a save is whole or not there. A new
save has another token, so the one before it stays whole until the new index is in place. A piece is a zip file without
compression, as np.savez writes it: it has a checksum, and no pickle is ever read.

An index may be damaged, or be made by a stranger: its names are those of pieces and lead nowhere else, files have the
length that it says, and arrays have the shape. What does not fit is a ValueError that names the file and both values.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from typing import Any

import numpy as np

_FORMAT, _INDEX = 1, "index.json"
_PIECE = re.compile(r"[0-9a-f]{8,16}-[0-9]{1,5}-[0-9]{1,9}\.npz")
_NUMBERS = ("rows", "width", "last", "bytes")


def write_piece(folder: str, name: str, ids: Any, rows: Any) -> dict[str, Any]:
    """Brings rows to the disk; what the index is to say about them. OSError where that fails."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as file:
        np.savez(file, ids=ids, rows=rows)
        size = _to_disk(file)
    return {"file": name, "rows": len(ids), "width": rows.shape[1], "last": int(ids.max(initial=-1)), "bytes": size}


def write_index(folder: str, about: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Makes the save valid, then removes pieces of others. OSError where it cannot; the save before stays as it was."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, _INDEX)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "about": about, "pieces": pieces}, file)
        _to_disk(file)
    os.replace(path + ".new", path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the names
    finally:
        os.close(descriptor)
    for name in _pieces_in(folder) - {each["file"] for each in pieces}:
        os.remove(os.path.join(folder, name))


def read_index(folder: str, rows: int, dim: int, rule: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(about, pieces) of a whole save of such a table; ValueError [HVD034] for another one."""
    path = os.path.join(folder, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        about, pieces = index["about"], index["pieces"]
        found = {"format": index["format"], **{key: about[key] for key in ("rows", "dim", "rule")}}
        names = [each["file"] for each in pieces]
        numbers = [[each[key] for key in _NUMBERS] for each in pieces]
        if len(set(names)) != len(names) or not all(map(_PIECE.fullmatch, names)):
            raise ValueError(f"{path}: names files that are not pieces of a save, or names one twice [HVD034]")
        if not all(type(number) is int for each in numbers for number in each):
            raise ValueError(f"{path}: the numbers of its pieces are invalid [HVD034]")
    except FileNotFoundError:
        state = "the save is not whole: it has pieces" if _pieces_in(folder) else "there is no save in this folder"
        raise ValueError(f"{path} is missing: {state} [HVD034]") from None
    except (OSError, KeyError, TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as the index of a save: {error!r} [HVD034]") from error
    for key, ours in (("format", _FORMAT), ("rows", rows), ("dim", dim), ("rule", rule)):
        if found[key] != ours:
            raise ValueError(f"{path}: the save has {key}={found[key]!r}, but this table has {key}={ours!r} [HVD034]")
    for name, (_, width, last, size) in zip(names, numbers):
        _check_length(os.path.join(folder, name), size)
        if last >= rows or width != numbers[0][1]:
            raise ValueError(
                f"{path}: {name} has rows up to {last} of {width} numbers, but this save has rows up to {rows - 1} "
                f"of {numbers[0][1]} numbers [HVD034]"
            )
    return about, pieces


def read_piece(folder: str, piece: dict[str, Any]) -> tuple[Any, Any]:
    """(ids, rows) of a piece that `read_index` gave. ValueError [HVD034] if they are not what was written."""
    path, shape = os.path.join(folder, piece["file"]), (piece["rows"], piece["width"])
    _check_length(path, piece["bytes"])
    try:
        with zipfile.ZipFile(path) as packed:
            if any(each.compress_type != zipfile.ZIP_STORED for each in packed.infolist()):
                raise zipfile.BadZipFile("it is compressed")  # small files could fill the memory
        with np.load(path, allow_pickle=False) as arrays:
            ids, rows = arrays["ids"], arrays["rows"]
    except Exception as error:  # whatever reading damaged bytes ends with
        raise ValueError(f"{path}: is damaged: {error!r} [HVD034]") from error
    found = f"{ids.dtype} {ids.shape}, {rows.dtype} {rows.shape}"
    if found != f"int64 {shape[:1]}, float32 {shape}":
        raise ValueError(f"{path}: has {found}, but was written with int64 {shape[:1]}, float32 {shape} [HVD034]")
    if ids.min(initial=0) < 0 or ids.max(initial=-1) != piece["last"]:
        raise ValueError(
            f"{path}: has rows {ids.min()} to {ids.max()}, but was written with rows up to {piece['last']} [HVD034]"
        )
    return ids, rows


def _to_disk(file: Any) -> int:
    """Flushes a file to the disk; its length."""
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


def _pieces_in(folder: str) -> set[str]:
    return set(filter(_PIECE.fullmatch, os.listdir(folder))) if os.path.isdir(folder) else set()


def _check_length(path: str, size: int) -> None:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read (it was written with {size:,} bytes): {error} [HVD034]") from error
    if found != size:
        raise ValueError(f"{path} has {found:,} bytes, but was written with {size:,} [HVD034]")
