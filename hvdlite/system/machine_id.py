"""Identity of a machine: two processes are on one where this gives the same text.

A name is not enough: clones share theirs, and containers of one machine may share neither memory nor network. The
kernel's boot id tells machines apart, and the spaces of network and of shared memory tell containers. Ranks compare it
in the rendezvous (rendezvous/placement.py), the launcher where nodes come to it by themselves
(launcher/starters/rendezvous.py). Standard library only, because the launcher imports this.
"""

from __future__ import annotations

import os
import socket


def host_id() -> str:
    """Name of this host, unlike that of every other: the same for processes that can share memory."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
    except OSError:
        parts.append("")
    for space in ("net", "ipc"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
        except OSError:
            parts.append("")
    return " ".join(parts)
