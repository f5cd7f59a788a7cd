"""Costs of a model's layers in the format `hvdlite-layers-1`, which profiles write and planners read.

    {"format": "hvdlite-layers-1", "layers": [{"name", "forward_ms", "backward_ms", "activation", "weights",
        "stash", "heads", "sync"}, ...]}

Sizes are bytes of one micro-batch on one rank, as search.Layer says; the last three may be left out. What is read is
checked as untrusted input: an error names the file and the layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from .search import LAYERS_MAX, Layer
from .table import PlanError, named

FORMAT = "hvdlite-layers-1"
BYTES_MAX = 16 << 20


def write(path: str | Path, layers: Iterable[Layer]) -> None:
    """One layer a line."""
    rows = ",\n".join(json.dumps(asdict(layer)) for layer in layers)
    Path(path).write_text(f'{{"format": "{FORMAT}", "layers": [\n{rows}\n]}}\n', encoding="utf-8")


def read(path: str | Path) -> list[Layer]:
    """Raises PlanError, OSError."""
    with open(path, "rb") as file:
        text = file.read(BYTES_MAX + 1)
    try:
        if len(text) > BYTES_MAX:
            raise ValueError(f"more than {BYTES_MAX} bytes")
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"its format is {str(found)[:40]!r}, this version reads {FORMAT!r}")
        rows = content.get("layers")
        if not isinstance(rows, list) or not 1 <= len(rows) <= LAYERS_MAX:
            raise ValueError(f"layers must be a list of 1 to {LAYERS_MAX}")
        return [_layer(number, row) for number, row in enumerate(rows)]
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a file of layers: {str(error)[:200]} [HVD005]") from None


def _layer(number: int, row: Any) -> Layer:
    known = {each.name: each.default is MISSING for each in fields(Layer)}
    if not isinstance(row, dict) or not named(row.get("name"), 200):
        raise ValueError(f"layer {number} is no object with a name of at most 200 letters that can be printed")
    wrong = [f"{name} is missing" for name, needed in known.items() if needed and name not in row]
    wrong += [f"{str(name)[:40]} is no field" for name in row if name not in known]
    if wrong:
        raise ValueError(f"layer {number}, {row['name'][:64]!r}: {', '.join(wrong)}")
    return Layer(**row)
