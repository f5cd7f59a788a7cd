"""Addresses of this host that others reach, and whether a name means this host.

Nothing is guessed from the names of interfaces: the kernel is asked which route leads to the other host, and the
address that the route leaves from is the one it can answer to. (docker0 has the same address on every host; no route
to another host leaves from it.) --network-interface overrides that, by name or by network.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence

from hvdlite.errors.codes import coded

_SIOCGIFADDR = 0x8915


class AddressError(ValueError):
    """No such host, route or interface; the text names it."""


def resolve(name: str) -> list[str]:
    """The addresses of a host, as the system orders them. Raises AddressError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # the latter: a name that DNS cannot have
        raise AddressError(f"{name}: {getattr(error, 'strerror', None) or error} [HVD712]") from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def source_towards(ip: str) -> str | None:
    """This host's address on the route to another; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def is_own(ip: str) -> bool:
    """Is this address one of this host's?"""
    return ip.startswith("127.") or ip == "::1" or source_towards(ip) == ip


def towards(names: Sequence[str], resolve: Callable[[str], list[str]] = resolve) -> str:
    """The address of this host that the first of these hosts with a route reaches. Raises AddressError."""
    trouble = []
    for name in names:
        try:
            found = resolve(name)
        except AddressError as error:
            trouble.append(str(error))
            continue
        for ip in found:
            mine = source_towards(ip)
            if mine is not None:
                return mine
        trouble.append(f"{name}: no route from this host to {', '.join(found)}")
    raise AddressError(coded("HVD712", "\n".join(trouble)))


def outward() -> str:
    """An address of this host that others may reach, where it is not known yet which these are: on the default route,
    else of any interface, bridges last; 127.0.0.1 if there is none."""
    others = [(os.path.exists(f"/sys/class/net/{name}/bridge"), ip) for name, ip in _interfaces()]
    found = sorted((bridge, ip) for bridge, ip in others if not ip.startswith("127."))
    return source_towards("192.0.2.1") or (found[0][1] if found else "127.0.0.1")  # an address that no host has


def of_interfaces(wanted: Sequence[str]) -> str:
    """The address of the first of these interfaces (names, or networks like 10.0.0.0/8) that has one.

    Raises AddressError naming what there is.
    """
    own = _interfaces()
    for each in wanted:
        for name, ip in own:
            if each == name or ("/" in each and _within(ip, each)):
                return ip
    there = ", ".join(f"{name} ({ip})" for name, ip in own)
    raise AddressError(f"--network-interface {','.join(wanted)}: this host has only {there} [HVD712]")


def _within(ip: str, network: str) -> bool:
    import ipaddress  # late: slow to import

    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _interfaces() -> list[tuple[str, str]]:
    """(name, IPv4 address) of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                ip = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            found.append((name, ip))
    return found
