"""A job under test: `hvdlite-run` as a process, what it says as it says it, a deadline, and what is left of it.

Every process of a job carries a mark in its environment, so that those that are left can be found wherever they hide.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import warm

RUN = [sys.executable, "-m", "hvdlite.launcher"]
SECONDS = 90.0
GRACE = "6"
NO_RECORDS = {"HVDLITE_TRACE_DIR": "off"}  # what tests let fail leaves nothing behind


class Launch:
    """`hvdlite-run *words` in a session of its own; `with Launch(...) as job:` kills what is left at the end.

    cold: nothing of it is forked off a process that has imported frameworks (see warm.py)."""

    def __init__(
        self, *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, under=(), merged=False, cold=False, **environ
    ):
        self.mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited["HVDLITE_PRELOAD"] = "off"  # jobs that do not start cold have their framework already
        inherited["HVDLITE_FAILURE_GRACE"] = GRACE  # ranks of a crowded machine end late
        self.process = warm.start(
            [*under, *RUN, *words],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            env={**inherited, **NO_RECORDS, warm.MARK: self.mark, **environ},
            cold=cold,
        )
        self.pid = self.process.pid
        self._said = {"out": bytearray(), "err": bytearray()}
        self._change = threading.Condition()
        pipes = {"out": self.process.stdout, "err": self.process.stderr}
        self._readers = [self._reader(name, pipe) for name, pipe in pipes.items() if pipe is not None]

    def _reader(self, name, pipe):
        def read():
            while chunk := os.read(pipe.fileno(), 65536):
                with self._change:
                    self._said[name] += chunk
                    self._change.notify_all()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    @property
    def out(self):
        return self._said["out"].decode(errors="replace")

    @property
    def err(self):
        return self._said["err"].decode(errors="replace")

    def until(self, text, count=1, seconds=SECONDS):
        """Waits until `text` has been said `count` times."""
        end = time.monotonic() + seconds
        with self._change:
            while (self.out + self.err).count(text) < count:
                left = end - time.monotonic()
                assert left > 0, f"{text!r} was not said {count} times in {seconds} s:\n{self.out}{self.err}"
                self._change.wait(left)

    def wait(self, seconds=SECONDS):
        """The exit code of the launcher, once all that it said has been read."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds} s:\n{self.out}{self.err}") from None
        for thread in self._readers:
            thread.join(SECONDS)
            assert not thread.is_alive(), "the launcher has ended, but somebody holds its output open"
        return code

    def send(self, number):
        """A signal to the launcher."""
        os.kill(self.pid, number)

    def children(self):
        """Of the first process: the launcher, where `under` has forked it."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def left(self):
        """Living processes of the job."""
        return marked(self.mark)

    def until_gone(self):
        """Waits until no process of the job is left."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() < began + SECONDS, f"left after {SECONDS} s: {left}"
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def free_port():
    """At which nobody listens just now."""
    with socket.create_server(("127.0.0.1", 0)) as any_of_them:
        return any_of_them.getsockname()[1]


def marked(mark):
    """(pid, command) of every living process with this mark in its environment."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/stat", "rb") as stat:
                if mark.encode() in environ.read() and stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    with open(f"/proc/{name}/cmdline", "rb") as command:
                        found[int(name)] = command.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def launch(*words, **settings):
    """Runs a job to its end: (exit code, stdout, stderr). Nothing of it may be left."""
    with Launch(*words, **settings) as job:
        code = job.wait()
        assert not job.left(), "the launcher has ended before its ranks"
        return code, job.out, job.err


ANSWERS = """
import json, os, sys
from hvdlite.launcher import cli
codes = []
for number, words in enumerate(json.loads(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
        sys.exit(cli.main(words))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


def answers(jobs, folder, **environ):
    """(exit code, stdout, stderr) of hvdlite-run for each of these lists of words, none of which starts anything:
    forks of one process that has imported it. What they say is kept in `folder`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    words = [sys.executable, "-c", ANSWERS, str(folder), json.dumps([[str(word) for word in job] for job in jobs])]
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "timeout": SECONDS}
    done = subprocess.run(words, env={**inherited, **NO_RECORDS, **environ}, check=True, **settings)
    said = ([(folder / f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(jobs)))
    return [(code, *each) for code, each in zip(json.loads(done.stdout), said)]
