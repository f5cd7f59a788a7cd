"""The pictures of a job, as plain dicts that plotly.js draws: {"data": [...], "layout": {...}} each.

What is drawn is bounded however long a job was and however many ranks it had: steps are united into a few hundred
bins, lines are drawn for a handful of ranks and a band for the rest, one step is shown for sixteen ranks at most. Names
of tensors and hosts come from files, and plotly reads a kind of HTML in texts: they are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .step import overlap
from .table import Array, JobTable, middle

Figure = dict[str, Any]
BINS = 400
LINES = 8  # ranks that get a line of their own
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#8c564b",
)  # for colour-blind readers too
SLOWEST = 15


def figures(table: JobTable) -> dict[str, Figure]:
    """All of them by their names, in the order of the page."""
    if not len(table.steps):
        return {}
    found: dict[str, Callable[[JobTable], Figure | None]] = {
        "steps": _step_time, "exposed": _exposed_share, "late": _lateness, "overlap": overlap, "buckets": _sizes,
        "slowest": _slowest,
    }  # fmt: skip
    drawn = {name: draw(table) for name, draw in found.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def layout(title: str, x: str, y: str, **more: Any) -> dict[str, Any]:
    """What all pictures have in common."""
    return {
        "title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
        "margin": {"l": 70, "r": 50, "t": 60, "b": 90}, "hovermode": "closest", "height": 380,
        "font": {"family": "system-ui, sans-serif", "size": 13}, "plot_bgcolor": "#ffffff", "paper_bgcolor": "#ffffff",
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0.01},
        "uirevision": "kept", **more,
    }  # fmt: skip


def numbers(values: Array) -> list[float | None]:
    """For JSON, which has no NaN: to four digits, which is more than a screen shows."""
    return [None if not np.isfinite(value) else float(f"{value:.4g}") for value in np.asarray(values, float)]


def _binned(table: JobTable, values: Array) -> tuple[list[int], Array]:
    """The first step of each bin, and [ranks, bins]: medians."""
    bins = table.bins(BINS)
    return [int(table.steps[each.start]) for each in bins], np.stack(
        [middle(values[:, each], axis=1) for each in bins], axis=1
    )


def _step_time(table: JobTable) -> Figure:
    x, each = _binned(table, table.step)
    bins = table.bins(BINS)
    most = [float(np.nanmax(np.nan_to_num(table.step[:, part]))) for part in bins]
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "longest of all ranks", "x": x, "y": numbers(np.array(most)),
         "line": {"color": "#bbbbbb", "width": 1}}
    ]  # fmt: skip
    if len(table.ranks) <= LINES:
        lines = [(f"rank {rank}", row) for rank, row in zip(table.ranks, each)]
    else:
        lines = [("median of all ranks", middle(each, axis=0)), ("slowest rank's median", np.nanmax(each, axis=0))]
    data += [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": x,
            "y": numbers(row),
            "line": {"color": color, "width": 2},
        }
        for (name, row), color in zip(lines, COLORS)
    ]
    top = 1.3 * float(np.percentile(most, 98)) if most else None
    return {
        "data": data,
        "layout": layout("Step time", "step", "ms", yaxis={"title": {"text": "ms"}, "range": [0, top]}),
    }


def _exposed_share(table: JobTable) -> Figure:
    x, step = _binned(table, table.step)
    parts = (
        ("computing", table.compute, COLORS[0]), ("waiting for data", table.data_wait, COLORS[4]),
        ("waiting for other ranks (exposed communication)", table.exposed, COLORS[1]),
    )  # fmt: skip
    whole = np.nansum(step, axis=0)
    data = []
    for name, values, color in parts:
        shares = 100 * np.nansum(np.nan_to_num(_binned(table, values)[1]), axis=0) / np.where(whole > 0, whole, 1)
        data.append(
            {"type": "scatter", "mode": "lines", "stackgroup": "parts", "name": name, "x": x, "y": numbers(shares),
             "line": {"color": color, "width": 0.5}, "hovertemplate": "%{y:.1f} %"}
        )  # fmt: skip
    made = layout("What a step is made of, over all ranks", "step", "% of the step")
    made["yaxis"]["range"] = [0, 105]
    return {"data": data, "layout": made}


def _lateness(table: JobTable) -> Figure | None:
    if len(table.ranks) < 2 or not np.isfinite(table.late).any():
        return None
    x, late = _binned(table, table.late)
    labels = [f"rank {rank}" for rank in table.ranks]
    heat = {
        "type": "heatmap", "x": x, "y": labels, "z": [numbers(row) for row in late], "colorscale": "Viridis", "zmin": 0,
        "colorbar": {"title": {"text": "ms"}}, "hovertemplate": "%{y}, from step %{x}: %{z:.2f} ms<extra></extra>",
    }  # fmt: skip
    made = layout("Who is late: milliseconds after the first rank", "step", "")
    made["yaxis"].update(autorange="reversed", type="category")
    made["height"] = min(900, 200 + 22 * len(labels))
    return {"data": [heat], "layout": made}


def _all_buckets(table: JobTable) -> list[Mapping[str, Any]]:
    return [bucket for file in table.files for each in file.samples.values() for bucket in each["buckets"]]


def _sizes(table: JobTable) -> Figure | None:
    buckets = [each for each in _all_buckets(table) if each["bytes"] > 0]
    if not buckets:
        return None
    powers = np.array([int(each["bytes"]).bit_length() - 1 for each in buckets])
    speed = np.array([each["bytes"] / max(each["end"] - each["start"], 1) for each in buckets])  # GB/s
    kinds = sorted(set(powers.tolist()))
    x = [_size(2**power) for power in kinds]
    data = [
        {"type": "bar", "name": "buckets", "x": x, "y": [int((powers == power).sum()) for power in kinds],
         "marker": {"color": COLORS[0]}},
        {"type": "scatter", "mode": "lines+markers", "name": "their bandwidth (median)", "x": x, "yaxis": "y2",
         "y": numbers(np.array([np.median(speed[powers == power]) for power in kinds])), "line": {"color": COLORS[1]}},
    ]  # fmt: skip
    second = {
        "title": {"text": "GB/s"},
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
        "nticks": 5,
        "showgrid": False,
    }
    made = layout("Bucket sizes (sampled steps)", "size, at least", "buckets", yaxis2=second)
    made["xaxis"]["type"] = "category"
    return {"data": data, "layout": made}


def _slowest(table: JobTable) -> Figure | None:
    times: dict[str, list[tuple[float, int]]] = {}
    for each in _all_buckets(table):
        more = each["tensors"] - len(each["names"])
        name = ", ".join(each["names"]) + (f" and {more} more" if more > 0 else "") or "unnamed"
        times.setdefault(name, []).append(((each["end"] - each["start"]) * 1e-6, each["bytes"]))
    if not times:
        return None
    ranked = sorted(((float(np.median([t for t, _ in seen])), name) for name, seen in times.items()), reverse=True)
    ranked = ranked[:SLOWEST][::-1]
    data = {
        "type": "bar", "orientation": "h", "x": [float(f"{time:.4g}") for time, _ in ranked],
        "y": [short(name, 60) for _, name in ranked], "marker": {"color": COLORS[0]},
        "text": [_size(max(size for _, size in times[name])) for _, name in ranked],
        "hovertext": [html.escape(name) for _, name in ranked],
    }  # fmt: skip
    made = layout("The slowest tensors: how long they were under way", "ms (median)", "")
    made["yaxis"].update(automargin=True, type="category")
    made["height"] = 160 + 26 * len(ranked)
    return {"data": [data], "layout": made}


def short(name: str, most: int) -> str:
    """The beginning and the end of a long name, for a label."""
    if len(name) > most:
        name = name[: most // 2 - 1] + "..." + name[-(most // 2 - 2) :]
    return html.escape(name)


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count //= 1024
    return f"{count} GiB"
