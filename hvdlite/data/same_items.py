"""Check that all ranks hold the same data in the same order. Each rank deals for itself, so where orders differ (files
as a folder lists them, a shuffle with a seed of one's own) some samples go to two ranks and others to none, and nothing
fails.

With check=True the ranks compare the length and digests of the first items, before these are dealt: one small
allgather. Digests are of arrays' bytes, and of the pickles of all else, without addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import HvdMismatchError
from ..ops.objects import allgather_object
from ..process_sets.process_set import ProcessSet
from .first_batch import digest, is_rank

COUNT = 8  # so many items of what has a length


def require_same_data(read: Callable[[int], Any], length: int, process_set: ProcessSet) -> None:
    """As require_same_items, of what can be indexed."""
    require_same_items(lambda: map(read, range(min(COUNT, length))), length, process_set)


def require_same_items(items: Callable[[], Iterable[Any]], length: int | None, process_set: ProcessSet) -> None:
    """HvdMismatchError on all ranks of the set if their data differ. All have to call it; nothing in other processes.

    items: reads the first ones. Where on some rank they differ when they are read twice, since they are made at random,
    or cannot be read or pickled, only lengths are compared. length: of all data, None if it is not known.
    """
    if not is_rank():
        return
    everyone = allgather_object((length, _digests(items)), "first_items", process_set)
    lengths = [each for each, _ in everyone]
    _require_one(f"the number of items (by rank: {lengths})", lengths, process_set)
    digests = [each for _, each in everyone if each is not None]
    if len(digests) == len(everyone):
        for index, of_ranks in enumerate(itertools.zip_longest(*digests)):
            _require_one(f"item {index}", of_ranks, process_set)


def _require_one(what: str, of_ranks: Sequence[Any], process_set: ProcessSet) -> None:
    """HvdMismatchError that names the ranks which have another value than the first."""
    others = [str(rank) for rank, value in zip(process_set.ranks, of_ranks) if value != of_ranks[0]]
    if others:
        raise HvdMismatchError(
            f"hvd.data.shard: {what} on rank{'s' * (len(others) > 1)} {', '.join(others)} differs from that on rank "
            f"{process_set.ranks[0]}. Give all ranks the same data in the same order, such as sorted(files) [HVD302]"
        )


def _digests(items: Callable[[], Iterable[Any]]) -> list[bytes] | None:
    """Of each item; None if they cannot be compared."""
    try:
        first, second = ([digest(item) for item in items()] for _ in range(2))
    except Exception:  # the training loop will raise it, too; the other ranks wait here
        return None
    return [each for each in first if each is not None] if first == second and None not in first else None
