"""Python objects from rank to rank, pickled by cloudpickle: no framework's tensors are needed for that.

An object becomes bytes, bytes travel as a tensor of uint8 by the core's ordinary collectives, and every receiver makes
an object of its own. Classes and functions of the script itself travel, too: that is what cloudpickle is for.

Unpickling runs code that the sender chose; the ranks of a job trust each other, and bytes that no rank of the job has
sent are not unpickled (security/signed_pickle.py).
"""

from __future__ import annotations

import pickle
from typing import Any

from .. import _core
from .._core import byte_exchange
from ..process_sets.process_set import ProcessSet, global_process_set, number_of, rank_in
from ..security import signed_pickle

_LENGTH = signed_pickle.SEAL_BYTES + 8


def _pickled(obj: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(obj)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank.

    All ranks of ``process_set`` must call it with the same root. The object is pickled by cloudpickle, so classes and
    functions of the script work. It makes two broadcasts: the length, then the bytes. Unpickling runs code of the
    sender.

    Args:
        obj (object, optional): object to send; not used on ranks other than the root.
        root_rank (int): global rank that sends. Default: 0.
        name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are matched
            by their order.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Returns:
        object: on the root ``obj`` itself; elsewhere a new object.

    Raises:
        HvdMismatchError: if the ranks name different roots.
        HvdPeerLostError: if a rank dies or leaves the job, and if the received bytes do not come from the root.
        HvdNotInitializedError: before ``init``.
        ValueError: on a rank outside ``process_set``, and for a root outside it.
        TypeError: on the root, if ``obj`` cannot be pickled.

    Example:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None)
        {'epoch': 3}
    """
    number, root = number_of(process_set), rank_in(process_set, root_rank)
    is_root, seals = _core.is_root(root_rank), signed_pickle.current()
    what = f"broadcast_object{_named(name)} in process set {number}"
    block = seals.sealed(what, _pickled(obj)) if is_root else bytearray()
    length = seals.sealed(f"the length of {what}", len(block).to_bytes(8, "little")) if is_root else bytearray(_LENGTH)
    byte_exchange.broadcast_bytes(length, root, None if name is None else f"broadcast_object.{name}.length", number)
    if not is_root:
        block = bytearray(int.from_bytes(seals.opened(f"the length of {what}", root_rank, length), "little"))
    byte_exchange.broadcast_bytes(block, root, None if name is None else f"broadcast_object.{name}", number)
    return obj if is_root else pickle.loads(seals.opened(what, root_rank, block))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks.

    All ranks of ``process_set`` must call it. The objects are pickled by cloudpickle and may differ in size. Unpickling
    runs code of the senders.

    Args:
        obj (object): object to send.
        name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are matched
            by their order.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Returns:
        list: one object per rank, in the order of the ranks; new objects, this rank's own among them.

    Raises:
        HvdPeerLostError: if a rank dies or leaves the job, and if received bytes do not come from their rank.
        HvdNotInitializedError: before ``init``.
        ValueError: on a rank outside ``process_set``.
        TypeError: if ``obj`` cannot be pickled.

    Example:
        >>> hvd.allgather_object(f"from {hvd.rank()}")
        ['from 0', 'from 1']
    """
    number, seals = number_of(process_set), signed_pickle.current()
    what = f"allgather_object{_named(name)} in process set {number}"
    full = None if name is None else f"allgather_object.{name}"
    parts = byte_exchange.allgather_bytes(seals.sealed(what, _pickled(obj)), full, number)
    ranks = range(len(parts)) if process_set is global_process_set else process_set._ranks()
    return [pickle.loads(seals.opened(what, rank, part)) for rank, part in zip(ranks, parts)]


def _named(name: str | None) -> str:
    return "" if name is None else f" {name!r}"
