"""Addresses of ranks, packed, and the identity of their host.

A rank publishes the address from which the route to the rendezvous leaves. However many interfaces a host has (docker0
has the same address everywhere), that one reaches the other hosts, because it reaches the host of the rendezvous.
Without a rendezvous (bootstrap over MPI) a rank publishes all addresses but loopback ones, and connecting tries each of
them; a wrong host is found out by its answer.

Two processes share a host if they can share memory and descriptors: same kernel (boot id), same network namespace (an
abstract unix socket connects the ranks of a host), same host name and ipc namespace (`host_id`, from
system/machine_id.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HvdInitError
from ..system.machine_id import host_id as host_id

ADDRESS_MAX = 128
ENDS_MAX = 4  # addresses of one rank
HOST_MAX = 40  # bytes of a host's name, which only messages show
_MARK_BYTES = 8
_VERSION = 1
_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")  # address, interface's number, prefix, scope, flags, name; absent without IPv6
_GLOBAL = 0  # the scope of what is neither loopback nor of one link only
_UNUSABLE = 0x08 | 0x40  # flags: found twice, not yet known to be the only one
_KINDS = {4: socket.AF_INET, 6: socket.AF_INET6}


class End(NamedTuple):
    """One address and port at which a rank listens."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Can only processes of the same host reach it?"""
        return self.ip == "::1" or self.ip.startswith("127.")


class Address(NamedTuple):
    """What others need to connect to a rank. `mark` identifies the host, `host` is for messages."""

    host: str
    mark: bytes
    ends: tuple[End, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.ends))} on host {self.host}"


def pack(address: Address) -> bytes:
    """At most ADDRESS_MAX bytes."""
    name = address.host.encode("utf-8", "replace")[:HOST_MAX]
    pieces = [bytes((_VERSION,)), address.mark, bytes((len(name),)), name]
    for end in address.ends[:ENDS_MAX]:
        kind = 6 if ":" in end.ip else 4
        pieces.append(struct.pack("!BH", kind, end.port) + socket.inet_pton(_KINDS[kind], end.ip.partition("%")[0]))
    return b"".join(pieces)


def unpack(packed: bytes) -> Address:
    """The inverse of `pack`. ValueError for what is no packed address."""
    if not 2 + _MARK_BYTES < len(packed) <= ADDRESS_MAX or packed[0] != _VERSION:
        raise ValueError(f"not the address of a rank: {packed!r}")
    at = 1 + _MARK_BYTES
    mark, length = packed[1:at], packed[at]
    name, at = packed[at + 1 : at + 1 + length], at + 1 + length
    ends = []
    while at < len(packed):
        kind = packed[at]
        step = {4: 4, 6: 16}.get(kind, 0)
        if not step or at + 3 + step > len(packed):
            raise ValueError(f"not the address of a rank: {packed!r}")
        (port,) = struct.unpack_from("!H", packed, at + 1)
        ends.append(End(socket.inet_ntop(_KINDS[kind], packed[at + 3 : at + 3 + step]), port))
        at += 3 + step
    if length > HOST_MAX or len(name) < length or not ends or len(ends) > ENDS_MAX:
        raise ValueError(f"not the address of a rank: {packed!r}")
    return Address(name.decode("utf-8", "replace"), mark, tuple(ends))


def own_address(ends: Sequence[End], identity: str) -> Address:
    """The address of a rank that listens at `ends`, on the host of that identity."""
    mark = hashlib.sha256(identity.encode()).digest()[:_MARK_BYTES]
    return Address(socket.gethostname(), mark, tuple(ends))


def hosts_of(identities: Sequence[str]) -> list[int]:
    """The number of each rank's host, hosts counted in the order of their first ranks."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]


def everywhere() -> list[str]:
    """The addresses of this host that others may reach: of bridges last, because a container engine's is the same on
    every host, and IPv6 after IPv4. At most ENDS_MAX."""
    found: list[tuple[bool, int, str]] = [(_is_bridge(name), 6, ip) for name, ip in _of_ipv6()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                ip = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:  # an interface without an address
                continue
            if not End(ip, 0).is_loopback:
                found.append((_is_bridge(name), 4, ip))
    return [ip for *_, ip in sorted(found, key=lambda each: each[:2])][:ENDS_MAX] or ["127.0.0.1"]


def _is_bridge(interface: str) -> bool:
    return os.path.exists(f"/sys/class/net/{interface}/bridge")


def _of_ipv6() -> list[tuple[str, str]]:
    """(interface, address) of each IPv6 address that leads beyond its link."""
    try:
        rows = [line.split() for line in _IPV6.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
    return [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
        for digits, _, _, scope, flags, name in rows
        if int(scope, 16) == _GLOBAL and not int(flags, 16) & _UNUSABLE
    ]


def towards(rendezvous: tuple[str, int], rank: int) -> tuple[socket.AddressFamily, Any]:
    """(family, socket address with port 0) from which the route to the rendezvous leaves. Raises HvdInitError."""
    host, port = rendezvous
    if not host or host.startswith("/"):  # rendezvous over a unix socket: all are on this host
        return socket.AF_INET, ("127.0.0.1", 0)
    reasons = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, reasons = [], [str(error)]
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # a datagram socket: asks for the route, sends nothing
                mine = probe.getsockname()
                return family, (mine[0], 0, *mine[2:])
        except OSError as error:
            reasons.append(f"{target[0]}: {error}")
    raise HvdInitError(
        f"rank {rank} on host {socket.gethostname()} has no route to the rendezvous at {host}:{port} "
        f"({'; '.join(reasons)}): set HVDLITE_STORE_ADDR to an address that all hosts reach [HVD114]"
    )
