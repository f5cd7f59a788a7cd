"""Preload (`--preload`): the framework is imported once on a host, and its ranks are forks of the process that has it.

`import torch` takes a second of a CPU in each rank. So a child of the agent, the fork server (fork_server.py), imports
it, while the agent serves its launcher. After the import, the agent sends the server a message for each rank, and the
fork becomes a child of the agent, as one that it has executed. If the server ends, or another order of the launcher
comes before it is ready, the ranks are executed: nothing waits for an import, or fails by it.

By default this is done only where no script can see a difference but in time: `python [-u] script.py` by the launcher's
own interpreter, for several ranks that read no stdin, have no terminal and are bound to no CPUs. The script must import
torch before it does anything but import the standard library and NumPy: what else it does may be meant for that import,
such as `os.environ["OMP_NUM_THREADS"] = "4"`. TensorFlow is not imported: it is not made to be forked.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from . import process
from .fork_server import READY

NAME = "HVDLITE_PRELOAD"
_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
_FRAMEWORK = ("torch", "hvdlite.torch", "horovod.torch")
_BEFORE = {*getattr(sys, "stdlib_module_names", ()), "numpy"}  # Python 3.9 does not have these names

Start = Callable[..., int]  # process.start, or Preload.fork


class Preload:
    """The ranks of one order, and the server while there is one."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._near: socket.socket | None = None

    def begin(self, order: Mapping[str, Any], stdin: int, start_ranks: Callable[[Start], None]) -> None:
        """Calls start_ranks with what starts a process: now, or when the import is over. stdin: of rank 0, or -1."""
        self._start_ranks, self._environ = start_ranks, order["environ"]
        names = "" if stdin >= 0 else _wanted(order)
        if not names:
            start_ranks(process.start)
            return
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null, at = os.open(os.devnull, os.O_RDWR), _place(order["command"])
        words = [*order["command"][:at], _SERVER, names, *order["command"][at:]]
        try:
            self._pid = process.start(words, self._environ, order["cwd"], (null, far.fileno(), far.fileno()))
        except OSError:
            near.close()
            start_ranks(process.start)
        else:
            self._near = near
            self._selector.register(near, selectors.EVENT_READ, self._imported)
        finally:
            os.close(null)
            far.close()

    def _imported(self) -> None:
        """The server is ready, or has ended."""
        assert self._near is not None
        ready = False
        try:
            ready = self._near.recv(1 << 16) == READY
        except OSError:
            pass
        try:
            self._start_ranks(self.fork if ready else process.start)
        finally:
            self.drop()

    def give_up(self) -> None:
        """Ranks that wait for the import start without it."""
        if self._near is not None:
            self.drop()
            self._start_ranks(process.start)

    def drop(self) -> None:
        """Ends the server. Ranks that wait for it are not started."""
        if self._near is not None:
            process.send(self._pid, signal.SIGKILL)
            self._selector.unregister(self._near)
            self._near.close()
            self._near = None

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: str,
        streams: tuple[int, int, int],
        cpus: Collection[int] | None = None,
    ) -> int:
        """As process.start, for a rank of the order."""
        own = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        reading, report = os.pipe()
        try:
            if self._near is not None:  # the launcher is there
                socket.send_fds(self._near, [json.dumps(own).encode()], [*streams, report])
        except OSError:
            pass  # the server has ended, and so does the pipe
        os.close(report)
        pid = os.read(reading, 16)
        os.close(reading)
        return int(pid) if pid else process.start(command, environ, cwd, streams, cpus)


def _wanted(order: Mapping[str, Any]) -> str:
    """The modules to import, with commas between; "": ranks are to be executed."""
    value, command = order["environ"].get(NAME, "auto").strip(), order["command"]
    several = len(order["ranks"]) > 1
    if value == "off" or not several or order["pty"] or order["bind"] != "none" or not _is_own(order):
        return ""
    script = command[_place(command)] if len(command) > _place(command) else "-"
    try:
        with open(os.path.join(order["cwd"], script), "rb") as file:
            source = b"" if script.startswith("-") else file.read()
    except OSError:
        return ""
    if value == "auto":
        folder = os.path.dirname(os.path.join(order["cwd"], script))
        return "torch" if b"torch" in source and _is_torch_first(source, folder) else ""
    return value.replace(" ", "") if source else ""


def _place(command: Sequence[str]) -> int:
    """Of the script among the words of the command."""
    return 2 if command[1:2] == ["-u"] else 1


def _is_own(order: Mapping[str, Any]) -> bool:
    """Whether the command is run by the interpreter of this process, in whichever virtual environment."""
    word, folders = order["command"][0], os.get_exec_path(order["environ"])
    paths = [os.path.join(order["cwd"], folder, word) for folder in ([""] if os.sep in word else folders)]
    found = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
    return os.path.realpath(found) == os.path.realpath(sys.executable)


def _is_torch_first(source: bytes, folder: str) -> bool:
    """Whether the script, in this folder, does nothing that an import of torch could see before it imports torch."""
    for name in _imports(source):
        path = os.path.join(folder, name.partition(".")[0])
        if os.path.exists(path) or os.path.exists(f"{path}.py"):
            return False
        if f"{name}.".startswith(tuple(f"{framework}." for framework in _FRAMEWORK)):
            return True
        if name.partition(".")[0] not in _BEFORE and name != "hvdlite":
            return False
    return False


def _imports(source: bytes) -> Iterator[str]:
    """What the script imports before its first statement of another kind."""
    import ast  # late: few scripts come here

    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # the ranks report it
        return
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{'.' * statement.level}{statement.module}.{alias.name}" for alias in statement.names)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            return
