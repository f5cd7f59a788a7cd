"""How does a Python test run on several ranks? `@as_ranks(2, 3)` makes a function the program of each rank.

    @as_ranks(1, 2, 4)
    def test_sum_of_ranks():
        assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()

The function runs once per size in brackets, on that many processes which the real launcher has started: once per size,
since importing torch costs seconds. It is sent by reference (module and name; parameters pickled). A rank's exception
comes back with its traceback and fails the test in the rank's name; so does a rank that dies or does not answer before
the deadline (its Python stack is shown), and then the ranks are started anew for the next test. After each test that
passed, the ranks are initialized again if it has shut down, and meet in a barrier: a test that leaves ranks which
cannot meet fails itself, and the next one gets new ranks. Each module begins with a life of hvdlite of its own, the
environment that the ranks started with, and torch's own settings. A module that needs new processes says
FRESH_RANKS = True.

`Job` starts ranks of one program for tests in which ranks die, where nothing can be kept.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import warm
from forking import exactly
from launching import GRACE, NO_RECORDS

HERE = Path(__file__).resolve().parent
# Test modules of all folders are imported by name, here and in ranks.
sys.path += sorted({str(path.parent) for path in HERE.parent.glob("*/test_*.py")} - set(sys.path))
sys.path.append(str(HERE.parent / "tools"))
START_S = 120.0
DEADLINE_S = 120.0
AFTER_FAILURE_S = 2.0  # what the other ranks get to answer once one has failed
KEPT = (1, 2, 3, 4)  # sizes whose ranks outlive a module
NEW_LIFE = "", "new life", {}  # in the place of a test: module, name, arguments
MEET = "", "meet", {}
# A job ends this long after its first failure. Ranks that have failed and begun a new life are used again.
NEVER = str(24 * 3600.0)
EVERYTHING = bool(os.environ.get("TESTS_EVERYTHING"))  # tests/run everything
OPTIONAL = ("HVDLITE_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")


def needs(*names):
    """Skips the module where one of these packages is not installed. To import TensorFlow takes seconds in each process
    of tests, and only ranks need it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def everything(*cases):
    """These parameters of a test, where all are asked for (tests/run everything); else none of them."""
    return cases if EVERYTHING else ()


def as_ranks(*sizes, deadline=DEADLINE_S):
    """Run the decorated function as each rank of a job of each size. It may be parametrized. A module whose ranks take
    their time (to import TensorFlow, say) names the least deadline of its tests: PATIENCE_S."""

    def decorate(body):
        limit = max(deadline, body.__globals__.get("PATIENCE_S", 0.0))

        def test(ranks_of_module, world, **arguments):
            ranks_of_module.run(world, body.__module__, body.__name__, arguments, limit)

        own = list(inspect.signature(body).parameters.values())
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        given = [inspect.Parameter(name, kind) for name in ("ranks_of_module", "world")]
        functools.update_wrapper(test, body)
        del test.__wrapped__
        test.__signature__ = inspect.Signature(given + own)
        test.body = body
        return pytest.mark.parametrize("world", sizes, ids=[f"np{size}" for size in sizes])(test)

    return decorate


def environment(**extra):
    """This process's environment without what a launcher or a user's job left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OPTIONAL)}
    paths = [str(HERE), *([kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "HVDLITE_FAILURE_GRACE": GRACE, **NO_RECORDS, **extra}


def gone(pids, seconds=5.0):
    """Wait until none of these processes is left; those that are."""
    until = time.monotonic() + seconds
    left = set(pids)
    while True:
        left = {pid for pid in left if _alive(pid)}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Job:
    """A program on `size` ranks under the real launcher. Use as a context manager: afterwards nothing is left of it.
    framework, cold: see warm.start."""

    def __init__(self, size, command, *launcher_flags, framework=None, cold=False, **extra):
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        words = [sys.executable, "-m", "hvdlite.launcher", "-np", str(size), *launcher_flags, *command]
        self.process = warm.start(
            words, environment(**extra), stdout=self.output, stderr=subprocess.STDOUT, cold=cold, framework=framework
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self.output.close()

    def wait(self, seconds):
        """The launcher's exit code; fails the test when it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end within {seconds} s:\n{self.text()}", pytrace=False)

    def text(self):
        """What launcher and ranks have printed."""
        self.output.seek(0)
        return self.output.read()[-6000:]

    def end(self):
        """Stop the launcher, kindly if possible; it takes the ranks with it."""
        for number, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            if self.process.poll() is not None:
                return
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


class _Pool:
    """`size` ranks that wait for bodies to run. framework: what they have imported when they begin."""

    def __init__(self, size, framework):
        self.size, self.framework = size, framework
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        path = os.path.join(self.folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(0.2)
            command = [sys.executable, str(HERE / "ranks.py"), path]
            flags = ("--start-timeout", str(START_S), "--failure-grace", NEVER)
            self.job = Job(size, command, *flags, framework=framework)
            self.links, self.pids = {}, {}
            until = time.monotonic() + START_S
            while len(self.links) < size:
                self._accept(listener, until)

    def _accept(self, listener, until):
        try:
            link, _ = listener.accept()
        except socket.timeout:
            if self.job.process.poll() is None and time.monotonic() < until:
                return
            output = self.job.text()
            self.close(kindly=False)
            pytest.fail(f"{self.size} ranks did not start:\n{output}", pytrace=False)
        link.settimeout(10)
        rank, pid = _receive(link)
        self.links[rank], self.pids[rank] = link, pid

    def run(self, module, name, arguments, deadline):
        """{rank: (outcome, text)}; a rank that does not answer has the outcome 'dead' or 'late'."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                _send(link, (module, name, arguments))
        answers = {}
        until = time.monotonic() + deadline
        with selectors.DefaultSelector() as waiting:
            for rank, link in self.links.items():
                waiting.register(link, selectors.EVENT_READ, rank)
            while len(answers) < self.size and time.monotonic() < until:
                for key, _ in waiting.select(max(0.0, until - time.monotonic())):
                    try:
                        answers[key.data] = _receive(key.fileobj)
                    except (EOFError, OSError):
                        answers[key.data] = ("dead", "")
                    waiting.unregister(key.fileobj)
                    if answers[key.data][0] in ("failed", "dead"):
                        until = min(until, time.monotonic() + AFTER_FAILURE_S)
        late = [rank for rank in self.links if rank not in answers]
        for rank in late:
            answers[rank] = ("late", "")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)  # prints its Python stack
        if late:
            time.sleep(0.3)
        return answers

    def close(self, kindly=True):
        """End the ranks; returns what is wrong with how they ended, or an empty text."""
        for link in self.links.values():
            if kindly:
                with contextlib.suppress(OSError):
                    _send(link, None)
            link.close()
        complaint = ""
        if kindly:
            try:
                code = self.job.process.wait(60)
                complaint = f"the launcher ended with {code}:\n{self.job.text()}" if code else ""
            except subprocess.TimeoutExpired:
                complaint = f"the ranks did not end:\n{self.job.text()}"
        self.job.__exit__()
        for pid in gone(self.pids.values()):
            complaint += f"\nrank's process {pid} was left"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.folder.cleanup()
        return complaint


class Ranks:
    """The pools of ranks, by world size."""

    def __init__(self):
        self.pools = {}
        self.lived = set()  # sizes whose ranks have run something of this module

    def pids(self):
        """The processes that are there to stay: ranks and their launchers."""
        ranks = {pid for pool in self.pools.values() for pid in (pool.job.process.pid, *pool.pids.values())}
        return ranks | warm.pids()

    def run(self, size, module, name, arguments, deadline):
        framework = warm.named_in(Path(sys.modules[module].__file__).read_text())
        there = self.pools[size].framework if size in self.pools else framework
        # New ranks have it from their server, which costs less than an import in each of these.
        if framework not in ("numpy", there) and (there, framework) != ("sklearn", "torch"):
            self.close([size])
        if size not in self.pools:
            self.pools[size] = _Pool(size, framework)
        elif size not in self.lived:
            self._tell(size, self.pools[size].run(*NEW_LIFE, DEADLINE_S))
        self.lived.add(size)
        self._tell(size, self.pools[size].run(module, name, arguments, deadline))
        self._tell(size, self.pools[size].run(*MEET, DEADLINE_S), "the test passed, but its ranks are of no more use")

    def _tell(self, size, answers, found=""):
        bad = {rank: answer for rank, answer in sorted(answers.items()) if answer[0] not in ("passed", "skipped")}
        if bad:
            pool = self.pools.pop(size)
            output = pool.job.text() if any(outcome != "failed" for outcome, _ in bad.values()) else ""
            pool.close(kindly=False)
            lines = [f"rank {rank} of {size} {outcome}\n{text}" for rank, (outcome, text) in bad.items()]
            pytest.fail("\n".join([*filter(None, [found]), *lines, output]), pytrace=False)
        skipped = [text for outcome, text in answers.values() if outcome == "skipped"]
        if skipped:
            pytest.skip(skipped[0])

    def end_module(self, fresh):
        """Keep what the next module may have."""
        self.lived.clear()
        self.close([size for size in self.pools if fresh or size not in KEPT])

    def close(self, sizes=None):
        """End the ranks of these sizes, or all."""
        complaints = [self.pools.pop(size).close() for size in list(self.pools if sizes is None else sizes)]
        if any(complaints):
            pytest.fail("\n".join(filter(None, complaints)), pytrace=False)


def _send(link, message):
    body = pickle.dumps(message)
    link.sendall(struct.pack("!I", len(body)) + body)


def _receive(link):
    return pickle.loads(exactly(link, *struct.unpack("!I", exactly(link, 4))))


def _serve(path):
    """A rank's side: run what comes until nothing comes any more."""
    import faulthandler

    import hvdlite as hvd

    faulthandler.enable()  # a rank that dies of a signal shows where
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    at_start = dict(os.environ)
    hvd.init()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        _send(link, (hvd.rank(), os.getpid()))
        while True:
            try:
                order = _receive(link)
            except EOFError:
                return
            if order is None:
                return
            _send(link, _new_life(at_start) if order == NEW_LIFE else _run(*order))


def _new_life(environ):
    """What an earlier module has changed is as it was, as far as tests change anything."""
    import hvdlite as hvd

    hvd.shutdown()
    os.environ.clear()
    os.environ.update(environ)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", 1)))
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    return "passed", ""


def _run(module, name, arguments):
    import hvdlite as hvd

    try:
        hvd.init()
        if (module, name, arguments) == MEET:
            hvd.barrier()
        else:
            getattr(importlib.import_module(module), name).body(**arguments)
        return "passed", ""
    except BaseException as error:
        if type(error).__name__ == "Skipped":
            return "skipped", str(error)
        return "failed", "".join(traceback.format_exception(type(error), error, error.__traceback__)[-12:])


if __name__ == "__main__":
    _serve(sys.argv[1])
