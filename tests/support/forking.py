"""The process from which warm jobs are forked (warm.py): it imports a framework, and forks when it is told to.

    python forking.py FRAMEWORK SOCKET DESCRIPTOR PARENT

It writes "ready" to the descriptor and ends with its parent. A fork becomes the launcher. Where its agent would execute
Python for a rank, the rank goes on in the fork (`_as_new`), as a new Python would: environment, arguments, descriptors,
signals, `__main__`, an `hvdlite` that is imported anew, and Python's own end.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import types

# The last is imported by the first optimizer, which takes as long as torch itself. Tests that raise an exception at any
# instruction fork from a server without it: with it, a rank was lost without a message in 6 of 86 runs, for no known
# reason.
BARE = ("torch", "torch.distributed", "torch.utils.data")
TORCH = (*BARE, "torch._dynamo")
FRAMEWORKS = {
    "numpy": ("numpy", "cloudpickle", "cffi"),
    "torch": ("numpy", "cloudpickle", "cffi", *TORCH),
    "torch, bare": ("numpy", "cloudpickle", "cffi", *BARE),
    "sklearn": ("numpy", "cloudpickle", "cffi", *TORCH, "sklearn.datasets"),
    "jax": ("numpy", "cloudpickle", "cffi", "jax", "jax.numpy", "optax"),
    "tensorflow": ("numpy", "cloudpickle", "cffi", "tensorflow"),
}
MARK = "HVDLITE_TEST_MARK"  # by this, in its environment, a test finds what its job has left (launching.py)
LAUNCHER = "import sys; from hvdlite.launcher.cli import main; sys.exit(main())"


def program(words):
    """("code", "module" or "file", it, arguments) of a Python's command line; None for what is done in another way."""
    if len(words) > 2 and words[1] == "-c":
        return "code", words[2], ["-c", *words[3:]]
    if len(words) > 2 and words[1] == "-m":
        return "module", words[2], ["-m", *words[3:]]
    if len(words) > 1 and words[1].endswith(".py"):
        return "file", words[1], words[1:]
    return None


def exactly(link, count):
    held = b""
    while len(held) < count:
        chunk = link.recv(count - len(held))
        if not chunk:
            raise EOFError
        held += chunk
    return held


def _serve(path, told):
    """Forks what is asked for until its parent ends. Returns in the forks only: (order, descriptors)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(told, b"ready")
    os.close(told)
    links = {}
    while True:
        readable, _, _ = select.select([listener, woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _tell_of_ends(links)
        if listener in readable:
            link, _ = listener.accept()
            size, streams, _, _ = socket.recv_fds(link, 4, 3)
            order = pickle.loads(exactly(link, *struct.unpack("!I", size)))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                return order, streams
            for stream in streams:
                os.close(stream)
            links[pid] = link
            with contextlib.suppress(OSError):
                link.sendall(struct.pack("!i", pid))


def _tell_of_ends(links):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with links.pop(pid) as link, contextlib.suppress(OSError):
            link.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))


def _as_new(words, environ, fresh=True):
    """Goes on as a new process would that has executed this Python command. Never returns. fresh: it has not imported
    hvdlite."""
    _forget_descriptors()
    _forget_signals()
    os.environ.clear()
    os.environ.update(environ)
    kind, what, sys.argv = program(words) or ("code", "raise SystemExit(127)", [])
    folder = {"code": "", "module": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(what)))
    sys.path[:] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *_PATHS]
    for name in [name for name in sys.modules if fresh and name.split(".")[0] == "hvdlite"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    _new_streams(bool(environ.get("PYTHONUNBUFFERED")))
    random.seed()
    sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if kind == "module":
        what = f"import runpy\nrunpy._run_module_as_main({what!r})"
    if kind == "file":
        main.__file__ = what
        what = "with open(__file__, 'rb') as _: _ = compile(_.read(), __file__, 'exec')\nexec(_)"
    _end(_code_of(what))


def _code_of(text):
    """Runs a program to its end: its exit code, minus a signal's number."""
    left = []  # the SystemExit
    try:
        exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)
        return 0
    except SystemExit as error:
        left.append(error)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _thread.start_new_thread(left.clear, ())  # at Python's end there is no frame any more, which hvdlite asks about
    while left:
        time.sleep(0.001)
    return code


def _end(code):
    """As Python ends, but that it does not take its modules apart, which is half a second for torch."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    ctypes.CDLL(None).fflush(None)
    os._exit(code & 0xFF)


def _forget_descriptors():
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2 and not os.get_inheritable(number):
                os.close(number)


def _forget_signals():
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does when it starts
        signal.signal(number, signal.SIG_IGN)


def _new_streams(unbuffered):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "rw"[number > 0], closefd=False)
        buffer = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        lines = number == 2 or os.isatty(number)
        through = {} if number == 0 else {"write_through": unbuffered, "line_buffering": lines}
        stream = io.TextIOWrapper(buffer, "utf-8", "strict" if number < 2 else "backslashreplace", **through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _launch(order, streams):
    """The fork's life as the launcher."""
    os.setsid()
    os.chdir(order["cwd"])
    for target, source in enumerate(streams):
        os.dup2(source, target)
    for source in streams:
        if source > 2:
            os.close(source)
    execute = os.execvpe

    def become(file, words, environ):
        os.execvpe = execute
        if file != sys.executable or program(words) is None:
            execute(file, words, environ)
        _as_new(words, environ)

    os.execvpe = become
    if len(order["environ"].get(MARK, "")) == 32:  # written where /proc shows it
        place = ctypes.CDLL(None).getenv
        place.restype = ctypes.c_void_p
        ctypes.memmove(place(MARK.encode()), order["environ"][MARK].encode(), 32)
    _as_new([sys.executable, "-c", LAUNCHER, *order["words"][3:]], order["environ"], fresh=False)


def _import(framework):
    for name in FRAMEWORKS[framework]:
        importlib.import_module(name)
    importlib.import_module("hvdlite.launcher.cli")
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{framework} has started {len(threads) - 1} threads, of which a fork has none"
    assert "hvdlite._core" not in sys.modules, "what is forked must not hold a core"
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, all pages with objects


if __name__ == "__main__":
    _framework, _path, _told, _parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != int(_parent):
        sys.exit(1)
    _own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _PATHS = [path for path in sys.path[1:] if path not in _own]
    _import(_framework)
    _launch(*_serve(_path, int(_told)))
