"""Costs of a model's layers in the formats `hvdlite-layers-1` and `hvdlite-profiles-1`, which planners read.

    {"format": "hvdlite-layers-1", "layers": [{"name", "forward_ms", "backward_ms", "activation", "weights",
        "stash", "heads", "sync"}, ...]}
    {"format": "hvdlite-profiles-1", "profiles": {"2": [{"name", ...}, ...], "4": [...]}}

Sizes are bytes of one micro-batch on one rank, as search.Layer says; the last three may be left out. The second has the
same layers at several numbers of rows of the micro-batch. What is read is checked as untrusted input: an error names
the file and the layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from .search import LAYERS_MAX, Layer
from .table import PlanError, named

FORMAT, PROFILES = "hvdlite-layers-1", "hvdlite-profiles-1"
BYTES_MAX = 16 << 20
ROWS_MAX, PROFILES_MAX = 1 << 20, 64
_NOUN = {FORMAT: "layers", PROFILES: "profiles"}
_ROWS = re.compile("[1-9][0-9]{0,6}")


def write(path: str | Path, layers: Iterable[Layer]) -> None:
    """One layer a line."""
    Path(path).write_text(f'{{"format": "{FORMAT}", "layers": {_lines(layers)}}}\n', encoding="utf-8")


def write_profiles(path: str | Path, profiles: Mapping[int, Iterable[Layer]]) -> None:
    """profiles: layers by rows of the micro-batch. One layer a line."""
    parts = ",\n".join(f'"{rows}": {_lines(profiles[rows])}' for rows in sorted(profiles))
    Path(path).write_text(f'{{"format": "{PROFILES}", "profiles": {{\n{parts}\n}}}}\n', encoding="utf-8")


def read(path: str | Path) -> list[Layer]:
    """Raises PlanError, OSError."""
    try:
        return _layers(_content(path, FORMAT).get("layers"))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def read_profiles(path: str | Path) -> dict[int, list[Layer]]:
    """Layers by rows of the micro-batch, the same ones in each. Raises PlanError, OSError."""
    try:
        return _profiles(_content(path, PROFILES).get("profiles"))
    except PlanError as error:
        raise PlanError(f"{path}: {str(error).removesuffix(' [HVD005]')} [HVD005]") from None


def _lines(layers: Iterable[Layer]) -> str:
    rows = ",\n".join(json.dumps(asdict(layer)) for layer in layers)
    return f"[\n{rows}\n]"


def _content(path: str | Path, wanted: str) -> dict[str, Any]:
    """The object that a file of this format has."""
    with open(path, "rb") as file:
        text = file.read(BYTES_MAX + 1)
    if len(text) > BYTES_MAX:
        raise PlanError(f"not a file of {_NOUN[wanted]}: more than {BYTES_MAX} bytes [HVD005]")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not a file of {_NOUN[wanted]}: {str(error)[:200]} [HVD005]") from None
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if isinstance(content, dict) and found == wanted:
        return content
    why = f"its format is {str(found)[:40]!r}, this version reads {wanted!r}"
    if wanted == PROFILES and found == FORMAT:
        why = "it has one profile only; `hvdlite-plan profile --rows 2,4,8` writes several"
    raise PlanError(f"not a file of {_NOUN[wanted]}: {why} [HVD005]")


def _profiles(parts: Any) -> dict[int, list[Layer]]:
    if not isinstance(parts, dict) or not 1 <= len(parts) <= PROFILES_MAX:
        raise PlanError(f"profiles must be an object of 1 to {PROFILES_MAX} of them, by rows [HVD005]")
    for key in parts:
        if not _ROWS.fullmatch(key) or int(key) > ROWS_MAX:
            raise PlanError(f"profile {key[:40]!r}: the rows must be a whole number of 1 to {ROWS_MAX} [HVD005]")
    found: dict[int, list[Layer]] = {}
    for rows in sorted(map(int, parts)):
        try:
            found[rows] = _layers(parts[str(rows)])
        except PlanError as error:
            raise PlanError(f"profile {rows}: {str(error).removesuffix(' [HVD005]')} [HVD005]") from None
        first = min(found)
        if [layer.name for layer in found[rows]] != [layer.name for layer in found[first]]:
            raise PlanError(f"profile {rows} is not of the same layers as profile {first} [HVD005]")
    return found


def _layers(rows: Any) -> list[Layer]:
    if not isinstance(rows, list) or not 1 <= len(rows) <= LAYERS_MAX:
        raise PlanError(f"layers must be a list of 1 to {LAYERS_MAX} [HVD005]")
    try:
        return [_layer(number, row) for number, row in enumerate(rows)]
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"{str(error)[:200]} [HVD005]") from None


def _layer(number: int, row: Any) -> Layer:
    known = {each.name: each.default is MISSING for each in fields(Layer)}
    if not isinstance(row, dict) or not named(row.get("name"), 200):
        raise ValueError(f"layer {number} is no object with a name of at most 200 letters that can be printed")
    wrong = [f"{name} is missing" for name, needed in known.items() if needed and name not in row]
    wrong += [f"{str(name)[:40]} is no field" for name in row if name not in known]
    if wrong:
        raise ValueError(f"layer {number}, {row['name'][:64]!r}: {', '.join(wrong)}")
    return Layer(**row)
