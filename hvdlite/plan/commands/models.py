"""hvdlite-plan profile, pipeline, auto, network, rewrite: costs of layers, cuts, networks, rewritten sums.

Layers, plans and programs are files of the formats that layers.py, auto.py and program.py describe. What is measured or
chosen is printed in words; files are written for other programs: layers for `pipeline` and `auto`, a plan for
`hvdlite.parallel.planned`, spans for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import draw, units
from ..table import SIZE_MAX, PlanError
from . import text

RATE, INSIDE, ACROSS, UNIT = "1GB/s", "5us,10GB/s", "20us,1GB/s", "64k"


def add(kinds: Any) -> None:
    def command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = kinds.add_parser(name, help=about, description=f"hvdlite-plan {name}: {about}.")
        made.set_defaults(run=run)
        return made

    made = command("profile", profiled, "measure the layers of a PyTorch model: ms of forward and backward, and bytes")
    made.add_argument("model", metavar="MODULE:FUNCTION", help="function that returns (layers, a micro-batch)")
    made.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="file of layers to write, for pipeline and auto"
    )
    made.add_argument("--rows", metavar="N,N", help="measure micro-batches of so many rows, and write a file for morph")
    pipeline = command("pipeline", piped, "find the cut of a chain of layers, and the ranks of each stage")
    auto = command("auto", chosen, "find the mesh, cuts and kinds with the shortest step, for hvdlite.parallel")
    for made in (pipeline, auto):
        made.add_argument("layers", metavar="FILE", help="file of layers from `hvdlite-plan profile`")
        made.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks, all of them used")
        made.add_argument("--micro", type=int, required=True, metavar="M", help="number of micro-batches of a step")
        made.add_argument("--memory", metavar="SIZE", help="memory of a rank, as 16GB; default: no limit")
        made.add_argument("--rate", default=RATE, metavar="RATE", help=f"rate between any two ranks (default: {RATE})")
    pipeline.add_argument(
        "--objective",
        choices=("latency", "throughput"),
        default="latency",
        help="shortest step (latency, the default), or most micro-batches a second",
    )
    pipeline.add_argument("--svg", metavar="FILE", help="draw one step")
    pipeline.add_argument("--timeline", metavar="FILE", help="write one step for ui.perfetto.dev")
    auto.add_argument("-o", "--output", metavar="FILE", help="file of the plan, for hvdlite.parallel.planned")
    made = command("network", network, "divide a budget of bandwidth among the dimensions of a network")
    made.add_argument("--dims", required=True, metavar="N,N", help="ranks of each dimension, the inner one first")
    made.add_argument(
        "--budget", required=True, metavar="RATE", help="bandwidth of all dimensions together, as 100GB/s"
    )
    made.add_argument("--sizes", metavar="SIZE,SIZE", help="size of each allreduce; 25M:0+2 spans dimensions 0, 2")
    made.add_argument("--recording", metavar="DIR", help="use the gradients of hvdlite-run --record as sizes")
    made = command(
        "rewrite", rewritten, "rewrite the collectives of a step into faster ones, with a proof of each use of a rule"
    )
    made.add_argument("program", metavar="FILE", help="JSON file in the format hvdlite-program-1")
    made.add_argument(
        "--hosts", type=int, required=True, metavar="H", help="number of hosts, with equal numbers of ranks"
    )
    made.add_argument("--ranks", type=int, metavar="N", help="number of ranks, to check the program against")
    made.add_argument(
        "--inside", default=INSIDE, metavar="TIME,RATE", help=f"link between ranks of a host (default: {INSIDE})"
    )
    made.add_argument("--across", default=ACROSS, metavar="TIME,RATE", help=f"link between hosts (default: {ACROSS})")
    made.add_argument("--unit", default=UNIT, metavar="SIZE", help=f"bytes of an element (default: {UNIT})")
    made.add_argument("-o", "--output", metavar="FILE", help="file of the rewritten program")


def profiled(args: argparse.Namespace) -> int:
    from .. import layers
    from ..profile import profile, profiles

    module, _, function = args.model.partition(":")
    sys.path.insert(0, "")  # as `python -m` has it: the model is mostly a file of this folder
    try:
        made, sample = getattr(import_module(module), function)()
    except Exception as error:  # of the user's own code
        raise PlanError(f"{args.model}: {type(error).__name__}: {str(error)[:200]} [HVD005]") from error
    if args.rows is not None:
        several = profiles(list(made), sample, _numbers(args.rows, "rows"))
        layers.write_profiles(args.output, several)
        print(f"{'rows':>7} {'forward ms':>10} {'backward ms':>11} {'ms a row':>10}")
        for rows, own in several.items():
            forward, backward = sum(each.forward_ms for each in own), sum(each.backward_ms for each in own)
            print(f"{rows:7} {forward:10.3f} {backward:11.3f} {(forward + backward) / rows:10.3f}")
        return 0
    found = profile(list(made), sample)
    layers.write(args.output, found)
    print(f"{'layer':24} {'forward ms':>10} {'backward ms':>11} {'activation':>12} {'weights':>12}")
    for each in found:
        sizes = f"{each.activation:12,.0f} {each.weights:12,.0f}"
        print(f"{each.name[:24]:24} {each.forward_ms:10.3f} {each.backward_ms:11.3f} {sizes}")
    return 0


def _numbers(words: str, what: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise ValueError(f"{words[:40]!r} is no list of {what}: write it as 2,4,8 [HVD008]") from None


def _chain(args: argparse.Namespace, **more: Any) -> Any:
    from .. import layers
    from ..search import Chain

    if not 1 <= args.ranks <= SIZE_MAX:
        raise ValueError(f"{args.ranks} ranks: a plan is for 1 to {SIZE_MAX} [HVD008]")
    memory = math.inf if args.memory is None else units.size_bytes(args.memory)
    return Chain(layers.read(args.layers), units.ns_a_byte(args.rate) / 1e6, args.micro, memory, **more)


def piped(args: argparse.Namespace) -> int:
    from ..search import best, played

    chain = _chain(args, kinds=("dp",))
    found = best(chain, args.ranks, args.objective)
    step = played(chain, found)
    print(f"{args.ranks} ranks, {args.micro} micro-batches, {args.rate} between two ranks; best in {args.objective}:")
    for at, cut in enumerate(found.stages):
        forward, backward, sums, _, memory = chain.of_stage(cut, len(found.stages) - 1 - at)
        names = " to ".join(dict.fromkeys(chain.layers[each].name for each in (cut.first, cut.end - 1)))
        print(
            f"stage {at}: layers {names}; ranks {cut.ranks}; forward {forward:.3f} ms, backward {backward:.3f} ms, sum "
            f"of gradients {sums:.3f} ms; {memory:,.0f} bytes a rank; computes "
            f"{100 * step.busy[at] / (step.end or 1):.0f} % of the step"
        )
    unit = {"latency": "a step", "throughput": "a micro-batch in steady state"}[args.objective]
    print(f"{found.ms:.3f} ms {unit} by the formula; {step.end:.3f} ms a step, played as 1F1B")
    if args.svg:
        title = f"{len(found.stages)} stages, {args.micro} micro-batches, 1F1B"
        Path(args.svg).write_text(draw.pipeline(step, title), encoding="utf-8")
    if args.timeline:
        Path(args.timeline).write_text(draw.pipeline_rows(step.spans), encoding="utf-8")
    return 0


def chosen(args: argparse.Namespace) -> int:
    from ..auto import choose

    plan = choose(_chain(args), args.ranks)
    print(*plan.why, sep="\n")
    if args.output:
        plan.write(args.output)
    return 0


def network(args: argparse.Namespace) -> int:
    from ..network import split, step_time, volumes

    try:
        dims = [int(part) for part in args.dims.split(",")]
        words = [word.partition(":")[::2] for word in (args.sizes or "").split(",") if word]
        spans = [[int(part) for part in which.split("+")] if which else None for _, which in words]
    except ValueError as error:
        raise ValueError(f"{error}: write dimensions as 4,4 and sizes as 100M,25M:0+1 [HVD008]") from None
    if (args.recording is None) == (not words):
        raise ValueError("the bytes come from --sizes or from --recording: pass one of them [HVD008]")
    sizes: list[float] = [units.size_bytes(word) for word, _ in words]
    if args.recording is not None:  # a module of a higher floor
        sizes, spans = [float(import_module("hvdlite.predict.recording").load(args.recording).bytes.sum())], [None]
    budget = 1 / units.ns_a_byte(args.budget)  # bytes a ns: GB/s
    load = [volumes(size, dims, used) for size, used in zip(sizes, spans)]
    rates = split(load, budget)
    print(f"{'dimension':>9} {'ranks':>6} {'GB/s':>10} {'of it':>6}")
    for at, (ranks, rate) in enumerate(zip(dims, rates)):
        print(f"{at:9} {ranks:6} {rate:10.3f} {100 * rate / budget:5.1f} %")
    mine, equal = step_time(load, rates), step_time(load, [budget / len(dims)] * len(dims))
    print(
        f"all allreduces: {mine / 1e6:.3f} ms; with equal parts {equal / 1e6:.3f} ms, {equal / mine:.2f} times as long"
    )
    return 0


def rewritten(args: argparse.Namespace) -> int:
    from ..program import Where, from_json, price
    from ..rewrite import improve

    program = from_json(text(args.program), args.program)
    size, hosts = program.size, args.hosts
    if args.ranks not in (None, size):
        raise PlanError(f"{args.program}: its axes make {size} ranks, not {args.ranks} [HVD006]")
    if hosts < 1 or size % hosts:
        raise ValueError(f"{size} ranks cannot be divided evenly over {hosts} hosts [HVD008]")
    unit = units.size_bytes(args.unit)
    where = Where(
        [rank * hosts // size for rank in range(size)], units.link(args.inside), units.link(args.across), unit
    )
    before, found = price(program, where), improve(program, where)
    for rule in found.rules:
        print(f"rule {rule}")
    for op, out, inputs, group, more in found.program.lines:
        over = f" over {group}" if group else ""
        print(f"    {out} = {op} {', '.join(inputs)}{over}{'' if more is None else f' {more}'}")
    print(
        f"{before.ns / 1e6:.3f} ms before, {found.price.ns / 1e6:.3f} ms now; {before.off / 1e6:.1f} MB before, "
        f"{found.price.off / 1e6:.1f} MB now leave the busiest host; {found.proved} rewrites proved, "
        f"{found.refused} refused"
    )
    if args.output:
        Path(args.output).write_text(found.program.to_json(), encoding="utf-8")
    return 0
