"""Files of a checkpoint: a folder of pieces of at most 64 MB, and an index.json that names them.

    5f0c9a31-0-0.npz  token of the save, server, number: ids (int64 [n]), rows with their state (float32 [n, width]),
                      parts (int64 [m, 3]: number of a part (placement.py), its rows, CRC-32 of all)
    index.json        {"format": 2, "about": {rows, dim, rule, ...}, "pieces": [{file, rows, width, last, bytes}, ...]}

Servers write pieces, rank 0 the index, by rename, when all pieces are on the disk: a save is whole or not there. A new
save has another token, so the one before it stays complete until the new index is written. No pickle is ever read.
Format 1, of hvdlite 0.2, has no parts: its pieces are read as a whole.

An index may be damaged, or be made by a stranger: its names are those of pieces and lead nowhere else, files have the
length in its head, and arrays have the shape. What does not fit is a ValueError that names the file and both values.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

from .checkpoint_pieces import check_length, to_disk

_FORMATS, _INDEX = (1, 2), "index.json"
_PIECE = re.compile(r"[0-9a-f]{8,16}-[0-9]{1,5}-[0-9]{1,9}\.npz")
_NUMBERS = ("rows", "width", "last", "bytes")


def write_index(folder: str, about: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Makes the save valid, then removes pieces of others. OSError where it cannot; the save before stays as it was."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, _INDEX)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"format": _FORMATS[-1], "about": about, "pieces": pieces}, file)
        to_disk(file)
    os.replace(path + ".new", path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the names
    finally:
        os.close(descriptor)
    remove(folder, [{"file": name} for name in _pieces_in(folder) - {each["file"] for each in pieces}])


def remove(folder: str, pieces: list[dict[str, Any]]) -> None:
    """Removes pieces that no index names."""
    for each in pieces:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, each["file"]))


def read_index(
    folder: str, rows: int, dim: int, rule: str, tables: list[list[Any]] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(about, pieces) of a whole save of such a table; ValueError [HVD034] for another one."""
    path = os.path.join(folder, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        about, pieces = index["about"], index["pieces"]
        found = {
            "format": index["format"],
            **{key: about[key] for key in ("rows", "dim", "rule")},
            "tables": about.get("tables"),
        }
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
    expected = (("format", _FORMATS), ("rows", rows), ("dim", dim), ("rule", rule), ("tables", tables))
    for key, ours in expected:
        if found[key] != ours and not (key == "format" and found[key] in _FORMATS):
            raise ValueError(f"{path}: the save has {key}={found[key]!r}, but this table has {key}={ours!r} [HVD034]")
    for name, (_, width, last, size) in zip(names, numbers):
        check_length(os.path.join(folder, name), size)
        if last >= rows or width != numbers[0][1]:
            raise ValueError(
                f"{path}: {name} has rows up to {last} of {width} numbers, but this save has rows up to {rows - 1} "
                f"of {numbers[0][1]} numbers [HVD034]"
            )
    return about, pieces


def _pieces_in(folder: str) -> set[str]:
    return set(filter(_PIECE.fullmatch, os.listdir(folder))) if os.path.isdir(folder) else set()
