"""How do the ranks of a test seem to lie on several hosts? `with hosts_of(2):` two ranks on each, in a life of its own.

For tests with @as_ranks. The plane is p2p: the others know where ranks really are.
"""

import contextlib
import os

import hvdlite as hvd


@contextlib.contextmanager
def hosts_of(ranks_each):
    """A life of hvdlite on so many ranks on each host, and then one as before."""
    rank, size = hvd.rank(), hvd.size()
    before = dict(os.environ)
    hvd.shutdown()
    seat = {"LOCAL_RANK": rank % ranks_each, "LOCAL_SIZE": ranks_each}
    seat.update(CROSS_RANK=rank // ranks_each, CROSS_SIZE=size // ranks_each)
    for alias in ("HVDLITE", "HOROVOD"):
        os.environ.update({f"{alias}_{name}": str(value) for name, value in seat.items()})
    os.environ.update(HVDLITE_HOST_ID=f"host {rank // ranks_each}", HVDLITE_PLANE="p2p")
    hvd.init()
    try:
        yield
        hvd.barrier()
    finally:
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)
        hvd.init()
