"""Calls from rank to rank: a function runs on another rank, and its result or its exception comes back.

    hvd.init()
    hvd.rpc.start()                                # collective; nothing listens before
    hvd.rpc.call(2, f, x, timeout=5)               # f(x) on rank 2
    future = hvd.rpc.call_async(2, f, x)           # a concurrent.futures.Future
    model = hvd.rpc.remote(2, Model, 64)           # what Model(64) gives stays on rank 2
    model.call("step", x)                          # a method of it
    hvd.rpc.serve()                                # until all ranks are here
    hvd.shutdown()

calls.py: sockets, threads, and how calls end. messages.py: names of functions, and what is pickled. call_tables.py:
what a rank remembers. references.py: values that stay where they were made. docs/guides/rpc.md is the guide.
"""

from __future__ import annotations

from typing import Any

from ..process_sets.process_set import global_process_set, rank_in
from .call_tables import Future
from .calls import running, start
from .messages import whole
from .references import Ref, make

__all__ = ["Future", "Ref", "call", "call_async", "remote", "serve", "start"]


def call_async(rank: int, f: Any, /, *args: Any, **kwargs: Any) -> Future:
    """Start ``f(*args, **kwargs)`` on a rank and return a future of its result.

    The function travels by name, so every rank must be able to import it. Arguments and results are pickled by
    cloudpickle and have at most 64 MB. The other rank starts the calls of one rank in the order in which they were
    made. A callback of the future must not wait for other calls.

    Args:
        rank (int): the rank on which ``f`` runs. It may be this one.
        f: a function or class of a module that every rank has, a ``functools.partial`` of one, or its name as
            ``"module:name"``.
        args: positional arguments of ``f``.
        kwargs: keyword arguments of ``f``.

    Returns:
        Future: it raises what ``f`` raises.

    Raises:
        HvdError: ``hvd.rpc.start()`` has not been called.
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        TypeError: ``f`` has no name that other ranks can import, or an argument cannot be pickled.
        ValueError: there is no rank ``rank``, or the arguments are too large.

    Example:
        >>> hvd.rpc.start()
        >>> future = hvd.rpc.call_async(1, "operator:add", 2, 3)
        >>> future.result()
        5
    """
    calls = running()
    return calls.begin(rank_in(global_process_set, rank), f, args, kwargs)


def call(rank: int, f: Any, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Any:
    """Run ``f(*args, **kwargs)`` on a rank, wait, and return its result.

    An exception of ``f`` is raised here; ``SystemExit`` and ``KeyboardInterrupt`` as an ``HvdError``. Its attribute
    ``remote_traceback`` has the text of the traceback on the other rank.

    Args:
        rank (int): the rank on which ``f`` runs. It may be this one.
        f: as in ``call_async``.
        args: positional arguments of ``f``.
        timeout (float, optional): seconds to wait. Default: 60. None: no limit.
        kwargs: keyword arguments of ``f``.

    Returns:
        The result of ``f``.

    Raises:
        HvdPeerLostError: a rank of the job has died, or the rank has left.
        HvdTimeoutError: no answer within ``timeout``. The call may continue on the other rank.
        TypeError: the function or a value cannot be sent. The other errors are those of ``call_async``, and what ``f``
            raises.

    Example:
        >>> hvd.rpc.start()
        >>> hvd.rpc.call(0, "math:sqrt", 16.0, timeout=30)
        4.0
        >>> hvd.rpc.call(1, "math:sqrt", -1.0)
        Traceback (most recent call last):
            ...
        ValueError: ...
    """
    return call_async(rank, f, *args, **kwargs).result(timeout)


def remote(rank: int, f: Any, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Ref:
    """Run ``f(*args, **kwargs)`` on a rank, leave the result there, and return a reference to it.

    Args:
        rank (int): the rank on which ``f`` runs and its result stays.
        f: as in ``call_async``, usually a class.
        args: positional arguments of ``f``.
        timeout (float, optional): seconds to wait. Default: 60. None: no limit.
        kwargs: keyword arguments of ``f``.

    Returns:
        Ref: a reference that may be sent to other ranks as an argument or result of calls.

    Raises:
        HvdPeerLostError: a rank of the job has died, or the rank has left.
        HvdTimeoutError: no answer within ``timeout``. The other errors are those of ``call_async``, and what ``f``
            raises.

    Example:
        >>> hvd.rpc.start()
        >>> letters = hvd.rpc.remote(1, "collections:Counter", "aab")
        >>> letters.rank, letters.call("most_common", 1)
        (1, [('a', 2)])
    """
    calls = running()
    rank = rank_in(global_process_set, rank)
    ref: Ref = calls.begin(rank, make, whole(f, args, kwargs), {}).result(timeout)
    return ref


def serve() -> None:
    """Run calls of other ranks until all ranks have called ``serve`` or have left the job.

    Use it on ranks that only answer calls. It has no time limit, unlike a barrier, which ends after
    ``HVDLITE_COLLECTIVE_TIMEOUT``.

    Raises:
        HvdError: ``hvd.rpc.start()`` has not been called.
        HvdPeerLostError: a rank has died.

    Example:
        >>> hvd.rpc.start()
        >>> hvd.rpc.serve()
    """
    running().serve()
