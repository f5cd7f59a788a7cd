"""Probe of one host for `hvdlite-run doctor`: its limits, addresses, and what it reaches.

On another host it is started as an agent is, reports to the doctor as an agent does, and then answers what is asked
over the control stream, until that ends. On the doctor's own host it is called. It imports no framework, starts no
rank and changes nothing.

Ways between hosts are tried as ranks will need them: a connection to a listener at the address by which the doctor
reached that host, with the proof of the secret on it. Latency is half of the median of small messages there and back;
bandwidth is what one connection carries within `STREAM_S`, as the far end has counted it.
"""

from __future__ import annotations

import glob
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hvdlite import __version__
from hvdlite.errors.codes import coded
from hvdlite.security import framing

from ..control import registration
from . import check_build

REACH_S = 5.0
STREAM_S = 0.5
_ROUNDS = 200
_BLOCK = bytes(1 << 18)
_READY = b"!"  # the far end has read the greeting, and nothing behind it


def facts() -> dict[str, Any]:
    """What is known of this host without touching anything. All of it can be JSON."""
    found = {each.name: each.detail.partition(",")[0] if each.found else None for each in check_build.frameworks()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    core = check_build.extension()
    return {
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "hvdlite": __version__,
        "core": None if core.found else core.detail,
        "frameworks": found,
        "gpus": _gpus(),
        "cpus": len(os.sched_getaffinity(0)),
        "libraries": {kind: _library(kind) for kind in ("MPI", "NCCL")},
        "shm": _shared_memory("/dev/shm"),
        "files": [soft, hard],
        "ports": _ports(),
        "user": os.geteuid(),
    }


def _library(kind: str) -> str | None:
    first = check_build.libraries(kind)[0]
    return first.detail.partition(", /")[0] if first.found else None


def _gpus() -> list[str]:
    """The models of the GPUs that the driver shows."""
    models = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                models.append(file.readline().partition(":")[2].strip())
        except OSError:
            continue
    return models or ["GPU"] * len(glob.glob("/dev/nvidia[0-9]*"))


def _shared_memory(folder: str) -> list[int] | None:
    """[bytes in all, bytes free] where this user can write; else None."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return [room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize] if os.access(folder, os.W_OK) else None


def _ports() -> int:
    """How many ports are free of those that the kernel may give away by itself."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    taken = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                taken.update(int(line.split()[1].rpartition(":")[2], 16) for line in list(file)[1:])
        except (OSError, ValueError, IndexError):
            continue
    return high - low + 1 - sum(low <= port <= high for port in taken)


class Examiner:
    """Answers the doctor's questions about this host. `secret`: of this examination."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def answer(self, asks: Mapping[str, Any]) -> Any:
        """What JSON can carry. `do`: facts, check_build, clock, listen (at), reach (targets), measure (target)."""
        do = asks["do"]
        if do == "facts":
            return facts()
        if do == "check_build":
            return check_build.text()
        if do == "clock":
            return time.time()
        if do == "listen":
            return self._listen(asks["at"])
        if do == "reach":
            return [self._reach(target) for target in asks["targets"]]
        return self._measure(asks["target"])

    def close(self) -> None:
        """Listens no longer."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _listen(self, at: str) -> list[Any] | str:
        """[address, port] of a listener; or what is in its way."""
        try:
            listener = registration.Registration(self._secret, at)
        except OSError as error:
            return f"cannot listen at {at}: {error.strerror}"
        self._threads.append(threading.Thread(target=self._serve, args=(listener,), daemon=True))
        self._threads[-1].start()
        return list(listener.address)

    def _serve(self, listener: registration.Registration) -> None:
        while not self._stop.wait(0.005):
            for arrival in listener.turn():
                threading.Thread(target=_echo, args=(arrival,), daemon=True).start()
        listener.close()

    def _connect(self, target: list[Any], streams: bool = False) -> socket.socket:
        hello = {"streams": streams}
        sock, _ = registration.report((target[0], target[1]), self._secret, hello, time.monotonic() + REACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(REACH_S)
        try:
            if sock.recv(1) != _READY:
                raise registration.ReportError("the connection was closed [HVD720]")
        except OSError as error:
            raise registration.ReportError(str(error)) from None
        return sock

    def _reach(self, target: list[Any]) -> str | None:
        """Why it cannot be reached; None: it can."""
        try:
            self._connect(target).close()
        except registration.ReportError as error:
            return str(error).partition("should be: ")[2] or str(error)
        return None

    def _measure(self, target: list[Any]) -> list[float] | str:
        """[seconds of a message one way, bytes per second]; or why not."""
        try:
            with self._connect(target) as sock:
                times = []
                for _ in range(_ROUNDS):
                    began = time.perf_counter()
                    sock.sendall(b"x")
                    if not sock.recv(1):
                        raise ConnectionError("the connection was closed [HVD720]")
                    times.append(time.perf_counter() - began)
            with self._connect(target, streams=True) as sock:
                began = time.perf_counter()
                while time.perf_counter() < began + STREAM_S:
                    sock.sendall(_BLOCK)
                sock.shutdown(socket.SHUT_WR)
                counted = sock.recv(8)
                took = time.perf_counter() - began
        except (registration.ReportError, OSError) as error:
            return str(error)
        return [statistics.median(times) / 2, int.from_bytes(counted, "big") / took]


def _echo(arrival: registration.Arrival) -> None:
    """The far end of _reach and _measure."""
    count = 0
    with arrival.sock as sock:
        sock.settimeout(REACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.sendall(_READY)
            while chunk := sock.recv(1 << 18):
                count += len(chunk)
                if not arrival.hello.get("streams"):
                    sock.sendall(chunk)
            if arrival.hello.get("streams"):
                sock.sendall(count.to_bytes(8, "big"))
        except OSError:
            pass


def serve(control: socket.socket, session: framing.Session, secret: bytes) -> None:
    """Answers until the doctor's stream ends: a frame for each of its frames."""
    examiner = Examiner(secret)
    control.settimeout(None)
    reader = framing.FrameReader(session)
    try:
        while chunk := control.recv(1 << 16):
            for _, body in reader.feed(chunk):
                control.sendall(session.pack(1, json.dumps(examiner.answer(json.loads(body))).encode()))
        reader.end()
    except OSError:
        pass
    except framing.WireError as error:
        print(coded("HVD112", f"hvdlite-agent: received data that the doctor does not send: {error}"), file=sys.stderr)
    finally:
        examiner.close()
