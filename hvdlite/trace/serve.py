"""The page of a job while it trains, served by a process of its own.

report/live.py does it; this is its command line. hvdlite-run --dashboard starts it with --with-parent, so that it ends
with the launcher, however that ends. What is printed is the page's address, once it is there.

Any process that can reach the address sees the numbers, so it is one of this machine alone unless --host is given.
"""

from __future__ import annotations

import argparse
import os

from .report import wrong

HELP = "serve the page of report during the job, like hvdlite-run --dashboard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of --trace-dir; it may still be empty")
    parser.add_argument("--port", type=_port, default=0, metavar="P", help="port; 0, the default: a free port")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="listening address (default: 127.0.0.1)")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started it ends")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)  # and remove DIR then: it is the page's


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535 [HVD704]")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from .report.live import end_with, serve
    from .report.page import MissingLibraryError

    try:
        serving = serve(args.folder, args.host, args.port)
    except MissingLibraryError as error:
        return wrong(str(error))
    except OSError as error:
        return wrong(f"cannot listen on {args.host}:{args.port}: {error.strerror or error} [HVD718]")
    if args.with_parent:
        end_with(os.getppid(), args.folder if args.own else None)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{serving.number}/", flush=True)
    try:
        serving.wait()
    except KeyboardInterrupt:
        pass
    finally:
        serving.close()
    return 0
