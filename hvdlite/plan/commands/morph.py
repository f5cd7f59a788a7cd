"""hvdlite-plan morph: the layout that a job would have at each number of ranks, before any of them is started.

Its file has profiles of the layers at several numbers of rows, from `hvdlite-plan profile --rows`. One line for each
number of ranks has stages and copies, ranks that stay spare, micro-batches, the time of a step, rows a second and the
layers of each stage. Where no layout is possible the line has the reason. The exit code is 0 if there is a layout for
any of the numbers, else 2.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from .. import units
from ..table import SIZE_MAX, PlanError, plain
from .models import RATE

NONE = 2


def add(kinds: Any) -> None:
    about = "find stages, copies and micro-batches for each number of ranks, with the batch unchanged"
    made = kinds.add_parser("morph", help=about, description=f"hvdlite-plan morph: {about}.")
    made.set_defaults(run=morph)
    made.add_argument("profiles", metavar="FILE", help="file of profiles from `hvdlite-plan profile --rows`")
    made.add_argument("--batch", type=int, required=True, metavar="N", help="rows of a step, of all copies together")
    made.add_argument("--ranks", required=True, metavar="N[-N]", help="number of ranks, or the least and the most")
    made.add_argument("--memory", metavar="SIZE", help="memory of a rank, as 16GB; default: no limit")
    made.add_argument("--rate", default=RATE, metavar="RATE", help=f"rate between any two ranks (default: {RATE})")


def morph(args: argparse.Namespace) -> int:
    from ..layers import read_profiles
    from ..layout import layout_for

    numbers = _range(args.ranks)
    memory = math.inf if args.memory is None else units.size_bytes(args.memory)
    beta, profiles = units.ns_a_byte(args.rate) / 1e6, read_profiles(args.profiles)
    code = NONE
    print(f"ranks {'stages x copies':>15} spare {'micro-batches x rows':>20} {'ms':>12} {'rows/s':>12} layers")
    for ranks in numbers:
        try:
            found = layout_for(profiles, ranks, args.batch, beta, memory)
        except PlanError as error:
            print(f"{ranks:5} {plain(error)}", flush=True)
            continue
        code = 0
        shape, micro = f"{found.pp} x {found.dp}", f"{found.micro_batches} x {found.rows}"
        times = f"{found.ms:12.3f} {1e3 * args.batch / found.ms:12.1f}"
        layers = "+".join(map(str, found.balance))
        print(f"{ranks:5} {shape:>15} {ranks - found.ranks:5} {micro:>20} {times} {layers}", flush=True)
    return code


def _range(words: str) -> range:
    """The numbers of "8" or "1-8". Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", words)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= SIZE_MAX:
        raise ValueError(f"--ranks {words[:40]!r} must be a number of 1 to {SIZE_MAX}, or two of them as 1-8 [HVD008]")
    return range(first, last + 1)
