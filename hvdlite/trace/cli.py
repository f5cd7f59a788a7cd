"""The program hvdlite-trace: what happened on all ranks, read afterwards. `python -m hvdlite.trace` is the same.

Each subcommand is a module of this package that says HELP, adds its arguments (`add_arguments`) and runs (`run`, which
returns the exit code): a new one is a new file and its name in SUBCOMMANDS. Only the one that is asked for is imported,
so analyze and merge need neither a rank nor NumPy nor the compiled core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

SUBCOMMANDS = ("analyze", "merge", "report", "serve")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if there was nothing to do it with, 2 for words that cannot be."""
    parser = argparse.ArgumentParser(prog="hvdlite-trace", description="What happened on all ranks, read afterwards.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in SUBCOMMANDS:
        module = import_module(f"{__package__}.{name}")
        made = kinds.add_parser(name, help=module.HELP, description=(module.__doc__ or "").partition("\n")[0])
        module.add_arguments(made)
        made.set_defaults(run=module.run)
    asked = parser.parse_args(words)
    try:
        return int(asked.run(asked))
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"hvdlite-trace: {error}", file=sys.stderr)
        return 1
