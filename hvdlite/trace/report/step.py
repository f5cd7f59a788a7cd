"""One step, drawn: what each rank does, and which buckets are under way meanwhile.

Each rank has two lanes. In the upper one the thread that trains: waiting for data, computing, waiting for the others,
the optimizer. Only how long each took is known, and when the rank had submitted its last tensor: so data is drawn
first, the optimizer last, and what was waited behind the last tensor. In the lower lane are the buckets, from when they
began to when they were done: those under the computing are what overlaps.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from .table import MS, JobTable

SHOWN = 12  # steps to choose from
RANKS = 16
_PARTS = (("waiting for data", "#e69f00"), ("computing", "#0072b2"), ("waiting for others", "#d55e00"),
          ("optimizer", "#56b4e9"))  # fmt: skip
_BUCKETS = ("buckets under way", "#009e73")


def overlap(table: JobTable) -> dict[str, Any] | None:
    """A picture with a menu of steps, the last one shown; None where no step tells of buckets."""
    from .figures import layout

    steps = _steps_with_buckets(table)
    if not steps:
        return None
    rows = _rows(table)
    data: list[dict[str, Any]] = []
    for number in steps:
        for trace in _traces(table, number, rows):
            trace["visible"] = number == steps[-1]
            data.append(trace)
    each = len(data) // len(steps)
    buttons = [
        {"label": f"step {number}", "method": "restyle",
         "args": ["visible", [at // each == index for at in range(len(data))]]}
        for index, number in enumerate(steps)
    ]  # fmt: skip
    made = layout("Computing and communication in one step (drag to zoom)", "ms since the first rank began it", "")
    made["barmode"] = "overlay"
    lanes = [lane for row in rows for lane in (f"rank {table.ranks[row]}", f"rank {table.ranks[row]} buckets")]
    made["yaxis"].update(range=[len(lanes) - 0.5, -0.5], type="category", automargin=True, categoryarray=lanes)
    made["height"] = 190 + 44 * len(rows)
    made["updatemenus"] = [
        {"buttons": buttons, "active": len(steps) - 1, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    ]
    return {"data": data, "layout": made}


def _steps_with_buckets(table: JobTable) -> list[int]:
    """Steps of which all ranks that tell of any tell: the last ones, and the longest."""
    sets = [set(file.samples) for file in table.files if file.samples]
    every = sorted(set.intersection(*sets)) if sets else []
    columns = np.searchsorted(table.steps, every)
    longest = [every[at] for at in np.argsort(-np.nan_to_num(table.step[:, columns]).max(axis=0))[:3]] if every else []
    return sorted({*every[-(SHOWN - 3) :], *longest})


def _rows(table: JobTable) -> list[int]:
    """All ranks, or of many those that are latest and earliest."""
    if len(table.ranks) <= RANKS:
        return list(range(len(table.ranks)))
    order = np.argsort(np.nan_to_num(np.nanmean(np.nan_to_num(table.late), axis=1)))
    return sorted({*order[: RANKS // 2].tolist(), *order[-RANKS // 2 :].tolist()})


def _traces(table: JobTable, number: int, rows: list[int]) -> list[dict[str, Any]]:
    at = int(np.searchsorted(table.steps, number))
    zero = float(np.nanmin(table.began[rows, at]))
    bars: dict[str, list[tuple[float, float, str, str]]] = {name: [] for name, _ in (*_PARTS, _BUCKETS)}
    for row in rows:
        rank, file = table.ranks[row], table.files[row]
        begin = float(table.began[row, at]) - zero
        for name, start, end in _thread(table, row, at, begin):
            bars[name].append((start, end, f"rank {rank}", f"rank {rank}: {name}"))
        offset = (file.offset_ns or 0) * MS
        for bucket in file.samples.get(number, {"buckets": []})["buckets"]:
            start, end = bucket["start"] * MS + offset - zero, bucket["end"] * MS + offset - zero
            names = html.escape(", ".join(bucket["names"]) or "unnamed")
            text = f"rank {rank}: {bucket['tensors']} tensors ({names}), {bucket['bytes']:,} bytes, {bucket['plane']}"
            bars[_BUCKETS[0]].append((start, end, f"rank {rank} buckets", text))
    return [
        {
            "type": "bar", "orientation": "h", "name": name, "legendgroup": name, "marker": {"color": color},
            "base": [_number(start) for start, *_ in bars[name]],
            "x": [_number(end - start) for start, end, *_ in bars[name]], "y": [lane for *_, lane, _ in bars[name]],
            "hovertext": [f"{text}, {end - start:.3f} ms" for start, end, _, text in bars[name]],
            "hoverinfo": "text",
        }
        for name, color in (*_PARTS, _BUCKETS)
    ]  # fmt: skip


def _thread(table: JobTable, row: int, at: int, begin: float) -> list[tuple[str, float, float]]:
    """What the training thread did: (name, start, end) in ms."""

    def known(values: np.ndarray) -> float:
        return float(np.nan_to_num(values[row, at]))

    end = begin + known(table.step)
    data = min(begin + known(table.data_wait), end)
    optimizer = max(end - known(table.optimizer), data)
    waited = min(known(table.exposed), optimizer - data)
    last = table.arrived[row, at] - table.began[row, at] + begin
    last = optimizer - waited if not np.isfinite(last) else min(max(float(last), data), optimizer - waited)
    parts = [
        ("waiting for data", begin, data), ("computing", data, last), ("waiting for others", last, last + waited),
        ("computing", last + waited, optimizer), ("optimizer", optimizer, end),
    ]  # fmt: skip
    return [part for part in parts if part[2] - part[1] > 1e-6]


def _number(value: float) -> float:
    return round(value, 5)
