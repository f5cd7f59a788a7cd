"""Smoke test: `hvdlite-run -np 2 python -m hvdlite.hello` prints one line from each rank.

It needs no framework: the ranks meet, add one number and leave. Each line names the rank, the size of the job and the
host, so the same command shows which hosts of a cluster take part.

A sum that is wrong ends the job with an error.
"""

from __future__ import annotations

import platform


def main() -> None:
    """Print ``rank 0 of 2 on HOST`` once all ranks have added a number.

    Raises:
        HvdInitError: when the ranks do not meet within ``HVDLITE_START_TIMEOUT`` seconds (30).

    Example:
        >>> main()
        rank 0 of 2 on ...  # rank 0
        rank 1 of 2 on ...  # rank 1
    """
    import hvdlite as hvd

    hvd.init()
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    print(f"rank {hvd.rank()} of {hvd.size()} on {platform.node()}")


if __name__ == "__main__":
    main()
