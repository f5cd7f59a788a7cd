"""`--dashboard`: a page that shows the job while it trains, served beside it and gone with it.

The page is that of `hvdlite-trace serve`, in a process of its own that reads what the ranks write of their steps: the
launcher only starts it, says where it is, and ends it. The folder is the one of --trace-dir; where there is none, one
for this job alone, removed at the end. Ranks on other hosts write there too if all hosts see the folder; else the page
says which ranks it has nothing of.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hvdlite.errors.codes import coded
from hvdlite.system import python_command

START_S = 20.0


class DashboardError(ValueError):
    """It cannot be had; the text says why."""


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those of the page."""
    add("--dashboard", action="store_true", help="serve a page that shows the running job, on this machine only")
    add("--dashboard-port", dest="dashboard_port", metavar="P", help="port of that page; default: a free port")


@contextmanager
def shown(
    args: argparse.Namespace, folder: str | None, options: Mapping[str, str]
) -> Iterator[tuple[str | None, Mapping[str, str]]]:
    """While the block runs: the page's address, None if not asked for; and the options, with what makes ranks write.

    folder: that of --trace-dir, if there is one. Raises DashboardError.
    """
    if not args.dashboard and args.dashboard_port is None:
        yield None, options
        return
    port = args.dashboard_port if args.dashboard_port is not None else "0"
    if not port.isdecimal() or int(port) > 65535:
        raise DashboardError(f"--dashboard-port {port}: a port is a number from 0 to 65535 [HVD718]")
    import shutil  # late: most jobs have no page, and every job has a start
    import tempfile

    folder = None if folder in ("off", "0") else folder  # no records are wanted; the page still needs a folder
    own = None if folder else tempfile.mkdtemp(prefix="hvdlite-dashboard-")
    read = os.path.abspath(folder or own or "")
    try:
        serving = _started(read, port, own is not None)
        try:
            yield _address(serving), {**options, "HVDLITE_TRACE_DIR": read, "HVDLITE_TRACE_STEPS": "1"}
        finally:
            serving.kill()
            serving.wait()
            assert serving.stdout is not None and serving.stderr is not None
            serving.stdout.close()
            serving.stderr.close()
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _started(folder: str, port: str, own: bool) -> subprocess.Popen[bytes]:
    """own: the page removes the folder if this process cannot."""
    words = [*python_command.words("hvdlite.trace.cli"), "serve", folder, "--port", port, "--with-parent"]
    words += ["--own"] if own else []
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def _address(serving: subprocess.Popen[bytes]) -> str:
    assert serving.stdout is not None and serving.stderr is not None
    ready, _, _ = select.select([serving.stdout], [], [], START_S)
    line = serving.stdout.readline().decode(errors="replace").strip() if ready else ""
    if line:
        return line
    serving.kill()
    text = serving.stderr.read(2000).decode(errors="replace").strip().splitlines()
    why = text[-1].partition("hvdlite-trace: ")[2] or text[-1] if text else f"its page was not there in {START_S:g} s"
    raise DashboardError(coded("HVD718", f"--dashboard: {why}"))
