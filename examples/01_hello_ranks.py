"""Every rank prints its number, then rank 0 prints the list of all ranks.

hvdlite-run -np 2 python examples/01_hello_ranks.py
python examples/01_hello_ranks.py            # without a launcher: rank 0 of 1
"""

import os
import socket

import hvdlite as hvd

hvd.init()
print(f"Hello from rank {hvd.rank()} of {hvd.size()}, number {hvd.local_rank()} of {hvd.local_size()} on this host")

# Any picklable object works. Every rank gets the same list, in rank order.
everyone = hvd.allgather_object((hvd.rank(), socket.gethostname(), os.getpid()))
if hvd.rank() == 0:
    assert [rank for rank, _, _ in everyone] == list(range(hvd.size()))
    print(f"All {len(everyone)} ranks have met:", ", ".join(f"{rank} (process {pid})" for rank, _, pid in everyone))
hvd.shutdown()
