"""The program hvdlite-trace: what happened on all ranks, read afterwards. `python -m hvdlite.trace` is the same.

Each subcommand is a module that says HELP, adds its arguments (`add_arguments`) and runs (`run`, which returns the
exit code): a new one is a new file and a row of SUBCOMMANDS, which may name a module of a higher floor. What a module
needs it imports when it runs, so analyze and merge need neither a rank nor NumPy nor the compiled core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

SUBCOMMANDS = {
    "analyze": "hvdlite.trace.analyze",
    "merge": "hvdlite.trace.merge",
    "report": "hvdlite.trace.report",
    "serve": "hvdlite.trace.serve",
    "predict": "hvdlite.predict.cli",
}


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if there was nothing to do it with, 2 for words that cannot be."""
    parser = argparse.ArgumentParser(prog="hvdlite-trace", description="Read the records of all ranks after a job.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, module_name in SUBCOMMANDS.items():
        module = import_module(module_name)
        made = kinds.add_parser(name, help=module.HELP, description=(module.__doc__ or "").partition("\n")[0])
        module.add_arguments(made)
        made.set_defaults(run=module.run)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"hvdlite-trace: {error}", file=sys.stderr)
        return 1
