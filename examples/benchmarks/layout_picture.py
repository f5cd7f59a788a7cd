"""Picture (SVG) of the layouts of an elastic pipeline over its steps: which stage has each slot when?

python examples/benchmarks/layout_picture.py docs/guides/elastic-pipelines.svg
"""

import sys
from html import escape
from pathlib import Path

from hvdlite.plan import Layout

STYLE = """
  text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .note { fill: #57606a }
  .spare { fill: #eef1f4 }
  .s0 { fill: #3b82d6 } .s1 { fill: #2e9e6b } .s2 { fill: #8a63c9 }
  .box { fill: #fff; text-anchor: middle }
  .middle { text-anchor: middle }
  .lost { stroke: #d1542c; stroke-width: 2.5 }
"""
ROW, HIGH, TOP, LEFT, STEP = 34, 26, 66, 72, 15  # from row to row, of a box, above the rows, before them, of a step
PLACES = 8
LOG = [  # as state.log, and the slots that have a process; ranks are numbered in the order of slots
    (0, Layout(2, 4, 8, 3, (4, 4), 0.0), range(8)),
    (12, Layout(3, 2, 16, 3, (3, 2, 3), 0.0), (0, 2, 3, 4, 5, 7)),
    (24, Layout(2, 2, 16, 3, (4, 4), 0.0), (0, 2, 4, 5, 7)),
    (36, Layout(2, 4, 8, 3, (4, 4), 0.0), range(8)),
]
END = 48


def words(x: float, y: float, text: str, kind: str = "name") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def svg(log: "list[tuple[int, Layout, object]]", end: int, title: str) -> str:
    below = TOP + ROW * PLACES
    wide = LEFT + STEP * end + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{below + 62}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        words(16, 26, title, "title"),
        *(words(16, TOP + ROW * place + 17, f"slot {place}") for place in range(PLACES)),
    ]
    for (step, layout, here), following in zip(log, [*log[1:], (end, None, ())]):
        x, width = LEFT + STEP * step, STEP * (following[0] - step)
        copies = f"{layout.pp} stages x {layout.dp} copies"
        out += [words(x + width / 2, TOP - 12, copies, "middle"), words(x, below + 14, f"step {step}", "note")]
        for rank, place in enumerate(here):
            stage, y = rank % layout.pp, TOP + ROW * place
            first = sum(layout.balance[:stage])
            what = f"layers {first}-{first + layout.balance[stage] - 1}"
            spare = rank >= layout.ranks
            box = f'<rect class="{"spare" if spare else f"s{stage}"}" x="{x + 1}" y="{y}" width="{width - 2}" '
            title = f"rank {rank}: {'spare' if spare else f'stage {stage}, copy {rank // layout.pp}'}"
            out.append(f'{box}height="{HIGH}" rx="3"><title>{title}</title></rect>')
            text, kind = ("spare: keeps copies", "note middle") if spare else (what, "box")
            out.append(words(x + width / 2, y + 17, text, kind))
            if following[1] is not None and place not in following[2]:
                at = x + width - 24
                out.append(f'<path class="lost" d="M{at} {y + 5}l16 16m0 -16l-16 16"><title>killed</title></path>')
    marks = [*((f"s{stage}", f"stage {stage}") for stage in range(3)), ("spare", "spare")]
    for at, (kind, name) in enumerate(marks):
        x, y = 16 + 96 * at, below + 34
        out += [f'<rect class="{kind}" width="14" height="14" rx="3" x="{x}" y="{y}"/>', words(x + 20, y + 11, name)]
    x, y = 16 + 96 * len(marks), below + 34
    out += [f'<path class="lost" d="M{x} {y}l14 14m0 -14l-14 14"/>', words(x + 20, y + 11, "killed")]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    title = "8 layers on up to 8 ranks: stages and copies follow the number of ranks"
    Path(sys.argv[1]).write_text(svg(LOG, END, title), encoding="utf-8")
