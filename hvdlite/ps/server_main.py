"""Main of a parameter server that hvdlite-run has started: it runs as long as the launcher's store.

The environment has the server's number, the number of servers, and the store's address. A rank holds a pipe to a server
that it has started itself; here the connection to the store replaces it. The server sends the address at which it
listens, and gets the numbers of servers that have ended. BYE, or the end of the connection, ends the server.

SIGINT, SIGTERM and SIGHUP are ignored: a scheduler or a terminal may send them to all processes, and ranks that save
then need their tables. The server listens only where the route to the store leaves, never on all addresses of its host.
"""

from __future__ import annotations

import signal
import time

from .. import config
from ..rendezvous import store_client
from ..rendezvous.server_line import StoreLine


def main() -> int:
    """The process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    from .server import ServerOptions, run  # NumPy and ZeroMQ take their time, in which a signal may come

    values = config.load().values
    number, secret = values["server"], values["secret_key"]
    limit = time.monotonic() + values["start_timeout"]
    where = values["store_addr"], values["store_port"]
    line = StoreLine(*store_client.authenticate(*where, secret, f"server {number}", limit), number)
    order = ServerOptions(
        number=number,
        servers=values["servers"],
        secret=secret,
        job=values["job_id"],
        encrypted=values["ps_curve"],
        host=line.host,
    )
    run(order, line, line.announce)
    return 0
