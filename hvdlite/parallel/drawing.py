"""Drawings of a schedule: a table for a terminal and a picture (SVG), from actions and their timeline.

    stage 0  F0 F1 .  .  B0--- .  B1---|
    stage 1  .  F0 B0--- F1 B1---|.  .

Time goes from left to right. A forward and a backward are as wide as they take; dots are idle time, and a bar is an
update. With several chunks in a stage, F2b is micro-batch 2 in the second of them. What a stage keeps (stash, versions
of the weights) is the caller's to say, in a note for each stage. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from .schedule import Action, Timeline

_STYLE = """
  text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .note { fill: #57606a }
  .idle { fill: #eef1f4 }
  .F rect { fill: #3b82d6 } .B rect { fill: #2e9e6b } .F text, .B text { fill: #fff; text-anchor: middle }
  .U { stroke: #d1542c; stroke-width: 2.5 }
"""
_ROW, _HIGH, _TOP, _LEFT = 34, 26, 44, 72  # from row to row, of a cell, above the rows, before them: pixels


def text(lists: Sequence[Sequence[Action]], timeline: Timeline, notes: Sequence[str], chunks: int = 1) -> str:
    """One row for each stage, then makespan and busy share, then the notes."""
    wide = 1 + max((1 + len(_number(k, chunks)) for actions in lists for _, k in actions), default=1)
    scale = wide / _unit(timeline)
    idle = "." + " " * (wide - 1)
    rows = []
    for stage, spans in enumerate(timeline.spans):
        row = list(idle * (round(timeline.makespan * scale) // wide + 1))[: round(timeline.makespan * scale)]
        for what, k, start, end in spans:
            first, last = round(start * scale), round(end * scale)
            if what == "U":
                row[last - 1 : last] = "|"
                continue
            room = last - first - 1  # a number that is cut would be another number
            label = what + _number(k, chunks)
            label = label if len(label) <= room else what
            row[first:last] = label.ljust(room, "-" if what == "B" else " ")[: max(room, 0)] + " " * (last > first)
        rows.append(f"stage {stage:<{len(str(len(lists) - 1))}}  {''.join(row).rstrip()}")
    return "\n".join([*rows, _summary(timeline), *(f"stage {stage}: {note}" for stage, note in enumerate(notes))])


def svg(
    lists: Sequence[Sequence[Action]], timeline: Timeline, title: str, notes: Sequence[str], chunks: int = 1
) -> str:  # fmt: skip
    """A picture on a light background that needs no other file; the notes stand behind their rows."""
    digits = max((len(_number(k, chunks)) for actions in lists for _, k in actions), default=1)
    scale = (12 + 8 * digits) / _unit(timeline)
    end_x = _LEFT + timeline.makespan * scale
    below = _TOP + _ROW * len(lists)
    width = max(end_x + 28 + 7 * max(map(len, notes), default=0), 8.5 * len(title) + 40, 460)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{below + 62}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        _words(16, 26, title, "title"),
    ]
    for stage, spans in enumerate(timeline.spans):
        y = _TOP + _ROW * stage
        parts.append(_words(16, y + 17, f"stage {stage}"))
        parts.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{end_x - _LEFT:.1f}" height="{_HIGH}" rx="3"/>')
        for what, k, start, end in spans:
            number = str(k) if what == "U" else _number(k, chunks)
            parts.append(_cell(what, number, _LEFT + start * scale, (end - start) * scale, y))
        if stage < len(notes):
            parts.append(_words(end_x + 12, y + 17, notes[stage], "note"))
    parts.append(_words(16, below + 18, _summary(timeline)))
    legend = ("F", "forward"), ("B", "backward"), ("idle", "idle"), ("U", "update")
    for at, (what, name) in enumerate(legend):
        x, y = 16 + 96 * at, below + 34
        mark = f'<rect width="14" height="14" rx="3" x="{x}" y="{y}" class="idle"/>'
        if what in "FB":
            mark = f'<g class="{what}"><rect width="14" height="14" rx="3" x="{x}" y="{y}"/></g>'
        elif what == "U":
            mark = f'<path class="U" d="M{x + 7} {y - 1}v16"/>'
        parts += [mark, _words(x + 20, y + 11, name, "note")]
    return "\n".join([*parts, "</svg>\n"])


def _number(unit: int, chunks: int) -> str:
    """Of a micro-batch, with a letter for the chunk where a stage has several."""
    k, c = divmod(unit, chunks)
    return f"{k}{chr(ord('a') + c) if chunks > 1 else ''}"


def _unit(timeline: Timeline) -> float:
    """The time that is as wide as a label: a usual forward's, since stages may differ by far."""
    return median([end - start for row in timeline.spans for what, _, start, end in row if what == "F"] or [1]) or 1


def _summary(timeline: Timeline) -> str:
    return f"makespan {timeline.makespan:g}, busy {timeline.busy:.0%}"


def _words(x: float, y: float, words: str, kind: str = "name") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(words)}</text>'


def _cell(what: str, k: str, x: float, wide: float, y: int) -> str:
    if what == "U":  # it takes no time on paper, so it is a mark between two cells
        return f'<path class="U" d="M{x:.1f} {y - 2}v{_HIGH + 4}"><title>update {k}</title></path>'
    box = f'<rect x="{x + 0.5:.1f}" y="{y}" width="{max(wide - 1, 0.5):.1f}" height="{_HIGH}" rx="3"/>'
    number = f'<text x="{x + wide / 2:.1f}" y="{y + 17}">{k}</text>' if wide > 7 * len(k) + 2 else ""
    return f'<g class="{what}"><title>{what}{k}</title>{box}{number}</g>'
