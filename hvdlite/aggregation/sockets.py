"""How the machines meet real datagrams: UDP, the loop of an aggregator or server, and a rank's two ends.

A rank greets until it is answered, and the aggregator learns from that where to send sums. A greeting holds the address
that it was sent from, so a copy of it from elsewhere changes nothing. Sockets of ranks are connected: the kernel drops
what others send to them, and reports where the port of an aggregator is closed.

What has no valid MAC, or is of a job that has not greeted, is dropped. Memory is bounded: JOBS_MAX jobs of 64 ranks.
"""

from __future__ import annotations

import collections
import hmac
import ipaddress
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import config
from ..errors import HvdInitError, HvdTimeoutError
from ..security import job_secret
from .packet import BYE, HELLO, UPDATE, WELCOME, Packet, control, unpack
from .server import Server
from .switch import ALL, SERVER, Hashed, Pool
from .worker import Worker

JOBS_MAX = 256
IDLE_S = 60.0  # without a datagram, after which another job may have the place of one
_LEAVING_S = 5.0  # the same, from the first rank that has left: then no operation can begin any more
_MARK_AT = 32  # datagrams that wait at once
_LOOK_S = 0.1
_GREETING_S = (0.02, 0.5)  # between greetings, at first and at most
_BUFFER = 4 << 20  # asked for; Linux gives net.core.rmem_max twice
_DATAGRAM = 2304  # bytes of the buffer that one of 1 KB takes, about
Address = tuple[Any, ...]


def opened(host: str, port: int = 0) -> socket.socket:
    """A socket on this address of this host. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def connected(host: str, port: int) -> socket.socket:
    """A socket that exchanges datagrams with that one alone. Raises OSError."""
    sock = opened("::" if ":" in host else "0.0.0.0")
    try:
        sock.connect((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def named(sock: socket.socket) -> str:
    """ "10.0.0.1:4141"."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT". Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no address: write HOST:PORT, such as 10.0.0.9:4141 [HVD024]")
    return host, int(port)


def _numbers(address: Address) -> list[int]:
    """A socket's address as integers."""
    return [address[1], *ipaddress.ip_address(address[0].partition("%")[0]).packed]


def send(sock: socket.socket, data: bytes, to: Address | None = None) -> None:
    """As datagrams go: what cannot be sent is lost. Raises ConnectionRefusedError of a connected socket."""
    try:
        sock.send(data) if to is None else sock.sendto(data, to)
    except ConnectionRefusedError:
        raise
    except OSError:  # a full buffer, a route that is gone: timers repeat it
        pass


def _ready(*sources: Any, seconds: float = -1.0) -> list[Any]:
    """Those that are readable; select() knows no descriptor above 1023."""
    poll, by_number = select.poll(), {source.fileno(): source for source in sources}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(None if seconds < 0 else math.ceil(1000 * seconds))]


def _received(sock: socket.socket) -> Iterator[tuple[bytes, Address]]:
    """What has come, at most as much as a loop should take before it looks at other things. Raises
    ConnectionRefusedError of a connected socket."""
    for _ in range(256):
        try:
            yield sock.recvfrom(2048)
        except ConnectionRefusedError:
            raise
        except OSError:  # there is none, or a report of a host out of reach: timers see to that
            return


class Jobs:
    """Which jobs greeted, from where, and when each was last active. The loop of `serve` has one."""

    def __init__(self, machine: Pool | Hashed | Server, capacity: int) -> None:
        self._machine, self._capacity = machine, capacity
        self._ranks: dict[int, dict[int, Address]] = {}
        self._idle_at: dict[int, float] = {}  # when another job may have its place
        self._leaving: set[int] = set()
        self._over = collections.deque[int](maxlen=4096)  # a copy of a greeting revives none of these

    def greeted(self, p: Packet, sender: Address, now: float) -> Packet | None:
        """The answer to a greeting; None: it is a copy from elsewhere. Without slots: there is no place."""
        if p.numbers.tolist() != _numbers(sender) or p.job in self._over:
            return None
        if p.job not in self._ranks and not self._place_for(p.job, now):
            return control(WELCOME, p.job, p.n, p.rank, [self._machine.hashed, 0, 0])
        self._ranks.setdefault(p.job, {})[p.rank] = sender
        self._idle_at[p.job] = now + IDLE_S
        slots = getattr(self._machine, "slots", 1)
        return control(WELCOME, p.job, p.n, p.rank, [self._machine.hashed, slots, self._capacity])

    def _place_for(self, job: int, now: float) -> bool:
        if len(self._ranks) < JOBS_MAX and self._machine.admit(job):
            return True
        idle = min(self._idle_at, key=lambda each: self._idle_at[each])
        if self._idle_at[idle] > now:
            return False
        self.forget(idle)
        return self._machine.admit(job)

    def left(self, p: Packet, now: float) -> None:
        """One rank has. The others may still wait for the answers of the last operation, or are gone without a BYE."""
        ranks = self._ranks.get(p.job, {})
        ranks.pop(p.rank, None)
        if not set(ranks) - {-1}:
            self.forget(p.job)
        elif p.job not in self._leaving:
            self._leaving.add(p.job)
            self._idle_at[p.job] = now + _LEAVING_S

    def forget(self, job: int) -> None:
        """It is over."""
        self._machine.forget(job)
        self._ranks.pop(job, None)
        self._idle_at.pop(job, None)
        self._leaving.discard(job)
        self._over.append(job)

    def active(self, p: Packet, sender: Address, now: float) -> bool:
        """Whether one of its ranks has sent this block, and so is active. A server gets blocks of the switch, too."""
        own = self._ranks.get(p.job, {}).get(p.rank) == sender
        if own and p.job not in self._leaving:
            self._idle_at[p.job] = now + IDLE_S
        return own or (isinstance(self._machine, Server) and p.job in self._ranks)

    def to(self, p: Packet, where: int) -> list[Address]:
        """The addresses that a datagram goes to."""
        ranks = self._ranks.get(p.job, {})
        if where == ALL:
            return [ranks[rank] for rank in range(p.n) if rank in ranks]
        where = -1 if where == SERVER else where
        return [ranks[where]] if where in ranks else []


def serve(
    machine: Pool | Hashed | Server, sock: socket.socket, key: bytes, source: Any, ended: Callable[[], bool]
) -> None:
    """Answer datagrams until `ended()`, which is asked when `source` is readable."""
    jobs = Jobs(machine, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _DATAGRAM)
    while True:
        if source in _ready(sock, source) and ended():
            return
        for waiting, (data, sender) in enumerate(_received(sock)):
            p, now = unpack(data, key), time.monotonic()
            if p is None:
                continue
            if p.kind == HELLO:
                answer = jobs.greeted(p, sender, now)
                if answer is not None:
                    send(sock, answer.pack(key), sender)
            elif p.kind == BYE:
                jobs.left(p, now)
            elif p.kind == UPDATE and jobs.active(p, sender, now):
                for where, q in machine.on_packet(p, now, waiting >= _MARK_AT):
                    packed = q.pack(key)
                    for to in jobs.to(q, where):
                        send(sock, packed, to)


def greet(
    sock: socket.socket,
    key: bytes,
    job: int,
    n: int,
    rank: int,
    limit: float,
    what: str,
    to: Address | None = None,
    known: bool = False,
) -> tuple[int, ...]:
    """Until there is an answer and a place: (hashed, slots, capacity) of the aggregator. rank -1: of the job's server,
    whose socket is not connected. limit: seconds; what: for the error, "rank 0: the aggregator". known: it
    has listened before, so a closed port is its end. Raises HvdInitError, HvdTimeoutError for that."""
    hello = control(HELLO, job, n, rank, _numbers(sock.getsockname())).pack(key)
    until, pause, full = time.monotonic() + limit, _GREETING_S[0], False
    while time.monotonic() < until:
        try:
            send(sock, hello, to)
            _ready(sock, seconds=pause)
            for data, _ in _received(sock):
                p = unpack(data, key)
                if p is not None and p.kind == WELCOME and p.job == job and len(p.numbers) == 3:
                    full = not p.numbers[1]
                    if not full:
                        return tuple(p.numbers.tolist())
        except ConnectionRefusedError:  # it may be starting yet
            if known:
                raise HvdTimeoutError(f"{what} has ended: its port is closed [HVD430]") from None
        time.sleep(min(pause, 0.05))
        pause = min(1.5 * pause, _GREETING_S[1])
    host, port = (to or sock.getpeername())[:2]
    if full:
        raise HvdInitError(
            f"{what} at {host}:{port} had no slots left for {limit:g} s: start another, or one with --kind hashed "
            f"(slots of a killed job become free after {IDLE_S:g} s) [HVD024]"
        )
    raise HvdInitError(
        f"{what} at {host}:{port} has not answered for {limit:g} s: is it running, has it this job's key "
        "(--aggregator-key), and may UDP pass? [HVD024]"
    )


def complete(worker: Worker, ends: dict[int, socket.socket], key: bytes, failed: Callable[[], bool]) -> None:
    """An operation that has begun, until its result is there. ends: by SWITCH and, of a shared switch, SERVER. Raises
    HvdTimeoutError where that cannot be, or `failed()`."""
    places = {sock: place for place, sock in ends.items()}
    look = time.monotonic() + _LOOK_S
    while True:
        closed = _sent(worker, ends, key)
        if worker.result is not None:
            return
        now = time.monotonic()
        for sock in _ready(*places, seconds=max(0.0, min(worker.due, look) - now)):
            try:
                for data, _ in _received(sock):
                    p = unpack(data, key)
                    if p is not None:
                        worker.on_packet(p, time.monotonic())
                        closed += _sent(worker, ends, key)
            except ConnectionRefusedError:
                closed.append(places[sock])
        now = time.monotonic()
        if closed:
            if not worker.hashed or SERVER in closed:
                raise HvdTimeoutError(f"rank {worker.rank}: the aggregator has ended: its port is closed [HVD430]")
            worker.without_switch(now)
        worker.on_timer(now)
        if now >= look:
            look = now + _LOOK_S
            if failed():
                raise HvdTimeoutError(f"rank {worker.rank}: the job has failed during '{worker.name}' [HVD430]")


def _sent(worker: Worker, ends: dict[int, socket.socket], key: bytes) -> list[int]:
    """Sends what the worker has; the places whose ports are closed."""
    closed = []
    out, worker.out = worker.out, []
    for place, p in out:
        try:
            send(ends[place], p.pack(key))
        except ConnectionRefusedError:
            closed.append(place)
    return closed


def key_of_user(path: str | None) -> bytes:
    """The key in a file; None: that of this user, which is made if there is none. Raises SecretError, a ValueError."""
    return job_secret.of_user(config.environ(), one_host=True) if path is None else job_secret.of_file(path)


def secret(master: bytes) -> bytes:
    """The key of datagrams, from the secret of a job or the key of a user."""
    return hmac.digest(master, b"hvdlite aggregation", "sha256")


def job_number() -> int:
    """A number that no other job has."""
    return int.from_bytes(os.urandom(8), "little")
