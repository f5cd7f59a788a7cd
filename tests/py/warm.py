"""Jobs that start warm: the launcher and its ranks are forks of a process that has imported the framework already.

A rank that imports torch takes 2 seconds of a core, one that imports TensorFlow 5, and the tests start thousands. So a
test's job is forked off a server that has imported it, once for each process of tests and framework:

    process = warm.start([sys.executable, "-m", "hvdlite.launcher", "-np", "2", sys.executable, "x.py"], env=env)

It has the pid, the pipes, poll, wait and send_signal of subprocess.Popen, and is one where the job has to start cold:
another program than the launcher, or a variable that Python or a framework reads when it starts. The launcher is a fork
of the server and forks its agent as always; where that would execute Python for a rank, the rank goes on in the fork
(`_as_new`) as a new Python would: its environment, arguments, folder, descriptors and signals, `__main__`, an `hvdlite`
that is imported anew, and Python's own end. Not as in a new process: /proc shows the server's command, all ranks have
one seed of str's hash, nothing is taken apart at the end, and memory shared with the server counts as a rank's.
Tests of such things say cold=True.
"""

from __future__ import annotations

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
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
FRAMEWORKS = {
    "numpy": ("numpy", "cloudpickle", "cffi"),
    "torch": ("numpy", "cloudpickle", "cffi", "torch", "torch.distributed", "torch.utils.data"),
    "tensorflow": ("numpy", "cloudpickle", "cffi", "tensorflow"),
}
# Of the server's own. NumPy's BLAS starts threads at its import unless it is told not to; a fork has none of them.
OWN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Variables that may be other ones than the server's: what they say is read later than at an import.
LATE = ("HVDLITE_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_", "MASTER_", "NCCL_", "TEST_", "PYTEST_")
LATE_TOO = ("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "TMPDIR", "PWD", "OLDPWD", "_", *OWN)


MARK = "HVDLITE_TEST_MARK"  # by this, in its environment, a test finds what its job has left (launching.py)


class Forked:
    """A process that a server has forked, as subprocess.Popen has its children."""

    def __init__(self, link, args):
        self._link, self.args, self.returncode = link, args, None
        self.stdout = self.stderr = self.stdin = None
        (self.pid,) = struct.unpack("!i", _exactly(link, 4))

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            try:
                self.returncode = struct.unpack("!i", _exactly(self._link, 4))[0]
            except (EOFError, OSError):
                raise RuntimeError("the server of warm processes has ended") from None
            self._link.close()
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class _Server:
    """As its client sees it."""

    def __init__(self, framework):
        self.folder = tempfile.TemporaryDirectory(prefix="warm")
        self.path = os.path.join(self.folder.name, "socket")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LATE)}
        self.environ = {**kept, **OWN, MARK: "0" * 32}
        ready, told = os.pipe()
        with open(ready, "rb") as answer:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "warm.py"), framework, self.path, str(told), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=self.environ,
                pass_fds=[told],
            )
            os.close(told)
            assert answer.read() == b"ready", f"no warm {framework}: its server ended with {self.process.wait()}"

    def fork(self, order, streams):
        link = socket.socket(socket.AF_UNIX)
        link.connect(self.path)
        body = pickle.dumps(order)
        socket.send_fds(link, [struct.pack("!I", len(body))], streams)
        link.sendall(body)
        return Forked(link, order["words"])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


_servers = {}


def pids():
    """Of the servers, which are there to stay."""
    return {server.process.pid for server in _servers.values()}


def forked():
    """The processes that they have forked."""
    found = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            found.update(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return found


def close():
    """Ends the servers."""
    while _servers:
        _servers.popitem()[1].close()


def start(words, env, stdin=subprocess.DEVNULL, stdout=None, stderr=None, cold=False, framework=None):
    """`words` in a session of its own, warm where that can be. The streams are as for subprocess.Popen; framework: what
    its program imports, where its text does not say it."""
    words = list(map(str, words))
    framework = None if cold or stdin == subprocess.PIPE else framework or wanted(words)
    server = framework and _server(framework, env)
    if not server:
        return subprocess.Popen(words, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    with contextlib.ExitStack() as mine:
        ends = {}

        def descriptor(name, stream, number):
            if stream in (subprocess.PIPE, subprocess.DEVNULL):
                read, write = os.pipe() if stream == subprocess.PIPE else (None, os.open(os.devnull, os.O_RDWR))
                mine.callback(os.close, write)
                if read is not None:
                    ends[name] = open(read, "rb")
                return write
            return number if stream is None else stream if isinstance(stream, int) else stream.fileno()

        streams = [descriptor("stdin", stdin, 0), descriptor("stdout", stdout, 1)]
        streams.append(streams[1] if stderr == subprocess.STDOUT else descriptor("stderr", stderr, 2))
        forked = server.fork({"words": words, "environ": dict(env), "cwd": os.getcwd()}, streams)
    forked.stdout, forked.stderr = ends.get("stdout"), ends.get("stderr")
    return forked


def _server(framework, env):
    """The server for jobs in this environment; None: there can be none."""
    if framework not in _servers:
        _servers[framework] = _Server(framework)
    own = _servers[framework].environ
    early = (name for name in {*env, *own} if not name.startswith(LATE) and name not in LATE_TOO)
    return None if any(env.get(name) != own.get(name) for name in early) else _servers[framework]


def wanted(words):
    """The framework that this job's program imports, as far as its text says; None: no Python under our launcher."""
    words = list(words)
    if words[:3] != [sys.executable, "-m", "hvdlite.launcher"] or sys.executable not in words[3:]:
        return None
    program = _program(words[words.index(sys.executable, 3) :])
    if program is None:
        return None
    kind, what, _ = program
    try:
        text = Path(what).read_text(errors="replace") if kind == "file" else what
    except OSError:
        return None
    return named_in(text)


def named_in(text):
    """The framework that a program of this text imports."""
    return "tensorflow" if "tensorflow" in text or "keras" in text else "torch" if "torch" in text else "numpy"


def _program(words):
    """("code" or "file", it, arguments) of a Python's command line; None for what is done in another way."""
    if len(words) > 2 and words[1] == "-c":
        return "code", words[2], ["-c", *words[3:]]
    if len(words) > 1 and words[1].endswith(".py"):
        return "file", words[1], words[1:]
    return None


def _exactly(link, count):
    held = b""
    while len(held) < count:
        chunk = link.recv(count - len(held))
        if not chunk:
            raise EOFError
        held += chunk
    return held


# The server's side.


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
            order = pickle.loads(_exactly(link, *struct.unpack("!I", size)))
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
    kind, what, sys.argv = _program(words) or ("code", "raise SystemExit(127)", [])
    folder = "" if kind == "code" else os.path.dirname(os.path.abspath(what))
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
    if kind == "file":
        main.__file__ = what
        what = "with open(__file__, 'rb') as _: _ = compile(_.read(), __file__, 'exec')\nexec(_)"
    _end(_code_of(what))


def _code_of(text):
    """Runs a program to its end: its exit code, 128 and more for a signal's."""
    try:
        exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


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
        through = (
            {} if number == 0 else {"write_through": unbuffered, "line_buffering": number == 2 or os.isatty(number)}
        )
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
        if file != sys.executable or _program(words) is None:
            execute(file, words, environ)
        _as_new(words, environ)

    os.execvpe = become
    if (
        len(order["environ"].get(MARK, "")) == 32
    ):  # where /proc shows a process's environment, not in Python's copy only
        place = ctypes.CDLL(None).getenv
        place.restype = ctypes.c_void_p
        ctypes.memmove(place(MARK.encode()), order["environ"][MARK].encode(), 32)
    _as_new([sys.executable, "-c", LAUNCHER, *order["words"][3:]], order["environ"], fresh=False)


LAUNCHER = "import sys; from hvdlite.launcher.cli import main; sys.exit(main())"


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
