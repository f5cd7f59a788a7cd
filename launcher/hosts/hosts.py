"""Host lists to slots: which ranks run on which host. Pure but for `read`.

Accepted are `-H a:4,b` and host files with one host a line: `a slots=4`, `a:4` or `a`, with comments, blank lines and
IPv6 addresses in brackets. A host without a number has one slot. Ranks fill hosts in order; cross_rank counts the hosts
that have a rank of the same local_rank, as Horovod does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_SHORT = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s\x00-\x1f:,\[\]=]+)(?::(?P<slots>[0-9]+))?")
_LONG = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>[0-9]+)(?:\s+max[_-]slots\s*=\s*[0-9]+)?")

DIGITS_MAX = 12  # of a number that is read
NAME_MAX, LABEL_MAX = 253, 63  # characters of a name, and between its dots (RFC 1035)
SIZE_MAX = 1 << 16  # ranks of a job


class HostError(ValueError):
    """A host list that cannot be read or does not fit; the text says where and why."""


class Host(NamedTuple):
    """A machine and how many ranks may run there."""

    name: str
    slots: int


class Slot(NamedTuple):
    """One rank assignment: the slot of a rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_rank: int = 0  # the host's number among those that have ranks, and how many these are
    host_size: int = 1


def parse_hosts(text: str) -> list[Host]:
    """`a:4,b,[::1]:2`. Raises HostError."""
    return _distinct([_host(part.strip(), f"-H {text!r}") for part in text.split(",")])


def parse_hostfile(text: str, path: str) -> list[Host]:
    """The lines of a host file; `path` is for messages. Raises HostError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        source = f"{path}, line {number}"
        long = _LONG.fullmatch(line)
        if long:
            host = _host(long["host"], source)
            hosts.append(Host(host.name, _slots(long["slots"], source)))
        else:
            hosts.append(_host(line, source))
    if not hosts:
        raise HostError(f"{path} names no host [HVD708]")
    return _distinct(hosts)


def parse_discovered(text: str, slots: int) -> tuple[list[Host], str]:
    """What a host discovery script prints: `name:slots` a line, or `name`, which has `slots`. A host with 0 slots is
    not offered, as with Horovod. Also what is wrong with the first line that is no host: the others count."""
    found, wrong = list[Host](), ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        try:
            found += [_host(line, f"line {number}", slots, least=0)] if line else []
        except HostError as error:
            wrong = wrong or str(error)
    return _distinct([host for host in found if host.slots]), wrong


def read(path: str) -> str:
    """The text of a host file; Windows' editors begin theirs with a mark. Raises OSError."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read()


def _host(text: str, source: str, default: int = 1, least: int = 1) -> Host:
    match = _SHORT.fullmatch(text)
    if match is None or not _is_name(match["name"]):
        raise HostError(f"{source}: {text[:80]!r} is not a host: write name, name:slots or [IPv6]:slots [HVD708]")
    slots = default if match["slots"] is None else _slots(match["slots"], source, least)
    return Host(match["name"].strip("[]"), slots)


def _is_name(name: str) -> bool:
    """Whether it can be looked up: no part of it is empty, or longer than DNS allows."""
    labels = name.removesuffix(".").split(".")
    return name.startswith("[") or (len(name) <= NAME_MAX and all(0 < len(each) <= LABEL_MAX for each in labels))


def _slots(text: str, source: str, least: int = 1) -> int:
    if len(text.lstrip("0")) > DIGITS_MAX:
        raise HostError(f"{source}: {text[:12]}... slots are more than a host can have: write name:4 [HVD708]")
    slots = int(text)
    if slots < least:
        raise HostError(f"{source}: a host needs at least one slot: write name:1, or leave the host out [HVD708]")
    return slots


def _distinct(hosts: Sequence[Host]) -> list[Host]:
    """A host that is named twice has the slots of both."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def merged(hosts: Sequence[Host], names: Sequence[str]) -> list[Host]:
    """These names are one host: it stands where the first of them stood, with the slots of all."""
    total = sum(host.slots for host in hosts if host.name in names)
    kept = [host for host in hosts if host.name not in names or host.name == names[0]]
    return [Host(host.name, total) if host.name in names else host for host in kept]


def of_servers(slots: Sequence[Slot], servers: int) -> list[str]:
    """The host of each parameter server, and of each aggregator: those that have ranks, in turn. None where a rank is
    alone: it joins no rank, and starts its own."""
    names = list(dict.fromkeys(slot.host for slot in slots))
    return [names[number % len(names)] for number in range(servers if len(slots) > 1 else 0)]


def server_name(number: int, servers: int) -> str:
    """ "server 1" of so many parameter servers, or "aggregator 0", which is numbered after them."""
    return f"server {number}" if number < servers else f"aggregator {number - servers}"


def is_this_host(name: str, own_name: str) -> bool:
    """Does `name` mean this machine, whose own name is `own_name`?"""
    if name in ("localhost", "ip6-localhost", "::1") or name.startswith("127."):
        return True
    return name.lower() in (own_name.lower(), own_name.lower().partition(".")[0])


def assign(hosts: Sequence[Host], size: int) -> list[Slot]:
    """A slot for each of `size` ranks, hosts filled in order. Raises HostError if they do not fit."""
    available = sum(host.slots for host in hosts)
    if size > available:
        last = hosts[-1]
        room = f"[{last.name}]" if ":" in last.name else last.name
        raise HostError(
            f"Requested more processes ({size}) than there are available slots ({available}): write "
            f"{room}:{last.slots + size - available} (a host without a number has one slot), or give --oversubscribe "
            "[HVD709]"
        )
    if size > SIZE_MAX:
        raise HostError(f"{size} ranks are more than the maximum of {SIZE_MAX} [HVD710]")
    used: list[int] = []
    for host in hosts:
        taken = min(host.slots, size - sum(used))
        used.append(taken)
    busy = [index for index, count in enumerate(used) if count]
    slots: list[Slot] = []
    for index, host in enumerate(hosts):
        for local_rank in range(used[index]):
            same = [other for other, count in enumerate(used) if count > local_rank]
            cross = same.index(index), len(same)
            slots.append(Slot(len(slots), host.name, local_rank, used[index], *cross, busy.index(index), len(busy)))
    return slots
