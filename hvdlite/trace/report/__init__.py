"""The steps of a job as one page, in pictures and in words, that needs nothing else.

Reads what ranks write with HVDLITE_TRACE_DIR and HVDLITE_TRACE_STEPS=1 (read.py), puts it on one clock (table.py), says
what to do (advice.py), draws (figures.py, step.py) and makes one page of it (page.py). The page is a file here, and is
served while training runs by ../serve.py. Only drawing needs NumPy and plotly.
"""

from __future__ import annotations

import argparse
import os
import sys

from .. import attempts

HELP = "write one page with pictures and advice about the steps of a job"
WRONG = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of --trace-dir")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="file of the page (default: report.html)"
    )
    attempts.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    from .page import MissingLibraryError
    from .read import ReadError

    try:
        write(args.folder, args.output, args.before)
    except (ReadError, MissingLibraryError) as error:
        return wrong(str(error))
    except OSError as error:
        return wrong(f"{args.output} cannot be written: {error.strerror or error} [HVD725]")
    print(args.output)
    return 0


def write(folder: str, output: str, before: int = 0) -> None:
    """The page of a folder: of the newest attempt, or of one before it.

    Raises ReadError where there is nothing to draw, MissingLibraryError, OSError.
    """
    from .page import content, page
    from .read import Folder, ReadError
    from .table import JobTable

    found = Folder(folder, before)
    found.look()
    ranks = found.ranks
    if not ranks:
        reasons = f" ({'; '.join(found.problems)})" if found.problems else ""
        raise ReadError(
            f"{folder} holds no steps of any rank{reasons}: ranks write them if they run with HVDLITE_TRACE_DIR and "
            "HVDLITE_TRACE_STEPS=1 (hvdlite-run --trace-dir DIR --trace-steps) [HVD724]"
        )
    parts = page(content(JobTable(ranks), found.problems))
    beside = f"{output}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.writelines(parts)
        os.replace(beside, output)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)


def wrong(text: str) -> int:
    """Prints the error about invalid arguments, and returns its exit code."""
    print(f"hvdlite-trace: {text}", file=sys.stderr)
    return WRONG
