"""The page: one file that needs nothing else, neither when it is opened nor later.

plotly.js, a well-kept library, lies in it whole (of the package plotly, which `pip install hvdlite[report]` brings),
and numbers as JSON. It may load nothing: its own policy forbids that to the browser. What comes from files stands in
the page as text, never as markup. Served while training runs, the same page asks for new numbers every two seconds.
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .advice import advice, exposed_share, settled
from .figures import figures
from .table import JobTable, middle

NOTES = {
    "steps": "Medians of neighbouring steps; the grey line is the longest step of any rank in them.",
    "exposed": "The orange part is communication that computation does not hide.",
    "late": "When a rank had submitted what the step needs, after the first rank had. A bright row is a rank that all "
    "others wait for.",
    "overlap": "How long each part took is measured; in the upper lanes data is drawn first, the optimizer last, and "
    "waiting behind the last tensor.",
    "buckets": "Tensors travel together. Many small buckets cost more than few large ones.",
    "slowest": "From when a bucket began to when it was done on that rank; a rank that comes late makes it longer.",
}


class MissingLibraryError(ImportError):
    """plotly is not installed; the text says what to do."""


def plotly_js() -> str:
    """The library that draws. Raises MissingLibraryError."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingLibraryError(
            "the report needs the package plotly, which draws it: pip install plotly (or hvdlite[report]) [HVD807]"
        ) from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def content(table: JobTable, problems: Sequence[str]) -> dict[str, Any]:
    """All that the page shows of a job: title, facts, advice, problems, figures; JSON has no NaN in it."""
    return {
        "title": _title(table), "facts": _facts(table), "advice": advice(table), "problems": list(problems),
        "figures": figures(table), "notes": NOTES,
    }  # fmt: skip


def _title(table: JobTable) -> str:
    hosts = len(set(table.hosts))
    return f"{len(table.ranks)} rank{'s' * (len(table.ranks) != 1)} on {hosts} host{'s' * (hosts != 1)}"


def _facts(table: JobTable) -> list[list[str]]:
    if not len(table.steps):
        return []
    step, exposed = float(middle(table.step[:, settled(table)])), exposed_share(table)
    moved: dict[str, int] = {}
    for file in table.files:
        for plane, count in file.bytes.items():
            moved[plane] = moved.get(plane, 0) + count
    facts = [
        ["steps", f"{len(table.steps)} ({table.steps[0]} to {table.steps[-1]})"],
        ["time", f"{float(np.nan_to_num(table.seconds)[-1]):.1f} s"],
        ["step (median)", f"{step:.2f} ms"], ["exposed communication", f"{100 * exposed:.1f} %"],
    ]  # fmt: skip
    return facts + [[f"moved by {plane}", f"{count / 1e6:,.1f} MB"] for plane, count in sorted(moved.items()) if count]


@functools.lru_cache(1)
def _plotly() -> bytes:
    return plotly_js().encode()


def page(content: dict[str, Any], live: bool = False) -> list[bytes]:
    """The whole page in parts. The large one, which draws, is always the same object."""
    numbers = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    policy += "; connect-src 'self'" if live else ""
    before = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>hvdlite: {html.escape(content['title'])}</title>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        "<script>"
    )
    after = (
        f"</script></head>\n<body>{_BODY}\n"
        f'<script type="application/json" id="said">{numbers}</script>\n'
        f"<script>const LIVE = {'true' if live else 'false'};\n{_SCRIPT}</script></body></html>\n"
    )
    return [before.encode(), _plotly(), after.encode()]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1em 1.5em 4em; color: #1a1a1a }
h1 { font-size: 1.5em; margin: 0.4em 0 } h2 { font-size: 1.1em; margin: 1.6em 0 0.3em }
#facts { display: flex; flex-wrap: wrap; gap: 0.6em 2.2em }
#facts div span { color: #666; display: block; font-size: 0.85em }
#facts div { font-size: 1.15em } #advice li { margin: 0.35em 0 } #problems { color: #a33b00 }
figure { margin: 1.4em 0 0 } figcaption { color: #666; font-size: 0.9em; padding: 0 0.5em } #live { color: #00794f }
"""
_BODY = """
<h1>hvdlite: <span id="title"></span> <small id="live" hidden>live</small></h1>
<div id="facts"></div><ul id="problems"></ul><h2>What to do</h2><ul id="advice"></ul><main id="figures"></main>
"""
_SCRIPT = """
const byId = (id) => document.getElementById(id);
const drawn = new Map();
function list(id, lines) {
  byId(id).replaceChildren(...lines.map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
}
function fact([name, value]) {
  const box = document.createElement("div"), label = document.createElement("span");
  label.textContent = name; box.append(label, document.createTextNode(value)); return box;
}
function show(said) {
  byId("title").textContent = said.title;
  byId("facts").replaceChildren(...said.facts.map(fact));
  list("advice", said.advice); list("problems", said.problems);
  for (const [name, figure] of Object.entries(said.figures)) {
    let place = byId("figure-" + name);
    if (!place) {
      const box = document.createElement("figure"), note = document.createElement("figcaption");
      place = document.createElement("div"); place.id = "figure-" + name; note.textContent = said.notes[name] || "";
      box.append(place, note); byId("figures").append(box);
    }
    const text = JSON.stringify(figure);
    if (drawn.get(name) === text) continue;
    drawn.set(name, text);
    Plotly.react(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
  }
  document.body.dataset.drawn = String(Object.keys(said.figures).length);
}
async function again() {
  try {
    const answer = await fetch("numbers.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    show(await answer.json()); byId("live").textContent = "live";
  } catch (error) { byId("live").textContent = "no answer: the job has ended, or its page is no longer served"; }
  setTimeout(again, 2000);
}
show(JSON.parse(byId("said").textContent));
if (LIVE) { byId("live").hidden = false; setTimeout(again, 2000); }
"""
