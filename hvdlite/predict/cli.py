"""hvdlite-trace predict DIR --ranks 4,8,64: what a step would take with more ranks, from the recording of a small job.

DIR is what `hvdlite-run -np 2 --record DIR` has filled. Lists (of ranks, wires, batches and so on) are all combined.
A second folder, recorded on one rank, gives the computing where recorded ranks shared processors.

Words go to stdout, what is wrong to stderr with exit code 2. NumPy is loaded when it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .prediction import Job, Prediction
    from .step_simulation import Played

HELP = "predict the time of a step on more ranks from a recorded job"
WRONG = 2
ROWS_MAX = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of hvdlite-run --record, from two or more ranks")
    parser.add_argument("alone", metavar="DIR1", nargs="?", help="recording of one rank; its computing time is used")
    parser.add_argument("--ranks", default="4,8,16", metavar="N,N", help="numbers of ranks (default: 4,8,16)")
    parser.add_argument("--hosts", type=int, metavar="H", help="largest number of hosts; default: as recorded")
    parser.add_argument("--cores", type=int, metavar="N", help="processors of each host; default: as recorded")
    parser.add_argument(
        "--link", metavar="RATE,TIME", help="network between hosts, as 25gbit,20us; default: as recorded"
    )
    parser.add_argument(
        "--medium", choices=("own", "bus", "shm"), help="own: one wire a host; bus: one wire for all; shm: one host"
    )
    parser.add_argument("--plan", metavar="NAME|FILE", help="algorithm of hvdlite-plan instead of the core's")
    parser.add_argument("--fusion-mb", metavar="MB,MB", help="fusion thresholds in MB; default: as recorded")
    parser.add_argument(
        "--wire", default="none", metavar="W,W", help="compression of tensors: none, fp16, bf16, int8, int4"
    )
    parser.add_argument("--batch", default="1x", metavar="X,X", help="multiples of the recorded batch, as 1x,2x")
    parser.add_argument(
        "--sync-every",
        default="1",
        metavar="H,H",
        help="steps of each rank's own before one exchange (LocalSGD, DiLoCo)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--timeline", metavar="FILE", help="write the last row's first steps for ui.perfetto.dev")
    parser.add_argument("--svg", metavar="FILE", help="draw the step time against the number of ranks")
    parser.add_argument("--compare", metavar="DIR2", help="compare a recording of a larger job with its prediction")


def run(args: argparse.Namespace) -> int:
    from ..plan.table import PlanError
    from .recording import RecordingError

    try:
        return _run(args)
    except (RecordingError, PlanError, ValueError) as error:
        print(f"hvdlite-trace predict: {error}", file=sys.stderr)
        return WRONG


def _numbers(text: str, flag: str) -> list[float]:
    try:
        found = [float(part) for part in text.lower().replace("x", "").split(",")]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"{flag} {text!r}: separate numbers with commas, such as 2,8,32 [HVD008]")
    return found


def _whole(text: str, flag: str) -> list[Any]:
    return [int(n) if n.is_integer() else n for n in _numbers(text, flag)]


def _run(args: argparse.Namespace) -> int:
    from . import report
    from .prediction import load

    ranks, steps = (_whole(*each) for each in ((args.ranks, "--ranks"), (args.sync_every, "--sync-every")))
    if args.compare is not None and steps != [1]:
        raise ValueError(
            "--compare DIR2 reads a job that exchanges in each step: leave out --compare or --sync-every [HVD008]"
        )
    thresholds: list[Any] = [None] if args.fusion_mb is None else _numbers(args.fusion_mb, "--fusion-mb")
    batches = _numbers(args.batch, "--batch")
    every = list(itertools.product(ranks, thresholds, args.wire.split(","), batches, steps))
    if len(every) > ROWS_MAX:
        raise ValueError(f"{len(every)} rows; at most {ROWS_MAX} at once [HVD008]")
    job = load(args.folder, args.alone)
    more = {"hosts": args.hosts, "cores": args.cores, "link": args.link, "medium": args.medium, "plan": args.plan}
    rows = [job.step(n, fusion_mb=mb, wire=wire.strip(), batch=b, sync_every=h, **more) for n, mb, wire, b, h in every]
    measured = None
    if args.compare is not None:
        other = load(args.compare)
        size = other.recording.size * other.recording.of_copy
        _, mb, wire, b, _ = every[0]
        more["hosts"] = other.recording.hosts if size > 1 else None
        measured = other, job.step(size, fusion_mb=mb, wire=wire.strip(), batch=b, **more)
    if args.timeline is not None:
        _write(args.timeline, json.dumps(_picture(job.picture(rows[-1]))))
    if args.svg is not None:
        from .drawing import svg

        _write(args.svg, svg(rows, f"A step, predicted from {job.recording.size} recorded ranks"))
    if args.json:
        print(json.dumps(_as_json(job, rows, measured)))
        return 0
    print(*report.recorded(job), "", *report.table(rows), "", *report.notes(rows), *report.advice(job, rows), sep="\n")
    if measured is not None:
        print(report.compared(*measured))
    if args.timeline is not None:
        print(f"{args.timeline}: the first steps with {rows[-1].ranks} ranks; open it in ui.perfetto.dev")
    return 0


def _as_json(job: Job, rows: list[Prediction], measured: tuple[Job, Prediction] | None) -> dict[str, Any]:
    rec, fit = job.recording, job.fit
    report: dict[str, Any] = {
        "format": "hvdlite-prediction-1",
        "recorded": {
            "folder": rec.folder, "ranks": rec.size * rec.of_copy, "hosts": rec.hosts, "gradients": len(rec.names),
            "bytes": int(rec.bytes.sum()), "steps": len(rec.step_ns), "ms": float(rec.step_ns.mean()) / 1e6,
            "exposed_ms": rec.exposed_ns / 1e6, "bucket_ns": fit.a, "bucket_ns_a_byte": fit.b, "problems": rec.problems,
        },
        "predicted": [{**asdict(p), "efficiency": p.efficiency, "bound": p.bound} for p in rows],
    }  # fmt: skip
    if measured is not None:
        took = float(measured[0].recording.step_ns.mean()) / 1e6
        report["compared"] = {**asdict(measured[1]), "measured_ms": took}
    return report


def _picture(played: Played) -> list[dict[str, Any]]:
    """Rows for Perfetto: a process for each rank (the first 16) and one for the wire."""
    ranks = sorted({rank for rank, *_ in played.picture})
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        title = {"name": "buckets" if rank < 0 else f"rank {rank}"}
        rows.append({"ph": "M", "pid": rank + 1, "tid": 0, "name": "process_name", "args": title})
    rows += [
        {"ph": "X", "pid": rank + 1, "tid": 0, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "name": what}
        for rank, what, begin, end in played.picture
        if end > begin
    ]
    return rows


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error} [HVD725]") from None
