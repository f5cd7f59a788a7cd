"""MPI waits without end for ranks that do not come, or that it cannot reach. What is said then, and who says it?

`advice` is the pure part: what to try, by the kind of MPI and the networks of this host. `limited` goes around
MPI_Init, which can be neither interrupted nor given a limit, and in which Open MPI waits for every rank of the job: a
thread says after a third of the time that this rank waits, and when the time is up it says why and ends this process,
so that the launcher ends the others. Nothing else could: the thread that would raise is the one inside MPI.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence

_FIRST_WORD = 1 / 3  # of the limit
_SIOCGIFFLAGS, _UP, _LOOPBACK = 0x8913, 0x1, 0x8
_CHOICES = {
    "Open MPI": "mpirun --mca btl_tcp_if_include {0} --mca oob_tcp_if_include {0}",
    "MPICH": "mpiexec -iface {0} (MPICH; Intel MPI: I_MPI_HYDRA_IFACE, FI_TCP_IFACE)",
}


def advice(kind: str, networks: Sequence[str]) -> str:
    """What may be wrong when ranks do not meet. kind: hvd_mpi_word(0); networks: this host's interfaces."""
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


@contextlib.contextmanager
def limited(who: str, kind: str, seconds: float) -> Iterator[None]:
    """What runs within is MPI_Init: said aloud when it takes long, and this process ends when it takes longer."""
    over = threading.Event()

    def watch() -> None:
        hint = advice(kind, networks())
        if over.wait(seconds * _FIRST_WORD):
            return
        _say(f"{who} has waited {seconds * _FIRST_WORD:g} s in MPI_Init for the other ranks. {hint}")
        if over.wait(seconds * (1 - _FIRST_WORD)):
            return
        _say(f"{who} has waited {seconds:g} s in MPI_Init (HVDLITE_START_TIMEOUT) for the other ranks and ends. {hint}")
        os._exit(1)

    threading.Thread(target=watch, name="hvdlite-mpi-init", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _say(text: str) -> None:
    """In one write, whatever holds sys.stderr: the rank's lines may not be ours to wait for."""
    line = f"hvdlite: {text}\n".encode("utf-8", "replace")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), line)
