"""Diagnosis of an MPI that waits without end for ranks that do not come or cannot be reached.

`advice` is the pure part: what to try, by the kind of MPI and the networks of this host. `limited` goes around
MPI_Init, which can be neither interrupted nor given a limit, and in which Open MPI waits for every rank of the job: a
thread says after a third of the time that this rank waits, and when the time is up it says why and ends this process,
so that the launcher ends the others. Nothing else could: the thread that would raise is the one inside MPI.

Hydra (of MPICH and Intel MPI) does not end a job when a process ends before it has called MPI_Init, however badly: the
others wait for it for ever. Its ranks of one host are children of one process, so a waiting rank can see that there are
fewer of them than were started (`Siblings`), and ends the job then instead of at the limit. Open MPI and PRRTE end it
by themselves. Not seen: the end of a rank that is the only one of its host; if it raises, it reports it (hydra.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .. import config

_FIRST_WORD = 1 / 3  # of the limit
_LOOK_S = 0.25  # between two looks at the ranks of this host
_SURE_S = 2.0  # from the end of one until the job is ended: its own last words come first
_SIOCGIFFLAGS, _UP, _LOOPBACK = 0x8913, 0x1, 0x8
_CHOICES = {
    "Open MPI": "mpirun --mca btl_tcp_if_include {0} --mca oob_tcp_if_include {0}",
    "MPICH": "mpiexec -iface {0} (MPICH; Intel MPI: I_MPI_HYDRA_IFACE, FI_TCP_IFACE)",
}


def advice(kind: str, networks: Sequence[str]) -> str:
    """What may be wrong when the rendezvous fails. kind: hvd_mpi_word(0); networks: this host's interfaces."""
    text = "Do all of them call it, and with the same MPI?"
    if len(networks) < 2:
        return text
    name = next((each for each in networks if not each.startswith(("docker", "virbr", "br-"))), networks[0])
    choice = _CHOICES.get(kind, f"the option of your MPI that names it, for {name}").format(name)
    return (
        f"{text} If they are on several hosts, this MPI may be trying a network that does not join them: host "
        f"{socket.gethostname()} has {', '.join(networks)}. Name the one that does, as in: {choice}"
    )


def networks() -> list[str]:
    """The interfaces of this host that are up, but for loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                flags = int.from_bytes(fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)[16:18], sys.byteorder)
                if flags & (_UP | _LOOPBACK) == _UP:
                    found.append(name)
    return found


class Siblings:
    """The ranks of this host under Hydra, that of process `own` among them. proc: the folder /proc."""

    def __init__(self, environ: Mapping[str, str], own: int, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        started, size = environ.get("MPI_LOCALNRANKS", ""), environ.get("PMI_SIZE")
        self._started = int(started) if started.isdigit() else 0
        self._all_here = size == started
        self._parent = self._hydra(str(own)) if self._started > 1 else None

    def ended(self) -> str | None:
        """ "rank 2", or "a rank of this host", where one has ended; None: all live, or nothing can be known."""
        if self._parent is None:
            return None
        try:
            tasks = (self._proc / self._parent / "task").glob("*/children")
            pids = [pid for task in tasks for pid in task.read_text().split()]
            living = [pid for pid in pids if self._stat(pid)[0] not in "ZX"]
            if not living or len(living) >= self._started:
                return None
            missing = sorted({str(rank) for rank in range(self._started)} - {self._rank(pid) for pid in living})
        except OSError:  # it has ended meanwhile, or is not ours to look at
            return None
        return f"rank {missing[0]}" if self._all_here and missing else "a rank of this host"

    def _hydra(self, pid: str) -> str | None:
        """The process that has started the ranks here: the parent, or, of a script that starts Python, its parent."""
        with contextlib.suppress(OSError):
            while pid not in ("0", "1"):
                if (self._proc / pid / "comm").read_text().startswith("hydra_"):
                    return pid
                pid = self._stat(pid)[1]
        return None

    def _stat(self, pid: str) -> list[str]:
        """State and parent; those of a dead process where it is gone."""
        try:
            return (self._proc / pid / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            return ["X", "0"]

    def _rank(self, pid: str) -> str:
        words = (self._proc / pid / "environ").read_bytes().split(b"\0")
        return next((word[9:].decode() for word in words if word.startswith(b"PMI_RANK=")), "")


@contextlib.contextmanager
def limited(caller: str, kind: str, seconds: float) -> Iterator[None]:
    """What runs within is MPI_Init: it is reported when it takes long, and this process ends when it takes longer."""
    over = threading.Event()

    def watch() -> None:
        hint = advice(kind, networks())
        siblings, lost, lost_at = Siblings(config.environ(), os.getpid()), None, math.inf
        began, warned = time.monotonic(), False
        while not over.wait(min(_LOOK_S, max(0.0, began + seconds - time.monotonic()))):
            now = time.monotonic()
            if lost is None:
                lost, lost_at = siblings.ended(), now
            if lost is not None and now - lost_at >= _SURE_S:
                _print(f"{caller} ends: it waits in MPI_Init for {lost}, which ended before its own MPI_Init. [HVD113]")
                os._exit(1)
            if now - began >= seconds:
                limit = f"{seconds:g} s in MPI_Init (HVDLITE_START_TIMEOUT)"
                _print(f"{caller} has waited {limit} for the other ranks and ends. {hint} [HVD113]")
                os._exit(1)
            if not warned and now - began >= seconds * _FIRST_WORD:
                warned = True
                _print(
                    f"{caller} has waited {seconds * _FIRST_WORD:g} s in MPI_Init for the other ranks. {hint} [HVD113]"
                )

    threading.Thread(target=watch, name="hvdlite-mpi-init", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _print(text: str) -> None:
    """In one write, whatever holds sys.stderr: the rank's lines may not be ours to wait for."""
    line = f"hvdlite: {text}\n".encode("utf-8", "replace")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), line)
