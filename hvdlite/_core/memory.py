"""Memory of the core: how much it uses (`memory_stats`), and memory that travels without a copy (`block`, `hvd.empty`).

Ranks of one host reduce a tensor in place, each its part of it for all, if all have it in *plane memory*: shared memory
that every rank of the host maps. Elsewhere each rank copies its bytes in and the result out again. What the core sums
for all ranks lies in the caller's array.

A forked child has a copy of it from the moment of the fork, as of all other memory. The rank makes the copy, once for
children that it forks in a row, such as the workers of a DataLoader; it keeps it until a collective works in plane
memory again. subprocess and "spawn" copy nothing. A fork during a collective may copy a part of its result.

A block is freed by its last view, also after shutdown() and after another init(), whose collectives treat it as memory
like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from . import ffi, lib

_KINDS: list[str] = []
while (_name := lib.hvd_usage_name(len(_KINDS))) != ffi.NULL:
    _KINDS.append(_core.text_of(_name))


def memory_stats() -> dict[str, int]:
    """Return how much memory the core uses on this rank.

    The keys are these; each value is a number of bytes.

    ===========  =======================================================================================================
    Key          Meaning
    ===========  =======================================================================================================
    ``lanes``    shared memory through which tensors outside plane memory travel
    ``arena``    plane memory in use: ``hvd.empty``, and gradients of an optimizer's parameters; a fork's copy
    ``results``  results of allgathers and alltoalls that have not been fetched yet
    ``boards``   votes
    ``sets``     process sets
    ``records``  tables of tensors and handles, and the flight recorder
    ``devices``  GPU memory for tensors that travel together and for results
    ``pinned``   pinned host memory for GPU tensors that travel through it; it is kept until ``shutdown``
    ``total``    the sum
    ===========  =======================================================================================================

    Returns:
        dict of str to int: bytes by purpose.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> stats = hvd.memory_stats()
        >>> stats["total"] == sum(stats.values()) - stats["total"]
        True
    """
    _core.require_job()
    stats = {kind: int(lib.hvd_usage_bytes(index)) for index, kind in enumerate(_KINDS)}
    return {**stats, "total": sum(stats.values())}


def block(count: int) -> Any | None:
    """A writable buffer of `count` > 0 bytes of plane memory, contents undefined; None where there is none to be had
    (one rank, no shared memory left). Its last user frees it. ValueError for more bytes than any memory has."""
    if count >= 1 << 63:
        raise ValueError(f"a size of {count} bytes exceeds every memory: the limit is 2**63 [HVD220]")
    memory = lib.hvd_alloc(count)
    if memory == ffi.NULL:
        return None
    return ffi.buffer(ffi.gc(memory, lib.hvd_free), count)


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape as its users write it: a number or a sequence of them. ValueError below 0, TypeError for what is none."""
    dims = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    if any(isinstance(dim, bool) or not hasattr(dim, "__index__") for dim in dims):
        raise TypeError(f"a shape must be a whole number or a sequence of whole numbers, not {shape!r} [HVD220]")
    numbers = tuple(dim.__index__() for dim in dims)
    if any(number < 0 for number in numbers):
        raise ValueError(f"a shape must not have negative numbers: {shape!r} [HVD220]")
    return numbers
