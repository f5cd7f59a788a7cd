"""Traffic between this rank and others: the counts of each stream of the core.

The core adds them up while it moves bytes; asking takes the engine's turn for a moment, so the four numbers of a rank
belong together.

Not here: what crosses shared memory or an MPI, which keep no counts.
"""

from __future__ import annotations

from .. import _core
from .._core import ffi, lib
from ..process_sets.process_set import ProcessSet, global_process_set, number_of

_COUNTS = ("bytes_out", "bytes_in", "messages_out", "messages_in")


def link_stats(process_set: ProcessSet = global_process_set) -> dict[int, dict[str, int]]:
    """Return how much has crossed the streams between this rank and others since the set was made.

    The counts include tensors and votes. Ranks that share memory with this one, and ranks over MPI, have no stream.

    Args:
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Returns:
        dict of int to dict: by global rank, ``bytes_out`` and ``bytes_in`` (bytes), ``messages_out`` and
        ``messages_in`` (messages).

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        ValueError: on a rank outside ``process_set``.
        TypeError: if ``process_set`` is not a ``ProcessSet``.

    Example:
        >>> all("bytes_out" in each for each in hvd.link_stats().values())  # {} on one host
        True
    """
    number, stats = number_of(process_set), {}
    counts = ffi.new("uint64_t[]", len(_COUNTS))
    for index, rank in enumerate(process_set.ranks):
        if _core.checked(lib.hvd_link_counts(number, index, counts)):
            stats[int(rank)] = dict(zip(_COUNTS, map(int, counts)))
    return stats
