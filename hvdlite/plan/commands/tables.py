"""hvdlite-plan list, verify, draw, time, run: tables of collectives, proved, drawn, timed and run.

A plan is a name of `list`, or a file that ends with .json. Its number of ranks is given by --ranks, by the topology or
by the file, the job's in `run`. Links are ports of one rate (--links) or a file (--topology), never both. Options of a
generator, as the dimensions of a grid, cannot be given here: such a table is made in Python, and written to a file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import draw, registry, units
from ..links import Links, from_json
from ..proof import places, prove
from ..simulator import CURSORS, time_of
from ..table import KINDS, SUMS, PlanError, Table
from . import text

LINKS = "20us,1GB/s"
BYTES_MAX = 1 << 50
ELEMENTS_MAX = 1 << 20  # that `run` sums
SAME = {"allreduce", "allgather", "broadcast"}  # all ranks end with the same


def add(kinds: Any) -> None:
    def command(name: str, run: Any, about: str, plans: str | int | None = None) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = kinds.add_parser(name, help=about, description=f"hvdlite-plan {name}: {about}.")
        made.set_defaults(run=run, ranks=None, links=None, cursors=CURSORS[0])
        if plans:
            made.add_argument("plans", nargs=plans, metavar="PLAN", help="name from `hvdlite-plan list`, or FILE.json")
            made.add_argument(
                "--kind", choices=KINDS, default=KINDS[0], help=f"collective of a named plan ({KINDS[0]})"
            )
            made.add_argument(
                "--root", type=int, default=0, metavar="RANK", help="root of a broadcast or reduce (default: 0)"
            )
            made.add_argument("--topology", metavar="FILE", help="JSON file of links, format hvdlite-topology-1")
            made.add_argument("--dims", metavar="N,N", help="size of a grid of ranks, linked along its lines")
            made.add_argument("--rates", metavar="RATE,RATE", help="rate of each of --dims; default: that of --links")
            made.add_argument(
                "--parts", type=int, default=1, metavar="N", help="number of parts of `grid`, one after the other"
            )
        if plans and name != "run":
            made.add_argument("--ranks", type=int, metavar="N", help="number of ranks")
        return made

    command("list", show, "list all plans, also of other packages, and those that cannot be imported")
    command("verify", verify, "prove a plan, or name the step, rank and chunk of the defect", "+")
    drawn = command("draw", picture, "draw a plan, as SVG or for ui.perfetto.dev", 1)
    timed = command("time", times, "time plans on links that need not exist", "+")
    for made, default in ((drawn, "1M"), (timed, "4k,1M,16M")):
        made.add_argument("--links", metavar="TIME,RATE", help=f"links: each rank has a port in and one out ({LINKS})")
        made.add_argument("--bytes", default=default, metavar="SIZE", help=f"size of the buffer (default: {default})")
        made.add_argument("--cursors", choices=CURSORS, help="serialize the moves of each link, or of each rank")
    drawn.add_argument("-o", "--output", metavar="FILE", help="SVG file; without -o and --perfetto: stdout")
    drawn.add_argument("--perfetto", metavar="FILE", help="write the picture for ui.perfetto.dev")
    command("run", really, "sum numbers by a plan, in each rank of hvdlite-run", 1)


def _network(args: argparse.Namespace) -> Links | None:
    """The links of the file, if one was given."""
    if args.dims is not None:
        if args.topology is not None:
            raise ValueError("the network is given twice, by --dims and by --topology [HVD008]")
        late, rate = units.link(args.links or LINKS)
        dims = _dims(args)
        return Links.grid(dims, args.rates.split(",") if args.rates else [rate] * len(dims), late)
    if args.topology is None:
        return None
    if args.links is not None:
        raise ValueError("the network is given twice, by --links and by --topology [HVD008]")
    return from_json(text(args.topology), args.topology)


def _dims(args: argparse.Namespace) -> list[int]:
    try:
        return [int(part) for part in args.dims.split(",")]
    except ValueError:
        raise ValueError(f"--dims {args.dims!r}: write the lengths of a grid, such as 4,4 [HVD008]") from None


def _options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Those of the plan `grid`."""
    if name != "grid" or args.dims is None:
        return {}
    rates = args.rates.split(",") if args.rates else None
    return {"dims": _dims(args), "parts": args.parts, **({"rates": rates} if rates else {})}


def _tables(args: argparse.Namespace, links: Links | None, size: int | None = None) -> list[Table]:
    """The plans that were asked for, proved and of one size."""
    files = {word: registry.file(word) for word in args.plans if word.endswith(".json")}
    sizes = [size, args.ranks, links.size if links else None, *(table.size for table in files.values())]
    size = next((each for each in sizes if each is not None), None)
    if size is None:
        raise ValueError("the number of ranks is missing: pass --ranks or --topology [HVD008]")
    for word, table in files.items():
        if table.size != size:
            raise PlanError(f"{word}: plan {table.name!r} is for {table.size} ranks, not for {size} [HVD009]")
    return [
        files.get(name) or registry.make(name, size, args.kind, args.root, links=links, **_options(name, args))
        for name in args.plans
    ]


def _played(args: argparse.Namespace) -> tuple[list[Table], Links, list[tuple[str, int]]]:
    """Tables, links, and the sizes of buffers as they were written, with their bytes."""
    network = _network(args)
    found = _tables(args, network)
    sizes = [(word, units.size_bytes(word)) for word in args.bytes.split(",")]
    for word, count in sizes:
        if not 1 <= count <= BYTES_MAX:
            raise ValueError(f"a buffer of {word!r} is out of range: use 1 byte to {BYTES_MAX >> 40}T [HVD008]")
    return found, network or Links.uniform(found[0].size, *units.link(args.links or LINKS)), sizes


def show(args: argparse.Namespace) -> int:
    problems, names = registry.found_elsewhere(), registry.names()
    for name, (kinds, about, package) in names.items():
        print(f"{name:14} {', '.join(kinds)}" + (f"  (of {package})" if package not in ("", "hvdlite") else ""))
        print(f"{'':14}     {about}")
    for problem in problems:
        print(f"could not be imported: {problem}")
    return 0


def verify(args: argparse.Namespace) -> int:
    for table in _tables(args, _network(args)):
        proof = prove(table)
        order = "chunks are added in different orders (not ordered)"
        if proof.ordered:
            order = f"ordered: all chunks are added in {'the order of ranks' if proof.in_rank_order else 'one order'}"
        verdict = f"proved, {order}" if table.kind in SUMS else "proved"
        print(f"{_about(table)}, {draw.some(table.chunks, 'chunk')}, digest {table.digest()[:8]}: {verdict}")
    return 0


def _about(table: Table) -> str:
    size, moves, steps = (draw.some(*each) for each in
                          ((table.size, "rank"), (len(table.moves), "move"), (table.steps, "step")))  # fmt: skip
    return f"{table.name}: {table.kind} on {size}, {moves} in {steps}"


def picture(args: argparse.Namespace) -> int:
    (table, *_), links, sizes = _played(args)
    if len(sizes) > 1:
        raise ValueError(f"a picture shows one size, not {args.bytes!r} [HVD008]")
    for path, made in ((args.output, draw.svg), (args.perfetto, draw.perfetto)):
        if path:
            Path(path).write_text(made(table, sizes[0][1], links, args.cursors), encoding="utf-8")
    if not args.output and not args.perfetto:
        print(draw.svg(table, sizes[0][1], links, args.cursors), end="")
    return 0


def times(args: argparse.Namespace) -> int:
    found, links, sizes = _played(args)
    taken = [[time_of(table, count, links, args.cursors) for _, count in sizes] for table in found]
    network = args.topology or f"{args.links or LINKS}, a port in and one out for each rank"
    if args.dims is not None:
        network = f"a grid of {args.dims}, {args.rates or args.links or LINKS}, a switch for each line"
    print(f"{found[0].size} ranks, links: {network}; cursors by {args.cursors}; * is the fastest")
    print(" ".join([f"{'plan':16}", *(f"{word:>13} " for word, _ in sizes)]).rstrip())
    least = [min(column) for column in zip(*taken)]
    for table, row in zip(found, taken):
        cells = (f"{_time(ns):>13}{'*' if ns == best else ' '}" for ns, best in zip(row, least))
        print(" ".join([f"{table.name:16}", *cells]).rstrip())
    return 0


def _time(ns: float) -> str:
    return f"{ns / 1e3:,.1f} us" if ns < 1e6 else f"{ns / 1e6:,.1f} ms"


def really(args: argparse.Namespace) -> int:
    """Integers are summed exactly in any order, so the core's own sum of what ranks give is what the plan must say."""
    from ... import numpy as hvd
    from ..execution import run

    hvd.init()
    me, args.links = hvd.rank(), None
    (table,) = _tables(args, _network(args), hvd.size())
    count = min(4 * table.chunks + 3, ELEMENTS_MAX)  # chunks of different lengths
    gives, promised = (np.repeat(each[me], np.diff(table.cut(count))) for each in places(table))
    random = np.random.default_rng(me)
    mine = random.integers(-1000, 1000, count).astype(np.float32)
    want = hvd.allreduce(np.where(gives, mine, np.float32(0)), op=hvd.Sum)
    begin = time.perf_counter()
    wrong = int(np.count_nonzero((run(table, mine) != want)[promised]))
    took = time.perf_counter() - begin
    bits = run(table, random.standard_normal(count).astype(np.float32)).tobytes()
    every = hvd.allgather_object((wrong, bits if table.kind in SAME else b""))
    failures = [f"rank {rank}: {bad} of {count} integers are wrong" for rank, (bad, _) in enumerate(every) if bad]
    failures += [
        f"rank {rank}: floats have other bits than on rank 0" for rank, (_, b) in enumerate(every) if b != every[0][1]
    ]
    if me == 0:
        right = "integers exact" + (f", floats the same bits on all {table.size} ranks" if table.kind in SAME else "")
        print(f"{_about(table)}: {'; '.join(failures) or right}, {took * 1e3:.1f} ms")
    return 1 if failures else 0
