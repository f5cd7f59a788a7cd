"""The process of an aggregator: one that hvdlite-run has started, or the program hvdlite-aggregator for several jobs.

    hvdlite-run -np 4 --aggregators 1 python train.py
    hvdlite-aggregator --kind hashed --slots 512 --listen 10.0.0.9:4141 --key FILE

SIGINT, SIGTERM and SIGHUP are ignored under hvdlite-run, as by parameter servers: its connection to the store ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from .. import config
from ..errors.codes import uncoded
from ..rendezvous import store_client
from ..rendezvous.server_line import StoreLine

SLOTS = 64  # of a job's own


def main() -> int:
    """Of hvdlite-run --aggregators."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    values = config.load().values
    number, what = values["server"], f"aggregator {values['server'] - values['servers']}"
    limit = time.monotonic() + values["start_timeout"]
    where = values["store_addr"], values["store_port"]
    line = StoreLine(*store_client.authenticate(*where, values["secret_key"], what, limit), number, what)
    from . import Hashed, Pool, sockets  # NumPy takes its time: the launcher knows by now that this process runs

    sock = sockets.opened(line.host)
    machine = Hashed(SLOTS) if values["aggregator_kind"] == "hashed" else Pool(SLOTS, sockets.JOBS_MAX)
    line.announce(f"udp://{sockets.named(sock)}")
    sockets.serve(machine, sock, sockets.secret(values["secret_key"]), line, lambda: line.ended(lambda *_: None))
    return 0


def command(words: Sequence[str] | None = None) -> int:
    """Of hvdlite-aggregator."""
    parser = argparse.ArgumentParser(
        prog="hvdlite-aggregator",
        description="Add gradients of several jobs as a network switch would, until SIGINT or SIGTERM. Jobs use it "
        "with hvdlite-run --aggregator HOST:PORT. All who have the key are trusted.",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", required=True, help="address of this host to listen on")
    parser.add_argument("--kind", choices=("pool", "hashed"), default="pool", help="pool: each job has slots of its "
                        "own (SwitchML); hashed: jobs share them (ATP)")  # fmt: skip
    parser.add_argument("--slots", type=int, default=SLOTS, help=f"blocks of 1 KB in flight; default {SLOTS}")
    parser.add_argument("--jobs", type=int, default=4, help="of a pool: jobs that have slots at once; default 4")
    parser.add_argument("--key", metavar="FILE", help="file with 64 hexadecimal digits, mode 0600; default: the key of "
                        "this user, ~/.config/hvdlite/key")  # fmt: skip
    args = parser.parse_args(words)
    if not 0 < args.slots <= 1 << 20 or not 0 < args.jobs <= 256:
        parser.error("--slots must be 1 to 1048576, --jobs 1 to 256 [HVD024]")
    from . import Hashed, Pool, sockets

    ended, end = socket.socketpair()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: end.close())
    try:
        key = sockets.secret(sockets.key_of_user(args.key))
        sock = sockets.opened(*sockets.parsed(args.listen))
    except (ValueError, OSError) as error:
        print(f"hvdlite-aggregator: --listen {args.listen}: {uncoded(str(error))} [HVD024]", file=sys.stderr)
        return 2
    machine = Hashed(args.slots) if args.kind == "hashed" else Pool(args.slots, args.jobs)
    print(
        f"hvdlite-aggregator: {args.kind} of {args.slots} slots at {sockets.named(sock)} (pid {os.getpid()})",
        flush=True,
    )
    sockets.serve(machine, sock, key, ended, lambda: True)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(machine.counts.items()))
    with contextlib.suppress(BrokenPipeError):
        print(f"hvdlite-aggregator: {counts or 'no datagram came'}", flush=True)
    return 0
