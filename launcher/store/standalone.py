"""Standalone store: a process that rank 0 starts where no launcher of hvdlite runs.

hvdlite/rendezvous/standalone_store.py runs it (hvdlite/system/python_command.py says how). One line of JSON on stdin
says for how many ranks, at which address, at which ports to try, and the secret, which is in no argument list and no
environment; one line on stdout says where it listens, or what failed. Then stdin is only held open: its end is rank
0's. The keeper outlives it, so that the others learn from the store which rank is gone, and ends once no rank is
connected, or LINGER_S later.

Signals that a scheduler sends to a whole step are meant for the ranks and ignored here; it needs no signal but SIGKILL,
which is what schedulers do to what is left of a step.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import sys
import time

from ..agent import process
from .server import StoreServer

LINGER_S = 10.0
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """The process. 0, or 1 where it cannot listen."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    process.rename(b"hvdlite-keeper")
    order = json.loads(sys.stdin.buffer.readline())
    job = int.from_bytes(os.urandom(8), "big")
    server = None
    failed = "there is no port to try"
    for port in order["ports"]:
        try:
            server = StoreServer(
                order["size"], bytes.fromhex(order["secret"]), job, address=order["address"], port=port
            )
            break
        except OSError as error:
            failed = f"{order['address']} port {port}: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                break
    answer = {"failed": failed} if server is None else dict(zip(("address", "port"), server.address))
    print(json.dumps(answer), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (1, 2):  # held open, they would keep the reader of rank 0's output waiting
        os.dup2(null, standard)
    if server is None:
        return 1
    keep(server)
    return 0


def keep(server: StoreServer) -> None:
    """Serves until stdin has ended and the ranks are gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        end: float | None = None
        while end is None or (server.peopled and time.monotonic() < end):
            times = [due for due in (server.deadline(), end) if due is not None]
            patience = max(0.0, min(times) - time.monotonic()) if times else None
            for key, _ in selector.select(patience):
                if key.fileobj == 0 and not os.read(0, 4096):
                    selector.unregister(0)
                    end = time.monotonic() + LINGER_S
            server.turn()
    server.close()
