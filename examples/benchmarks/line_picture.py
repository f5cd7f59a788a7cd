"""Picture (SVG) of lines over time or bytes, without another library: how is the loss of each form drawn?

The lower part of the y axis is what matters, so what is above `most` is left out.
"""

import math
from html import escape

COLORS = "#000000", "#e69f00", "#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#777777", "#009e73"
WIDE, HIGH, LEFT, TOP = 640, 340, 56, 40  # pixels
Line = "list[tuple[float, float]]"


def svg(
    lines: "dict[str, Line]", end: float, most: float, title: str, below: str, dashed: str, begin: float = 0.0
) -> str:
    """lines: points (time, value) by name; those whose name begins with `dashed` are dashed. end: of the time axis.
    begin: of the time axis, which then is logarithmic.
    """
    low = min(value for points in lines.values() for _, value in points) - 0.05

    def x(time: float) -> float:
        part = math.log(time / begin) / math.log(end / begin) if begin else time / end
        return round(LEFT + part * (WIDE - LEFT - 140), 1)

    def y(value: float) -> float:
        return round(TOP + (most - value) / (most - low) * (HIGH - TOP - 48), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HIGH - 10}">{escape(below)}</text>',
    ]
    for value in (each / 4 for each in range(int(4 * low) + 1, int(4 * most) + 1)):
        rule = f'<path d="M{LEFT},{y(value)} H{x(end)}" stroke="#e4e7ea"/>'
        out.append(f'{rule}<text x="16" y="{y(value) + 4}">{value:.2f}</text>')
    tens = [10.0**power for power in range(-9, 10) if begin <= 10.0**power <= end]
    for time in tens if begin else (end * part / 5 for part in range(6)):
        out.append(f'<text x="{x(time)}" y="{HIGH - 30}" text-anchor="middle">{time:g}</text>')
    for number, (name, points) in enumerate(lines.items()):
        dash = ' stroke-dasharray="5 4"' if name.startswith(dashed) else ""
        pen = f'fill="none" stroke="{COLORS[number % len(COLORS)]}" stroke-width="2"{dash}'
        drawn = " ".join(f"{x(time)},{y(value)}" for time, value in points if value <= most and time <= end)
        row = TOP + 14 + 22 * number
        out.append(f'<polyline points="{drawn}" {pen}/><path d="M{WIDE - 124},{row - 4} h30" {pen}/>')
        out.append(f'<text x="{WIDE - 88}" y="{row}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
