"""What has a job left behind? Everything that is there now and was not before, where the trial is alone.

`alone` is the command line that runs another in namespaces of its own: its processes, its network, its /dev/shm are
nobody else's, so that whatever is found there afterwards is a leftover, and goes with the namespaces. Where that may
not be had, processes are known by a mark in their environment, and of /dev/shm only what bears our name counts.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
import subprocess
import time
from pathlib import Path

import launching

SPACE = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && chmod 1777 /dev/shm &&
exec "$@"
"""
UNSHARE = ("unshare", "-n", "-i", "-m", "-p", "--fork", "--kill-child", "sh", "-c", SPACE, "sh")
OF_OTHERS = ("torchinductor_",)
OF_MPI = ("mpich_shm_", "sm_segment.", "vader_segment.", "ompi.", "openmpi-", "prte.", "prterun", "pmix", "gpu-stub-")
SETTLE_S = 10.0
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


@functools.lru_cache(None)
def can_be_alone():
    """Whether this process may make namespaces."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def alone(words):
    """The command line that runs `words` alone, if that can be."""
    return [*UNSHARE, *words] if can_be_alone() else list(words)


class Watch:
    """What is there before the job; `left` says what has come and stayed."""

    def __init__(self, mark, folder):
        self.mark, self.folder = mark, folder
        self.alone = os.getpid() == 1
        if self.alone:  # the network of a new namespace begins without its loopback
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
        self.shm, self.sockets = self._shm(), self._sockets()

    def left(self, seconds=SETTLE_S, mpis_own=False):
        """Texts, one for each thing that is left after so long. mpis_own: what an MPI leaves is not ours."""
        until = time.monotonic() + seconds
        while True:
            found = self._found(mpis_own)
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def processes(self):
        """{pid: command} of the job's; alone, that is everybody."""
        found = launching.marked("" if self.alone else self.mark)
        return {pid: command[:120] for pid, command in found.items() if pid != os.getpid()}

    def _found(self, mpis_own):
        found = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        found += [f"/dev/shm/{name}" for name in self._shm() - self.shm if not (mpis_own and name.startswith(OF_MPI))]
        found += [f"socket {line}" for line in self._sockets() - self.sockets]
        files = [name for name in os.listdir(self.folder) if not name.startswith(OF_OTHERS + OF_MPI * mpis_own)]
        return found + [f"temporary file {name}" for name in files]

    def _shm(self):
        return {name for name in os.listdir("/dev/shm") if self.alone or "hvd" in name}

    def _sockets(self):
        """Sockets of the network namespace, if it is ours: unix ones that have a name, TCP ones that do not only wait
        for their time to be over."""
        if not self.alone:
            return set()
        found = {name for line in _lines("unix") for name in line[7:]}
        for kind in ("tcp", "tcp6"):
            for _, local, remote, state, *_ in _lines(kind):
                if state not in ("06", "04", "05", "09"):  # TIME_WAIT, FIN_WAIT, LAST_ACK: the kernel's
                    found.add(f"{kind} {local} {remote} state {state}")
        return found


def _lines(kind):
    return [line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
