"""What a driver of an engine (on_ray.py, on_dask.py, on_spark.py) says of its cases: a line of JSON each.

engines.py reads them.
"""

import json
import os
import time

from hvdlite.errors import HvdError


def returns(rank, before_init):
    """On a rank at once, or before the others' collective."""
    import hvdlite as hvd

    if before_init and os.environ["HVDLITE_RANK"] == str(rank):
        return
    hvd.init()
    if hvd.rank() != rank:
        hvd.barrier()


def said(case, **what):
    os.write(1, f"\n{json.dumps({'case': case, **what})}\n".encode())  # Ray's own words come from another thread


def failure(case, call, kind=(HvdError, TypeError)):
    began = time.time()
    try:
        call()
    except kind as error:
        rank = getattr(error, "rank", None)
        said(case, kind=type(error).__name__, rank=rank, text=str(error), at=time.time(), seconds=time.time() - began)
    else:
        said(case, kind=None)
