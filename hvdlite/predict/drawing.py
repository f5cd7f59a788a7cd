"""Picture (SVG) of the step time against the number of ranks, with a band for the range.

The dashed line of a setting is a step without communication: what is above it is the price of more ranks. Ranks stand
on a scale of doublings. The picture needs no other file.

A circle says its numbers where a pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .prediction import Prediction

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDE, _HIGH, _LEFT, _TOP = 640, 320, 64, 40


def svg(rows: Sequence[Prediction], title: str) -> str:
    """rows: of any settings; those that differ in ranks alone are one line."""
    top = 1.1 * max(p.high for p in rows)
    logs = [math.log2(p.ranks) for p in rows]
    first, span = min(logs), (max(logs) - min(logs)) or 1.0

    def x(ranks: int) -> float:
        return round(_LEFT + (math.log2(ranks) - first) / span * (_WIDE - _LEFT - 24), 1)

    def y(ms: float) -> float:
        return round(_HIGH - 40 - ms / top * (_HIGH - 40 - _TOP), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH + 24}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in (0.25, 0.5, 0.75, 1.0):
        at = y(top * tick)
        out.append(f'<line x1="{_LEFT}" x2="{_WIDE - 16}" y1="{at}" y2="{at}" stroke="#e4e7ea"/>')
        out.append(f'<text x="8" y="{at + 4}">{top * tick:.3g} ms</text>')
    for ranks in sorted({p.ranks for p in rows}):
        out.append(f'<text x="{x(ranks)}" y="{_HIGH - 22}" text-anchor="middle">{ranks}</text>')
    lines: dict[str, list[Prediction]] = {}
    for p in sorted(rows, key=lambda p: p.ranks):
        every = f", every {p.sync_every}" if p.sync_every > 1 else ""
        lines.setdefault(f"{p.fusion_mb:g} MB, {p.wire}, batch {p.batch:g}x{every}", []).append(p)
    for number, (name, of) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        band = [f"{x(p.ranks)},{y(p.high)}" for p in of] + [f"{x(p.ranks)},{y(p.low)}" for p in reversed(of)]
        out.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.18"/>')
        for what, dash in ((lambda p: p.ms, ""), (lambda p: p.alone_ms, ' stroke-dasharray="4 4" opacity="0.6"')):
            points = " ".join(f"{x(p.ranks)},{y(what(p))}" for p in of)
            out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        for p in of:
            label = f"{p.ranks} ranks: {p.ms:.1f} ms ({p.low:.1f} to {p.high:.1f}), confidence {p.confidence}"
            out.append(
                f'<circle cx="{x(p.ranks)}" cy="{y(p.ms)}" r="3.5" fill="{color}"><title>{label}</title></circle>'
            )
        out.append(
            f'<text x="{_LEFT + 190 * (number % 3)}" y="{_HIGH + 14 * (number // 3)}" fill="{color}">{name}</text>'
        )
    out.append(f'<text x="8" y="{_HIGH - 22}">ranks</text></svg>')
    return "\n".join(out) + "\n"
