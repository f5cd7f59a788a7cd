"""What ssh is between real hosts, for launchers that want one: runs a command on another of the hosts of hosts.py.

    with Shell(hosts, environ) as shell:
        hosts.popen(0, ["mpirun", "--mca", "plm_rsh_agent", shell.agent, ...], env=shell.environ)

`agent` is this file as a program: `agent [-options] nodeB command ...`. Over a socket in the hosts' folder (the file
system is shared) it gives the command and its own standard streams to the test's process, which starts the command on
that host and tells how it has ended. Like ssh it carries no environment over: the command gets `environ`.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

NAMES = [f"node{letter}" for letter in "ABCDEFGH"]  # those of hosts.py, which the agent does without
_SOCKET = "HOSTS_SHELL"
_COMMAND_MAX = 1 << 16
_SECONDS = 30.0


class Shell:
    """Serves `agent` on all hosts. A context manager: afterwards nothing that it has started is left."""

    def __init__(self, hosts, environ):
        path = os.path.join(hosts.folder, "shell")
        self._hosts = hosts
        self.environ = {**environ, _SOCKET: path, "TMPDIR": hosts.folder}
        self.agent = os.path.join(hosts.folder, "agent")
        Path(self.agent).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(__file__)} "$@"\n')
        os.chmod(self.agent, 0o755)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(16)
        self._lock, self._running, self._over = threading.Lock(), [], False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            peer, _ = self._server.accept()
            if self._over:
                peer.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer):
        with peer:
            peer.settimeout(_SECONDS)
            asked, streams, _, _ = socket.recv_fds(peer, _COMMAND_MAX, 3)
            name, command = json.loads(asked)
            words = self._hosts.within(NAMES.index(name), ["--", "sh", "-c", command])
            with self._lock:
                if self._over:
                    return
                process = subprocess.Popen(
                    words,
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    env=self.environ,
                    start_new_session=True,
                )
                self._running.append(process)
            for stream in streams:
                os.close(stream)
            code = process.wait()
            with contextlib.suppress(OSError):  # the agent may have ended before
                peer.sendall(json.dumps(code).encode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._lock:
            self._over = True
        for process in self._running:
            end(process)
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.environ[_SOCKET])
        for thread in self._threads:
            thread.join(_SECONDS)
            assert not thread.is_alive(), "a command on another host was left"
        self._server.close()


def end(process):
    """Kills what Hosts.popen or Shell has started on a host, which is the child of `process`: that one ends when the
    child has, so that afterwards its ports are free."""
    until = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < until:
        for pid in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.kill()
    process.wait(_SECONDS)


def _children(pid):
    with contextlib.suppress(FileNotFoundError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def main(words):
    """The agent."""
    while words[0].startswith("-"):
        words = words[1:]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_SOCKET])
        socket.send_fds(server, [json.dumps([words[0], " ".join(words[1:])]).encode()], [0, 1, 2])
        said = server.recv(64)
    code = json.loads(said) if said else 255
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
