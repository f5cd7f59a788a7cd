"""Report of a prediction: a table, the recording behind it, notes, and one sentence of advice.

A table is for eyes; `--json` has the same numbers for programs. Units stand in the heads of columns. A note that
several rows share is printed once. The advice is about the last row whose ranks wait for gradients: how short a step
could be at best, and what the narrower float on the wire would bring.
"""

from __future__ import annotations

from collections.abc import Sequence

from .network_model import AGGREGATOR
from .prediction import Job, Prediction

HEAD = (
    "ranks", "hosts", "fusion MB", "wire", "batch", "sync every", "step ms", "range", "waits ms", "efficiency",
    "bound by", "confidence",
)  # fmt: skip


def recorded(job: Job) -> list[str]:
    """What was recorded, and what was fitted."""
    rec, fit = job.recording, job.fit
    copies = f" ({rec.size} copies of the model)" if rec.of_copy > 1 else ""
    size = rec.size * rec.of_copy
    ranks = f"{size} rank{'s' * (size > 1)}{copies} on {rec.hosts} host{'s' * (rec.hosts > 1)}"
    lines = [
        f"recorded: {ranks}, {len(rec.names)} gradients of {rec.bytes.sum() / 1e6:.2f} MB, {len(rec.step_ns)} steps, "
        f"plane {', '.join(rec.planes) or 'none'}; a step {rec.step_ns.mean() / 1e6:.2f} ms, of it "
        f"{rec.exposed_ns / 1e6:.2f} ms waiting for gradients"
    ]
    if rec.size > 1:
        rate = f"{1 / fit.b:.2f} GB/s" if fit.b else "no limit seen"
        lines.append(
            f"fitted: a bucket takes {fit.a / 1e3:.0f} us and {fit.b:.3f} ns a byte ({rate}), an agreement "
            f"{sorted(rec.rounds[:, 0])[len(rec.rounds) // 2] / 1e3:.0f} us"
        )
    return lines + [f"left out: {problem}" for problem in rec.problems]


def table(rows: Sequence[Prediction]) -> list[str]:
    """Rows with their heads, right-justified."""
    cells: list[Sequence[str]] = [HEAD]
    cells += [
        (
            str(p.ranks), str(p.hosts), f"{p.fusion_mb:g}", p.wire, f"{p.batch:g}x", str(p.sync_every), f"{p.ms:.2f}",
            f"{p.low:.2f} to {p.high:.2f}", f"{p.exposed_ms:.2f}", f"{p.efficiency:.0%}", p.bound, p.confidence,
        )
        for p in rows
    ]  # fmt: skip
    if all(p.sync_every == 1 for p in rows):
        cells = [[cell for head, cell in zip(HEAD, row) if head != "sync every"] for row in cells]
    wide = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, wide)) for row in cells]


def notes(rows: Sequence[Prediction]) -> list[str]:
    """Each once, with the ranks that it is about."""
    about: dict[str, list[int]] = {}
    for p in rows:
        for note in p.notes:
            ranks = about.setdefault(note, [])
            ranks += [p.ranks] if p.ranks not in ranks else []
    every = {p.ranks for p in rows}
    return [
        f"note: {note}" + ("" if set(ranks) == every else f" ({', '.join(map(str, ranks))} ranks)")
        for note, ranks in about.items()
    ]


def advice(job: Job, rows: Sequence[Prediction]) -> list[str]:
    """What would help where ranks wait; nothing where they compute."""
    waiting = [p for p in rows if p.bound != "computing"]
    if not waiting:
        return []
    p = waiting[-1]
    text = f"{p.ranks} ranks wait {p.exposed_ms:.1f} of {p.ms:.1f} ms for gradients"
    if p.bound == "late ranks":
        return [f"{text}, mostly for the last rank's: a faster network would not help, more equal steps would"]
    text += f"; bytes that cost nothing would leave {p.ms - p.bytes_ms:.1f} ms, which no network is faster than"
    if p.wire == "none" and p.plan != AGGREGATOR:  # which has integers of 32 bits on the wire, whatever the tensor's
        half = job.step(
            p.ranks, hosts=p.hosts, cores=p.cores or None, link=p.link, medium=p.medium, plan=p.plan,
            fusion_mb=p.fusion_mb, wire="fp16", batch=p.batch, sync_every=p.sync_every
        )  # fmt: skip
        text += f", float16 on the wire {half.ms:.1f} ms"
    return [text]


def compared(measured: Job, predicted: Prediction) -> str:
    """A line for --compare."""
    took = float(measured.recording.step_ns.mean()) / 1e6
    inside = "inside" if predicted.low <= took <= predicted.high else "outside"
    return (
        f"measured: {predicted.ranks} ranks took {took:.2f} ms; predicted {predicted.ms:.2f} ms, "
        f"{100 * (predicted.ms / took - 1):+.1f} %, measured lies {inside} the range"
    )
