"""Fork server of one host: the process that imports the framework once, of which the ranks are forks (preload.py).

The agent runs this file in the place of the script: `python [-u] fork_server.py NAMES script.py words`, with the
environment and the folder of the ranks. So options and variables of Python, OMP_NUM_THREADS and the search paths are
in force when NAMES are imported. stdout is a socket of the agent. Once all is imported, the server writes READY there.
Each message of the agent then asks for one rank: variables of its own as JSON, and with it its stdin, stdout and
stderr and a pipe for its pid. The rank is a fork of a fork that ends at once, so it becomes a child of the agent, which
is a subreaper.

The server ends where it must not be forked: an import fails, takes longer than LIMIT_S, starts a thread or a trace
function, or a module of the script's folder has the name of one that is loaded. The agent executes the ranks then, and
they report what is wrong themselves. What the imports print is kept, and written by each rank.

A rank returns to the end of this file, as the program of this interpreter: exit codes, threads, exit handlers and death
by SIGINT are Python's own. New in each rank are the seeds of random numbers, `__main__`, arguments and sys.path[0].
Only the standard library is imported here, so a script finds its own hvdlite. No signal has a handler.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import os
import signal
import socket
import sys
import time
import types
from typing import Any

LIMIT_S = 60
READY = b"hvdlite: imported"  # one message, which no output of Python's start is
_PR_SET_PDEATHSIG = 1
_KEPT = ("__package__", "__spec__", "__cached__", "__builtins__", "__annotations__")  # of any script's __main__


def _is_import_safe(names: str, folder: str) -> bool:
    """Imports NAMES. Whether a fork is as good as a new process that imports them itself."""
    signal.alarm(LIMIT_S)
    try:
        for name in names.split(","):
            importlib.import_module(name)
    except BaseException:
        return False
    finally:
        signal.alarm(0)
    alone = len(os.listdir("/proc/self/task")) == 1
    return alone and sys.gettrace() is None and sys.getprofile() is None and not _is_shadowed(folder)


def _is_shadowed(folder: str) -> bool:
    """Whether a new process would find another module in the folder under the name of one that is loaded here."""
    for entry in os.listdir(folder):
        name, dot, _ = entry.partition(".")
        importable = (
            entry.endswith((".py", ".so")) if dot else os.path.exists(os.path.join(folder, entry, "__init__.py"))
        )
        if importable and name in sys.modules and name != "__main__":
            found = getattr(sys.modules[name], "__file__", None) or ""
            if not os.path.realpath(found).startswith(os.path.join(folder, name)):
                return True
    return False


def _serve(agent: socket.socket, printed: dict[int, bytes]) -> None:
    """Forks ranks until the agent closes its end. Returns in ranks only."""
    parent = os.getppid()
    agent.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(agent, 1 << 16, 4)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            break
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    if os.getppid() != parent:  # the agent has ended
        os._exit(1)
    for target in range(3):
        os.dup2(descriptors[target], target)
    os.environ.update(json.loads(message))
    for target, text in printed.items():
        os.write(target, text)
    os.write(descriptors[3], str(os.getpid()).encode())
    for descriptor in descriptors:
        os.close(descriptor)
    agent.close()


def _reseed() -> None:
    """Generators that their module seeds at random at its import. That of `random` is seeded in each fork."""
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if hasattr(modules.get("torch"), "default_generator"):
        modules["torch"].default_generator.seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _load_main(script: str) -> types.CodeType:
    """Replaces __main__ by that of the script; returns its code."""
    path, old = os.path.abspath(script), vars(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    vars(main).update({name: old[name] for name in _KEPT if name in old}, __file__=path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with io.open_code(path) as source:
        return compile(source.read(), path, "exec", dont_inherit=True)


def _show_error(hook: Any, kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    """sys.excepthook without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    hook(kind, error.with_traceback(trace), trace)


def main() -> None:
    """As the server, and in ranks the script."""
    _, names, script, *words = sys.argv
    at = len(getattr(sys, "orig_argv", sys.argv)) - len(sys.argv)
    sys.argv = [script, *words]
    if hasattr(sys, "orig_argv"):
        del sys.orig_argv[at : at + 2]
    folder = os.path.dirname(os.path.realpath(script))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    agent = socket.socket(fileno=os.dup(1))
    pipes = {1: os.pipe(), 2: os.pipe()}
    for target, (_, write_end) in pipes.items():
        os.set_blocking(write_end, False)  # an import that prints more than fits fails
        os.dup2(write_end, target)
        os.close(write_end)
    if not _is_import_safe(names, folder):
        os._exit(1)
    gc.freeze()  # a collection in a rank writes to, and so copies, no page of what is shared
    printed = {}
    for target, (read_end, _) in pipes.items():
        os.write(target, b"\n")  # there is something to read
        printed[target] = os.read(read_end, 1 << 16)[:-1]
        os.close(read_end)
    _serve(agent, printed)
    _reseed()
    try:
        exec(_load_main(script), vars(sys.modules["__main__"]))
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_show_error, sys.excepthook)
        raise


if __name__ == "__main__":
    main()
