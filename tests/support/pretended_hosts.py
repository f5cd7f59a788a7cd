"""Ranks of one machine that take each other for ranks of other hosts: `pretend(2)` makes hosts of two ranks each.

Call it on all ranks of an `as_ranks` test; the next module's ranks have their own environment again. A whole program:

    hvdlite-run -np 2 python tests/support/pretended_hosts.py 1 program.py ...      # each rank is a host
"""

import os
import runpy
import sys

import hvdlite as hvd


def pretend(*per_host):
    """Begin a new job with hosts of so many ranks; one number: of each host. `hvd` is initialized afterwards."""
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    _place(rank, list(per_host) if len(per_host) > 1 else [per_host[0]] * (size // per_host[0]))
    hvd.init()


def _place(rank, slots):
    host = next(n for n in range(len(slots)) if rank < sum(slots[: n + 1]))
    local = rank - sum(slots[:host])
    fellows = [n for n, count in enumerate(slots) if count > local]
    seat = {"LOCAL_RANK": local, "LOCAL_SIZE": slots[host]}
    seat.update({"CROSS_RANK": fellows.index(host), "CROSS_SIZE": len(fellows)})
    for prefix in ("HVDLITE", "HOROVOD"):
        os.environ.update({f"{prefix}_{name}": str(value) for name, value in seat.items()})
    os.environ["HVDLITE_HOST_ID"] = f"pretended host {host}"


if __name__ == "__main__":
    here = int(sys.argv[1])
    _place(int(os.environ["HVDLITE_RANK"]), [here] * (int(os.environ["HVDLITE_SIZE"]) // here))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
