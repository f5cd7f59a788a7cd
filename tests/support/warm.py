"""Jobs that start warm: the launcher and its ranks are forks of a process that has imported the framework already.

A rank that imports torch takes 2 seconds of a core, one that imports TensorFlow 5, and the tests start thousands. So a
test's job is forked off a server that has imported it, once for each process of tests and framework:

    process = warm.start([sys.executable, "-m", "hvdlite.launcher", "-np", "2", sys.executable, "x.py"], env=env)

It has the pid, the pipes, poll, wait and send_signal of subprocess.Popen, and is one where the job has to start cold:
another program than the launcher, or a variable that Python or a framework reads when it starts. What differs in a fork
from a new process: /proc shows the server's command, all ranks have one seed of str's hash, nothing is taken apart at
the end, and memory shared with the server counts as a rank's. Tests of such things say cold=True.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from forking import MARK, exactly, program

HERE = Path(__file__).resolve().parent
# Of the server's own. NumPy's BLAS starts threads at its import unless it is told not to; a fork has none of them.
OWN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Variables that may be other ones than the server's: what they say is read later than at an import.
LATE = ("HVDLITE_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_", "MASTER_", "NCCL_", "TEST_", "PYTEST_")
LATE_TOO = ("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "TMPDIR", "PWD", "OLDPWD", "_", *OWN)
# What imports of scikit-learn, TensorFlow and h5py set in the tests' own process; the server has imported them itself.
IMPORTED = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TF2_BEHAVIOR", "HDF5_PLUGIN_PATH")
IMPORTED += ("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "ENABLE_RUNTIME_UPTIME_TELEMETRY")
# Those that are read at an import and that tests set: a server for each value.
KERAS = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")


class Forked:
    """A process that a server has forked, as subprocess.Popen has its children."""

    def __init__(self, link, args):
        self._link, self.args, self.returncode = link, args, None
        self.stdout = self.stderr = self.stdin = None
        (self.pid,) = struct.unpack("!i", exactly(link, 4))

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            try:
                self.returncode = struct.unpack("!i", exactly(self._link, 4))[0]
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
    """As its client sees it. more: the early variables that it has besides those of the tests' own process."""

    def __init__(self, framework, more):
        self.folder = tempfile.TemporaryDirectory(prefix="warm")
        self.path = os.path.join(self.folder.name, "socket")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LATE)}
        self.environ = {**kept, **OWN, **more, MARK: "0" * 32}
        ready, told = os.pipe()
        with open(ready, "rb") as answer:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "forking.py"), framework, self.path, str(told), str(os.getpid())],
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
    more = {name: env[name] for name in KERAS if name in env}
    key = (framework, *sorted(more.items()))
    if key not in _servers:
        _servers[key] = _Server(framework, more)
    own = _servers[key].environ
    early = (name for name in {*env, *own} if not name.startswith(LATE) and name not in (*LATE_TOO, *IMPORTED))
    return None if any(env.get(name) != own.get(name) for name in early) else _servers[key]


def wanted(words):
    """The framework that this job's program imports, as far as its text says; None: no Python under our launcher."""
    words = list(words)
    if words[:3] != [sys.executable, "-m", "hvdlite.launcher"] or sys.executable not in words[3:]:
        return None
    found = program(words[words.index(sys.executable, 3) :])
    if found is None:
        return None
    kind, what, _ = found
    if kind == "module":
        return None
    try:
        text = Path(what).read_text(errors="replace") if kind == "file" else what
    except OSError:
        return None
    return named_in(text)


def named_in(text):
    """The framework that a program of this text imports."""
    if "tensorflow" in text or "keras" in text:
        return "tensorflow"
    if "torch" not in text:
        return "jax" if "import jax" in text else "numpy"
    return "torch, bare" if "Raises(" in text else "sklearn" if "sklearn" in text else "torch"
