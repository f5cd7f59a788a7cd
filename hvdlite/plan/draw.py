"""Pictures of tables and pipelines: an SVG, and rows for ui.perfetto.dev.

In the SVG each rank is a line from left to right, and a move an arrow from where and when its bytes leave to where and
when they are there. A solid arrow's bytes are copied, a dashed one's are added; colors are the chunks. Text in a
picture is escaped: names come from files.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from ..parallel import drawing
from ..parallel.schedule import Timeline
from .links import Links
from .pipeline import Played
from .simulator import of_table
from .table import COPY, FOLD, HOW, Table

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
ARROWS_MAX = 4000
WIDTH, LANE, LEFT, TOP = 960, 44, 70, 40
SPANS = {"F": "forward", "B": "backward", "send": "transfer", "sum": "sum of gradients"}


def some(count: int, what: str) -> str:
    """ "1 move", "2 moves"."""
    return f"{count} {what}{'s' * (count != 1)}"


def _played(table: Table, count_bytes: int, links: Links, cursors: str) -> list[tuple[Any, float, float, float]]:
    """Of each move its row, when it starts and ends, and when its bytes are there; ns."""
    tasks, later = of_table(table, count_bytes, links, cursors)
    start, end = tasks.play()
    rows = zip(tasks.tags, start, end, later)
    return [(tag, begin, over, over + late) for tag, begin, over, late in rows if tag[0] != HOW[FOLD]]


def svg(table: Table, count_bytes: int, links: Links, cursors: str = "link") -> str:
    """A picture of a table on a buffer of so many bytes."""
    moves = _played(table, count_bytes, links, cursors)
    last = max((there for *_, there in moves), default=0.0)

    def x(time: float) -> float:
        return round(LEFT + time / (last or 1.0) * (WIDTH - LEFT - 20), 1)

    title = f"{table.name}: {table.kind} of {count_bytes:,} bytes on {some(table.size, 'rank')}, "
    title += f"{last / 1e3:,.1f} us, {some(len(moves), 'move')} in {some(table.steps, 'step')}"
    if len(moves) > ARROWS_MAX:
        title += f"; the first {ARROWS_MAX} are drawn"
    y = [TOP + LANE * rank for rank in range(table.size)]
    height = TOP + LANE * table.size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="18">{html.escape(title)}</text>',
    ]
    for rank in range(table.size):
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y[rank]}" y2="{y[rank]}" stroke="#cccccc"/>')
        lines.append(f'<text x="8" y="{y[rank] + 4}">rank {rank}</text>')
    for (src, dst, at, n, how, step), begin, _, there in moves[:ARROWS_MAX]:
        color = COLORS[at * len(COLORS) // table.chunks]
        dashed = "" if how == COPY else ' stroke-dasharray="5 3"'
        label = f"step {step}: rank {src} to {dst}, chunks {at} to {at + n - 1}, {HOW[how]}"
        lines.append(
            f'<line x1="{x(begin)}" y1="{y[src]}" x2="{x(there)}" y2="{y[dst]}" stroke="{color}" stroke-width="1.6"'
            f"{dashed}><title>{label}, {begin / 1e3:,.1f} to {there / 1e3:,.1f} us</title></line>"
            f'<circle cx="{x(there)}" cy="{y[dst]}" r="2.5" fill="{color}"/>'
        )
    return "\n".join([*lines, "</svg>", ""])


def perfetto(table: Table, count_bytes: int, links: Links, cursors: str = "link") -> str:
    """JSON for Perfetto: a process for each rank, a lane for each peer that it sends to."""
    rows = _processes("rank", table.size)
    for (src, dst, at, n, how, step), begin, end, there in _played(table, count_bytes, links, cursors):
        about = {"step": step, "first chunk": at, "chunks": n, "there after us": there / 1e3}
        rows.append(_span(src, dst, f"to {dst}: {HOW[how]}", begin / 1e3, end / 1e3) | {"args": about})
    return json.dumps(rows)


def pipeline(played: Played, title: str) -> str:
    """An SVG of one step of a pipeline, as hvdlite.parallel draws its schedules: what stages compute."""
    spans: list[list[tuple[str, int, float, float]]] = [[] for _ in played.busy]
    for what, stage, number, begin, end in sorted(played.spans, key=lambda span: span[3]):
        if what in ("F", "B"):
            spans[stage].append((what, number, begin, end))
    whole = len(spans) * played.end
    timeline = Timeline(round(played.end, 3), played.peaks, sum(played.busy) / whole if whole else 0.0, spans)
    notes = [f"keeps {peak} at most" for peak in played.peaks]
    return drawing.svg([[(what, k) for what, k, *_ in row] for row in spans], timeline, title, notes)


def pipeline_rows(spans: Iterable[tuple[str, int, int, float, float]]) -> str:
    """JSON for Perfetto of what pipeline.makespan played, in ms: a process for each stage. spans:
    (what, stage, number, start, end)."""
    found = sorted(spans, key=lambda span: span[3])
    stages = 1 + max((stage for _, stage, *_ in found), default=-1)
    rows, ends = _processes("stage", stages), [[0.0] for _ in range(stages)]
    for what, stage, number, begin, end in found:
        lane = 0  # a stage computes one thing after the other; what else it does is in the first lane that is free
        if what not in ("F", "B"):
            free = (at for at, over in enumerate(ends[stage]) if at and over <= begin)
            lane = next(free, len(ends[stage]))
            ends[stage][lane:] = [end, *ends[stage][lane + 1 :]]
        rows.append(_span(stage, lane, f"{SPANS[what]} {number}", begin * 1e3, end * 1e3))
    return json.dumps(rows)


def _processes(what: str, count: int) -> list[dict[str, Any]]:
    named = {"ph": "M", "tid": 0, "name": "process_name"}
    return [{**named, "pid": number, "args": {"name": f"{what} {number}"}} for number in range(count)]


def _span(process: int, lane: int, name: str, begin: float, end: float) -> dict[str, Any]:
    """A row; times in us."""
    return {"ph": "X", "pid": process, "tid": lane, "ts": begin, "dur": end - begin, "name": name}
