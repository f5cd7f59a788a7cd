"""The program hvdlite-plan, also `python -m hvdlite.plan`: plans of collectives, networks and models.

Subcommands stand in commands/, by what they are about: `add` of a module adds its own, each with a function that runs
it and returns the exit code. Numbers are words here and are read with their units (units.py). An error is one line with
its code; what a subcommand needs beyond NumPy is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .commands import models, morph, tables
from .table import plain

WRONG, NOT_PROVED = 2, 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(WRONG, f"hvdlite-plan: {message}: see {self.prog} --help [HVD008]\n")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where a plan is not right; 2 for what cannot be read or done."""
    parser = _Parser(prog="hvdlite-plan", description="Choose an algorithm, a network, or a cut of a model.")
    kinds = parser.add_subparsers(dest="subcommand", required=True)
    tables.add(kinds)
    models.add(kinds)
    morph.add(kinds)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        return WRONG
    except (ValueError, OSError, ImportError) as error:
        text = plain(f"{error} [HVD008]" if isinstance(error, OSError) else error)
        print(f"hvdlite-plan: {text}", file=sys.stderr)
        return NOT_PROVED if text.endswith("[HVD001]") else WRONG
