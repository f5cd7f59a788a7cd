"""Pictures of the pages about how hvdlite works, drawn from the tables that the tests hold true.

`floors` reads the folders of csrc/ and their floors from tests/project/test_floors.py; `gradient` and `vote` are
lists of steps, `ranks` is the picture of the first page.
Each function returns an SVG that takes the colors of the page, so it can be read in the light and the dark theme.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAR, ROW, PAD = 7.4, 30, 10


def _svg(
    width: float,
    height: float,
    parts: list[str],
    title: str,
    kind: str = "diagram",
) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    head = f'<svg class="{kind}" {size} role="img" aria-label="{escape(title)}"'
    arrow = (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>'
    )
    return f'{head} font-family="monospace" font-size="12" fill="currentColor">{arrow}{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, text: str, height: float = ROW - 6) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="none" stroke="currentColor"/>'
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4:g}" text-anchor="middle">{escape(text)}</text>'
    )


def _note(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g},{y:g} L{to_x:g},{to_y:g}" fill="none" stroke="currentColor" marker-end="url(#end)"/>'


def c_floors() -> dict[str, float]:
    """C_FLOOR of tests/project/test_floors.py, which is the check of every include."""
    floors: dict[str, float] = {}
    for node in ast.parse((ROOT / "tests/project/test_floors.py").read_text(encoding="utf-8")).body:
        text = ast.unparse(node)
        if text.startswith("C_FLOOR = "):
            floors = ast.literal_eval(node.value)  # type: ignore[attr-defined]
        elif text.startswith("C_FLOOR.update("):
            floors.update(ast.literal_eval(node.value.args[0]))  # type: ignore[attr-defined]
    return floors


def floors() -> str:
    """The folders of the core, the highest floor first; an include points down."""
    by_floor: dict[float, list[str]] = {}
    for folder, floor in c_floors().items():
        if folder and not (ROOT / "csrc" / folder).is_dir():
            continue
        by_floor.setdefault(floor, []).append(folder + "/" if folder else "hvdlite.h, api*.c")
    parts, width, y = [], 640.0, 8.0
    order = sorted(by_floor, reverse=True)
    for floor in order:
        names = by_floor[floor]
        each = (width - 2 * PAD - PAD * (len(names) - 1)) / len(names)
        parts += [_box(PAD + i * (each + PAD), y, each, name) for i, name in enumerate(names)]
        if floor != order[-1]:
            parts.append(_arrow(width / 2, y + ROW - 6, width / 2, y + ROW + 6))
        y += ROW + 8
    return _svg(
        width,
        y,
        parts,
        "The folders of the core by floor; includes point down",
    )


GRADIENT = (
    ("your thread", "backward computes a gradient; its hook submits it"),
    ("your thread", "the next layers compute on"),
    ("engine", "drain: the request becomes ready on this rank"),
    ("engine", "vote: the rank writes what is ready on its board"),
    ("engine", "merge: all votes give the same plan on every rank"),
    ("engine", "start: tensors of the plan move as one bucket"),
    ("plane", "copy in slices, reduce in rank order, copy out"),
    ("engine", "finish: the handle is complete"),
    ("your thread", "backward returns with averaged gradients"),
)


def gradient() -> str:
    """The path of a gradient through thread, engine and plane."""
    lanes, width = ["your thread", "engine", "plane"], 640.0
    xs = {lane: 60 + 110 * i for i, lane in enumerate(lanes)}
    parts = [_note(xs[lane], 16, lane, "middle") for lane in lanes]
    bottom = 30 + ROW * len(GRADIENT)
    parts += [f'<path d="M{x},24 V{bottom}" stroke="currentColor" stroke-dasharray="2 4"/>' for x in xs.values()]
    for i, (lane, text) in enumerate(GRADIENT):
        y = 40 + ROW * i
        parts.append(f'<circle cx="{xs[lane]}" cy="{y}" r="5"/>')
        parts.append(_note(xs["plane"] + 20, y + 4, text))
        if i + 1 < len(GRADIENT) and GRADIENT[i + 1][0] != lane:
            parts.append(_arrow(xs[lane], y + 5, xs[GRADIENT[i + 1][0]], y + ROW - 6))
    return _svg(
        width + 60,
        bottom,
        parts,
        "The path of a gradient from hook to average",
    )


VOTES = {"rank 0": "1 1 0 1", "rank 1": "1 0 1 1", "rank 2": "1 1 1 1"}


def vote() -> str:
    """Three votes on four tensors, merged by and."""
    parts = [_note(150, 16, "a b c d"), _note(10, 16, "tensor")]
    for i, (rank, bits) in enumerate(VOTES.items()):
        y = 30 + ROW * i
        parts += [
            _note(10, y + 16, f"{rank}: ready"),
            _box(140, y, 80, bits),
            _arrow(225, y + 12, 300, 30 + ROW + 12),
        ]
    ready = [min(bits) for bits in zip(*(bits.split() for bits in VOTES.values()))]
    names = ", ".join(name for name, bit in zip("abcd", ready) if bit == "1")
    parts += [
        _note(345, 48, "merged", "middle"),
        _box(305, 30 + ROW, 80, " ".join(ready)),
    ]
    parts += [
        _arrow(390, 30 + ROW + 12, 440, 30 + ROW + 12),
        _box(445, 30 + ROW, 190, f"every rank: reduce {names}"),
    ]
    return _svg(
        650,
        40 + ROW * len(VOTES),
        parts,
        "Three ranks vote on four tensors",
    )


def ranks() -> str:
    """Two ranks in one step: different samples, one average, equal weights. Narrow enough for a phone."""
    width, each, parts = 340.0, 150.0, []
    xs = (PAD, width - PAD - each)
    rows = ("samples {}", "forward, backward", "gradients {}")
    for rank, x in enumerate(xs):
        middle = x + each / 2
        parts.append(_note(middle, 14, f"rank {rank}: train.py", "middle"))
        for row, text in enumerate(rows):
            y = 24 + (ROW + 8) * row
            parts.append(_box(x, y, each, text.format(rank)))
            parts.append(_arrow(middle, y + ROW - 6, middle, y + ROW + 6))
    y = 24 + (ROW + 8) * len(rows)
    parts.append(_box(PAD, y, width - 2 * PAD, "hvdlite: the average of both"))
    for x in xs:
        middle = x + each / 2
        parts.append(_arrow(middle, y + ROW - 6, middle, y + ROW + 6))
        parts.append(_box(x, y + ROW + 8, each, "optimizer.step()"))
    y += 2 * (ROW + 8) + 12
    parts.append(_note(width / 2, y, "The weights stay equal on all ranks.", "middle"))
    return _svg(
        width,
        y + 10,
        parts,
        "Two ranks compute on different samples, hvdlite averages their gradients, and both take the same step",
        "small",
    )
