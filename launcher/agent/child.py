"""Start of a process of a job on its host: pipes for its output, its environment, its CPUs.

A rank runs the command of the order, rank 0 perhaps at a terminal. A parameter server is no rank: its number is above
those of all ranks, it runs hvdlite.ps.server_main by this host's own Python, and it is bound to no CPUs, since it works
for all ranks. An aggregator is a server with another main, and its number is above those of the parameter servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdlite.system import python_command

from . import cpu_binding, process, terminal


def begun(
    order: Mapping[str, Any],
    each: Mapping[str, Any],
    stdin: int,
    null: int,
    kinds: tuple[int, int],
    start: Callable[..., int],
) -> tuple[int, dict[int, int]]:
    """Its pid, and where its output is read, stdout and stderr by these kinds. stdin: of rank 0, or -1; null: of all
    others. start: process.start for a rank, or what does the same. Raises OSError, binding.BindError; nothing stays
    open then."""
    first, is_server = each["rank"] == 0, "HVDLITE_SERVER" in each["environ"]
    pty = order["pty"] if first else None
    ends = {kind: terminal.pair(pty) if pty else os.pipe() for kind in kinds}
    out, err = (write_end for _, write_end in ends.values())
    environ = {**order["environ"], **each["environ"]}
    try:
        command = python_command.words(_main(each["environ"]), "main()") if is_server else order["command"]
        cpus = None if is_server else cpu_binding.cpus_of(order["bind"], environ)
        streams = (stdin if first and stdin >= 0 else null, out, err)
        pid = (process.start if is_server else start)(command, environ, order["cwd"], streams, cpus)
    except BaseException:
        _close(read_end for read_end, _ in ends.values())
        raise
    finally:
        _close((out, err))
    return pid, {kind: read_end for kind, (read_end, _) in ends.items()}


def _main(environ: Mapping[str, str]) -> str:
    """The module of a server's main."""
    is_aggregator = int(environ["HVDLITE_SERVER"]) >= int(environ["HVDLITE_SERVERS"])
    return "hvdlite.aggregation.aggregator_main" if is_aggregator else "hvdlite.ps.server_main"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
