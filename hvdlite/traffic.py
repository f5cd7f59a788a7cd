"""What has crossed between this rank and others? The counts that each stream of the core keeps, for users.

The core adds them up while it moves bytes; asking takes the engine's turn for a moment, so the four numbers of a rank
belong together.

Not here: what crosses shared memory or an MPI, which keep no counts.
"""

from __future__ import annotations

from . import _core
from ._core import ffi, lib
from .process_set import ProcessSet, global_process_set, number_of

_COUNTS = ("bytes_out", "bytes_in", "messages_out", "messages_in")


def link_stats(process_set: ProcessSet = global_process_set) -> dict[int, dict[str, int]]:
    """By rank: bytes and messages that have crossed the streams between it and this rank, since the set was made.

    Of tensors and of votes together, each way: bytes_out, bytes_in, messages_out, messages_in. Only ranks that a stream
    leads to are there: none where a host's shared memory carries all, or an MPI does. A set has streams of its own.
    Raises HvdNotInitializedError before init(), ValueError for a set that this rank is not in.
    """
    number, stats = number_of(process_set), {}
    counts = ffi.new("uint64_t[]", len(_COUNTS))
    for place, rank in enumerate(process_set.ranks):
        if _core.checked(lib.hvd_link_counts(number, place, counts)):
            stats[int(rank)] = dict(zip(_COUNTS, map(int, counts)))
    return stats
