"""Function server: a function goes to the ranks, and its results return to the caller of `hvdlite.run`.

The process that calls hvdlite.run listens here, at one address: loopback, or the one that the job's other hosts reach.
Each rank (hvdlite/executors/worker.py) connects once, proves a key that was made for this call alone (the handshake of
control/registration.py) and sends its rank; it receives the call, and sends one answer. Both travel in signed frames
(hvdlite/security/framing.py): PART for each megabyte, then one with the rest, whose kind says that it is the last, and
of what. Nothing is unpickled here, and nothing is parsed before its rank has proved the key.

A connection that ends before its answer is complete is a loss, and the order of losses and answers is kept: the caller
gets the first of them that is not the consequence of another. One thread, no blocking call; `turn` serves what is
ready.
"""

from __future__ import annotations

import argparse
import selectors
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hvdlite.security import framing

from .control import registration
from .hosts import address, hosts, scheduler
from .placement import host_flags
from .starters import ssh

RETURNED, RAISED, SUFFERED = 1, 2, 3  # kinds of answers; SUFFERED: it has raised because another rank is gone
PART, CALL = 4, 5
PART_BYTES = 1 << 20
KEY = "HVDLITE_CALL_KEY"  # the variable that ranks find the key in
_READ_BYTES = 1 << 18
SILENCE_S = 5.0  # of a rank's host, before it counts as lost; as --agent-timeout by default


class Answer(NamedTuple):
    """What became of a rank. kind 0: it went without an answer, and body has the reason, if known. who: its host and
    process. In an elastic job its number is the member's, and body says which rank it was in the end."""

    rank: int
    kind: int
    body: bytes
    who: str


class _Guest:
    def __init__(self, sock: socket.socket, session: framing.Session, rank: int, process: str, call: bytes) -> None:
        self.sock, self.rank, self.who = sock, rank, process
        self.frames = frames(session, CALL, call)
        self.unsent = memoryview(b"")
        self.reader = framing.FrameReader(session, PART_BYTES + 1)
        self.held = bytearray()


def frames(session: framing.Session, kind: int, body: bytes) -> Iterator[bytes]:
    """The frames of a call or an answer, made as they are sent."""
    for at in range(0, len(body) - PART_BYTES, PART_BYTES):
        yield session.pack(PART, body[at : at + PART_BYTES])
    yield session.pack(kind, body[max(0, (len(body) - 1) // PART_BYTES * PART_BYTES) :])


class FunctionServer:
    """Serves a call of `size` ranks at `address`; None: as many as come. Raises OSError when it cannot listen there."""

    def __init__(self, key: bytes, address: str, size: int | None, call: bytes) -> None:
        self._registration = registration.Registration(key, address)
        self._size, self._call = size, call
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._registration, selectors.EVENT_READ)
        self._guests: dict[int, _Guest] = {}
        self.seen: set[int] = set()  # ranks that have come
        self.answers: list[Answer] = []  # in the order in which they came

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: (host, port)."""
        return self._registration.address

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self) -> None:
        """Serves what is ready."""
        for arrival in self._registration.turn():
            self._welcome(arrival)
        for key, events in self._selector.select(0):
            if key.fileobj is self._registration:
                continue
            guest: _Guest = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._hand_out(guest)
                if events & selectors.EVENT_READ:
                    self._take_in(guest)
            except BlockingIOError:
                continue
            except (OSError, EOFError, ValueError) as error:
                self._leave(guest, 0, str(error) if isinstance(error, framing.WireError) else "")

    def close(self) -> None:
        """Serves no rank any more."""
        for guest in self._guests.values():
            guest.sock.close()
        self._registration.close()
        self._selector.close()

    def _welcome(self, arrival: registration.Arrival) -> None:
        rank, pid = arrival.hello.get("rank"), arrival.hello.get("pid")
        wrong = not isinstance(rank, int) or rank in self.seen or not isinstance(pid, int)
        if wrong or rank < 0 or (self._size is not None and rank >= self._size):
            arrival.sock.close()
            return
        process = f"({str(arrival.hello.get('host', '?'))[:64]}, pid {pid})"
        guest = _Guest(arrival.sock, arrival.session, rank, process, self._call)
        registration.keep_watch(arrival.sock, False, SILENCE_S)
        self.seen.add(rank)
        self._guests[rank] = guest
        self._selector.register(arrival.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, guest)

    def _hand_out(self, guest: _Guest) -> None:
        while guest.unsent or (frame := next(guest.frames, b"")):
            guest.unsent = guest.unsent or memoryview(frame)
            guest.unsent = guest.unsent[guest.sock.send(guest.unsent) :]
        self._selector.modify(guest.sock, selectors.EVENT_READ, guest)

    def _take_in(self, guest: _Guest) -> None:
        chunk = guest.sock.recv(_READ_BYTES)
        if not chunk:
            guest.reader.end()
            raise EOFError
        for kind, body in guest.reader.feed(chunk):
            guest.held += body
            if kind in (RETURNED, RAISED, SUFFERED):
                self._leave(guest, kind)
                return
            if kind != PART:
                raise ValueError

    def _leave(self, guest: _Guest, kind: int, why: str = "") -> None:
        self._selector.unregister(guest.sock)
        guest.sock.close()
        del self._guests[guest.rank]
        self.answers.append(Answer(guest.rank, kind, bytes(guest.held) if kind else why.encode(), guest.who))


def address_for(args: argparse.Namespace, size: int | None, environ: Mapping[str, str]) -> str:
    """The address of the function server of a job, whose hosts are those of the command line; size: None: all.

    Raises ValueError for hosts that cannot be, or that no route leads to.
    """
    try:
        if args.hostfile is not None:
            with open(args.hostfile, encoding="utf-8", errors="replace") as file:
                listed = hosts.parse_hostfile(file.read(), args.hostfile)
        elif args.hosts is not None:
            listed = hosts.parse_hosts(args.hosts)
        else:
            listed = _allocated(environ)
        slots = hosts.assign(listed, size or sum(host.slots for host in listed)) if listed else []
    except OSError as error:
        raise ValueError(f"hostfile {args.hostfile}: {error.strerror} [HVD708]") from None
    others = [name for name in dict.fromkeys(slot.host for slot in slots) if not host_flags.is_here(name)]
    if not others and args.host_discovery_script is None:
        return "127.0.0.1"
    names = host_flags.interfaces_of(args)
    if names:
        return address.of_interfaces(names)
    if not others:
        return address.outward()
    port = None if args.ssh_port is None else int(args.ssh_port)
    try:
        return address.towards(others, ssh.Ssh(port, args.ssh_identity, []).resolve)
    except FileNotFoundError:
        return address.towards(others)  # there is no ssh that could know another name


def _allocated(environ: Mapping[str, str]) -> list[hosts.Host]:
    """The hosts that a scheduler has given; none: this one alone. One may have more ranks than slots
    (placement/allocation.py)."""

    def read(path: str) -> str:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    found = scheduler.allocation(environ, read)
    listed = list(found.hosts) if found is not None else []
    return listed if any(not host_flags.is_here(host.name) for host in listed) else []
