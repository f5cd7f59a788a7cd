"""Calls from rank to rank: a function runs on another rank, and its result or its exception comes back.

    hvd.init()
    hvd.rpc.start()                                # collective; nothing listens before
    hvd.rpc.call(2, f, x, timeout=5)               # f(x) on rank 2
    future = hvd.rpc.call_async(2, f, x)           # a concurrent.futures.Future
    model = hvd.rpc.remote(2, Model, 64)           # what Model(64) gives stays on rank 2
    model.call("step", x)                          # a method of it
    hvd.rpc.serve()                                # until all ranks are here
    hvd.shutdown()

calls.py: sockets, threads, and how calls end. messages.py: names of functions, and what is pickled. tables.py: what a
rank remembers. references.py: values that stay where they were made. docs/guides/rpc.md is the guide.
"""

from __future__ import annotations

from typing import Any

from ..process_set import global_process_set, rank_in
from .calls import running, start
from .messages import named
from .references import Ref, make
from .tables import Future

__all__ = ["Future", "Ref", "call", "call_async", "remote", "serve", "start"]


def call_async(rank: int, f: Any, /, *args: Any, **kwargs: Any) -> Future:
    """Begins f(*args, **kwargs) on a rank (also this one), and returns a Future of it.

    f: a function or class of a module that the rank has, too, or "module:name" of one. It travels by name; arguments
    and results are pickled by cloudpickle, and have at most 64 MB. Calls of this rank to another are taken up there in
    the order in which they are made. A callback of the future must not wait for other calls.
    """
    calls = running()
    return calls.begin(rank_in(global_process_set, rank), f, args, kwargs)


def call(rank: int, f: Any, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Any:
    """What f(*args, **kwargs) gives on a rank, or raises: the exception itself, whose `remote_traceback` is the text of
    its traceback there. HvdPeerLostError if a rank of the job dies meanwhile, HvdTimeoutError after `timeout` seconds
    (None: no limit); f may go on there."""
    return call_async(rank, f, *args, **kwargs).result(timeout)


def remote(rank: int, f: Any, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Ref:
    """Calls f, and leaves what it gives on the rank: a Ref to it, which may be sent to other ranks in calls."""
    calls = running()
    rank = rank_in(global_process_set, rank)
    ref: Ref = calls.begin(rank, make, (named(f), args, kwargs), {}).result(timeout)
    return ref


def serve() -> None:
    """Returns when all ranks have called this, or have left the job. Meanwhile this rank does calls of others, however
    long (a barrier ends with HVDLITE_COLLECTIVE_TIMEOUT). Raises HvdPeerLostError if a rank dies."""
    running().serve()
