"""Pretended hosts: `with hosts_of(2):` the ranks of a test seem to lie on hosts of two ranks, in a life of its own.
The plane is p2p: the others know where ranks really are."""

import contextlib
import os

import hvdlite as hvd


@contextlib.contextmanager
def hosts_of(each):
    """A life of hvdlite with so many ranks on each host, and then one as before."""
    rank, size, before = hvd.rank(), hvd.size(), dict(os.environ)
    hvd.shutdown()
    seat = {"LOCAL_RANK": rank % each, "LOCAL_SIZE": each, "CROSS_RANK": rank // each, "CROSS_SIZE": size // each}
    for alias in ("HVDLITE", "HOROVOD"):
        os.environ.update({f"{alias}_{name}": str(value) for name, value in seat.items()})
    os.environ.update(HVDLITE_HOST_ID=f"host {rank // each}", HVDLITE_PLANE="p2p")
    hvd.init()
    try:
        yield
        hvd.barrier()
    finally:
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)
        hvd.init()
